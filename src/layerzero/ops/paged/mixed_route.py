"""The route of ``lz.paged_attention`` for several query tokens a sequence."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Operation, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.checks import score_problems
from layerzero.ops.paged import mixed, tree, written
from layerzero.ops.paged.problems import head_problems, layout_problems, shape_problems
from layerzero.ops.paged.step import StepMetadata, table_problems
from layerzero.ops.ragged.starts import shape_problems as start_problems
from layerzero.ops.ragged.starts import value_problems

NOT_OF_FLOATS = ("layout", "key_scale", "value_scale", "narrow_query")
"""What is no argument of an operation over a cache of the queries' dtype."""


OF_FLOATS = ("sinks", "alibi_slopes", "tree_mask")
"""What only an operation of several tokens over a cache of the queries' dtype knows."""


def one_token_each(arguments: dict[str, Any]) -> list[str]:
    """Arguments that mean nothing without ``cu_seqlens_q``."""
    problems = [
        f"{name}: wanted None without cu_seqlens_q, got {told(arguments[name])}"
        for name in ("max_seqlen_q", "decodes")
        if arguments[name] is not None
    ]
    problems += [
        f"{name}: wanted cu_seqlens_q beside it (0 to B for one token each), got None"
        for name in OF_FLOATS
        if arguments[name] is not None
    ]
    if not isinstance(arguments["causal"], bool):
        problems.append(f"causal: wanted bool, got {told(arguments['causal'])}")
    return problems


def route_tokens(name: str, arguments: dict[str, Any]) -> Routed:
    """Check a call and choose the operation by head counts and by whether it promises decodes."""
    query, key_cache, layout = arguments["query"], arguments["key_cache"], arguments["layout"]
    problems = table_problems(arguments["block_tables"], arguments["context_lens"])
    found = shape_problems(arguments, ("query",), 3)
    if found and isinstance(query, Tensor) and query.ndim == 4:
        found = [f"{found[0]}; with cu_seqlens_q, given or of the step, queries are (T, H, D)"]
    problems += found
    if not problems:
        starts = arguments["cu_seqlens_q"], len(arguments["context_lens"]) + 1, len(query)
        problems += start_problems("cu_seqlens_q", *starts)
    problems += shape_problems(arguments, ("key_cache", "value_cache"), 4)
    problems += layout_problems(layout)
    if problems:
        raise InvalidCallError(name, problems)
    written.check(name, {each: arguments[each] for each in ("key_cache", "value_cache")}, layout)
    problems, uneven = head_problems(query, key_cache, layout)
    if problems:
        raise InvalidCallError(name, problems, ReasonCode.GQA_HEADS_MISMATCH if uneven else None)
    problems = score_problems(arguments) + token_problems(arguments) + _bias_problems(arguments)
    if not isinstance(arguments["causal"], bool):
        problems.append(f"causal: wanted bool, got {told(arguments['causal'])}")
    operation = _operation(arguments, query.shape[1] == key_cache.shape[1 + layout.index("H")])
    canonical = {each: value for each, value in arguments.items() if each not in NOT_OF_FLOATS}
    if operation.name in mixed.PREFILL_PAGED:
        del canonical["decodes"]
    window, scale = canonical["window"], canonical["scale"]
    if not problems and window is not None:
        canonical["window"] = None if tuple(window) == (-1, -1) else tuple(window)
    if isinstance(scale, (int, float)) and math.isclose(scale, query.shape[2] ** -0.5, rel_tol=1e-7):
        canonical["scale"] = None  # the default, spelled out: kernels without a scale argument stay legal
    problems += operation.schema.validate(layout=layout, **canonical)
    if problems:
        raise InvalidCallError(name, problems)
    slopes, own = arguments["alibi_slopes"], set[str]()  # rows of these belong to sequences, or to tokens
    own |= {"batch", "starts"} if slopes is not None and slopes.ndim == 2 else set()
    own |= {"tokens"} if arguments["tree_mask"] is not None else set()
    varies = ("tokens", "batch", "starts", "max_blocks", "pages")
    return Routed(operation, canonical, layout, varies=tuple(each for each in varies if each not in own))


def _bias_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with slopes and with a tree mask, whose shapes the schema leaves open.

    Whether the mask is that of a tree, each call is looked at for, this one too.
    """
    tokens, heads = arguments["query"].shape[:2]
    problems = tree.shape_problems(arguments["tree_mask"], tokens, causal=arguments["causal"])
    slopes, sequences = arguments["alibi_slopes"], len(arguments["context_lens"])
    if isinstance(slopes, Tensor) and tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        wanted = f"({heads},) or ({sequences}, {heads})"
        problems.append(f"alibi_slopes: wanted shape {wanted}, got {tuple(slopes.shape)}")
    return problems


def _operation(arguments: dict[str, Any], equal_heads: bool) -> Operation:
    if arguments["decodes"] is None:
        return mixed.STANDARD_PREFILL_PAGED if equal_heads else mixed.GQA_PREFILL_PAGED
    return mixed.STANDARD_MIXED_PAGED if equal_heads else mixed.GQA_MIXED_PAGED


def token_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with starts, the step and promises of several tokens a sequence."""
    starts, step = arguments["cu_seqlens_q"], arguments["step"]
    problems = []
    decodes, longest = arguments["decodes"], arguments["max_seqlen_q"]
    if starts.is_cpu and type(starts) is Tensor:
        longest = longest if type(longest) is int else None
        problems = value_problems("cu_seqlens_q", starts, len(arguments["query"]), longest)
        problems += mixed.decodes_problems(starts, decodes) if type(decodes) is int else []
    if type(decodes) is int and decodes > len(starts) - 1:
        problems.append(f"decodes: wanted at most {len(starts) - 1}, as many as there are sequences, got {decodes}")
    if not isinstance(step, StepMetadata):
        return problems
    belongs = step.kind_for(arguments["block_tables"], arguments["context_lens"])
    if belongs == "foreign":
        problems.append("step: wanted the StepMetadata of these block_tables and context_lens, got that of others")
    elif belongs == "stale":
        problems.append("step: wanted advance() after tables, lengths or starts changed, got a step of old values")
    elif step.cu_seqlens_q is not starts:
        got = "that of one token a sequence" if step.cu_seqlens_q is None else "that of others"
        problems.append(f"step: wanted the StepMetadata of this cu_seqlens_q, got {got}")
    return problems

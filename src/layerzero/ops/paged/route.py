"""``lz.paged_attention`` and ``lz.append_paged_kv_``: their signatures, the checks of a call, and the routes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.checks import check_dense, overlaps, score_problems
from layerzero.ops.draw import Draw
from layerzero.ops.paged import draw, mixed_draw, quantized, quantized_route, written
from layerzero.ops.paged.declare import APPEND_PAGED, GQA_DECODE_PAGED, STANDARD_DECODE_PAGED
from layerzero.ops.paged.mixed import OPERATIONS as OF_TOKENS
from layerzero.ops.paged.mixed_route import NOT_OF_FLOATS, OF_FLOATS, one_token_each, route_tokens
from layerzero.ops.paged.problems import head_problems, layout_problems, shape_problems
from layerzero.ops.paged.step import StepMetadata, table_problems
from layerzero.ops.rope.route import apart


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    decodes: int | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    narrow_query: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest tokens of each sequence to all its tokens in a paged cache.

    One token a sequence is a decode step. Several, by ``cu_seqlens_q``, are prefills, chunks of prefills behind a
    cached prefix, and decodes, all in one call.

    Shapes: query (B, 1, H, D), or (T, H, D) with cu_seqlens_q (B + 1,); key_cache (P, N, K, D) and value_cache
        (P, N, K, D_v) in NHD, axes 1 and 2 swapped in HND; H a multiple of K; block_tables (B, max_blocks);
        context_lens (B,) → (B, 1, H, D_v), or (T, H, D_v).
    Dtype: query and caches the same floating dtype, or caches of float8_e4m3fn, float8_e5m2 or int8 with scales;
        tables, lengths and starts int32, on the same device.
    Args:
        block_tables: the pages of each sequence, in order; entries beyond its last page may hold anything.
        context_lens: tokens of each sequence that are in the cache, the queries' own included. 0 gives 0 and -inf (with
            sinks, the sink).
        scale: factor on the scores, 1/sqrt(D) by default.
        layout: ``"NHD"`` or ``"HND"``.
        window: (left, right) as in ``lz.attention``; of one causal query only left counts: nothing is to its right.
        softcap: ``c * tanh(score / c)`` on the scores.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1) or (H, T), natural logarithm.
        cu_seqlens_q: where each sequence's queries begin: 0, then the end of each; they are its newest tokens. A
            sequence may have none.
        max_seqlen_q: an upper bound of the queries of one sequence; all tokens together if None.
        decodes: a promise that the first so many sequences have one query each, so that kernels may treat them apart;
            None where there are none.
        causal: hide keys in the future, aligned at the end of each sequence; without it every query sees all keys.
        sinks: (H,), one extra logit a head; with cu_seqlens_q alone, as the next two. All three have a CPU kernel; on
            GPUs kernels for sinks (sm 9.x, bfloat16) and slopes wait for ``layerzero vet``, and the reference computes
            the rest.
        alibi_slopes: (H,) or (B, H).
        tree_mask: (T, columns) bool, for drafts that branch: which of its sequence's new tokens each query sees, by
            their places there, so that row i of a chain of 3 is True up to column i. Each token sees itself, its parent
            and what that one sees. Sequences with more new tokens than columns are chains.
        max_context_len: an upper bound of context_lens that the caller knows; what the tables hold if None. Kernels
            size their work by it. A length above it is the caller's mistake: found on a CPU and in debug mode.
        step: the :class:`layerzero.StepMetadata` of these tables and lengths, so that kernels that plan on the host
            do so once for all layers.
        key_scale, value_scale: of a cache of float8 or int8, what its numbers are multiples of: float32 (), (K,) or
            (P, N, K), whatever the layout.
        narrow_query: over a cache of float8, whether kernels may round queries and probabilities to it as well, as
            FlashAttention 3 does, which multiplies at twice the rate then: by 6 % of each at most.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; in
        debug mode and on a CPU for pages, lengths and starts out of range and a tree mask that is none, too.
        NoKernelFoundError if policy leaves no
        kernel.
    Source: PagedAttention, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def append_paged_kv_(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place.

    Shapes: key (T, K, D), value (T, K, D_v); caches as in ``lz.paged_attention``; slot_mapping (T,).
    Dtype: keys, values and caches the same floating dtype; slot_mapping int64, on the same device.
    Args:
        slot_mapping: ``page * page_size + offset`` of each token, -1 for padding; each slot at most once.
            ``StepMetadata.slot_mapping`` makes it from tables and lengths. On a GPU either of two tokens with one slot
            may be what is written; debug mode finds them.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share memory with the new
        tokens or with each other; on a CPU and in debug mode for slots beyond the cache or named twice, too.
    Source: reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


OF_SEVERAL = ("cu_seqlens_q", "max_seqlen_q", "decodes", "causal", *OF_FLOATS)
"""Arguments that one token a sequence has no use for."""


def draw_attention(draws: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.paged_attention``: one token a sequence, or several."""
    made = mixed_draw.paged_attention if draws.chance(0.5) else draw.paged_attention
    arguments = made(draws, dtype)
    if draws.chance(0.15) and not arguments.keys() & set(OF_FLOATS):
        arguments = draw.quantize(draws, arguments)
        if draws.chance(0.3):
            arguments["narrow_query"] = True
    return arguments


def _route_attention(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "paged_attention"
    check_dense(name, arguments)
    if quantized_route.is_asked(arguments):
        return quantized_route.route_quantized(name, arguments)
    if arguments["cu_seqlens_q"] is not None:
        return route_tokens(name, arguments)
    query, key_cache, step = arguments["query"], arguments["key_cache"], arguments["step"]
    problems = one_token_each(arguments)
    problems += table_problems(arguments["block_tables"], arguments["context_lens"])
    found = shape_problems(arguments, ("query",), 4)
    if found and isinstance(query, Tensor) and query.ndim == 3:
        found = [f"{found[0]}; queries of (T, H, D) go with cu_seqlens_q="]
    problems += found + shape_problems(arguments, ("key_cache", "value_cache"), 4)
    problems += layout_problems(arguments["layout"])
    if problems:
        raise InvalidCallError(name, problems)
    if query.shape[1] != 1:
        problem = f"query: wanted one token a sequence (B, 1, H, D) without cu_seqlens_q, got {tuple(query.shape)}"
        raise InvalidCallError(name, [problem])
    layout = arguments["layout"]
    written.check(name, {each: arguments[each] for each in ("key_cache", "value_cache")}, layout)
    problems, uneven = head_problems(query, key_cache, layout)
    if problems:
        raise InvalidCallError(name, problems, ReasonCode.GQA_HEADS_MISMATCH if uneven else None)
    problems = score_problems(arguments)
    tables = arguments["block_tables"], arguments["context_lens"]
    belongs = step.kind_for(*tables) if isinstance(step, StepMetadata) else ""
    if belongs == "foreign":
        problems.append("step: wanted the StepMetadata of these block_tables and context_lens, got that of others")
    if belongs == "stale":
        problems.append("step: wanted advance() after block_tables or context_lens changed, got a step of old values")
    equal = query.shape[2] == key_cache.shape[1 + layout.index("H")]
    operation = STANDARD_DECODE_PAGED if equal else GQA_DECODE_PAGED
    canonical = {each: value for each, value in arguments.items() if each not in (*NOT_OF_FLOATS, *OF_SEVERAL)}
    window, scale = canonical["window"], canonical["scale"]
    if not problems and window is not None:  # nothing lies to the right of the newest token
        canonical["window"] = None if window[0] < 0 else (window[0], 0)
    if isinstance(scale, (int, float)) and math.isclose(scale, query.shape[3] ** -0.5, rel_tol=1e-7):
        canonical["scale"] = None  # the default, spelled out: kernels without a scale argument stay legal
    problems += operation.schema.validate(layout=layout, **canonical)
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(operation, canonical, layout, varies=("batch", "max_blocks", "pages"))


def _route_append(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "append_paged_kv_"
    check_dense(name, arguments)
    problems = shape_problems(arguments, ("key", "value"), 3)
    problems += shape_problems(arguments, ("key_cache", "value_cache"), 4)
    problems += layout_problems(arguments["layout"])
    if problems:
        raise InvalidCallError(name, problems)
    layout = arguments["layout"]
    written.check(name, {each: arguments[each] for each in ("key_cache", "value_cache")}, layout)
    canonical = {each: value for each, value in arguments.items() if each != "layout"}
    problems = APPEND_PAGED.schema.validate(layout=layout, **canonical)
    keys, values = arguments["key_cache"], arguments["value_cache"]
    for cache in ("key_cache", "value_cache"):
        tensor = arguments[cache]
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            problems.append(f"{cache}: wanted memory of its own, got an expanded view with strides {tensor.stride()}")
        for new in ("key", "value", "slot_mapping"):
            if isinstance(arguments[new], Tensor) and overlaps(tensor, arguments[new]):
                problems.append(f"{cache}: wanted memory of its own, got memory that it shares with {new}")
    if keys.device.type != "meta" and overlaps(keys, values) and not apart(keys, values):
        problems.append("value_cache: wanted memory of its own, got that of key_cache")
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(APPEND_PAGED, canonical, layout, varies=("tokens", "pages"))


PAGED_ATTENTION = Function(
    name="paged_attention",
    signature=paged_attention,
    route=_route_attention,
    operations=(STANDARD_DECODE_PAGED, GQA_DECODE_PAGED, *OF_TOKENS, *quantized.OPERATIONS),
    draw=draw_attention,
    weight=4,
    state=frozenset({"sdpa"}),
)
APPEND_PAGED_KV = Function(
    name="append_paged_kv_",
    signature=append_paged_kv_,
    route=_route_append,
    operations=(APPEND_PAGED,),
    draw=draw.append_paged_kv_,
    weight=1,
    renamed={"append_paged_kv": "append_paged_kv_"},
    may_share_storage=frozenset({frozenset({"key_cache", "value_cache"})}),
)
FUNCTIONS = (PAGED_ATTENTION, APPEND_PAGED_KV)

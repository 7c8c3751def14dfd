"""Attention of sequences that lie one after the other: queries of all of them in one tensor, keys in another.

    attention.standard.prefill.ragged   H == K
    attention.gqa.prefill.ragged        H == g * K

Where sequences begin lies on the device: nothing is read on the host, so a captured step replays with other lengths.
``max_seqlen_q`` and ``max_seqlen_k`` promise what the longest of them has; kernels size their launches by it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, TensorSchema, told
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Operation, Routed, Work
from layerzero.core.values import Check
from layerzero.ops.attention import declare as attn
from layerzero.ops.attention.limits import torch_alone
from layerzero.ops.attention.route import check_heads, score_problems, slope_problems, without_defaults
from layerzero.ops.attention.sweep import Heads, extent_of
from layerzero.ops.declaration import check_dense
from layerzero.ops.declaration import shape_problems as rank_problems
from layerzero.ops.draw import Draw
from layerzero.ops.ragged.reference import parts_of_keys, ragged_attention, stock
from layerzero.ops.ragged.starts import RaggedMetadata, bounds_of, checks, guard, shape_problems, spread, value_problems

INT32 = frozenset({torch.int32})

MAX_SEQLEN_Q = Param("max_seqlen_q", int, None, Role.BOUND)
MAX_SEQLEN_K = Param("max_seqlen_k", int, None, Role.BOUND)
"""They bound differences of neighbours and no values, so that only :func:`_check_starts` can hold them to it."""

NAME = "ragged_attention"


def make_step(arguments: Mapping[str, Any], capturable: bool) -> RaggedMetadata:
    """The step of a call's starts."""
    return RaggedMetadata(arguments["cu_seqlens_q"], arguments["cu_seqlens_k"], capturable=capturable)


def _check_starts(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **_: object,
) -> list[Check]:
    """Values on the device: sequences that follow each other, end with the tokens, and are as short as promised."""
    return [
        *checks("cu_seqlens_q", cu_seqlens_q, len(query), max_seqlen_q),
        *checks("cu_seqlens_k", cu_seqlens_k, len(key), max_seqlen_k),
    ]


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    longest_q, longest_k = values["max_seqlen_q"], values["max_seqlen_k"]
    return {
        "bias_grad": attn.has_bias_grad(arguments, "alibi_slopes"),
        **attn.group_of(arguments, values),
        "longest_q": values["tokens"] if longest_q is None else min(longest_q, values["tokens"]),
        "longest_k": values["kv_tokens"] if longest_k is None else min(longest_k, values["kv_tokens"]),
    }


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over what is not hidden, as if all sequences were of one length; every tensor once."""
    batch = max(facts["starts"] - 1, 1)
    queries, keys = facts["tokens"], facts["kv_tokens"]
    pairs = batch * attn.visible_pairs(-(-queries // batch), -(-keys // batch), bool(facts["causal"]), facts["window"])
    return attn.work_of(facts, pairs, queries, keys)


def _examples(case: Case, _: torch.dtype, device: torch.device, __: torch.Generator | None) -> dict[str, Any]:
    """Sequences of unlike lengths, an empty one among many; the longest lengths are passed, as every caller does."""
    size, sequences = case.sizes, max(case.sizes["starts"] - 1, 0)
    promised: Mapping[str, Any] = case.params
    starts = {
        f"cu_seqlens_{of}": spread(size[name], sequences, promised.get(f"max_seqlen_{of}"))
        for of, name in (("q", "tokens"), ("k", "kv_tokens"))
    }
    longest = bounds_of(starts, promised, max_seqlen_q="cu_seqlens_q", max_seqlen_k="cu_seqlens_k")
    return {name: each.to(device) for name, each in starts.items()} | longest


def _scratch(sizes: Mapping[str, int]) -> int:
    """The larger of the scores and of the keys for every head, of sequences that are twice as long as the mean."""
    batch = max(sizes["starts"] - 1, 1)
    longest_q, longest_k = (min(2 * sizes[name] // batch + 1, sizes[name]) for name in ("tokens", "kv_tokens"))
    return batch * sizes["heads"] * longest_k * max(longest_q, sizes["head_dim"])


def _case(
    name: str, sequences: int, tokens: int, heads: int, kv_heads: int, head_dim: int, *, causal: bool = True
) -> Case:
    sizes = {"tokens": tokens, "kv_tokens": tokens, "starts": sequences + 1, "heads": heads, "kv_heads": kv_heads}
    return Case(name, sizes | {"head_dim": head_dim, "value_dim": head_dim}, {"causal": causal})


def ragged_case(heads: Heads, sequences: int, tokens: int, *, causal: bool) -> tuple[str, Case]:
    """An operation's name and a case of it: sequences of unlike lengths."""
    name = f"{sequences} sequences of {tokens} tokens ({heads}) {'causal' if causal else 'full'}"
    case = _case(name, sequences, tokens, heads.heads, heads.kv_heads, heads.head_dim, causal=causal)
    return f"attention.{heads.kind}.prefill.ragged", case


def sweep_of(operation: str, device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """The sweep of one kind of head counts: as many tokens as prefill sweeps have, in few and in many sequences."""
    extent = extent_of(device, narrow)
    for heads in extent.heads:
        for sequences in extent.batches:
            for length in extent.lengths_of(sequences, rare=True):
                if sequences > 1 and sequences * length <= extent.max_tokens:
                    name, case = ragged_case(heads, sequences, sequences * length, causal=heads.causal[0])
                    if name == operation:
                        yield case


def _operation(name: str, summary: str, cases: tuple[Case, ...], sibling: str = "") -> Operation:
    return attn.operation(
        name,
        summary,
        ragged_attention,
        inputs=(
            *attn.PACKED,
            TensorSchema("cu_seqlens_q", ("starts",), INT32, same_dtype=False, counts=("tokens",)),
            TensorSchema("cu_seqlens_k", ("starts",), INT32, same_dtype=False, counts=("kv_tokens",)),
            *attn.BIASES,
        ),
        outputs=attn.results("tokens"),
        params=(
            *(attn.CAUSAL, attn.SCALE, attn.WINDOW, attn.SOFTCAP, attn.RETURN_LSE, MAX_SEQLEN_Q, MAX_SEQLEN_K),
            Param("step", RaggedMetadata, None, Role.HANDLE, made_of=("cu_seqlens_q", "cu_seqlens_k"), make=make_step),
        ),
        axes=(
            Axis("tokens", scales=True, live=True, tiled=True, codes=attn.LENGTH),
            Axis("kv_tokens", scales=True, live=True, tiled=True, codes=attn.LENGTH),
            Axis("starts", scales=True, live=True),
            *attn.HEADS,
            Axis("longest_q", scales=True),
            Axis("longest_k", scales=True),
            *attn.HEAD_DIMS,
        ),
        cases=cases,
        sibling=sibling,
        left_by_state=torch_alone,
        aliases={
            each: fact for each, fact in attn.ALIASES.items() if fact not in ("batch", "seq_q", "seq_k", "attn_mask")
        },
        derive=_derive,
        derived_from={"bias_grad": (), **attn.GROUP, "longest_q": ("tokens",), "longest_k": ("kv_tokens",)},
        check_values=_check_starts,
        number_guard=guard(("cu_seqlens_q", "query"), ("cu_seqlens_k", "key")),
        examples=_examples,
        work=_work,
        scratch=_scratch,
        parts=parts_of_keys,
        sweep=functools.partial(sweep_of, name),
        stock=stock,
    )


STANDARD_RAGGED, GQA_RAGGED = attn.by_heads(
    _operation,
    "prefill.ragged",
    "Attention of sequences one after the other",
    (
        _case("small", 3, 40, 4, 4, 32),
        _case("short", 5, 90, 6, 6, 64),
        _case("minilm", 16, 1024, 12, 12, 32, causal=False),
        _case("vision", 8, 8192, 16, 16, 64, causal=False),
    ),
    (_case("small", 3, 40, 8, 2, 32), _case("short", 5, 90, 12, 3, 64), _case("llama3_8b_t4096", 8, 4096, 32, 8, 128)),
)

OPERATIONS = (STANDARD_RAGGED, GQA_RAGGED)
RAGGED = (STANDARD_RAGGED.name, GQA_RAGGED.name)


def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    """Check a call and choose the operation by head counts."""
    check_dense(NAME, arguments)
    problems = rank_problems(arguments, ("query", "key", "value"), 3)
    refuse(NAME, problems)
    query, key, slopes = arguments["query"].shape, arguments["key"].shape, arguments["alibi_slopes"]
    check_heads(NAME, query, key)
    problems = score_problems(arguments) + _start_problems(arguments)
    if not isinstance(arguments["causal"], bool):
        problems.append(f"causal: wanted bool, got {told(arguments['causal'])}")
    problems += [] if problems else slope_problems(slopes, query[1], len(arguments["cu_seqlens_q"]) - 1)
    operation = STANDARD_RAGGED if query[1] == key[1] else GQA_RAGGED
    canonical = without_defaults(operation, arguments, query[2])
    problems += operation.schema.validate(**canonical)
    refuse(NAME, problems)
    by_sequence = slopes is not None and slopes.ndim == 2
    return Routed(operation, canonical, varies=("tokens", "kv_tokens") if by_sequence else _VARIES)


_VARIES = ("tokens", "kv_tokens", "starts")


def _start_problems(arguments: dict[str, Any]) -> list[str]:
    starts, others = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    problems = shape_problems("cu_seqlens_q", starts, tokens=len(arguments["query"]))
    problems += shape_problems("cu_seqlens_k", others, None if problems else len(starts), len(arguments["key"]))
    step = arguments["step"]
    if problems:
        return problems
    for name, of in (("cu_seqlens_q", "query"), ("cu_seqlens_k", "key")):
        if arguments[name].is_cpu and type(arguments[name]) is Tensor:
            problems += value_problems(name, arguments[name], len(arguments[of]))
    if isinstance(step, RaggedMetadata):
        if step.is_stale:
            problems.append("step: wanted advance() after cu_seqlens changed, got a step of old values")
        elif not step.belongs(starts, others):
            problems.append("step: wanted the RaggedMetadata of these cu_seqlens, got that of others")
    return problems


_WIDTHS = (1, 7, 8, 16, 32, 33, 64, 96, 128)
_WIDTH_WEIGHTS = (1, 2, 3, 4, 4, 2, 4, 1, 2)
_LENGTHS = (0, 1, 2, 3, 5, 8, 16, 17, 33, 64)
_LENGTH_WEIGHTS = (2, 4, 3, 3, 3, 3, 3, 3, 2, 2)


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    sequences = draw.of((0, 1, 2, 3, 6), (1, 6, 12, 12, 6))
    kv_heads = draw.of((1, 2, 3, 4))
    heads = kv_heads * draw.of((1, 2, 3, 4), (6, 2, 1, 1))
    head_dim = draw.of(_WIDTHS, _WIDTH_WEIGHTS)
    value_dim = draw.of(_WIDTHS, _WIDTH_WEIGHTS) if draw.chance(0.1) else head_dim
    queries = [draw.of(_LENGTHS, _LENGTH_WEIGHTS) for _ in range(sequences)]
    same = draw.chance(0.5)
    keys = queries if same else [draw.of(_LENGTHS, _LENGTH_WEIGHTS) for _ in range(sequences)]
    starts_q = starts_of(draw, queries)
    starts_k = starts_q if same and draw.chance(0.5) else starts_of(draw, keys)
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((sum(queries), heads, head_dim), dtype)),
        "key": draw.laid_out(draw.normal((sum(keys), kv_heads, head_dim), dtype)),
        "value": draw.laid_out(draw.normal((sum(keys), kv_heads, value_dim), dtype)),
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
    }
    arguments |= scores(draw, head_dim)
    arguments |= draw.maybe(0.7, causal=lambda: draw.chance(0.6))
    if draw.chance(0.6):
        for name, lengths in (("max_seqlen_q", queries), ("max_seqlen_k", keys)):
            arguments[name] = max(*lengths, 1, 1) + draw.of((0, 3), (4, 1))
    arguments |= draw.maybe(0.1, sinks=lambda: draw.laid_out(draw.normal((heads,), draw.of((dtype, torch.float32)))))
    if draw.chance(0.1):
        slopes = (heads,) if draw.chance(0.6) else (sequences, heads)
        arguments["alibi_slopes"] = draw.laid_out(draw.uniform(slopes, draw.of((dtype, torch.float32))) / 2)
    arguments |= draw.maybe(0.3, step=lambda: RaggedMetadata(starts_q, starts_k, capturable=draw.chance(0.5)))
    # A NaN reaches what sees it; of a query that sees no key nothing is defined.
    if "window" not in arguments and all(rows <= columns for rows, columns in zip(queries, keys, strict=True)):
        draw.poison(arguments, ("query",))
    return arguments


def starts_of(draw: Draw, lengths: list[int]) -> Tensor:
    """Where sequences of these lengths begin, on the device of the draw."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return torch.tensor(ends, dtype=torch.int32, device=draw.device)


def scores(draw: Draw, head_dim: int) -> dict[str, Any]:
    """What acts on scores by number alone."""
    arguments: dict[str, Any] = {}
    if draw.chance(0.15):
        unit = head_dim**-0.5
        arguments["scale"] = draw.of((unit, 0.25 * unit, 3.0 * unit))
    arguments |= draw.maybe(0.12, window=lambda: (draw.of((-1, 0, 1, 4, 40)), draw.of((-1, 0, 3))))
    arguments |= draw.maybe(0.08, softcap=lambda: draw.of((0.5, 5.0, 30.0)))
    arguments |= draw.maybe(0.15, return_lse=lambda: True)
    return arguments


RAGGED_ATTENTION = Function(NAME, ragged_attention, route, OPERATIONS, _draw, 3, state=frozenset({"sdpa"}))
FUNCTIONS = (RAGGED_ATTENTION,)

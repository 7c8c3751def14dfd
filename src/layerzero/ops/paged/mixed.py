"""Several query tokens a sequence over a paged cache: prefills, chunks behind a cached prefix, decodes among them.

    attention.{standard,gqa}.prefill.paged   any number of queries a sequence
    attention.{standard,gqa}.mixed.paged     the same, of which the first ``decodes`` sequences have one query each

Queries lie one after the other, those of a sequence are its newest tokens. ``context_lens`` is the final length, the
queries' own tokens included: query i of n sees the keys below ``context_lens - n + 1 + i``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.core.values import Check
from layerzero.ops.attention.declare import (
    ALIASES,
    CAUSAL,
    HEAD_DIMS,
    LENGTH,
    RETURN_LSE,
    SCALE,
    SOFTCAP,
    TOLERANCE,
    TOLERANCE_REASON,
    WINDOW,
    visible_pairs,
)
from layerzero.ops.attention.limits import grouped
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.paged import tree, written
from layerzero.ops.paged.declare import (
    CACHE_LAYOUTS,
    MAX_CONTEXT_LEN,
    PAGES,
    READ,
    STEP_OF_TOKENS,
    check_pages,
    table_examples,
)
from layerzero.ops.paged.gather import gathered
from layerzero.ops.paged.mixed_sweep import sweep_of
from layerzero.ops.paged.step import StepMetadata
from layerzero.ops.ragged import parts
from layerzero.ops.ragged.declare import INT32, MAX_SEQLEN_Q
from layerzero.ops.ragged.reference import without_padding
from layerzero.ops.ragged.starts import bounds_of, checks, guard, longest_of, spread, to_the_right


def paged_tokens_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
    max_seqlen_q: int | None = None,
    decodes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Gather the pages of each sequence and pad its queries to the left, then attend by definition.

    Shapes: query (T, H, D), key_cache (P, N, K, D), value_cache (P, N, K, D_v), block_tables (B, max_blocks),
    context_lens (B,), cu_seqlens_q (B + 1,), sinks (H,), alibi_slopes (H,) or (B, H), tree_mask (T, columns)
    → (T, H, D_v); log-sum-exp (H, T). A query that sees no key gives 0, -inf (with sinks, the sink).
    Dtype: computes in float32, or float64 for float64; returns query.dtype; log-sum-exp float32, natural logarithm.
    Units: max_context_len and max_seqlen_q in tokens, decodes in sequences; promises, which change no result.
    Source: PagedAttention, arXiv:2309.06180; chunked prefill, arXiv:2308.16369.
    """
    keys, values = gathered(key_cache, value_cache, block_tables, context_lens, max_context_len)
    longest = longest_of(cu_seqlens_q, query.shape[0], max_seqlen_q)
    mask = None
    if tree_mask is not None:
        mask = tree.of_keys(tree_mask, cu_seqlens_q, context_lens, longest, keys.shape[1])
    result = attention_reference(
        to_the_right(query, cu_seqlens_q, longest),
        keys,
        values,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        attn_mask=mask,
        kv_lens=context_lens,
        return_lse=return_lse,
    )
    found: Tensor | tuple[Tensor, Tensor] = without_padding(result, cu_seqlens_q, query.shape[0])
    return found


def tokens_fake(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: object, return_lse: bool = False, **__: object
) -> Tensor | tuple[Tensor, Tensor]:
    """Results of the right shape and dtype, nothing computed."""
    tokens, heads, _dim = query.shape
    output = query.new_empty((tokens, heads, value_cache.shape[-1]))
    return (output, query.new_empty((heads, tokens), dtype=torch.float32)) if return_lse else output


def _check_values(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | None = None,
    decodes: int | None = None,
    step: StepMetadata | None = None,
    tree_mask: Tensor | None = None,
    **_: object,
) -> list[Check]:
    """Values on the device, beside places and counts: starts that follow each other, what was promised, a tree."""
    found = check_pages(key_cache, block_tables, context_lens, step)
    found += checks("cu_seqlens_q", cu_seqlens_q, len(query), max_seqlen_q)
    found += [] if decodes is None else _decodes_checks(cu_seqlens_q, decodes)
    return found if tree_mask is None else found + tree.checks(tree_mask, cu_seqlens_q)


def decodes_problems(starts: Tensor, decodes: int) -> list[str]:
    """What is wrong with the promise that the first sequences have one query each; reads starts on the host."""
    return values.problems_on_host(_decodes_checks(starts, decodes))


def _decodes_checks(starts: Tensor, decodes: int) -> list[Check]:
    if decodes >= len(starts):  # the route says so
        return []
    first = starts[: decodes + 1]
    unlike = (first != torch.arange(decodes + 1, device=starts.device)).any()

    def say(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"cu_seqlens_q: wanted one query in each of the first {decodes} sequences, got starts {list(got)}"

    return [Check(unlike, first[:9], say)]


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    capacity = values["max_blocks"] * values["page_size"]
    bound, longest, decodes = values["max_context_len"], values["max_seqlen_q"], values.get("decodes")
    found = {
        "group": values["heads"] // values["kv_heads"],
        "context_bound": capacity if bound is None else min(bound, capacity),
        "longest_q": values["tokens"] if longest is None else min(longest, values["tokens"]),
    }
    return found if decodes is None else found | {"decoding": min(decodes, values["batch"])}


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over the pages of full sequences, each of those that are no decodes with as many queries."""
    batch, heads, keys = facts["batch"], facts["heads"], facts["context_bound"]
    decodes = min(facts.get("decoding", 0), facts["tokens"])
    dims, others = facts["head_dim"] + facts["value_dim"], max(batch - decodes, 1)
    queries = -(-(facts["tokens"] - decodes) // others)
    causal, window = bool(facts["causal"]), facts["window"]
    pairs = decodes * visible_pairs(1, keys, causal, window) + others * visible_pairs(queries, keys, causal, window)
    elements = dims * (facts["tokens"] * heads + batch * keys * facts["kv_heads"])
    return Work(2.0 * heads * pairs * dims, float(elements * facts["dtype"].itemsize))


def _examples(mixed: bool) -> Callable[..., dict[str, Any]]:
    def examples(
        case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
    ) -> dict[str, Any]:
        """Tables as for decoding; eight sequences of nine decode in a mixed call, unless the case promises others."""
        batch, tokens = case.sizes["batch"], case.sizes["tokens"]
        decodes = 0
        if mixed:
            promised: Any = case.params.get("decodes", max(batch * 8 // 9, 1))
            decodes = max(min(promised, tokens, batch if batch == tokens else batch - 1), 0)
        ones = torch.arange(decodes, dtype=torch.int32)
        most: Any = case.params.get("max_seqlen_q")
        starts = torch.cat((ones, spread(tokens - decodes, batch - decodes, most) + decodes))
        made = table_examples(case, dtype, device, generator) | {"cu_seqlens_q": starts}
        made |= bounds_of(made, case.params, max_seqlen_q="cu_seqlens_q")
        made["cu_seqlens_q"] = starts.to(device)
        made |= _biases(case, device, generator)
        return made | {"decodes": decodes} if decodes else made

    return examples


def _biases(case: Case, device: torch.device, generator: torch.Generator | None) -> dict[str, Tensor]:
    """Sinks in the dtype that GPT-OSS has them in, whatever the queries', and slopes as steep as ALiBi's."""
    where, heads, made = device if generator is None else generator.device, case.sizes["heads"], dict[str, Tensor]()
    if "sinks" in case.given:
        made["sinks"] = torch.randn(heads, generator=generator, device=where).to(device, torch.bfloat16)
    if "alibi_slopes" in case.given:
        made["alibi_slopes"] = torch.rand(heads, generator=generator, device=where).to(device) / 2
    return made


def _scratch(sizes: Mapping[str, int]) -> int:
    """The larger of the scores and of the keys for every head; the longest sequence may have most of the queries."""
    keys = sizes["max_blocks"] * sizes["page_size"]
    return sizes["batch"] * sizes["heads"] * keys * max(sizes["tokens"], sizes["head_dim"])


def _guard(function: str, layout: str | None) -> Callable[..., None]:
    """What every call is looked at for: starts that fit the tables, caches that nobody says are written otherwise.

    On a CPU also that a tree mask is one.
    """
    starts = guard(("cu_seqlens_q", "query"), rows="block_tables")(function, layout)
    caches = written.guard(function, layout)

    def look(**tensors: Tensor) -> None:
        starts(**tensors)
        mask = tensors.get("tree_mask")
        if mask is not None and mask.is_cpu:
            tree.check(function, mask, tensors["cu_seqlens_q"])
        if caches is not None:
            caches(**tensors)

    return look


_BOOL = frozenset({torch.bool})
DECODES = Param("decodes", int, None, Role.BOUND)
_BATCH = Axis("batch", scales=True, live=True)
_TOKENS = (
    Axis("tokens", scales=True, live=True, tiled=True, codes=LENGTH),
    Axis("starts", live=True, implied=True),
    Axis("kv_heads", scales=True, beside=True, apart=True, carries=("heads",)),
    Axis("heads", scales=True, beside=True),
    Axis("group", implied=True),
    Axis("longest_q", scales=True),
    Axis("context_bound", scales=True),
    Axis("decoding", scales=True),
)


def _case(
    name: str, batch: int, tokens: int, context: int, heads: int, kv_heads: int, head_dim: int, page_size: int = 16
) -> Case:
    sizes = {"tokens": tokens, "batch": batch, "starts": batch + 1, "heads": heads, "kv_heads": kv_heads}
    blocks = context // page_size
    sizes |= {"head_dim": head_dim, "value_dim": head_dim, "page_size": page_size}
    return Case(name, sizes | {"max_blocks": blocks, "pages": batch * blocks}, {"causal": True})


def _operation(name: str, summary: str, cases: tuple[Case, ...], sibling: str = "") -> Operation:
    mixed = ".mixed." in name
    derived = ("group", "context_bound", "longest_q", *(("decoding",) if mixed else ()))
    behind = {"group": ("heads", "kv_heads"), "context_bound": ("max_blocks", "page_size"), "longest_q": ("tokens",)}
    return Operation(
        schema=OperationSchema(
            operation=name,
            inputs=(
                TensorSchema("query", ("tokens", "heads", "head_dim"), FLOATING),
                *READ,
                TensorSchema("cu_seqlens_q", ("starts",), INT32, same_dtype=False, counts=("tokens",)),
                TensorSchema("sinks", ("heads",), FLOATING, required=False, same_dtype=False),
                TensorSchema("alibi_slopes", (), FLOATING, required=False, same_dtype=False),
                TensorSchema("tree_mask", (), _BOOL, required=False, same_dtype=False),
            ),
            outputs=(
                TensorSchema("output", ("tokens", "heads", "value_dim")),
                TensorSchema("lse", ("heads", "tokens"), frozenset({torch.float32}), when="return_lse"),
            ),
            params=(
                *(CAUSAL, SCALE, WINDOW, SOFTCAP, RETURN_LSE, MAX_CONTEXT_LEN, MAX_SEQLEN_Q),
                *((DECODES,) if mixed else ()),
                STEP_OF_TOKENS,
            ),
            axes=(_BATCH, *_TOKENS, *PAGES, *HEAD_DIMS),
            layouts=CACHE_LAYOUTS,
        ),
        summary=summary,
        reference=paged_tokens_reference,
        fake=tokens_fake,
        cases=cases,
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        sibling=sibling,
        unlike_sibling=grouped if sibling else None,
        aliases={each: fact for each, fact in ALIASES.items() if fact not in ("seq_q", "seq_k", "attn_mask")},
        derive=_derive,
        derived=derived,
        derived_from=behind | ({"decoding": ("batch",)} if mixed else {}),
        complete=lambda sizes: {"starts": sizes["batch"] + 1},
        work=_work,
        check_values=_check_values,
        guard=_guard,
        examples=_examples(mixed),
        scratch=_scratch,
        parts=parts.of_pages,
        sweep=sweep_of(name),
    )


STANDARD_PREFILL_PAGED = _operation(
    "attention.standard.prefill.paged",
    "Attention of several queries per sequence over a paged cache, equal head counts",
    (_case("small", 3, 20, 32, 4, 4, 64), _case("medium", 4, 1024, 1024, 16, 16, 64)),
)
GQA_PREFILL_PAGED = _operation(
    "attention.gqa.prefill.paged",
    "Attention of several queries per sequence over a paged cache, several query heads a kv head",
    (
        _case("small", 3, 20, 32, 8, 2, 64),
        _case("llama3_8b_chunks", 8, 4096, 4096, 32, 8, 128),
        _case("llama3_8b_prefill", 4, 8192, 2048, 32, 8, 128),
    ),
    sibling="attention.standard.prefill.paged",
)
STANDARD_MIXED_PAGED = _operation(
    "attention.standard.mixed.paged",
    "Decodes and prefills in one call over a paged cache, equal head counts",
    (_case("small", 3, 20, 32, 4, 4, 64), _case("medium", 18, 1040, 1024, 16, 16, 64)),
)
GQA_MIXED_PAGED = _operation(
    "attention.gqa.mixed.paged",
    "Decodes and prefills in one call over a paged cache, several query heads a kv head",
    (_case("small", 3, 20, 32, 8, 2, 64), _case("llama3_8b_64_and_8x512", 72, 4160, 4096, 32, 8, 128)),
    sibling="attention.standard.mixed.paged",
)

OPERATIONS = (STANDARD_PREFILL_PAGED, GQA_PREFILL_PAGED, STANDARD_MIXED_PAGED, GQA_MIXED_PAGED)
PREFILL_PAGED = (STANDARD_PREFILL_PAGED.name, GQA_PREFILL_PAGED.name)
MIXED_PAGED = (STANDARD_MIXED_PAGED.name, GQA_MIXED_PAGED.name)
ALL = (*PREFILL_PAGED, *MIXED_PAGED)

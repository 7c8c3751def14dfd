"""Several query tokens a sequence over a paged cache: prefills, chunks behind a cached prefix, decodes among them.

    attention.{standard,gqa}.prefill.paged   any number of queries a sequence
    attention.{standard,gqa}.mixed.paged     the same, of which the first ``decodes`` sequences have one query each

Queries lie one after the other, those of a sequence are its newest tokens. ``context_lens`` is the final length, the
queries' own tokens included: query i of n sees the keys below ``context_lens - n + 1 + i``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Random, Work
from layerzero.core.values import Check
from layerzero.ops.attention import declare as attn
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.attention.sweep import Heads, extent_of
from layerzero.ops.paged import declare as paged
from layerzero.ops.paged import layout_record, tree
from layerzero.ops.paged.pages import gathered
from layerzero.ops.paged.step import StepMetadata
from layerzero.ops.ragged.declare import INT32, MAX_SEQLEN_Q
from layerzero.ops.ragged.reference import parts_of_pages, without_padding
from layerzero.ops.ragged.starts import bounds_of, checks, guard, longest_of, spread, to_the_right


def paged_tokens_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    tree_mask: Tensor | None = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    max_context_len: int | None = None,
    max_seqlen_q: int | None = None,
    decodes: int | None = None,
    **scores: Any,
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
        places = cu_seqlens_q, context_lens, longest, keys.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        mask, window, alibi_slopes = tree.scored(tree_mask, *places, window, alibi_slopes, wide), None, None
    result = attention_reference(
        to_the_right(query, cu_seqlens_q, longest),
        keys,
        values,
        attn_mask=mask,
        kv_lens=context_lens,
        window=window,
        alibi_slopes=alibi_slopes,
        **{"causal": True, **scores},
    )
    found: Tensor | tuple[Tensor, Tensor] = without_padding(result, cu_seqlens_q, query.shape[0])
    return found


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
    """Values on the device, besides places and counts: starts that follow each other, what was promised, a tree."""
    found = paged.check_pages(key_cache, block_tables, context_lens, step)
    found += checks("cu_seqlens_q", cu_seqlens_q, len(query), max_seqlen_q)
    found += [] if decodes is None else _decodes_checks(cu_seqlens_q, decodes)
    return found if tree_mask is None else found + tree.checks(tree_mask, cu_seqlens_q)


def decodes_problems(starts: Tensor, decodes: int) -> list[str]:
    """What is wrong with the promise that the first sequences have one query each; reads starts on the host."""
    return values.problems_on_host(_decodes_checks(starts, decodes))


def _decodes_checks(starts: Tensor, decodes: int) -> list[Check]:
    if not 0 <= decodes < len(starts):  # the route and the schema say so
        return []
    first = starts[: decodes + 1]
    unlike = (first != torch.arange(decodes + 1, device=starts.device)).any()

    def say(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"cu_seqlens_q: wanted one query in each of the first {decodes} sequences, got starts {list(got)}"

    return [Check(unlike, first[:9], say)]


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    longest, decodes = values["max_seqlen_q"], values.get("decodes")
    found = attn.group_of(arguments, values) | paged.bound_of(arguments, values)
    found["longest_q"] = values["tokens"] if longest is None else min(longest, values["tokens"])
    return found if decodes is None else found | {"decoding": min(decodes, values["batch"])}


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over the pages of full sequences, each of those that are no decodes with as many queries."""
    batch, keys = facts["batch"], facts["context_bound"]
    decodes = min(facts.get("decoding", 0), facts["tokens"])
    others = max(batch - decodes, 1)
    queries = -(-(facts["tokens"] - decodes) // others)
    causal, window = bool(facts["causal"]), facts["window"]
    pairs = decodes * attn.visible_pairs(1, keys, causal, window) + others * attn.visible_pairs(
        queries, keys, causal, window
    )
    return attn.work_of(facts, pairs, facts["tokens"], batch * keys)


def _examples(mixed: bool, case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Tables as for decoding; eight sequences of nine decode in a mixed call, unless the case promises others."""
    batch, tokens = case.sizes["batch"], case.sizes["tokens"]
    decodes = 0
    if mixed:
        promised: Any = case.params.get("decodes", max(batch * 8 // 9, 1))
        decodes = max(min(promised, tokens, batch if batch == tokens else batch - 1), 0)
    ones = torch.arange(decodes, dtype=torch.int32)
    most: Any = case.params.get("max_seqlen_q")
    starts = torch.cat((ones, spread(tokens - decodes, batch - decodes, most) + decodes))
    made = paged.table_examples(case, dtype, device, generator) | {"cu_seqlens_q": starts}
    made |= bounds_of(made, case.params, max_seqlen_q="cu_seqlens_q")
    made["cu_seqlens_q"] = starts.to(device)
    made |= _biases(case, device, generator)
    return made | {"decodes": decodes} if decodes else made


def _biases(case: Case, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """Sinks in the dtype that GPT-OSS has them in, whatever the queries', and slopes as steep as ALiBi's."""
    where, heads, made = device if generator is None else generator.device, case.sizes["heads"], dict[str, Tensor]()
    if "sinks" in case.given:
        made["sinks"] = torch.randn(heads, generator=generator, device=where).to(device, torch.bfloat16)
    if "alibi_slopes" in case.given:
        made["alibi_slopes"] = torch.rand(heads, generator=generator, device=where).to(device) / 2
    return made


def _guard(function: str, layout: str | None) -> Callable[..., None]:
    """Checks of every call: caches without a record of another layout, and on a CPU that a tree mask is one."""
    caches = layout_record.guard(function, layout)

    def look(**tensors: Tensor) -> None:
        mask = tensors.get("tree_mask")
        if mask is not None and mask.is_cpu:
            tree.check(function, mask, tensors["cu_seqlens_q"])
        if caches is not None:
            caches(**tensors)

    return look


OF_TOKENS = ("sinks", "alibi_slopes", "tree_mask")
"""What only several tokens a sequence may have."""

_BOOL = frozenset({torch.bool})
DECODES = Param("decodes", int, None, Role.BOUND)
_BATCH = Axis("batch", scales=True, live=True)
_TOKENS = (
    Axis("tokens", scales=True, live=True, tiled=True, codes=attn.LENGTH),
    Axis("starts", live=True, implied=True),
    *attn.HEADS,
    Axis("longest_q", scales=True),
    Axis("context_bound", scales=True),
    Axis("decoding", scales=True),
)


def _case(name: str, batch: int, tokens: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    sizes = {"tokens": tokens, "batch": batch, "starts": batch + 1, "heads": heads, "kv_heads": kv_heads}
    blocks = -(-context // paged.PAGE_SIZE)
    sizes |= {"head_dim": head_dim, "value_dim": head_dim, "page_size": paged.PAGE_SIZE}
    return Case(name, sizes | {"max_blocks": blocks, "pages": batch * blocks}, {"causal": True})


CHUNKS = {"cuda": 512, "cpu": 64}
"""Queries of a chunk of a prefill."""


def tokens_case(heads: Heads, kind: str, batch: int, tokens: int, context: int) -> tuple[str, Case]:
    """An operation's name and a case of it; in a mixed call eight sequences of nine decode."""
    name = f"{tokens} tokens of {batch} KV{context} ({heads}) page {paged.PAGE_SIZE}"
    case = _case(name, batch, tokens, context, heads.heads, heads.kv_heads, heads.head_dim)
    return f"attention.{heads.kind}.{kind}.paged", case


def sweep_of(operation: str) -> Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]:
    """The sweep of one kind of head counts: chunks behind prefixes, and chunks among eight times as many decodes."""
    kind = operation.split(".")[2]

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        extent = extent_of(device, narrow)
        chunk = CHUNKS.get(device, CHUNKS["cpu"])
        for heads in extent.heads[:2]:
            for batch in (1, 8):
                for context in extent.contexts:
                    prefill = batch, batch * chunk
                    sequences, tokens = prefill if kind == "prefill" else (9 * batch, batch * (chunk + 8))
                    if chunk <= context <= paged.MAX_PAGED and sequences * context <= extent.max_context:
                        name, case = tokens_case(heads, kind, sequences, tokens, context)
                        if name == operation:
                            yield case

    return sweep


def _operation(name: str, summary: str, cases: tuple[Case, ...], sibling: str = "") -> Operation:
    mixed = ".mixed." in name
    return attn.operation(
        name,
        summary,
        paged_tokens_reference,
        inputs=(
            TensorSchema("query", ("tokens", "heads", "head_dim"), FLOATING),
            *paged.READ,
            TensorSchema("cu_seqlens_q", ("starts",), INT32, same_dtype=False, counts=("tokens",)),
            *attn.BIASES,
            TensorSchema("tree_mask", (), _BOOL, required=False, same_dtype=False),
        ),
        outputs=attn.results("tokens"),
        params=(
            *(attn.CAUSAL, attn.SCALE, attn.WINDOW, attn.SOFTCAP, attn.RETURN_LSE, paged.MAX_CONTEXT_LEN, MAX_SEQLEN_Q),
            *((DECODES,) if mixed else ()),
            paged.STEP_OF_TOKENS,
        ),
        axes=(_BATCH, *_TOKENS, *paged.PAGES, *attn.HEAD_DIMS),
        layouts=paged.CACHE_LAYOUTS,
        cases=cases,
        sibling=sibling,
        aliases={each: fact for each, fact in attn.ALIASES.items() if fact not in ("seq_q", "seq_k", "attn_mask")},
        derive=_derive,
        derived_from=attn.GROUP
        | paged.BOUND
        | {"longest_q": ("tokens",)}
        | ({"decoding": ("batch",)} if mixed else {}),
        complete=lambda sizes: {"starts": sizes["batch"] + 1},
        work=_work,
        check_values=_check_values,
        guard=_guard,
        number_guard=guard(("cu_seqlens_q", "query"), rows="block_tables"),
        examples=functools.partial(_examples, mixed),
        scratch=paged.scratch,
        parts=parts_of_pages,
        sweep=sweep_of(name),
    )


STANDARD_PREFILL_PAGED, GQA_PREFILL_PAGED = attn.by_heads(
    _operation,
    "prefill.paged",
    "Attention of several queries per sequence over a paged cache",
    (_case("small", 3, 20, 32, 4, 4, 64), _case("medium", 4, 1024, 1024, 16, 16, 64)),
    (
        _case("small", 3, 20, 32, 8, 2, 64),
        _case("llama3_8b_chunks", 8, 4096, 4096, 32, 8, 128),
        _case("llama3_8b_prefill", 4, 8192, 2048, 32, 8, 128),
    ),
)
STANDARD_MIXED_PAGED, GQA_MIXED_PAGED = attn.by_heads(
    _operation,
    "mixed.paged",
    "Decodes and prefills in one call over a paged cache",
    (_case("small", 3, 20, 32, 4, 4, 64), _case("medium", 18, 1040, 1024, 16, 16, 64)),
    (_case("small", 3, 20, 32, 8, 2, 64), _case("llama3_8b_64_and_8x512", 72, 4160, 4096, 32, 8, 128)),
)

OPERATIONS = (STANDARD_PREFILL_PAGED, GQA_PREFILL_PAGED, STANDARD_MIXED_PAGED, GQA_MIXED_PAGED)
PREFILL_PAGED = (STANDARD_PREFILL_PAGED.name, GQA_PREFILL_PAGED.name)
MIXED_PAGED = (STANDARD_MIXED_PAGED.name, GQA_MIXED_PAGED.name)
ALL = (*PREFILL_PAGED, *MIXED_PAGED)

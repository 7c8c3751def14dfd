"""Attention of one new token a sequence over the pages of its cache.

    attention.standard.decode.paged   H == K
    attention.gqa.decode.paged        H == g * K
    attention.gqa.decode.batched      H == g * K, a contiguous cache for each sequence in place of pages

A cache is (pages, page_size, kv_heads, head_dim) in NHD, (pages, kv_heads, page_size, head_dim) in HND. Block tables
and lengths lie on the device: nothing is read on the host, so a captured step replays with other tables and lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING, INDEX, dtype_name, dtype_named
from layerzero.core.facts import Facts
from layerzero.core.operation import Case, Operation, Part, Random, Work
from layerzero.core.reasons import ReasonCode
from layerzero.core.values import Check
from layerzero.ops import declaration
from layerzero.ops.attention import declare as attn
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.attention.sweep import Heads, extent_of
from layerzero.ops.paged import layout_record
from layerzero.ops.paged.pages import CacheList, converted_dtype, gathered
from layerzero.ops.paged.step import StepMetadata

_INT32 = frozenset({torch.int32})

CACHE_LAYOUTS = ("NHD", "HND")
"""Of a page: its tokens, kv heads, head dim; the pages come first in both."""

PAGES = (Axis("pages", live=True, works=False), Axis("max_blocks", scales=True, live=True))
AXES = (
    Axis("batch", scales=True, live=True, beside=True, apart=True),
    Axis("kv_heads", scales=True, beside=True, apart=True, shared=True, carries=("heads",)),
    Axis("heads", scales=True, beside=True),
    Axis("seq_q", scales=True, live=True, codes=attn.LENGTH),
    Axis("group", implied=True),
    Axis("context_bound", scales=True),
    *PAGES,
    *attn.HEAD_DIMS,
)


def make_step(arguments: Mapping[str, Any], capturable: bool) -> StepMetadata:
    """The step of a call's tables and lengths, and of its queries' starts where it has such."""
    return StepMetadata(
        arguments["block_tables"],
        arguments["context_lens"],
        cu_seqlens_q=arguments.get("cu_seqlens_q"),
        max_context_len=arguments.get("max_context_len") or None,  # a call over no blocks promises 0: no bound helps
        capturable=capturable,
    )


CACHE = ("pages", "page_size", "kv_heads")
READ = (
    TensorSchema("key_cache", (*CACHE, "head_dim"), FLOATING, has_layout=True, resident=True),
    TensorSchema("value_cache", (*CACHE, "value_dim"), FLOATING, has_layout=True, resident=True),
    TensorSchema("block_tables", ("batch", "max_blocks"), _INT32, same_dtype=False, indexes=("pages",)),
    TensorSchema("context_lens", ("batch",), _INT32, same_dtype=False, counts=("max_blocks", "page_size")),
)
"""A cache that is read, and where each sequence lies in it."""

MAX_CONTEXT_LEN = Param("max_context_len", int, None, Role.BOUND, made_of=("context_lens",))
STEP = Param("step", StepMetadata, None, Role.HANDLE, made_of=("block_tables", "context_lens"), make=make_step)
STEP_OF_TOKENS = replace(STEP, made_of=(*STEP.made_of, "cu_seqlens_q"))
"""Of calls with several queries a sequence."""


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    max_context_len: int | None = None,
    **scores: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Gather the pages of each sequence, then attend by definition; the query is each sequence's newest token.

    Entries of a table beyond a sequence's last page are not read: they may hold anything. So may the rest of its page.

    Shapes: query (B, 1, H, D), key_cache (P, N, K, D), value_cache (P, N, K, D_v), block_tables (B, max_blocks),
    context_lens (B,) → (B, 1, H, D_v); log-sum-exp (B, H, 1). A sequence of length 0 gives 0 and -inf.
    Dtype: computes in float32, or float64 for float64; returns query.dtype; log-sum-exp float32, natural logarithm.
    Units: max_context_len in tokens, an upper bound of context_lens.
    Source: PagedAttention, arXiv:2309.06180.
    """
    keys, values = gathered(key_cache, value_cache, block_tables, context_lens, max_context_len)
    return attention_reference(query, keys, values, kv_lens=context_lens, **scores)


def check_pages(
    key_cache: Tensor, block_tables: Tensor, context_lens: Tensor, step: StepMetadata | None = None, **_: object
) -> list[Check]:
    """Values on the device, besides places and counts: what the step says of them, and pages that have memory."""
    found = [] if step is None else _check_step(context_lens, step)
    return found + layout_record.checks(key_cache, block_tables=block_tables, context_lens=context_lens)


def _check_step(context_lens: Tensor, step: StepMetadata) -> list[Check]:
    """What a step knows of its tensors, and lengths within its bound."""
    found, bound = step.checks(), step.max_context_len
    if bound is None:
        return found

    def say(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"context_lens[{place[0]}]: wanted at most {bound}, as the step promises, got {got[0]}"

    return [*found, Check(context_lens > bound, context_lens.unsqueeze(1), say)]


def bound_of(_: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, object]:
    """The most tokens that a sequence has: what its table holds, or what was promised."""
    capacity, bound = sizes["max_blocks"] * sizes["page_size"], sizes["max_context_len"]
    return {"context_bound": capacity if bound is None else min(bound, capacity)}


BOUND = {"context_bound": ("max_blocks", "page_size")}


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over the pages of full sequences, as many as the table or the promised bound has."""
    batch, keys = facts["batch"], facts["batch"] * facts["context_bound"]
    return attn.work_of(facts, keys, batch, keys)


def table_examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Sequences on shuffled pages, each page in one place: where the cache is small, sequences are short."""
    size = case.sizes
    batch, blocks = size["batch"], size["max_blocks"]
    used = min(blocks, size["pages"] // max(batch, 1))  # pages that each sequence has
    shared = used == 0 and size["pages"] > 0 and blocks > 0  # fewer pages than sequences: all see the same prefix
    tokens = (1 if shared else used) * size["page_size"]
    table = torch.zeros(batch, blocks, dtype=torch.int64)  # beyond a sequence's last page: any page
    if not shared:
        where = torch.device("cpu") if generator is None else generator.device
        order = torch.randperm(size["pages"], generator=generator, device=where).cpu()
        table[:, :used] = order[: batch * used].view(batch, used)
    return {
        "block_tables": table.to(device, torch.int32),
        "context_lens": torch.full((batch,), tokens).to(device, torch.int32),
    }


PAGE_SIZE, MAX_PAGED = 16, 8192


def decode_case(name: str, batch: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    """One query a sequence over pages."""
    blocks = -(-context // PAGE_SIZE)
    sizes = {"batch": batch, "seq_q": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"value_dim": head_dim, "page_size": PAGE_SIZE, "max_blocks": blocks, "pages": batch * blocks}
    return Case(name, sizes)


def paged_case(heads: Heads, batch: int, context: int) -> tuple[str, Case]:
    """An operation's name and a case of it, for the heads of a kind of model."""
    name = f"B{batch} KV{context} ({heads}) page {PAGE_SIZE}"
    case = decode_case(name, batch, context, heads.heads, heads.kv_heads, heads.head_dim)
    return f"attention.{heads.kind}.decode.paged", case


def sweep_of(operation: str, device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """The sweep of attention over pages with one kind of head counts."""
    extent = extent_of(device, narrow)
    for heads in extent.heads:
        for batch in extent.decode_batches:
            for context in extent.contexts_of(batch):
                name, case = paged_case(heads, batch, context)
                if name == operation and batch * context <= extent.max_context and context <= MAX_PAGED:
                    yield case


def scratch(sizes: Mapping[str, int]) -> int:
    """The larger of the scores and of the keys for every head."""
    keys = sizes["max_blocks"] * sizes["page_size"]
    queries = sizes["seq_q"] if "seq_q" in sizes else sizes["tokens"]  # the longest sequence may have most of them
    return sizes["batch"] * sizes["heads"] * keys * max(queries, sizes["head_dim"])


def parts(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part]:
    """The first and the last sequence of a batch."""
    by_batch = [each.name for each in facts.operation.schema.inputs if each.shape_vars[:1] == ("batch",)]
    return [_sequence(arguments, by_batch, row) for row in dict.fromkeys((0, facts.size("batch") - 1))]


def _sequence(arguments: Mapping[str, Any], by_batch: Sequence[str], row: int) -> Part:
    rows = slice(row, row + 1)
    cut = {name: arguments[name][rows] for name in by_batch}
    return Part(f"sequence {row}", {**arguments, **cut, "step": None}, lambda tensor: tensor[rows])


def _operation(name: str, summary: str, cases: tuple[Case, ...], sibling: str = "") -> Operation:
    return attn.operation(
        name,
        summary,
        paged_attention_reference,
        inputs=(TensorSchema("query", ("batch", "seq_q", "heads", "head_dim"), FLOATING), *READ),
        outputs=attn.results("batch", "seq_q"),
        params=(attn.SCALE, attn.WINDOW, attn.SOFTCAP, attn.RETURN_LSE, MAX_CONTEXT_LEN, STEP),
        axes=AXES,
        layouts=CACHE_LAYOUTS,
        cases=cases,
        sibling=sibling,
        derive=lambda arguments, sizes: attn.group_of(arguments, sizes) | bound_of(arguments, sizes),
        derived_from=attn.GROUP | BOUND,
        work=_work,
        check_values=check_pages,
        guard=layout_record.guard,
        examples=table_examples,
        scratch=scratch,
        parts=parts,
        sweep=functools.partial(sweep_of, name),
    )


STANDARD_DECODE_PAGED, GQA_DECODE_PAGED = attn.by_heads(
    _operation,
    "decode.paged",
    "Attention of one query per sequence over a paged cache",
    (decode_case("small", 2, 64, 4, 4, 64), decode_case("medium", 8, 1024, 16, 16, 64)),
    (
        decode_case("small", 2, 64, 8, 2, 64),
        decode_case("llama3_8b_b1", 1, 4096, 32, 8, 128),
        decode_case("llama3_8b_b64", 64, 2048, 32, 8, 128),
    ),
)


def listed(given: Mapping[str, Any], _: bool = False) -> CacheList:
    """The rows of a call's caches as a list."""
    return CacheList.of_rows(given["key_cache"], given["value_cache"], given.get("layout", CACHE_LAYOUTS[0]))


CACHES = Param(
    "cache_list", CacheList, None, Role.HANDLE, made_of=("key_cache", "value_cache"), make=listed, changes_result=True
)
"""Contiguous caches in memory of their own, which both tensors stand for."""


def batched_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    cache_list: CacheList | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest token of each request to all its tokens in a contiguous cache of its own.

    Shapes: query (B, 1, H, D); key_cache a :class:`layerzero.CacheList` of B caches, which stands for both and brings
        ``cache_list`` and ``layout``, or (B, L, K, D) with value_cache (B, L, K, D_v) in NHD, axes 1 and 2 swapped in
        HND; H a multiple of K; kv_lens (B,) → (B, 1, H, D_v).
    Dtype: floating; the caches' may be another than the queries': then it computes in one that holds both, float32 or
        wider. kv_lens int32 or int64, on the same device. The output has the queries' dtype.
    Args:
        kv_lens: tokens of each request that are in its cache, the query's own included; what lies beyond may be
            anything. 0 gives 0 and -inf.
        scale: factor on the scores, 1/sqrt(D) by default.
        layout: ``"NHD"`` or ``"HND"``.
        window: (left, right) as in ``lz.attention``; of one query only left counts.
        softcap: ``c * tanh(score / c)`` on the scores.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1), natural logarithm.
        cache_list: what ``key_cache`` brings where it is a list.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing; on a CPU and in debug mode
        for lengths beyond a cache, too.
    Source: batched decodes of the Rust crate ferrum-kernels; arXiv:1706.03762.
    """
    if layout != CACHE_LAYOUTS[0]:
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    if cache_list is not None:
        cache_list.refuse_beyond("batched_attention", "kv_lens", kv_lens)
    rows = tuple(zip(key_cache, value_cache, strict=True)) if cache_list is None else cache_list.rows
    wide = query.to(converted_dtype(query, key_cache))
    scores: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "return_lse": True}
    found = [
        attention_reference(wide[row : row + 1], keys[None], values[None], kv_lens=kv_lens[row : row + 1], **scores)
        for row, (keys, values) in enumerate(rows)
    ] or [attention_reference(wide, key_cache, value_cache, kv_lens=kv_lens, **scores)]
    output, lse = (torch.cat(each) for each in zip(*found, strict=True))
    output = output.to(query.dtype)
    return (output, lse) if return_lse else output


def _batched_facts(arguments: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, object]:
    """Query heads of a kv head, the caches' dtype, and whether it is another than the queries': they are converted."""
    held = arguments["key_cache"].dtype
    told = {"cache_dtype": dtype_name(held), "converted": held is not sizes["dtype"]}
    return attn.group_of(arguments, sizes) | told


def _batched_work(facts: Mapping[str, Any]) -> Work:
    """Two products over full caches, whose bytes are of their own dtype."""
    keys = facts["batch"] * facts["length"]
    whole = attn.work_of(facts, keys, facts["batch"], keys)
    return replace(whole, bytes=whole.bytes * dtype_named(facts["cache_dtype"]).itemsize / facts["dtype"].itemsize)


def _check_list(kv_lens: Tensor, cache_list: CacheList | None = None, **_: object) -> list[Check]:
    """Lengths within each request's own cache, where these are a list."""
    return [] if cache_list is None else cache_list.checks("kv_lens", kv_lens)


_LISTED: dict[str, Any] = {"has_layout": True, "resident": True, "same_dtype": False}
_BATCHED = attn.operation(
    "attention.gqa.decode.batched",
    "Attention of one query per sequence over contiguous caches, one for each sequence",
    batched_attention,
    inputs=(
        TensorSchema("query", ("batch", "seq_q", "heads", "head_dim"), FLOATING),
        TensorSchema("key_cache", ("batch", "length", "kv_heads", "head_dim"), FLOATING, **_LISTED),
        TensorSchema("value_cache", ("batch", "length", "kv_heads", "value_dim"), FLOATING, **_LISTED),
        TensorSchema("kv_lens", ("batch",), INDEX, same_dtype=False, counts=("length",)),
    ),
    outputs=attn.results("batch", "seq_q"),
    params=(attn.SCALE, attn.WINDOW, attn.SOFTCAP, attn.RETURN_LSE, CACHES),
    axes=(*AXES[:5], Axis("length", scales=True, live=True), *attn.HEAD_DIMS),
    layouts=CACHE_LAYOUTS,
    cases=declaration.cases(
        "batch seq_q length heads kv_heads head_dim value_dim",
        {"small": (3, 1, 48, 8, 2, 64, 64), "llama3_8b_b16": (16, 1, 2048, 32, 8, 128, 128)},
    ),
    derive=_batched_facts,
    derived_from=attn.GROUP | {"cache_dtype": (), "converted": ()},
    aliases={**attn.ALIASES, "kv_cache_dtype": "cache_dtype"},
    work=_batched_work,
    check_values=_check_list,
    guard=layout_record.guard,
    scratch=lambda sizes: sizes["heads"] * sizes["length"] * max(sizes["seq_q"], sizes["head_dim"]),
)

_CODES = (("converted", ReasonCode.KV_CACHE_DTYPE_MISMATCH),)
GQA_DECODE_BATCHED = replace(_BATCHED, schema=replace(_BATCHED.schema, codes=_CODES))

OPERATIONS = (STANDARD_DECODE_PAGED, GQA_DECODE_PAGED, GQA_DECODE_BATCHED)
DECODE_PAGED = (STANDARD_DECODE_PAGED.name, GQA_DECODE_PAGED.name)

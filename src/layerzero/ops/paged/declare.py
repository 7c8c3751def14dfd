"""A paged KV cache: attention of one new token a sequence over its pages, and writing new tokens into them.

    attention.standard.decode.paged   H == K        kv.append.paged   tokens into the slots of a cache
    attention.gqa.decode.paged        H == g * K

A cache is (pages, page_size, kv_heads, head_dim) in NHD, (pages, kv_heads, page_size, head_dim) in HND. Block tables
and lengths lie on the device: nothing is read on the host, so a captured step replays with other tables and lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.core.values import Check
from layerzero.ops.attention.declare import (
    ALIASES,
    HEAD_DIMS,
    LENGTH,
    RETURN_LSE,
    SCALE,
    SOFTCAP,
    TOLERANCE,
    TOLERANCE_REASON,
    WINDOW,
)
from layerzero.ops.attention.limits import grouped
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.paged import on_demand, parts, written
from layerzero.ops.paged.gather import gathered
from layerzero.ops.paged.step import StepMetadata
from layerzero.ops.paged.sweep import append_sweep, sweep_of

_INT32 = frozenset({torch.int32})

CACHE_LAYOUTS = ("NHD", "HND")
"""Of a page: its tokens, kv heads, head dim; the pages come first in both."""

PAGES = (Axis("pages", live=True, works=False), Axis("max_blocks", scales=True, live=True))
AXES = (
    Axis("batch", scales=True, live=True, beside=True, apart=True),
    Axis("kv_heads", scales=True, beside=True, apart=True, carries=("heads",)),
    Axis("heads", scales=True, beside=True),
    Axis("seq_q", scales=True, live=True, codes=LENGTH),
    Axis("group", implied=True),
    Axis("context_bound", scales=True),
    *PAGES,
    *HEAD_DIMS,
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


_CACHE = ("pages", "page_size", "kv_heads")
READ = (
    TensorSchema("key_cache", (*_CACHE, "head_dim"), FLOATING, has_layout=True, resident=True),
    TensorSchema("value_cache", (*_CACHE, "value_dim"), FLOATING, has_layout=True, resident=True),
    TensorSchema("block_tables", ("batch", "max_blocks"), _INT32, same_dtype=False, indexes=("pages",)),
    TensorSchema("context_lens", ("batch",), _INT32, same_dtype=False, counts=("max_blocks", "page_size")),
)
"""A cache that is read, and where each sequence lies in it."""

MAX_CONTEXT_LEN = Param("max_context_len", int, None, Role.BOUND, made_of=("context_lens",))
STEP = Param("step", StepMetadata, None, Role.HANDLE, made_of=("block_tables", "context_lens"), make=make_step)
STEP_OF_TOKENS = replace(STEP, made_of=(*STEP.made_of, "cu_seqlens_q"))
"""Of calls with several queries a sequence."""


# attention.standard.decode.paged, attention.gqa.decode.paged


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
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
    return attention_reference(
        query, keys, values, scale=scale, window=window, softcap=softcap, kv_lens=context_lens, return_lse=return_lse
    )


def _paged_fake(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: object, return_lse: bool = False, **__: object
) -> Tensor | tuple[Tensor, Tensor]:
    batch, seq_q, heads, _dim = query.shape
    output = query.new_empty((batch, seq_q, heads, value_cache.shape[-1]))
    return (output, query.new_empty((batch, heads, seq_q), dtype=torch.float32)) if return_lse else output


def check_pages(
    key_cache: Tensor, block_tables: Tensor, context_lens: Tensor, step: StepMetadata | None = None, **_: object
) -> list[Check]:
    """Values on the device, beside places and counts: what the step says of them, and pages that have memory."""
    found = [] if step is None else _check_step(context_lens, step)
    return found + on_demand.checks(key_cache, block_tables=block_tables, context_lens=context_lens)


def _check_step(context_lens: Tensor, step: StepMetadata) -> list[Check]:
    """What a step knows of its tensors, and lengths within its bound."""
    found, bound = step.checks(), step.max_context_len
    if bound is None:
        return found

    def say(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"context_lens[{place[0]}]: wanted at most {bound}, as the step promises, got {got[0]}"

    return [*found, Check(context_lens > bound, context_lens.unsqueeze(1), say)]


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    capacity = values["max_blocks"] * values["page_size"]
    bound = values["max_context_len"]
    return {
        "group": values["heads"] // values["kv_heads"],
        "context_bound": capacity if bound is None else min(bound, capacity),
    }


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over the pages of full sequences, as many as the table or the promised bound has."""
    batch, dims = facts["batch"], facts["head_dim"] + facts["value_dim"]
    keys = facts["context_bound"]
    elements = batch * dims * (facts["heads"] + keys * facts["kv_heads"])
    return Work(2.0 * batch * facts["heads"] * keys * dims, float(elements * facts["dtype"].itemsize))


def table_examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Any]:
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


def _case(name: str, batch: int, context: int, heads: int, kv_heads: int, head_dim: int, page_size: int = 16) -> Case:
    blocks = context // page_size
    sizes = {"batch": batch, "seq_q": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Case(
        name, sizes | {"value_dim": head_dim, "page_size": page_size, "max_blocks": blocks, "pages": batch * blocks}
    )


def _operation(name: str, summary: str, cases: tuple[Case, ...], sibling: str = "") -> Operation:
    return Operation(
        schema=OperationSchema(
            operation=name,
            inputs=(
                TensorSchema("query", ("batch", "seq_q", "heads", "head_dim"), FLOATING),
                *READ,
            ),
            outputs=(
                TensorSchema("output", ("batch", "seq_q", "heads", "value_dim")),
                TensorSchema("lse", ("batch", "heads", "seq_q"), frozenset({torch.float32}), when="return_lse"),
            ),
            params=(
                *(SCALE, WINDOW, SOFTCAP, RETURN_LSE),
                MAX_CONTEXT_LEN,
                STEP,
            ),
            axes=AXES,
            layouts=CACHE_LAYOUTS,
        ),
        summary=summary,
        reference=paged_attention_reference,
        fake=_paged_fake,
        cases=cases,
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        sibling=sibling,
        unlike_sibling=grouped if sibling else None,
        aliases=ALIASES,
        derive=_derive,
        derived=("group", "context_bound"),
        derived_from={"group": ("heads", "kv_heads"), "context_bound": ("max_blocks", "page_size")},
        work=_work,
        check_values=check_pages,
        guard=written.guard,
        examples=table_examples,
        scratch=parts.scratch,
        parts=parts.parts,
        sweep=sweep_of(name),
    )


STANDARD_DECODE_PAGED = _operation(
    "attention.standard.decode.paged",
    "Attention of one query per sequence over a paged cache, equal head counts",
    (_case("small", 2, 64, 4, 4, 64), _case("medium", 8, 1024, 16, 16, 64)),
)
GQA_DECODE_PAGED = _operation(
    "attention.gqa.decode.paged",
    "Attention of one query per sequence over a paged cache, several query heads a kv head",
    (
        _case("small", 2, 64, 8, 2, 64),
        _case("llama3_8b_b1", 1, 4096, 32, 8, 128),
        _case("llama3_8b_b64", 64, 2048, 32, 8, 128),
    ),
    sibling="attention.standard.decode.paged",
)

# kv.append.paged


def append_paged_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value into its slot; a slot of -1 (padding) writes nothing.

    No value is read on the host: a token without a slot repeats one that has a slot, or what slot 0 holds.

    Shapes: key (T, K, D), value (T, K, D_v), key_cache (P, N, K, D), value_cache (P, N, K, D_v), slot_mapping (T,),
    each ``page * page_size + offset``. Mutates both caches. Raises: IndexError for a slot beyond the cache.
    """
    tokens = slot_mapping.shape[0]
    if tokens == 0 or key_cache.numel() == 0:
        return
    valid = slot_mapping >= 0
    stand_in = valid.long().argmax().expand(tokens)
    source = torch.where(valid, torch.arange(tokens, device=slot_mapping.device), stand_in)
    slots = torch.where(valid.any(), slot_mapping[source], 0)
    page, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[page, offset] = torch.where(valid.any(), new[source], cache[page, offset])


def _append_fake(*_: object, **__: object) -> None:
    return None


def _append_case(name: str, tokens: int, kv_heads: int, head_dim: int, pages: int, page_size: int = 16) -> Case:
    sizes = {"tokens": tokens, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    return Case(name, sizes | {"pages": pages, "page_size": page_size})


def _append_work(facts: Mapping[str, Any]) -> Work:
    """Each token's key and value read and written."""
    elements = facts["tokens"] * facts["kv_heads"] * (facts["head_dim"] + facts["value_dim"])
    return Work(0.0, 2.0 * elements * facts["dtype"].itemsize)


APPEND_PAGED = Operation(
    schema=OperationSchema(
        operation="kv.append.paged",
        inputs=(
            TensorSchema("key", ("tokens", "kv_heads", "head_dim"), FLOATING),
            TensorSchema("value", ("tokens", "kv_heads", "value_dim"), FLOATING),
            TensorSchema("key_cache", (*_CACHE, "head_dim"), FLOATING, mutated=True, has_layout=True, resident=True),
            TensorSchema("value_cache", (*_CACHE, "value_dim"), FLOATING, mutated=True, has_layout=True, resident=True),
            TensorSchema(
                "slot_mapping",
                ("tokens",),
                frozenset({torch.int64}),
                same_dtype=False,
                indexes=("pages", "page_size"),
                holes=True,
                distinct=True,
            ),
        ),
        outputs=(),
        axes=(
            Axis("tokens", scales=True, live=True, apart=True),
            Axis("kv_heads", scales=True, apart=True),
            *PAGES,
            *HEAD_DIMS,
        ),
        layouts=CACHE_LAYOUTS,
    ),
    summary="Write new keys and values into the slots of a paged cache",
    reference=append_paged_kv_reference,
    fake=_append_fake,
    cases=(
        _append_case("small", 3, 2, 64, 8),
        _append_case("llama3_8b_b64", 64, 8, 128, 8192),
        _append_case("prefill", 2048, 8, 128, 1024),
    ),
    tolerance=dict.fromkeys(TOLERANCE, Tolerance(0.0, 0.0)),
    tolerance_reason="it only moves numbers",
    check_values=on_demand.checks,
    guard=written.guard,
    note=written.note,
    work=_append_work,
    sweep=append_sweep,
)

OPERATIONS = (STANDARD_DECODE_PAGED, GQA_DECODE_PAGED, APPEND_PAGED)
DECODE_PAGED = (STANDARD_DECODE_PAGED.name, GQA_DECODE_PAGED.name)

"""A decode over a paged cache whose sequences begin with the same pages: the prefix is read once for all of them.

    attention.cascade.decode.paged

The result is that of a plain decode: that the first ``shared_blocks`` pages of every table are the same is a promise
that flat kernels may leave be. Attention over the prefix takes all queries as those of one sequence; attention over the
rest is a decode of its own; both are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.arguments import REQUIRED, Axis, Param, Role
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.core.values import Check
from layerzero.ops.attention.declare import ALIASES, TOLERANCE
from layerzero.ops.cascade.sweep import sweep
from layerzero.ops.paged import parts
from layerzero.ops.paged.declare import (
    DECODE_PAGED,
    GQA_DECODE_PAGED,
    check_pages,
    paged_attention_reference,
    table_examples,
)
from layerzero.ops.paged.step import StepMetadata

NAME = "attention.cascade.decode.paged"


def cascade_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    shared_blocks: int,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend as if nothing were shared; see :func:`layerzero.ops.paged.declare.paged_attention_reference`.

    Shapes: query (B, 1, H, D), caches (P, N, K, D) and (P, N, K, D_v), block_tables (B, max_blocks), context_lens (B,)
    → (B, 1, H, D_v); log-sum-exp (B, H, 1).
    Dtype: computes in float32, or float64 for float64; returns query.dtype; log-sum-exp float32, natural logarithm.
    Units: shared_blocks in pages. Source: cascade inference of FlashInfer, arXiv:2501.01005.
    """
    return paged_attention_reference(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        return_lse=return_lse,
        max_context_len=max_context_len,
    )


def shared_problems(block_tables: Tensor, context_lens: Tensor, shared_blocks: int, page_size: int) -> list[str]:
    """What is wrong with the promise: tables that begin otherwise, sequences that end in the prefix."""
    return values.problems_on_host(_shared_checks(block_tables, context_lens, shared_blocks, page_size))


def _shared_checks(block_tables: Tensor, context_lens: Tensor, shared_blocks: int, page_size: int) -> list[Check]:
    prefix, tokens = block_tables[:, :shared_blocks], shared_blocks * page_size

    def other_pages(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        wanted = f"the first {shared_blocks} pages as in row 0"
        return f"block_tables[{place[0]}]: wanted {wanted}, got {list(got)}"

    def too_short(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        wanted = f"at least the {tokens} tokens of {shared_blocks} shared pages"
        return f"context_lens[{place[0]}]: wanted {wanted}, got {got[0]}"

    return [
        Check((prefix != prefix[:1]).any(1), prefix[:, :8], other_pages),
        Check(context_lens < tokens, context_lens.unsqueeze(1), too_short),
    ]


def _check_values(
    key_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    shared_blocks: int,
    step: StepMetadata | None = None,
    layout: str = "NHD",
    **_: object,
) -> list[Check]:
    """Values on the device, beside places and counts: what was promised of tables and lengths."""
    page_size = key_cache.shape[layout.index("N") + 1]
    found = check_pages(key_cache, block_tables, context_lens, step)
    return found + _shared_checks(block_tables, context_lens, shared_blocks, page_size)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    capacity = values["max_blocks"] * values["page_size"]
    bound, shared = values["max_context_len"], values["shared_blocks"]
    return {
        "group": values["heads"] // values["kv_heads"],
        "context_bound": capacity if bound is None else min(bound, capacity),
        "prefix_tokens": min(shared or 0, values["max_blocks"]) * values["page_size"],
    }


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over all keys of each sequence; those that are shared are read once."""
    batch, dims, keys = facts["batch"], facts["head_dim"] + facts["value_dim"], facts["context_bound"]
    shared = min(facts["prefix_tokens"], keys)
    read = shared + batch * (keys - shared)
    elements = dims * (batch * facts["heads"] + read * facts["kv_heads"])
    return Work(2.0 * batch * facts["heads"] * keys * dims, float(elements * facts["dtype"].itemsize))


def _examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Any]:
    """Tables whose first seven pages of eight are the same, or as many as the case promises."""
    size = case.sizes
    made = table_examples(case, dtype, torch.device("cpu"), generator)
    tables, lens = made["block_tables"], made["context_lens"]
    page_size = max(size["page_size"], 1)
    full = int(lens.min()) // page_size if len(lens) else size["max_blocks"]
    promised: Any = case.params.get("shared_blocks", size["max_blocks"] * 7 // 8)
    shared = max(min(promised, full), 1)
    if len(lens):
        tables[:, :shared] = tables[:1, :shared]
    return {"block_tables": tables.to(device), "context_lens": lens.to(device), "shared_blocks": shared}


SHARED_BLOCKS = Param("shared_blocks", int, REQUIRED, Role.BOUND)
_OF_DECODE = GQA_DECODE_PAGED.schema


def _case(name: str, batch: int, context: int, heads: int, kv_heads: int, head_dim: int, page_size: int = 16) -> Case:
    sizes = {"batch": batch, "seq_q": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    blocks = context // page_size
    pages = batch * blocks
    return Case(name, sizes | {"value_dim": head_dim, "page_size": page_size, "max_blocks": blocks, "pages": pages})


CASCADE = Operation(
    schema=OperationSchema(
        operation=NAME,
        inputs=_OF_DECODE.inputs,
        outputs=_OF_DECODE.outputs,
        params=(*_OF_DECODE.params, SHARED_BLOCKS),
        axes=(*_OF_DECODE.axes, Axis("prefix_tokens", scales=True)),
        layouts=_OF_DECODE.layouts,
    ),
    summary="Attention of one query per sequence over pages, the first of which all sequences share",
    reference=cascade_reference,
    fake=GQA_DECODE_PAGED.fake,
    cases=(
        _case("small", 3, 64, 8, 2, 64),
        _case("llama3_8b_b64_kv9k", 64, 9216, 32, 8, 128),
    ),
    tolerance=TOLERANCE,
    tolerance_reason="the attention contract; parts are merged in float32, after one rounding more",
    aliases=ALIASES,
    derive=_derive,
    derived=("group", "context_bound", "prefix_tokens"),
    derived_from={
        "group": ("heads", "kv_heads"),
        "context_bound": ("max_blocks", "page_size"),
        "prefix_tokens": ("max_blocks", "page_size"),
    },
    work=_work,
    check_values=_check_values,
    guard=GQA_DECODE_PAGED.guard,
    examples=_examples,
    scratch=parts.scratch,
    parts=parts.parts,
    sweep=sweep,
)
OPERATIONS = (CASCADE,)
FLAT = (*DECODE_PAGED, NAME)
"""What a kernel serves that follows each table on its own: a shared prefix is a promise that it leaves be."""

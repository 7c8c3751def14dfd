"""vLLM's FlashAttention 2 and 3 over patterns of blocks: a row of blocks is a sequence, blocks of keys are its pages.

Keys of one sequence, cut into blocks, are a paged cache as they lie, and the pattern becomes a block table on the
device. Nothing is gathered.
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.vllm.library import driver_version
from layerzero.backends.vllm.varlen import HEADS, OF_V2, OF_V3, Forward, Keys, Own, acting
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.attention.reference import with_lse
from layerzero.ops.sparse.declare import NAME, block_table, in_blocks


def _load_blocks(facts: Facts, library: Callable[[], Forward]) -> Callable[..., Any]:
    forward, scored = library(), acting(facts)

    def run(
        query: Tensor, *rest: Tensor, block_rows: int, block_cols: int, return_lse: bool = False, **given: Any
    ) -> Any:
        key, value, block_indptr, block_indices = rest
        pages = in_blocks(key, block_cols), in_blocks(value, block_cols)
        table, counts = block_table(block_indptr, block_indices, len(pages[0]))
        starts = torch.arange(0, len(query) + 1, block_rows, dtype=torch.int32, device=query.device)
        keys = Keys(*pages, None, counts * block_cols, table, max(len(key), 1))
        output, lse = forward(query, starts, block_rows, keys, scored(**given), None)
        if not return_lse:
            return output
        # version 2 leaves what lay there for rows without a block (2.4e-38 on an H200, 2026-11-23)
        nothing = (counts == 0).repeat_interleave(block_rows)[: len(query)]
        return output, with_lse(output, lse)[1].masked_fill(nothing, -torch.inf)

    return run


def _of_blocks(own: Own, version: int, priority: int) -> Kernel:
    variant = functools.partial(variant_of_blocks, version=version)
    return own.backend.kernel(
        f"vllm.flash_attn.v{version}.block_sparse",
        NAME,
        functools.partial(_load_blocks, library=own.forward),
        *(each for each in own.limits if "page_size" not in each.facts_named()),
        *HEADS,
        # pages of version 2, and tiles of version 3 worth their launch
        limit.rule("block_cols: a multiple of 16", lambda facts: facts["block_cols"] % 16 == 0),
        limit.last_stride_one("query", "key", "value"),
        limit.aligned(16, "query", "key", "value"),
        limit.contiguous("block_indptr"),
        accepts=("block_rows", "block_cols", "scale", "return_lse"),
        **{**own.fields, **({"build_key": variant} if own.fields else {})},
        priority=priority,
    )


def variant_of_blocks(facts: Facts, version: int) -> tuple[object, ...]:
    """Which instantiation a call takes: one for each dtype and width, and whose compiler makes it of PTX."""
    return version, facts.device.sm, driver_version(), facts["dtype"], -(-facts.size("head_dim") // 32)


KERNELS = (_of_blocks(OF_V3, 3, 80), _of_blocks(OF_V2, 2, 55))

"""FlashInfer's block-sparse attention: keys in blocks as pages of its prefill, planned on the host.

A :class:`layerzero.BlockPattern` keeps the plan; without one each call copies the pattern there and plans. Where a
block and its group of heads fill no tile it takes the templates for decoding, which compute one query of each block:
2 and 3 queries of one head were wrong (0.7.2, H200, 2026-12-01). Log-sum-exps come in base 2 as (M, H).
Read: sparse.py of flashinfer-python 0.7.2.post1.

FlashInfer's attention to blocks of unlike sizes: every key is a page, planned on the host in each call.

Heads come first in its tensors, so that queries, keys and values are moved once.
Read: VariableBlockSparseAttentionWrapper in sparse.py of flashinfer-python 0.7.2.post1.
Library: flashinfer-python 0.7.2, Apache-2.0; arXiv:2501.01005.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import kernel
from layerzero.backends.flashinfer.modules import blocks_prebuilt
from layerzero.backends.flashinfer.paged import WORKSPACE_BYTES, planned_for, workspace
from layerzero.backends.flashinfer.plan import Staging
from layerzero.backends.flashinfer.varlen import natural
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.sparse.declare import NAME, BlockPattern
from layerzero.ops.sparse.variable import NAME as VARIABLE


class _Planned:
    """One wrapper and its plan, for the values that a pattern has now."""

    def __init__(self, pattern: BlockPattern, arguments: dict[str, Any], device: torch.device) -> None:
        from flashinfer.sparse import BlockSparseAttentionWrapper

        self._arguments = arguments
        self._wrapper = BlockSparseAttentionWrapper(workspace(device, capturable=False))
        self._staging, self.run = Staging(self._wrapper, device), self._wrapper.run
        self.update(pattern)

    def update(self, pattern: BlockPattern) -> None:
        self._staging.plan(*pattern.host, non_blocking=False, **self._arguments)


def _load(facts: Facts) -> Callable[..., Any]:
    dtype = facts.tensors["query"].dtype
    shape: dict[str, Any] = {
        "M": facts.size("tokens"),
        "N": facts.size("kv_tokens"),
        "R": facts["block_rows"],
        "C": facts["block_cols"],
        "num_qo_heads": facts.size("heads"),
        "num_kv_heads": facts.size("kv_heads"),
        "head_dim": facts.size("head_dim"),
        "q_data_type": dtype,
        "kv_data_type": dtype,
        "o_data_type": dtype,
    }

    def run(
        *tensors: Tensor,
        block_rows: int,
        block_cols: int,
        scale: float | None = None,
        return_lse: bool = False,
        block_pattern: BlockPattern | None = None,
    ) -> Any:
        query, key, value, block_indptr, block_indices = tensors
        arguments = shape | {"sm_scale": scale}
        owner = ("flashinfer.block_sparse", *arguments.values())

        def make(each: BlockPattern) -> _Planned:
            return _Planned(each, arguments, query.device)

        alone = functools.partial(BlockPattern, block_indptr, block_indices)
        planned = planned_for(block_pattern, alone, owner, query, make)
        result = planned.run(query, key, value, return_lse=return_lse)
        return natural(*result) if return_lse else result

    return run


def _tiles(facts: Facts) -> bool:
    rows: Any = facts["block_rows"]
    return bool(rows * facts.size("group") >= 4)


def _module(facts: Facts) -> Hashable:
    """FlashInfer compiles one for each dtype and head dim, for tiles or for single queries."""
    return "block_sparse", facts.device.sm, facts["dtype"], facts.size("head_dim"), _tiles(facts)


def _load_sparse_variable(facts: Facts) -> Callable[..., Any]:
    from flashinfer.sparse import VariableBlockSparseAttentionWrapper

    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))
    dtype = facts.tensors["query"].dtype

    def run(*tensors: Tensor, scale: float | None = None) -> Tensor:
        query, key, value, seen_blocks, row_sizes, col_sizes = tensors
        # its plan reads the last of all pages that are seen (IndexError on an H200, 2026-11-23); planning waits as well
        if not bool((seen_blocks & (col_sizes > 0).unsqueeze(1)).any()):
            return torch.zeros_like(query)
        wrapper = VariableBlockSparseAttentionWrapper(workspace(query.device, capturable=False))
        Staging(wrapper, query.device).plan(
            seen_blocks,
            row_sizes,
            col_sizes,
            heads,
            kv_heads,
            head_dim,
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            non_blocking=False,
        )
        # ``contiguous`` would leave one head or one token where it lies, and its loads need 16 bytes. bfloat16 five
        # elements off ended in a misaligned address or an illegal instruction (0.7.2, H200, 2026-12-01).
        moved = (each.transpose(0, 1).clone(memory_format=torch.contiguous_format) for each in (query, key, value))
        output: Tensor = wrapper.run(*moved)
        return output.transpose(0, 1)

    return run


KERNELS = (
    kernel(
        "flashinfer.block_sparse",
        NAME,
        _load,
        limit.dtype("float16", "bfloat16"),
        limit.dim("head_dim", one_of=(64, 128, 256)),
        limit.equal("value_dim", "head_dim"),
        limit.positive("scale"),
        limit.contiguous("query", "key", "value"),
        limit.aligned(16, "query", "key", "value"),
        limit.rule(
            "block_rows: 1, or block_rows * group >= 4", lambda facts: facts["block_rows"] == 1 or _tiles(facts)
        ),
        accepts=("block_rows", "block_cols", "scale", "return_lse", "block_pattern"),
        build_key=_module,
        prebuilt=blocks_prebuilt(_tiles),
        workspace_bytes=lambda _: WORKSPACE_BYTES,
        graph_safe=False,
        priority=60,
    ),
    kernel(
        "flashinfer.variable_sparse",
        VARIABLE,
        _load_sparse_variable,
        limit.dtype("float16", "bfloat16"),
        limit.dim("head_dim", one_of=(64, 128, 256)),
        limit.equal("value_dim", "head_dim"),
        limit.positive("scale"),
        limit.contiguous("seen_blocks", "row_sizes", "col_sizes"),
        accepts=("scale",),
        build_key=lambda facts: ("variable_sparse", facts.device.sm, facts["dtype"], facts.size("head_dim")),
        prebuilt=blocks_prebuilt(lambda _: True),
        workspace_bytes=lambda _: WORKSPACE_BYTES,
        graph_safe=False,
        priority=50,
    ),
)

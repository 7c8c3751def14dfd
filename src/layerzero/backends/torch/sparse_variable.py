"""Attention to blocks of unlike sizes in torch: the blocks as a mask of all pairs.

On NVIDIA torch's memory-efficient kernel attends. It was wrong in silence for a size of 65 where 64 was right (float32,
torch 2.11, 2026-11-22); pytorch issue 191937 reports that beside a mask it is so for any count of keys that leaves 1 of
32, where heads of keys are one memory seen several times. So each head gets keys of its own, which fill whole tiles.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import TORCH
from layerzero.backends.torch.cuda_attention import aligned_rows
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.sparse.variable import NAME, variable_mask

_TILE = 32
"""Keys of a tile that the memory-efficient kernel ends with; of its others, a divisor."""


def in_whole_tiles(key: Tensor, value: Tensor, mask: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (K, N, D), values (K, N, D_v) and a mask (K, M, N) with hidden keys behind, as many as fill the last tile.

    Keys and values come back as (K, group, N, D), each head dense in memory of its own.
    """
    hidden = -mask.shape[2] % _TILE
    key, value = (functional.pad(each, (0, 0, 0, hidden)).unsqueeze(1) for each in (key, value))
    return key.repeat(1, group, 1, 1), value.repeat(1, group, 1, 1), functional.pad(mask, (0, hidden))


def _load(facts: Facts) -> Callable[..., Any]:
    kv_heads, group, on_cuda = facts.size("kv_heads"), facts.size("group"), facts.device.platform == "cuda"

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen_blocks: Tensor,
        row_sizes: Tensor,
        col_sizes: Tensor,
        *,
        scale: float | None = None,
    ) -> Tensor:
        mask = variable_mask(seen_blocks, row_sizes, col_sizes, len(query), len(key))
        q = query.transpose(0, 1).reshape(kv_heads, group, *query.shape[::2])  # the heads of a key head as a batch
        k, v, seen = key.transpose(0, 1), value.transpose(0, 1), mask
        if on_cuda:
            k, v, seen = in_whole_tiles(k, v, mask, group)
        else:
            k, v = (each.unsqueeze(1).expand(-1, group, -1, -1) for each in (k, v))
        output = functional.scaled_dot_product_attention(
            aligned_rows(q), k, v, attn_mask=seen.unsqueeze(1), scale=scale
        )
        output = output.masked_fill(~mask.any(2)[:, None, :, None], 0.0)
        return output.flatten(0, 1).transpose(0, 1)

    return run


def _mask_bytes(facts: Facts) -> int:
    """The mask of each key head, as booleans and as numbers, and scores where torch has no better way."""
    pairs = facts.size("tokens") * (facts.size("kv_tokens") + _TILE)
    return pairs * (facts.size("kv_heads") + 2 * facts.tensors["query"].dtype.itemsize * facts.size("heads"))


KERNELS = (
    Kernel(
        id="torch.variable_sparse_masked",
        operations=(NAME,),
        backend=TORCH,
        load=_load,
        accepts=("scale",),
        limits=(limit.dtype("float32", "float64", "float16", "bfloat16"), limit.positive("scale")),
        device_guard=True,
        workspace_bytes=_mask_bytes,
        priority=30,
    ),
)

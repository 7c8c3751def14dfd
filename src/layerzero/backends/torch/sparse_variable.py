"""Attention to blocks of unlike sizes in torch: the blocks as a mask of all pairs.

On NVIDIA each head gets keys of its own: see :func:`layerzero.backends.torch.cuda_attention.own_heads`.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import TORCH
from layerzero.backends.torch.cuda_attention import aligned_rows, own_heads
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.attention.limits import AlignedOnCuda
from layerzero.ops.sparse.variable import NAME, variable_mask


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
        k, v = (aligned_rows(each.transpose(0, 1).unsqueeze(1)).expand(-1, group, -1, -1) for each in (key, value))
        if on_cuda:
            k = own_heads(k, v)
        output = functional.scaled_dot_product_attention(
            aligned_rows(q), k, v, attn_mask=mask.unsqueeze(1), scale=scale
        )
        output = output.masked_fill(~mask.any(2)[:, None, :, None], 0.0)
        return output.flatten(0, 1).transpose(0, 1)

    return run


def _mask_bytes(facts: Facts) -> int:
    """The mask of each key head, and scores where torch has no better way."""
    pairs = facts.size("tokens") * facts.size("kv_tokens")
    return pairs * (facts.size("kv_heads") + 2 * facts.tensors["query"].dtype.itemsize * facts.size("heads"))


KERNELS = (
    Kernel(
        id="torch.variable_sparse_masked",
        operations=(NAME,),
        backend=TORCH,
        load=_load,
        accepts=("scale",),
        limits=(
            limit.dtype("float32", "float64", "float16", "bfloat16"),
            limit.positive("scale"),
            AlignedOnCuda(("query", "key", "value")),
        ),
        workspace_bytes=_mask_bytes,
        deterministic=False,
        graph_safe=False,
        priority=30,
    ),
)

"""FlashInfer's attention to blocks of unlike sizes: every key is a page, planned on the host in each call.

Heads come first in its tensors, so that queries, keys and values are moved once.
Read: VariableBlockSparseAttentionWrapper in sparse.py of flashinfer-python 0.7.2.post1.
Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import FLASHINFER
from layerzero.backends.flashinfer.modules import blocks_prebuilt
from layerzero.backends.flashinfer.paged import WORKSPACE_BYTES, workspace
from layerzero.backends.flashinfer.staging import Staging
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.sparse.variable import NAME


def _load(facts: Facts) -> Callable[..., Any]:
    from flashinfer.sparse import VariableBlockSparseAttentionWrapper

    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))
    dtype = facts.tensors["query"].dtype

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
        output: Tensor = wrapper.run(*(each.transpose(0, 1).contiguous() for each in (query, key, value)))
        return output.transpose(0, 1)

    return run


KERNELS = (
    Kernel(
        id="flashinfer.variable_sparse",
        operations=(NAME,),
        backend=FLASHINFER,
        load=_load,
        accepts=("scale",),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float16", "bfloat16"),
            limit.dim("head_dim", one_of=(64, 128, 256)),
            limit.equal("value_dim", "head_dim"),
            limit.positive("scale"),
            limit.contiguous("seen_blocks", "row_sizes", "col_sizes"),
        ),
        build_key=lambda facts: ("variable_sparse", facts.device.sm, facts["dtype"], facts.size("head_dim")),
        prebuilt=blocks_prebuilt(lambda _: True),
        workspace_bytes=lambda _: WORKSPACE_BYTES,
        graph_safe=False,
        priority=50,
    ),
)

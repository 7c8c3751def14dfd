"""vLLM's choice of experts on CUDA: a softmax and the best of it in one kernel, a warp for a few rows.

Read: csrc/moe/torch_bindings.cpp of vLLM (``topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor!
token_expert_indices, Tensor gating_output, bool renormalize, Tensor? bias) -> ()``). Logits go in as float32, which
every version reads; the third tensor is scratch. A row whose length is a power of two, or a multiple of 64, is read by
vectors of at most 16 bytes: on an H200 float32 logits off such a boundary ended in a misaligned address, everything
else was right; with what it demands now it conforms there (torch 2.11, 2026-11-23).
Its ``grouped_topk`` is left out: nothing says in which order it names the experts. Its products of experts are Triton
code within the package, which is never imported.
Library: vllm 0.20, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerzero.backends.norm_limits import RowsAligned
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def _load(facts: Facts) -> Callable[..., tuple[Tensor, Tensor]]:
    operator = operators("_moe_C.abi3.so", "_moe_C").topk_softmax.default
    more = (None,) * (len(operator._schema.arguments) - 5)  # a bias; in vLLM 0.33 rows that count for nothing, too

    def route(logits: Tensor, *, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
        rows = logits.to(torch.float32)
        weights = rows.new_empty((len(rows), top_k))
        places, scratch = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
        operator(weights, places, scratch, rows, renormalize, *more)
        return weights if scale == 1.0 else weights.mul_(scale), places

    return route


KERNELS = (
    Kernel(
        id="vllm.topk_softmax",
        operations=("moe.route",),
        backend=VLLM,
        load=_load,
        accepts=("top_k", "renormalize", "scale"),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float32", "float16", "bfloat16"),
            limit.dim("experts", max=512),
            limit.contiguous("logits"),
            RowsAligned(("logits",), "experts"),
        ),
        priority=30,
    ),
)

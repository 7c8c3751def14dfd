"""vLLM's penalty for repetition on CUDA; frequency and presence are torch's, as vLLM has them.

Read: csrc/sampler.cu and csrc/torch_bindings.cpp of vLLM (``apply_repetition_penalties_(Tensor! logits, Tensor
prompt_mask, Tensor output_mask, Tensor repetition_penalties) -> ()``). It works in place on dense rows, takes masks for
all rows and a penalty for each in the dtype of the logits, and counts places of a row in 32 bits.
Conforms on an H200 (torch 2.11, 2026-11-22).

vLLM's choice of experts on CUDA: a softmax and the best of it in one kernel, a warp for a few rows.

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
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.norm_limits import RowsAligned
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.sampling.formulas import of_row, penalised


def _load(facts: Facts) -> Callable[..., Any]:
    repeat = operators("_C.abi3.so", "_C").apply_repetition_penalties_.default

    def run(
        logits: Tensor,
        output_counts: Tensor,
        *,
        prompt_mask: Tensor | None = None,
        repetition: float | None = None,
        presence: float | None = None,
        frequency: float | None = None,
        repetition_by_row: Tensor | None = None,
        presence_by_row: Tensor | None = None,
        frequency_by_row: Tensor | None = None,
    ) -> Tensor:
        said = output_counts > 0
        output = logits.clone()
        if repetition is not None or repetition_by_row is not None:
            rows = output.view(-1, output.shape[-1])
            ones = rows.new_ones(len(rows))
            each = ones * repetition if repetition is not None else ones * repetition_by_row.reshape(-1)  # type: ignore[union-attr]
            asked = torch.zeros_like(said) if prompt_mask is None else prompt_mask
            repeat(rows, asked.reshape(rows.shape).contiguous(), said.reshape(rows.shape).contiguous(), each)
        return penalised(
            output, said, output_counts, None, of_row(presence, presence_by_row), of_row(frequency, frequency_by_row)
        )

    return run


def _load_moe(facts: Facts) -> Callable[..., tuple[Tensor, Tensor]]:
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
    VLLM.kernel(
        "vllm.penalties",
        "sampling.penalties.counted",
        _load,
        accepts=(
            "prompt_mask",
            *(f"{name}{ending}" for ending in ("", "_by_row") for name in ("repetition", "presence", "frequency")),
        ),
        limits=(limit.dtype("float32"), limit.contiguous("logits")),
        priority=60,
    ),
    VLLM.kernel(
        "vllm.topk_softmax",
        "moe.route",
        _load_moe,
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("experts", max=512),
        limit.contiguous("logits"),
        RowsAligned(("logits",), "experts"),
        accepts=("top_k", "renormalize", "scale"),
        priority=30,
    ),
)

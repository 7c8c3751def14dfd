"""vLLM's penalty for repetition on CUDA; frequency and presence are torch's, as vLLM has them.

Read: csrc/sampler.cu and csrc/torch_bindings.cpp of vLLM (``apply_repetition_penalties_(Tensor! logits, Tensor
prompt_mask, Tensor output_mask, Tensor repetition_penalties) -> ()``). It works in place on dense rows, takes masks for
all rows and a penalty for each in the dtype of the logits, and counts places of a row in 32 bits.
Conforms on an H200 (torch 2.11, 2026-11-22).
Library: vllm 0.20, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.vllm.library import VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
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


KERNELS = (
    Kernel(
        id="vllm.penalties",
        operations=("sampling.penalties.counted",),
        backend=VLLM,
        load=_load,
        accepts=(
            "prompt_mask",
            *(f"{name}{ending}" for ending in ("", "_by_row") for name in ("repetition", "presence", "frequency")),
        ),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float32"),
            limit.contiguous("logits"),
        ),
        priority=60,
    ),
)

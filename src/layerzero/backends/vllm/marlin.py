"""vLLM's Marlin on CUDA with weights of float8, MX and NVFP4, and its kernel that widens GGUF's blocks.

Instantiations are those in vllm 0.20.0's ``_C.abi3.so``: e4m3 with a scale for each row or for 128 numbers, in float16
and bfloat16; mxfp4 and mxfp8 in bfloat16 alone; nvfp4 in both. Blocks of rows become rows. The kernel widens e4m3
without its exponent's bias, which scales take over: 2^8 in float16, 2^120 in bfloat16
(``fp8_fused_exponent_bias_into_scales`` of marlin_utils_fp8.py). Every second and third of four powers of two change
places, scales of nvfp4, too (marlin_utils_fp4.py), and those are written as five bits of an exponent and three of a
mantissa without a sign; of bfloat16 the highest bit must be set, so that all are multiplied by a power of two and the
second scale is divided by it. A weight whose scales do not fit is refused when it is packed.

``ggml_dequantize`` computes in float16 (csrc/quantization/gguf/dequantize.cuh), so that float32 is left out. Its
products ``ggml_mul_mat_a8`` and ``ggml_mul_mat_vec_a8`` round the rows to int8 and are not declared: the kernel here
leaves rows as they are, in calls that allow rounding, too.
Library: vllm 0.20, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends import grouped_weights
from layerzero.backends.vllm.grouped_linear import MARLIN, marlin, marlin_form, wide_weight
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.errors import NotPreparedError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.linear.packed import BELONGS, Pack, PackedWeight
from layerzero.ops.linear.quantized import QUANTIZED, of_outputs
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.quantize.groups import marlin_codes, marlin_scale
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import unpacked

E4M3, E2M1 = 2814749767172868, 562949953487106
"""Numbers of ``scalar_types.float8_e4m3fn`` and ``float4_e2m1f`` (vllm/scalar_type.py)."""

_BIAS = {torch.float16: 8, torch.bfloat16: 120}
_BIAS_OF_E2M1 = {torch.float16: 14, torch.bfloat16: 126}
"""Exponents that the kernel leaves to scales of e4m3 and of e2m1."""


Tensors = tuple[Tensor, Tensor, Tensor | None]
"""Words, scales and the second scale of a weight."""


_NAME = "vllm's Marlin"


def _unfit(what: str) -> NotPreparedError:
    return NotPreparedError("quantized_linear", [f"weight_scale: wanted {what} for {_NAME}, got others"])


def block_tensors(weight: QuantizedWeight, dtype: torch.dtype) -> Tensors:
    """Those of a weight of float8 in Marlin's order."""
    grouped_weights.refuse_nan(weight, _NAME)
    numbers = weight.fields.data.contiguous().view(torch.uint8)
    scale = marlin_scale(grouped_weights.by_rows(weight) * 2.0 ** _BIAS[dtype], dtype)
    if not scale.isfinite().all():
        raise _unfit(f"scales that stay finite in {dtype} times 2^{_BIAS[dtype]}")
    return marlin_codes(numbers, 8), scale, None


def _parts(facts: Facts, kind: int, tensors: Callable[..., Tensors]) -> tuple[Pack, grouped_weights.Product]:
    dtype = facts.tensors["input"].dtype

    def pack(weight: QuantizedWeight) -> tuple[tuple[Any, ...], int]:
        words, scale, second = tensors(weight, dtype)
        return marlin_form(words, scale, second=second)

    return pack, marlin(facts, kind)


_OF_ROWS = ("dtype", "weight_dtype", "out_features", "in_features")


def _load_by_row(facts: Facts) -> Callable[..., Any]:
    """float8 with scales of outputs, or one for all, which no handle holds: behind a product whose scales are 1."""
    name, dtype, product = "vllm.marlin_fp8_rows", facts.tensors["input"].dtype, marlin(facts, E4M3)
    call = grouped_weights.of_call(name, facts, _OF_ROWS)
    ndim, features = facts["input_ndim"], facts.size("in_features")

    def made(weight: Tensor | QuantizedWeight) -> tuple[tuple[Any, ...], int]:
        grouped_weights.made_for(call)
        data = weight if isinstance(weight, Tensor) else weight.fields.data
        grouped_weights.refuse_nan(data, _NAME)
        words = marlin_codes(data.contiguous().view(torch.uint8), 8)
        scale = torch.full((1, len(data)), 2.0 ** _BIAS[dtype], dtype=dtype, device=data.device)
        return marlin_form(words, scale)

    def run(
        input: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None, packed: PackedWeight
    ) -> Tensor:
        rows = input if ndim == 2 else input.reshape(-1, features)
        output = product(rows.contiguous(), packed.form(name, made)).mul_(of_outputs(weight_scale))
        output = output if bias is None else output.add_(bias)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


def _swapped(scale: Tensor) -> Tensor:
    return scale.view(-1, 4)[:, [0, 2, 1, 3]].view(scale.shape)


def unsigned_scale(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Scales of nvfp4 in Marlin's order and eight bits, and the power of two that they were multiplied by.

    Shapes: float8_e4m3fn (N, G) → (G, N). Raises: NotPreparedError for scales below 0, or too far apart.
    """
    wide, factor = scale.to(torch.float32), 1.0
    if bool((wide < 0.0).any()):
        raise _unfit("scales of nvfp4 from 0 on")
    most, least = float(wide.amax()), float(torch.where(wide > 0.0, wide, torch.inf).amin())
    while dtype is torch.bfloat16 and least * factor * 128.0 < 2.0:
        factor *= 2.0
    if most * factor * 128.0 > torch.finfo(torch.float16).max:
        raise _unfit("scales of nvfp4 from 2 to 65504 times one power of two")
    halves = _swapped(marlin_scale(wide * (factor * 128.0), torch.float16)).view(torch.int16) << 1
    return halves.view(torch.float8_e4m3fn)[:, 1::2].contiguous(), factor


def micro_tensors(weight: QuantizedWeight, dtype: torch.dtype) -> Tensors:
    """Those of a weight of MX or NVFP4 in Marlin's order."""
    grouped_weights.refuse_nan(weight, _NAME)
    scheme, scale = weight.format.scheme, weight.fields.scale
    data = weight.fields.data.contiguous().view(torch.uint8)
    assert scale is not None
    words = marlin_codes(data, 8) if scheme == "mxfp8" else marlin_codes(unpacked(data, 4, weight.shape[1]), 4)
    if scheme != "nvfp4":
        powers = marlin_scale(grouped_weights.as_powers(scale).view(torch.uint8), torch.uint8)
        return words, _swapped(powers).view(torch.float8_e8m0fnu), None
    eighths, factor = unsigned_scale(scale, dtype)
    return words, eighths, grouped_weights.second_factor(weight) * (2.0 ** (_BIAS_OF_E2M1[dtype] - 7) / factor)


def _micro(facts: Facts) -> tuple[Pack, grouped_weights.Product]:
    return _parts(facts, E4M3 if facts["weight_scheme"] == "mxfp8" else E2M1, micro_tensors)


_KINDS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "IQ4_NL": 20}
_KINDS |= {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
"""GGML's numbers of types (``GGMLQuantizationType`` of gguf 0.19)."""

_IN_PAIRS = frozenset({"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"})
"""Types whose scale and offset are one ``half2`` (csrc/quantization/gguf/ggml-common.h)."""


def _halves_on_boundary(facts: Facts) -> Reason | None:
    """Halves, and pairs of them that are loaded at once, off a boundary end the context (H200, 2026-11-26)."""
    needed, got = 4 if facts["weight_kind"] in _IN_PAIRS else 2, facts.tensors["weight"].alignment_bytes
    if got >= needed:
        return None
    hint = "Copy the weight once: weight.clone()"
    return Reason(ReasonCode.MISALIGNED, "weight", f"{needed} bytes", f"{got} bytes", hint)


def _load_gguf(facts: Facts) -> Callable[..., Any]:
    operator, kind = operators("_C.abi3.so", "_C").ggml_dequantize.default, _KINDS[str(facts["weight_kind"])]
    outputs, inputs = facts.size("out_features"), facts.size("in_features")

    def run(input: Tensor, weight: Tensor, *, weight_format: str, bias: Tensor | None = None) -> Tensor:
        return functional.linear(input, operator(weight, kind, outputs, inputs, input.dtype), bias)

    return run


def _kernel(name: str, parts: Any, operation: str, *limits: limit.Limit) -> Kernel:
    return grouped_weights.grouped(name, VLLM, parts, 40, *MARLIN, *limits, platform="cuda", operation=operation)


KERNELS = (
    _kernel(
        "vllm.marlin_fp8",
        lambda facts: _parts(facts, E4M3, block_tensors),
        "block",
        limit.one_of("weight_dtype", "float8_e4m3"),
        limit.dim("weight_group", one_of=(0, 128)),
    ),
    VLLM.kernel(
        "vllm.marlin_fp8_rows",
        QUANTIZED[None].name,
        _load_by_row,
        limit.platform("cuda"),
        *MARLIN,
        limit.dtype("bfloat16"),  # a sum with scales of 1 may be too large for float16
        limit.one_of("weight_dtype", "float8_e4m3"),
        BELONGS,
        grouped_weights.before_capture("vllm.marlin_fp8_rows", _OF_ROWS),
        accepts=("bias", "packed"),
        priority=40,  # 24 checks passed, 0 wrong (H200, vllm 0.20.0, 2026-11-27)
    ),
    _kernel(
        "vllm.marlin_mx",
        _micro,
        "mx",
        limit.dtype("bfloat16"),
        limit.one_of("weight_scheme", "mxfp4", "mxfp8"),
        limit.one_of("weight_dtype", "uint8", "float8_e4m3"),
    ),
    _kernel("vllm.marlin_nvfp4", _micro, "mx", limit.one_of("weight_scheme", "nvfp4")),
    VLLM.kernel(
        "vllm.gguf",
        (FORMATTED["gguf"].name, *grouped_weights.ROUNDING_GGUF),
        _load_gguf,
        limit.dtype("float16", "bfloat16"),
        limit.one_of("weight_kind", *_KINDS),
        limit.contiguous("weight"),
        limit.Custom("weight: its halves on a boundary", _halves_on_boundary),
        accepts=("weight_format", "bias"),
        workspace_bytes=wide_weight,
        priority=25,
    ),
)

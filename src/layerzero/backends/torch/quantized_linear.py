"""torch's products with weights of int8 and float8: the weight widened, int8 packed products, and int8 by int8.

``aten._weight_int8pack_mm`` is for bfloat16 alone (a float32 input took 1.5 s), and reads over the end of rows that are
no multiple of 16 numbers: garbage for 24 and 33, then a segmentation fault, as with a weight at no multiple of 16 bytes
or rows at none of 32, which are copied. ``_int_mm`` takes a weight with one input for another one, and gives other
numbers in silence. On an x86 CPU without VNNI oneDNN adds two products of int8 in int16, which ends at 32767: sums of
256 were off by 86105 (the EPYC below, held to AVX2 and to AVX512_CORE, torch 2.13.0, 2026-11-25). A weight of 4096 x
4096 and 1, 16, 64 and 256 rows of bfloat16, in units of ``F.linear`` with one of bfloat16: int8 packed products 0.53,
1.6, 2.8 and 4.2, the weight widened in each call 8.7, 6.5, 3.7 and 2.2, ``_int_mm`` 0.44, 1.3, 1.0 and 0.9 (one thread,
torch 2.13.0, AMD EPYC with AVX512-VNNI, 2026-11-23); float8 is widened four times as slowly as int8. oneDNN's product
with a packed weight wants codes from 0 on: with int8 ones of 0.13 ms it took 61. It makes its operation anew in each
call, in 60 us: of 1024 x 2816 in float32, 1, 4, 16 and 256 rows took 0.40, 0.24, 0.19 and 0.27 of ``F.linear``'s time,
``_int_mm`` 0.33, 0.41, 0.27 and 0.26; of 384 x 1536 it is never faster (one thread, EPYC held to AVX512_CORE_VNNI,
2026-11-26). Whole numbers up to 128 and every e4m3 number are bfloat16 numbers, so that quantized rows may be
multiplied in that. ``_scaled_mm`` with a scale for each row gives bfloat16 alone. On an H200 (torch 2.11, 2026-11-23)
it and ``_int_mm`` raised for columns in place of rows and for what lies off a boundary of 16 bytes, and ``_scaled_mm``
read a bias with steps as one without; with what is demanded now both conform there.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.norm_limits import RowsAligned
from layerzero.backends.torch.attention import FLOATS, kernel
from layerzero.backends.torch.cpu_half import fewer_rows, linear_for
from layerzero.backends.torch.elementwise import scales
from layerzero.backends.torch.linear import HAS_ONEDNN, by_rows
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.linear.packed import BELONGS, PackedWeight
from layerzero.ops.linear.quantized import ACTIVATIONS, QUANTIZED, of_outputs
from layerzero.ops.quantize.formats import FORMATS, Format, as_floats

_PLAIN, _WHOLE, _FLOAT8 = (QUANTIZED[each].name for each in ACTIVATIONS)


BLOCK = 2**17, 2**20
"""Numbers that are widened together, for up to 127 rows and for more, where products are larger than caches anyway."""


def _load_widened(facts: Facts) -> Callable[..., Any]:
    """The weight in the input's dtype, its scales behind the product; before it in float16, whose sums end at 65504."""
    before, wide = facts["dtype"] is torch.float16, torch.promote_types(facts["dtype"], torch.float32)  # type: ignore[arg-type]
    linear, step = linear_for(facts), BLOCK[facts.size_bits("rows") > 7] // max(facts.size("in_features"), 1)
    whole = facts["requires_grad"] or facts["platform"] != "cpu" or facts["weight_dtype"] != "float8_e4m3"

    def blocks(weight: Tensor) -> tuple[Tensor, ...]:
        """Rows whose numbers stay in the host's caches, where e4m3 is widened by its bits."""
        return (weight,) if whole else torch.split(weight, max(step, 1))

    def run(*tensors: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None) -> Tensor:
        input, weight, weight_scale = tensors
        dtype = out_dtype or input.dtype
        rows = input.to(dtype)
        # a scale's gradient is a sum over the whole weight: from parts in float16 it was 1.3 % off where they cancel
        if before and not (weight_scale.requires_grad and torch.is_grad_enabled()):
            numbers = as_floats(weight, wide) * weight_scale.reshape(-1, 1)
            return linear(rows, numbers.to(dtype), None if bias is None else bias.to(dtype))
        product = wide if before else dtype
        left = rows.to(product)
        parts = [linear(left, as_floats(each, product)) for each in blocks(weight)]
        output = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)) * of_outputs(weight_scale)
        return (output if bias is None else output + bias).to(dtype)

    return run


def _load_int8_packed(facts: Facts) -> Callable[..., Any]:
    operator, outputs = torch.ops.aten._weight_int8pack_mm.default, facts.size("out_features")

    def run(input: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None) -> Tensor:
        scales = weight_scale.to(input.dtype).reshape(-1).expand(outputs).contiguous()
        output: Tensor = operator(on_boundary(input, 32), weight, scales)
        return output if bias is None else output.add_(bias)

    return by_rows(facts, run)


def propagate_nan(output: Tensor, rows: Tensor) -> Tensor:
    """Write NaN into results of rows that hold NaN or infinity, in place; libraries that round rows lose both.

    An infinity gives NaN in the reference, too: its row has an infinite scale. A sum takes a tenth of the time of a
    maximum. Where finite numbers add up to more than the dtype holds, every number is looked at (2 us for a row of
    2048, Intel Xeon, 2026-11-29).
    """
    if not math.isfinite(rows.sum().item()):
        output.masked_fill_(~rows.isfinite().all(-1, keepdim=True), torch.nan)
    return output


def quantized_rows(rows: Tensor, of: Format) -> tuple[Tensor, Tensor]:
    """Rows in float32 as whole numbers, in float32 still, or as dense float8; and the scale of each, (*, 1)."""
    scale = scales(rows, of, "row", None)
    quotients = rows / scale
    if of.is_whole:  # the scale of numbers below 1e-42 is rounded down, and their quotients lie beyond
        bounds = torch.iinfo(of.dtype)
        return quotients.round_().clamp_(bounds.min, bounds.max), scale
    return _in_rows(quotients.clamp_(-of.largest, of.largest), of.dtype), scale


def _in_rows(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype, row after row: quotients lie as the input does, and cuBLASLt takes no columns there."""
    return codes.to(dtype, memory_format=torch.contiguous_format)


def on_boundary(tensor: Tensor, size: int = 16) -> Tensor:
    """Dense and from a multiple of so many bytes on, as products on GPUs read scales: the tensor itself, or a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % size == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _of_rows(multiply: Callable[[Tensor, Tensor], Tensor], of: Format, wide: torch.dtype) -> Callable[..., Tensor]:
    """A product of quantized rows and the codes of a weight, scales and bias; rounding lets no gradient through."""

    def run(*tensors: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None) -> Tensor:
        input, weight, weight_scale = tensors
        codes, scale = quantized_rows(input.detach().to(wide), of)
        output = multiply(codes, weight)
        output = output.to(torch.promote_types(output.dtype, scale.dtype)).mul_(scale).mul_(of_outputs(weight_scale))
        return (output if bias is None else output.add_(bias)).to(out_dtype or input.dtype)

    return run


def _load_rows(facts: Facts) -> Callable[..., Any]:
    """Rows and weight as floating numbers that hold them exactly: bfloat16 for a result of that, float32 else."""
    of = FORMATS[str(facts["operation"]).removeprefix(f"{_PLAIN}.")]
    wide = torch.float64 if facts["dtype"] is torch.float64 else torch.float32
    narrow = torch.bfloat16 if facts["dtype"] is torch.bfloat16 and facts["out_dtype"] is None else wide
    linear = linear_for(facts)
    return _of_rows(lambda codes, weight: linear(codes.to(narrow), weight.to(narrow)), of, wide)


def _load_int_mm(facts: Facts) -> Callable[..., Any]:
    def multiply(codes: Tensor, weight: Tensor) -> Tensor:
        return torch._int_mm(_in_rows(codes, torch.int8), weight.t())

    return by_rows(facts, _of_rows(multiply, FORMATS["int8"], torch.float32))


def _pack_onednn(weight: Tensor) -> tuple[Tensor, int]:
    packed = torch.ops.onednn.qlinear_prepack.default(weight, None)
    return packed, torch.ops.mkldnn._nbytes.default(packed)


def _load_onednn(facts: Facts) -> Callable[..., Any]:
    """Codes above 0 by adding 128, which oneDNN takes off its sums: for codes of int8 it has no instruction here."""
    operator, outputs = torch.ops.onednn.qlinear_pointwise.default, facts.size("out_features")
    zeros = torch.zeros(outputs, dtype=torch.int64)

    def run(
        *tensors: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None, packed: PackedWeight
    ) -> Tensor:
        input, _, weight_scale = tensors
        codes, scale = quantized_rows(input.to(torch.float32), FORMATS["int8"])
        numbers = _in_rows(codes.add_(128), torch.uint8)
        scales = weight_scale.reshape(-1).expand(outputs).contiguous()
        form = packed.form("torch.onednn.int8", _pack_onednn)
        output = operator(numbers, 1.0, 128, form, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        output = output.mul_(scale) if bias is None else torch.addcmul(bias, output, scale)
        return output.to(out_dtype or input.dtype)

    return by_rows(facts, run)


def _load_scaled_mm(facts: Facts) -> Callable[..., Any]:
    outputs = facts.size("out_features")

    def run(input: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None) -> Tensor:
        codes, scale = quantized_rows(input.to(torch.float32), FORMATS["fp8_e4m3"])
        of_weight = on_boundary(weight_scale.reshape(1, -1).expand(1, outputs))
        return torch._scaled_mm(codes, weight.t(), scale, of_weight, bias, out_dtype=torch.bfloat16)

    return by_rows(facts, run)


_WHOLE_PRODUCTS = frozenset({"avx_vnni", "avx512_vnni"})
"""Instructions of an x86 CPU that add products of int8 in int32."""


def _cut_products(facts: Facts) -> Reason | None:
    device = facts.device
    if device.architecture not in ("x86_64", "AMD64") or _WHOLE_PRODUCTS & device.instruction_sets:
        return None
    have, wanted = ", ".join(sorted(device.instruction_sets)) or "none known", " or ".join(sorted(_WHOLE_PRODUCTS))
    return Reason(ReasonCode.INSTRUCTION_SET_MISMATCH, "instruction_sets", wanted, have)


_WHOLE_SUMS = limit.Custom("an x86 CPU needs avx_vnni or avx512_vnni", _cut_products)

WIDENING = ("torch.quantized_linear", "torch.dequantized_")
"""How names of kernels begin that write the whole weight in the dtype of rows before each product. A GPU takes longer
for that than for the product with the weight itself: a token of an 8B Llama in fp8 took 29 ms of it, in bfloat16 5
(H200, 2026-11-27)."""

AS_NUMBERS = (*WIDENING, "torch.kept_", "reference.")
"""The same, and of those that keep such a copy: kernels that gain nothing by a format."""

_LONGEST_SUM = 131072
"""Products of 127 and 128 whose sum int32 holds."""


KERNELS = (
    kernel(
        "torch.quantized_linear",
        _PLAIN,
        _load_widened,
        FLOATS,
        accepts=("bias", "out_dtype"),
        grad=True,
        handles_negated=True,
        priority=20,
    ),
    kernel(
        "torch.int8pack_mm",
        _PLAIN,
        _load_int8_packed,
        limit.platform("cpu"),
        limit.dtype("bfloat16"),
        limit.one_of("weight_dtype", "int8"),
        limit.dim("rows", max=64),  # the widened weight takes half as long from 256 on
        # There the widened weight takes a third of its time for 64 rows of 2048 x 2048, and 2.5 times as long for 16 of
        # 4096 x 4096, whose copy of 32 MiB is mapped anew in each call (Intel Xeon, one thread, 2026-12-01).
        fewer_rows(16, numbers=2**24),
        limit.dim("in_features", multiple=16),
        limit.contiguous("input", "weight"),
        limit.aligned(16, "weight"),
        accepts=("bias",),
        graph_safe=False,
        priority=45,
    ),
    kernel(
        "torch.quantized_linear_rows",
        (_WHOLE, _FLOAT8),
        _load_rows,
        FLOATS,
        accepts=("bias", "out_dtype"),
        grad=True,
        priority=20,
    ),
    kernel(
        "torch.int_mm",
        _WHOLE,
        _load_int_mm,
        limit.platform("cpu"),
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("in_features", min=2, max=_LONGEST_SUM),
        limit.dim("out_features", min=2),
        limit.contiguous("weight"),
        _WHOLE_SUMS,
        accepts=("bias", "out_dtype"),
        graph_safe=False,
        priority=45,
    ),
    kernel(
        "torch.onednn_int8_packed",
        _WHOLE,
        _load_onednn,
        limit.platform("cpu"),
        HAS_ONEDNN,
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("rows", min=2),
        limit.dim("in_features", max=_LONGEST_SUM // 2),
        _WHOLE_SUMS,
        BELONGS,
        accepts=("bias", "out_dtype", "packed"),
        graph_safe=False,
        priority=40,  # behind torch.int_mm, for measured times to choose: faster for a few rows of large weights alone
    ),
    kernel(
        "torch.cuda.int_mm",
        _WHOLE,
        _load_int_mm,
        limit.platform("cuda"),
        limit.arch(min=(7, 5)),
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("rows", min=17),
        limit.dim("in_features", max=_LONGEST_SUM, multiple=8),
        limit.dim("out_features", multiple=8),
        limit.contiguous("weight"),
        RowsAligned(("weight",), "in_features"),
        accepts=("bias", "out_dtype"),
        priority=30,
    ),
    kernel(
        "torch.cuda.scaled_mm",
        _FLOAT8,
        _load_scaled_mm,
        limit.platform("cuda"),
        limit.arch(min=(9, 0)),
        limit.dtype("bfloat16"),
        *limit.dims("in_features", "out_features", multiple=16),
        limit.contiguous("weight", "bias"),
        limit.aligned(16, "weight", "bias"),
        accepts=("bias",),
        priority=30,
    ),
)

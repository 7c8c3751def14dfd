"""Formats of narrow numbers: what they hold, how numbers are scaled and rounded to them, and what the codes stand for.

int8, float8_e4m3fn and float8_e5m2 go with scales in float32. The MX formats have a power of two for each 32 numbers
(OCP Microscaling Formats 1.0), nvfp4 an e4m3 scale for each 16. Numbers of four bits are e2m1: 0, 0.5, 1, 1.5, 2, 3, 4
and 6 with a sign, two in a byte, the first one in its low bits; uint8, because torch's float4_e2m1fn_x2 is copied and
nothing else. Numbers of six bits are e2m3 or e3m2, four in three bytes, the first one in the lowest bits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

MX_BLOCK, NV_BLOCK = 32, 16
E8M0_BIAS = 127
E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class Format:
    """One format of narrow numbers.

    Attributes:
        name: as ``lz.quantize`` takes it.
        dtype: that of the tensor which holds them.
        largest: the largest number.
        exponent: that of the largest power of two; 0 for whole numbers.
        block: how many numbers share a scale where the format says so, else 0.
        scale_dtype: that of its scales.
        bits: of a number; of fewer than 8 a byte holds parts of several.
    """

    name: str
    dtype: torch.dtype
    largest: float
    exponent: int = 0
    block: int = 0
    scale_dtype: torch.dtype = torch.float32
    bits: int = 8

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds parts of several numbers."""
        return self.bits < 8

    @property
    def least_scale(self) -> float:
        """The least scale that is computed of float8: vLLM's bound, so that what is divided by it stays finite."""
        return 1.0 / (512.0 * self.largest)

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers."""
        return not self.dtype.is_floating_point and not self.is_packed


_E4M3, _E5M2, _E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu

SCALED = (
    Format("int8", torch.int8, 127.0),
    Format("fp8_e4m3", _E4M3, E4M3_LARGEST, 8),
    Format("fp8_e5m2", _E5M2, 57344.0, 15),
)
"""With scales in float32: for a tensor, a row, a column or a block."""

MX = (
    Format("mxfp8_e4m3", _E4M3, E4M3_LARGEST, 8, MX_BLOCK, _E8M0),
    Format("mxfp8_e5m2", _E5M2, 57344.0, 15, MX_BLOCK, _E8M0),
    Format("mxfp4", torch.uint8, E2M1_LARGEST, 2, MX_BLOCK, _E8M0, bits=4),
    Format("mxfp6_e2m3", torch.uint8, 7.5, 2, MX_BLOCK, _E8M0, bits=6),
    Format("mxfp6_e3m2", torch.uint8, 28.0, 4, MX_BLOCK, _E8M0, bits=6),
)
"""With a power of two for each block."""

NV = (Format("nvfp4", torch.uint8, E2M1_LARGEST, 2, NV_BLOCK, _E4M3, bits=4),)
"""With an e4m3 scale for each block, and one in float32 for the tensor."""

FORMATS: dict[str, Format] = {each.name: each for each in (*SCALED, *MX, *NV)}
"""By name."""

SPELLINGS = {"float8_e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "mxfp8": "mxfp8_e4m3"}
"""Other names of formats."""


def format_named(name: str) -> Format:
    """A format by any of its names. Raises: KeyError."""
    return FORMATS[SPELLINGS.get(name, name)]


def in_blocks(tensor: Tensor, size: int) -> Tensor:
    """Rows as blocks: (*, W) seen as (*, W / size, size)."""
    return tensor.view(*tensor.shape[:-1], tensor.shape[-1] // size, size)


def rounded(quotients: Tensor, to: Format) -> Tensor:
    """Numbers as the nearest ones of a format, of two as near the even one; beyond its range its largest, -128 in int8.

    NaN stays NaN in float8, and becomes 0 elsewhere. Shapes: (*, W) → (*, W), of fewer bits (*, W * bits / 8).
    Dtype: float32 or float64 → that of the format.
    """
    if to.is_packed:
        return packed(e2m1_codes(quotients)) if to.bits == 4 else four_in_three(six_bits(quotients, to))
    if to.is_whole:
        return quotients.nan_to_num(0.0).round().clamp(-128.0, 127.0).to(to.dtype)
    return quotients.clamp(-to.largest, to.largest).to(to.dtype)


def as_floats(narrow: Tensor, dtype: torch.dtype) -> Tensor:
    """float8 or int8 numbers in a wider dtype: of e4m3 on a CPU by its bits, where torch converts one after the other.

    Its bits are float16's of a 256th of the number, but for NaN. 2048 x 2048 numbers in blocks and the product of a row
    take 3.3 of the product's time, by torch's conversion 13 (AMD EPYC Zen 4, one thread, torch 2.13.0, 2026-11-26).
    """
    if narrow.dtype is not torch.float8_e4m3fn or narrow.device.type != "cpu" or narrow.requires_grad:
        return narrow.to(dtype)
    codes = narrow.view(torch.int8).to(torch.int16)
    sizes = codes & 0x7F
    halves = (sizes << 7) | (codes & -0x8000) | ((sizes + 1 & 0x80) * 0xF8)  # of 127 an exponent of ones: NaN
    return halves.view(torch.float16).to(torch.promote_types(dtype, torch.float32)).mul_(256.0).to(dtype)


def widened(narrow: Tensor, of: Format, dtype: torch.dtype) -> Tensor:
    """The numbers that a format's tensor holds. Shapes: (*, W), of fewer bits (*, W * bits / 8) → (*, W)."""
    if not of.is_packed:
        return as_floats(narrow, dtype)
    return e2m1_numbers(unpacked(narrow), dtype) if of.bits == 4 else of_six_bits(of_three(narrow), of, dtype)


def six_bits(quotients: Tensor, to: Format) -> Tensor:
    """Codes from 0 to 63 of the nearest e2m3 or e3m2 numbers, of two as near the even one; 0 of NaN."""
    size, (mantissa, least) = quotients.abs().nan_to_num(0.0).clamp(max=to.largest), _six_bits(to)
    exponent = (torch.frexp(size).exponent - 1).clamp(min=least)  # below the least, numbers lie evenly
    exponent = exponent.masked_fill(size == 0.0, least)
    steps = (size * _two_to(mantissa - exponent)).round().to(torch.int32)  # which may reach the next exponent's first
    code = (exponent - least << mantissa) + steps
    return code.to(torch.uint8) + (quotients < 0.0).to(torch.uint8) * 32


def of_six_bits(codes: Tensor, of: Format, dtype: torch.dtype) -> Tensor:
    """The numbers that codes from 0 to 63 stand for."""
    field, (mantissa, least) = (codes & 31).to(torch.int32), _six_bits(of)
    exponent = (field >> mantissa).clamp(min=1) - 1
    size = (field - (exponent << mantissa)).to(dtype) * _two_to(exponent + (least - mantissa)).to(dtype)
    return torch.where(codes > 31, -size, size)


def _two_to(exponents: Tensor) -> Tensor:
    """Powers of two in float32, of int32 exponents: ``torch.ldexp`` runs on the current device (2.11, 2 H200s)."""
    return (exponents + 127 << 23).view(torch.float32)


def _six_bits(of: Format) -> tuple[int, int]:
    """Bits behind the point, and the least exponent of normal numbers: of e2m3, or of e3m2."""
    return (3, 0) if of.exponent == 2 else (2, -2)


def four_in_three(codes: Tensor) -> Tensor:
    """Four codes of six bits in three bytes, the first one in the lowest bits. Shapes: (*, W) → (*, 3 W / 4)."""
    one, two, three, four = in_blocks(codes.contiguous(), 4).unbind(-1)
    return torch.stack((one | two << 6, two >> 2 | three << 4, three >> 4 | four << 2), -1).flatten(-2)


def of_three(narrow: Tensor) -> Tensor:
    """The codes of bytes. Shapes: (*, 3 W / 4) → (*, W)."""
    one, two, three = in_blocks(narrow.contiguous(), 3).unbind(-1)
    codes = one & 63, one >> 6 | (two & 15) << 2, two >> 4 | (three & 3) << 4, three >> 2
    return torch.stack(codes, -1).flatten(-2)


def e2m1_codes(quotients: Tensor) -> Tensor:
    """Codes from 0 to 15 of the nearest e2m1 numbers, of two as near the even one; 0 of NaN."""
    size = quotients.abs().nan_to_num(0.0).clamp(max=E2M1_LARGEST)
    step = 0.5 + 0.5 * (size >= 2.0).to(size.dtype) + (size >= 4.0).to(size.dtype)  # 0.5, from 2 on 1, from 4 on 2
    near = (size / step).round() * step
    below_2, below_4 = near < 2.0, near < 4.0
    code = torch.where(below_2, near * 2.0, torch.where(below_4, near + 2.0, near * 0.5 + 4.0)).to(torch.uint8)
    return code + (quotients < 0.0).to(torch.uint8) * 8


def e2m1_numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that codes from 0 to 15 stand for."""
    size = (codes & 7).to(dtype)
    number = torch.where(size < 4.0, size * 0.5, torch.where(size < 6.0, size - 2.0, size * 2.0 - 8.0))
    return torch.where(codes > 7, -number, number)


def packed(codes: Tensor) -> Tensor:
    """Two codes in a byte, the first one in its low bits. Shapes: (*, W) → (*, W / 2)."""
    return codes[..., ::2] | codes[..., 1::2] * 16


def unpacked(narrow: Tensor) -> Tensor:
    """The codes of bytes. Shapes: (*, W / 2) → (*, W)."""
    return torch.stack((narrow & 15, narrow >> 4), -1).flatten(-2)


_SIXTH = struct.unpack("f", struct.pack("f", 1.0 / E2M1_LARGEST))[0]
"""In float32: GPUs divide by a number so, and a scale may not depend on the device."""


def wide(tensor: Tensor) -> Tensor:
    """Without gradients, which rounding does not let through; float32, float64 stays."""
    tensor = tensor.detach()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def quantize_scaled(
    input: Tensor,  # torch's name
    to: Format,
    *,
    scale: Tensor | None = None,
    per: str = "tensor",
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Numbers divided by scales and rounded, and these scales in memory of their own.

    Shapes: input (*, W), scale (), (1,), (*, 1), (W,) or (*, W / b) → (*, W), the scale's. A computed scale is () for
    ``"tensor"``, (*, 1) for ``"row"``, (*, W / block_size) for ``"block"``.
    """
    numbers = wide(input)
    if scale is None:
        made = computed_scale(numbers, to, per, block_size)
    else:
        made = scale.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return rounded(divided(numbers, made), to), made


def computed_scale(numbers: Tensor, to: Format, per: str, block_size: int | None) -> Tensor:
    """The largest absolute value over the format's largest number; 1 of zeros in int8, at least vLLM's bound in float8.

    NaN makes no scale. Infinity makes an infinite one, so that what shares it reads as NaN: an overflow shows.
    """
    size = numbers.abs().nan_to_num(0.0, torch.inf)
    if per == "tensor":
        most = size.amax() if size.numel() else size.sum()
    else:
        most = in_blocks(size, block_size or size.shape[-1]).amax(-1)
    made = (most / to.largest).to(torch.float32)
    return made.masked_fill(made == 0.0, 1.0) if to.is_whole else made.clamp(min=to.least_scale)


def divided(numbers: Tensor, scale: Tensor) -> Tensor:
    """Numbers over the scale of their tensor, row, column or block."""
    size = block_of(numbers.shape, scale.shape)
    if not size:
        return numbers / scale
    return (in_blocks(numbers, size) / scale.unsqueeze(-1)).flatten(-2)


def multiplied(numbers: Tensor, scale: Tensor) -> Tensor:
    """Numbers times the scale of their tensor, row, column or block."""
    size = block_of(numbers.shape, scale.shape)
    if not size:
        return numbers * scale
    return (in_blocks(numbers, size) * scale.unsqueeze(-1)).flatten(-2)


def block_of(shape: torch.Size, scales: torch.Size) -> int:
    """How many numbers share a scale that broadcasts to no row; 0 where it does."""
    if len(scales) != len(shape) or scales[-1] in (1, shape[-1]):
        return 0
    return shape[-1] // scales[-1]


def granularity(shape: torch.Size, scales: torch.Size) -> str:
    """What has a scale of its own: ``"tensor"``, ``"row"``, ``"column"`` or ``"block"``."""
    if scales in ((), (1,)):
        return "tensor"
    if block_of(shape, scales):
        return "block"
    return "row" if len(scales) == len(shape) and scales[-1] == 1 else "column" if len(scales) == 1 else "block"


def quantize_mx(input: Tensor, to: Format) -> tuple[Tensor, Tensor]:
    """The numbers of :func:`mx_quotients` rounded, and their scales. Shapes: input (*, W) → (*, W) or (*, W / 2)."""
    quotients, scale = mx_quotients(input, to)
    return rounded(quotients, to), scale


def mx_quotients(input: Tensor, to: Format) -> tuple[Tensor, Tensor]:
    """Numbers over a power of two for each block of 32: ``2^(floor(log2(largest)) - exponent of the format)``.

    Shapes: input (*, W) → (*, W), scales (*, W / 32). A block that is not finite has a scale of NaN.
    """
    blocks = in_blocks(wide(input), to.block)
    codes = mx_codes(blocks.abs().amax(-1), to)
    scale = codes.view(torch.float8_e8m0fnu)
    return (blocks / scale.to(blocks.dtype).unsqueeze(-1)).flatten(-2), scale


def mx_codes(most: Tensor, to: Format) -> Tensor:
    """The scales of blocks as e8m0 codes: their exponents plus 127, at least 0, 255 where the block is not finite."""
    exponents = torch.frexp(most).exponent - 1 - to.exponent + E8M0_BIAS
    codes = exponents.clamp(0, 2 * E8M0_BIAS).masked_fill(most == 0.0, 0)
    return codes.masked_fill(~most.isfinite(), 255).to(torch.uint8)


def quantize_nv(input: Tensor, to: Format, *, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The numbers of :func:`nv_quotients` rounded, and their scales. Shapes: input (*, W) → (*, W / 2)."""
    quotients, scale = nv_quotients(input, to, tensor_scale=tensor_scale)
    return rounded(quotients, to), scale


def nv_quotients(input: Tensor, to: Format, *, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Numbers over an e4m3 scale for each block of 16, times that of the tensor: ``largest / 6 / tensor_scale``.

    Shapes: input (*, W), tensor_scale () or (1,) → (*, W), scales (*, W / 16). The block's scale is made in
    float32; of one that is 0 all numbers are, and one that is not finite has a scale of NaN.
    """
    blocks = in_blocks(wide(input), to.block)
    most = blocks.abs().amax(-1).to(torch.float32)
    whole = 1.0 if tensor_scale is None else tensor_scale.detach().to(torch.float32).reshape(())
    made = most * _SIXTH / whole
    scale = made.clamp(max=E4M3_LARGEST).masked_fill(~most.isfinite(), torch.nan).to(torch.float8_e4m3fn)
    divisor = scale.to(blocks.dtype) * whole
    quotients = blocks / divisor.masked_fill(divisor == 0.0, torch.inf).unsqueeze(-1)
    return quotients.flatten(-2), scale


def dequantize(
    quantized: Tensor,
    scale: Tensor,
    of: Format,
    *,
    tensor_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Numbers times their scales, rounded once.

    Shapes: quantized (*, W), or (*, W / 2) where two lie in a byte; scale as of the format → (*, W)
    """
    dtype = torch.float64 if torch.float64 in (scale.dtype, out_dtype) else torch.float32
    factor = scale.to(dtype)
    if tensor_scale is not None:
        factor = factor * tensor_scale.to(dtype).reshape(())
    return multiplied(widened(quantized, of, dtype), factor).to(out_dtype)

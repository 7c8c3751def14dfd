"""Formats of narrow numbers: what they hold, how numbers are rounded to them, and how two of four bits lie in a byte.

int8, float8_e4m3fn and float8_e5m2 go with scales in float32. The MX formats have a power of two for each 32 numbers
(OCP Microscaling Formats 1.0), nvfp4 an e4m3 scale for each 16. Numbers of four bits are e2m1: 0, 0.5, 1, 1.5, 2, 3, 4
and 6 with a sign, two in a byte, the first one in its low bits; uint8, because torch's float4_e2m1fn_x2 is copied and
nothing else.
"""

from __future__ import annotations

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
        is_packed: whether two lie in a byte.
    """

    name: str
    dtype: torch.dtype
    largest: float
    exponent: int = 0
    block: int = 0
    scale_dtype: torch.dtype = torch.float32
    is_packed: bool = False

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
    Format("mxfp4", torch.uint8, E2M1_LARGEST, 2, MX_BLOCK, _E8M0, is_packed=True),
)
"""With a power of two for each block."""

NV = (Format("nvfp4", torch.uint8, E2M1_LARGEST, 2, NV_BLOCK, _E4M3, is_packed=True),)
"""With an e4m3 scale for each block, and one in float32 for the tensor."""

FORMATS: dict[str, Format] = {each.name: each for each in (*SCALED, *MX, *NV)}
"""By name."""

SPELLINGS = {
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "mxfp8": "mxfp8_e4m3",
}
"""Other names of formats."""


def format_named(name: str) -> Format:
    """A format by any of its names. Raises: KeyError."""
    return FORMATS[SPELLINGS.get(name, name)]


def in_blocks(tensor: Tensor, size: int) -> Tensor:
    """Rows as blocks: (*, W) seen as (*, W / size, size)."""
    return tensor.view(*tensor.shape[:-1], tensor.shape[-1] // size, size)


def rounded(quotients: Tensor, to: Format) -> Tensor:
    """Numbers as the nearest ones of a format, of two as near the even one; beyond its range its largest, -128 in int8.

    NaN stays NaN in float8, and becomes 0 elsewhere. Shapes: (*, W) → (*, W), or (*, W / 2) where two lie in a byte.
    Dtype: float32 or float64 → that of the format.
    """
    if to.is_packed:
        return packed(e2m1_codes(quotients))
    if to.is_whole:
        return quotients.nan_to_num(0.0).round().clamp(-128.0, 127.0).to(to.dtype)
    return quotients.clamp(-to.largest, to.largest).to(to.dtype)


def widened(narrow: Tensor, of: Format, dtype: torch.dtype) -> Tensor:
    """The numbers that a format's tensor holds. Shapes: (*, W), or (*, W / 2) where two lie in a byte → (*, W)."""
    return e2m1_numbers(unpacked(narrow), dtype) if of.is_packed else narrow.to(dtype)


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

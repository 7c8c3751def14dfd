"""What numbers become in a format, with which scales, and what these stand for; plain PyTorch."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from layerzero.ops.quantize.formats import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    E8M0_BIAS,
    Format,
    in_blocks,
    rounded,
    widened,
)

_SIXTH = struct.unpack("f", struct.pack("f", 1.0 / E2M1_LARGEST))[0]
"""In float32: GPUs divide by a number so, and a scale may not depend on the device."""


def wide(tensor: Tensor) -> Tensor:
    """Without gradients, which rounding does not let through; float32, float64 stays."""
    tensor = tensor.detach()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def quantize_scaled(
    input: Tensor,
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


def quantize_nv(
    input: Tensor,
    to: Format,
    *,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The numbers of :func:`nv_quotients` rounded, and their scales. Shapes: input (*, W) → (*, W / 2)."""
    quotients, scale = nv_quotients(input, to, tensor_scale=tensor_scale)
    return rounded(quotients, to), scale


def nv_quotients(
    input: Tensor,
    to: Format,
    *,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
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

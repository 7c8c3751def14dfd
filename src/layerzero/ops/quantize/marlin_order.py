"""Marlin's order of codes, scales and zero points, there and back.

A tile of 16 inputs and 64 outputs is a word or two for each thread of four warps. So IST-DASLab's Marlin has it for
four bits (``Layer.pack`` of marlin/__init__.py), and vLLM's for eight, too (csrc/quantization/marlin/
gptq_marlin_repack.cu).
Scales lie in the order in which a thread needs them (``marlin_permute_scales``, ``marlin_zero_points`` of vLLM's
marlin_utils.py): 64 outputs in another order where groups have scales of their own, 32 where rows have.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from layerzero.ops.quantize.weight_format import packed, unpacked

_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3, 4, 6, 5, 7)}
"""In which a thread's eight codes lie, the lowest bits first."""

_GROUPS = tuple(eights + 8 * each for eights in range(8) for each in range(8))
ROWS_ORDER = tuple(2 * pair + each for pair in range(4) for each in (0, 1, 8, 9, 16, 17, 24, 25))
"""Orders of scales: of 64 outputs where groups have their own, of 32 where rows have."""


@functools.cache
def marlin_places(bits: int) -> Tensor:
    """Which number of a tile, input by input, each of Marlin's codes is."""
    inputs = (0, 1, 8, 9)
    return torch.tensor(
        [
            64 * (2 * (thread % 4) + inputs[code % 4]) + 16 * warp + thread // 4 + 8 * (code // 4)
            for thread in range(32)
            for warp in range(4)
            for code in _ORDER[bits]
        ]
    )


def marlin_codes(numbers: Tensor, bits: int) -> Tensor:
    """Codes in Marlin's order. Shapes: (N, K) → int32 (K / 16, N * bits / 2)."""
    outputs, inputs = numbers.shape
    tiles = numbers.view(outputs // 64, 64, inputs // 16, 16).permute(2, 0, 3, 1).reshape(-1, 1024)
    return packed(tiles[:, marlin_places(bits).to(tiles.device)], bits).view(inputs // 16, -1)


def marlin_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in Marlin's order. Shapes: (N, G) → (G, N)."""
    order = _GROUPS if scale.shape[1] > 1 else ROWS_ORDER
    return scale.t().to(dtype).reshape(-1, len(order))[:, list(order)].view(scale.shape[1], -1)


def marlin_zero(zero: Tensor) -> Tensor:
    """Zero points of 4 bits in Marlin's order. Shapes: (N, G) → int32 (G, N / 8)."""
    ordered = zero.t().reshape(-1, 64)[:, list(_GROUPS)].view(-1, 8)[:, list(_ORDER[4])]
    return packed(ordered.view(zero.shape[1], -1), 4)


def codes_of_marlin(words: Tensor, bits: int) -> Tensor:
    """The codes of words in Marlin's order. Shapes: int32 (K / 16, N * bits / 2) → (N, K)."""
    tiles, outputs = words.shape[0], words.shape[1] * 2 // bits
    codes = unpacked(words, bits, 16 * outputs).view(-1, 1024)
    found = torch.empty_like(codes)
    found[:, marlin_places(bits).to(codes.device)] = codes
    return found.view(tiles, outputs // 64, 16, 64).permute(1, 3, 0, 2).reshape(outputs, -1)


def scale_of_marlin(scale: Tensor) -> Tensor:
    """Scales as they were before. Shapes: (G, N) → (N, G)."""
    order = _GROUPS if len(scale) > 1 else ROWS_ORDER
    given = scale.reshape(-1, len(order))
    found = torch.empty_like(given)
    found[:, list(order)] = given
    return found.view(scale.shape).t()

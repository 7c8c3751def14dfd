"""GGUF's blocks of bytes, dequantised as ``gguf.dequantize`` does: gguf 0.19, after ggml-quants.c, MIT.

A block is so many numbers of a row: a scale in float16, maybe a least value, scales of its parts in 4 or 6 bits, codes.
Q4_1, Q5_1 and the k-quants with a least value are ``scale * code + least``; the least value of a k-quant is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.ops.quantize.formats import e2m1_numbers

Read = Callable[[Tensor, torch.dtype], Tensor]
"""The numbers (B, block) of blocks of bytes (B, size), in this dtype all along."""


class Kind(NamedTuple):
    """One of GGUF's types.

    Attributes:
        block: numbers of a block.
        size: its bytes.
        read: gives its numbers.
        halves: where its scales in float16 are.
    """

    block: int
    size: int
    read: Read
    halves: tuple[int, ...] = (0,)


def half(blocks: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """The float16 number at a place of each block. Shapes: (B, size) → (B, 1)."""
    return blocks[:, place : place + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).to(dtype)


def _shifted(data: Tensor, width: int, shifts: Iterable[int], mask: int) -> Tensor:
    """Every so many bytes once for each shift, one after the other."""
    parts = data.reshape(len(data), data.shape[1] // width, width)
    return (torch.stack([parts >> shift for shift in shifts], 2) & mask).flatten(1)


def _bits(data: Tensor) -> Tensor:
    """The bits of bytes, the lowest of each first."""
    return torch.stack([data >> shift & 1 for shift in range(8)], -1).flatten(1)


def _nibbles(data: Tensor, width: int = 16) -> Tensor:
    return _shifted(data, width, (0, 4), 15)


def looked_up(codes: Tensor, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """The numbers that codes stand for; a table that is made on the device, so that a CUDA graph can be captured."""
    table = torch.cat([torch.full((1,), each, dtype=dtype, device=codes.device) for each in numbers])
    return table[codes.to(torch.int32)]


def _q5_0(b: Tensor, dtype: torch.dtype) -> Tensor:
    codes = _nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4
    return half(b, 0, dtype) * (codes.to(dtype) - 16)


def _q5_1(b: Tensor, dtype: torch.dtype) -> Tensor:
    codes = _nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4
    return half(b, 0, dtype) * codes.to(dtype) + half(b, 2, dtype)


def _in_parts(scale: Tensor, codes: Tensor, least: Tensor | None = None) -> Tensor:
    """Codes (B, 256) times the scale of their part (B, P), less its least value."""
    parts = codes.view(*scale.shape, codes.shape[1] // scale.shape[1]) * scale.unsqueeze(-1)
    return (parts if least is None else parts - least.unsqueeze(-1)).flatten(1)


def _q2_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    scales, codes = b[:, :16], _shifted(b[:, 16:80], 32, (0, 2, 4, 6), 3)
    scale, least = half(b, 80, dtype) * (scales & 15).to(dtype), half(b, 82, dtype) * (scales >> 4).to(dtype)
    return _in_parts(scale, codes.to(dtype), least)


def _q3_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    scales = _shifted(b[:, 96:104], 8, (0, 4), 15) | _shifted(b[:, 104:108], 4, (0, 2, 4, 6), 3) << 4
    missing = _shifted(b[:, :32], 32, range(8), 1) ^ 1  # a bit that is not set takes 4 off
    codes = _shifted(b[:, 32:96], 32, (0, 2, 4, 6), 3).to(dtype) - (missing << 2).to(dtype)
    return _in_parts(half(b, 108, dtype) * (scales.to(dtype) - 32), codes)


def _six_bits(b: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and least values of eight parts, of 12 bytes."""
    low, of_least, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat([low & 63, rest & 15 | low >> 2 & 48], 1)
    return scale, torch.cat([of_least & 63, rest >> 4 | of_least >> 2 & 48], 1)


def _q4_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    scale, least = _six_bits(b)
    codes = _nibbles(b[:, 16:], 32)
    return _in_parts(half(b, 0, dtype) * scale.to(dtype), codes.to(dtype), half(b, 2, dtype) * least.to(dtype))


def _q5_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    scale, least = _six_bits(b)
    codes = _nibbles(b[:, 48:], 32) | _shifted(b[:, 16:48], 32, range(8), 1) << 4
    return _in_parts(half(b, 0, dtype) * scale.to(dtype), codes.to(dtype), half(b, 2, dtype) * least.to(dtype))


def _q6_k(b: Tensor, dtype: torch.dtype) -> Tensor:
    codes = _nibbles(b[:, :128], 64) | _shifted(b[:, 128:192], 32, (0, 2, 4, 6), 3) << 4
    scale = half(b, 208, dtype) * b[:, 192:208].view(torch.int8).to(dtype)
    return _in_parts(scale, codes.to(dtype) - 32)


_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _mxfp4(b: Tensor, dtype: torch.dtype) -> Tensor:
    """Half of a power of two, by its bits, and the doubles of e2m1 numbers."""
    code = b[:, :1].to(torch.int32)
    scale = torch.where(code < 2, (code + 1) << 21, (code - 1) << 23).view(torch.float32).to(dtype)
    return scale * (2 * e2m1_numbers(_nibbles(b[:, 1:]), dtype) + 0.0)  # ggml knows one 0


KINDS = {
    "Q4_0": Kind(32, 18, lambda b, dtype: half(b, 0, dtype) * (_nibbles(b[:, 2:]).to(dtype) - 8)),
    "Q4_1": Kind(32, 20, lambda b, dtype: half(b, 0, dtype) * _nibbles(b[:, 4:]).to(dtype) + half(b, 2, dtype), (0, 2)),
    "Q5_0": Kind(32, 22, _q5_0),
    "Q5_1": Kind(32, 24, _q5_1, (0, 2)),
    "Q8_0": Kind(32, 34, lambda b, dtype: b[:, 2:].view(torch.int8).to(dtype) * half(b, 0, dtype)),
    "Q2_K": Kind(256, 84, _q2_k, (80, 82)),
    "Q3_K": Kind(256, 110, _q3_k, (108,)),
    "Q4_K": Kind(256, 144, _q4_k, (0, 2)),
    "Q5_K": Kind(256, 176, _q5_k, (0, 2)),
    "Q6_K": Kind(256, 210, _q6_k, (208,)),
    "IQ4_NL": Kind(32, 18, lambda b, dtype: half(b, 0, dtype) * looked_up(_nibbles(b[:, 2:]), _IQ4_NL, dtype)),
    "MXFP4": Kind(32, 17, _mxfp4, ()),
}
"""By GGUF's name."""

NUMBERS = dict(zip((2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 39), KINDS, strict=True))
"""Names by ggml's numbers."""


def dequantized(data: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The numbers of rows of blocks. Shapes: data (N, bytes) uint8 → (N, numbers)."""
    of = KINDS[kind]
    blocks = data.shape[1] // of.size
    return of.read(data.reshape(len(data) * blocks, of.size), dtype).view(len(data), blocks * of.block)


WHOLE = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Kinds that are a code of four or eight bits times a scale, and maybe an offset, for each 32 numbers, of Q6_K 16."""


def whole(data: Tensor, kind: str) -> tuple[int, Tensor, Tensor, Tensor | None]:
    """Bits, codes (N, K) in uint8, scales and offsets (N, G) in float32; of :data:`WHOLE`.

    A number is ``(code - 2**(bits - 1)) * scale``, and the offset where there is one.
    """
    if kind in AFFINE:
        codes, scale, offset = affine(data, kind)
        return 4, codes, scale, None if kind == "Q4_0" else 8.0 * scale + offset
    blocks, least, rows = data.reshape(-1, KINDS[kind].size), None, len(data)
    if kind == "Q8_0":
        codes, scale = blocks[:, 2:] ^ 128, half(blocks, 0, torch.float32)
    elif kind == "Q5_K":
        of_parts, of_least = _six_bits(blocks)
        codes = (_nibbles(blocks[:, 48:], 32) | _shifted(blocks[:, 16:48], 32, range(8), 1) << 4) + 128
        scale = half(blocks, 0, torch.float32) * of_parts.to(torch.float32)
        least = (-half(blocks, 2, torch.float32) * of_least.to(torch.float32)).reshape(rows, -1)
    else:
        codes = (_nibbles(blocks[:, :128], 64) | _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << 4) + 96
        scale = half(blocks, 208, torch.float32) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    return 8, codes.reshape(rows, -1), scale.reshape(rows, -1), least


AFFINE = ("Q4_0", "Q4_1", "Q4_K")
"""Kinds that are a code of four bits times a scale, and an offset, for each 32 numbers."""


def affine(data: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, K) in uint8, and the scale and offset of each 32, (N, K / 32) in float32; of :data:`AFFINE`."""
    blocks = data.reshape(-1, KINDS[kind].size)
    scale = half(blocks, 0, torch.float32)
    if kind == "Q4_0":
        codes, offset = _nibbles(blocks[:, 2:]), -8.0 * scale
    elif kind == "Q4_1":
        codes, offset = _nibbles(blocks[:, 4:]), half(blocks, 2, torch.float32)
    else:
        of_parts, least = _six_bits(blocks)
        codes, offset = _nibbles(blocks[:, 16:], 32), -half(blocks, 2, torch.float32) * least.to(torch.float32)
        scale = scale * of_parts.to(torch.float32)
    rows = len(data)
    return codes.reshape(rows, -1), scale.reshape(rows, -1), offset.reshape(rows, -1)

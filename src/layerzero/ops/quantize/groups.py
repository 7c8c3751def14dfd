"""Whole numbers by group, as GPTQ, AWQ and compressed-tensors lay them out: gptqmodel 7.7, autoawq 0.2.9, 0.20.

Marlin's order of codes, scales and zero points, there and back.

A tile of 16 inputs and 64 outputs is a word or two for each thread of four warps. So IST-DASLab's Marlin has it for
four bits (``Layer.pack`` of marlin/__init__.py), and vLLM's for eight, too (csrc/quantization/marlin/
gptq_marlin_repack.cu).
Scales lie in the order in which a thread needs them (``marlin_permute_scales``, ``marlin_zero_points`` of vLLM's
marlin_utils.py): 64 outputs in another order where groups have scales of their own, 32 where rows have.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from layerzero.core.dtypes import dtype_named
from layerzero.ops.draw import Draw
from layerzero.ops.quantize.scheme import Scheme, Wanted, strange_options
from layerzero.ops.quantize.weight_format import Codes, Fields, WeightFormat, packed, unpacked

_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3, 4, 6, 5, 7)}
"""In which a thread's eight codes lie, the lowest bits first."""

_GROUPS = tuple(eights + 8 * each for eights in range(8) for each in range(8))
ROWS_ORDER = tuple(2 * pair + each for pair in range(4) for each in (0, 1, 8, 9, 16, 17, 24, 25))
"""Orders of scales: of 64 outputs where groups have their own, of 32 where rows have."""


@functools.cache
def marlin_places(bits: int) -> tuple[int, ...]:
    """Which number of a tile, input by input, each of Marlin's codes is."""
    inputs = (0, 1, 8, 9)
    return tuple(
        64 * (2 * (thread % 4) + inputs[code % 4]) + 16 * warp + thread // 4 + 8 * (code // 4)
        for thread in range(32)
        for warp in range(4)
        for code in _ORDER[bits]
    )


def _at(places: tuple[int, ...]) -> Tensor:
    """Places as an index of a call's own: compilers refuse tensors made elsewhere, and lists for meta tensors."""
    return torch.tensor(places, device="cpu")


def marlin_codes(numbers: Tensor, bits: int) -> Tensor:
    """Codes in Marlin's order. Shapes: (N, K) → int32 (K / 16, N * bits / 2)."""
    outputs, inputs = numbers.shape
    tiles = numbers.view(outputs // 64, 64, inputs // 16, 16).permute(2, 0, 3, 1).reshape(-1, 1024)
    return packed(tiles[:, _at(marlin_places(bits))], bits).view(inputs // 16, -1)


def marlin_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in Marlin's order. Shapes: (N, G) → (G, N)."""
    order = _GROUPS if scale.shape[1] > 1 else ROWS_ORDER
    return scale.t().to(dtype).reshape(-1, len(order))[:, _at(order)].view(scale.shape[1], -1)


def marlin_zero(zero: Tensor) -> Tensor:
    """Zero points of 4 bits in Marlin's order. Shapes: (N, G) → int32 (G, N / 8)."""
    ordered = zero.t().reshape(-1, 64)[:, _at(_GROUPS)].view(-1, 8)[:, _at(_ORDER[4])]
    return packed(ordered.view(zero.shape[1], -1), 4)


def codes_of_marlin(words: Tensor, bits: int) -> Tensor:
    """The codes of words in Marlin's order. Shapes: int32 (K / 16, N * bits / 2) → (N, K)."""
    tiles, outputs = words.shape[0], words.shape[1] * 2 // bits
    codes = unpacked(words, bits, 16 * outputs).view(-1, 1024)
    found = torch.empty_like(codes)
    found[:, _at(marlin_places(bits))] = codes
    return found.view(tiles, outputs // 64, 16, 64).permute(1, 3, 0, 2).reshape(outputs, -1)


def scale_of_marlin(scale: Tensor) -> Tensor:
    """Scales as they were before. Shapes: (G, N) → (N, G)."""
    order = _GROUPS if len(scale) > 1 else ROWS_ORDER
    given = scale.reshape(-1, len(order))
    found = torch.empty_like(given)
    found[:, _at(order)] = given
    return found.view(scale.shape).t()


HALVES = frozenset({torch.float16, torch.bfloat16, torch.float32})
_INT32 = frozenset({torch.int32})


class Grouped(Scheme):
    """Whole numbers with a scale for each group of a row.

    gptq has data int32 (K * bits / 32, N), scale (G, N), zero int32 (G, N * bits / 32), group_index (K,); awq has data
    int32 (K, N * bits / 32), whose eight numbers in a word come in the order 0, 2, 4, 6, 1, 3, 5, 7, scale (G, N) and
    zero as data; compressed-tensors has data int32 (N, ceil(K * bits / 32)), scale (N, G) and zero int32
    (ceil(N * bits / 32), G), or int8 (N, G) where they are ``signed``.
    """

    operation = "group"
    scale_dtype = torch.float16

    def __init__(self, name: str, bits: tuple[int, ...], zeros: tuple[str, ...], *, permuted: bool) -> None:
        self.name, self.widths, self.zeros, self.permuted = name, bits, zeros, permuted
        self.example = str(WeightFormat(name, bits=4, group=128, zeros=zeros[0]))

    def problems(self, of: WeightFormat) -> list[str]:
        problems = strange_options(of, "bits", "group", "zeros", *(["permuted"] if self.permuted else []))
        if of.bits not in self.widths:
            problems.append(f"bits: wanted {', '.join(map(str, self.widths))} with {of.scheme}, got {of.bits}")
        if of.zeros not in self.zeros:
            problems.append(f"zeros: wanted {', '.join(self.zeros)} with {of.scheme}, got {of.zeros!r}")
        return problems

    def size_problems(self, of: WeightFormat, outputs: int, inputs: int) -> list[str]:
        problems = []
        if outputs < 1 or inputs < 1:
            problems.append(f"data: wanted at least one row and column, got {outputs} x {inputs} numbers of {of}")
        elif of.group and inputs % of.group:
            problems.append(f"group: wanted a divisor of the {inputs} columns, got {of.group} in {of}")
        whole = 32 // math.gcd(32, of.bits)
        if of.scheme == "gptq" and (inputs % whole or outputs % whole):
            problems.append(f"data: wanted multiples of {whole} rows and columns in {of}, got {outputs} x {inputs}")
        return problems

    def bits(self, of: WeightFormat, scale: str = "float16") -> float:
        zero = {"none": 0, "signed": 8}.get(of.zeros, of.bits)
        return of.bits + ((8.0 * dtype_named(scale).itemsize + zero) / of.group if of.group else 0.0)

    def outputs(self, of: WeightFormat, data: tuple[int, ...], inputs: int) -> int:
        if len(data) != 2:
            return 0
        return {"gptq": data[1], "awq": data[1] * 32 // of.bits}.get(of.scheme, data[0])

    def wanted(self, of: WeightFormat, outputs: int, inputs: int) -> Wanted:
        groups = inputs // of.group if of.group else 1
        words, zeros = -(-inputs * of.bits // 32), -(-outputs * of.bits // 32)
        if of.scheme == "compressed-tensors":
            data, scale, zero = (outputs, words), (outputs, groups), (zeros, groups)
        else:
            data = (words, outputs) if of.scheme == "gptq" else (inputs, zeros)
            scale, zero = (groups, outputs), (groups, zeros)
        found: dict[str, tuple[tuple[int, ...], frozenset[torch.dtype]]] = {}
        found |= {"data": (data, _INT32), "scale": (scale, HALVES)}
        if of.zeros == "signed":
            found["zero"] = (outputs, groups), frozenset({torch.int8})
        elif of.zeros != "none":
            found["zero"] = zero, _INT32
        if of.permuted:
            found["group_index"] = (inputs,), _INT32
        return found

    def step(self, of: WeightFormat, inputs: int) -> int:
        by_row = of.scheme == "compressed-tensors" and of.zeros in {"none", "signed"}
        return 1 if by_row else 32  # words hold numbers of several rows

    def cut(self, of: WeightFormat, given: Fields, inputs: int, start: int, stop: int) -> Fields:
        rows, words = slice(start, stop), slice(start * of.bits // 32, -(-stop * of.bits // 32))
        assert given.scale is not None
        if of.scheme == "compressed-tensors":
            zero = None if given.zero is None else given.zero[rows if of.zeros == "signed" else words]
            return given._replace(data=given.data[rows], scale=given.scale[rows], zero=zero)
        assert given.zero is not None
        data = given.data[:, rows if of.scheme == "gptq" else words]
        return given._replace(data=data, scale=given.scale[:, rows], zero=given.zero[:, words])

    def codes(self, of: WeightFormat, given: Fields, inputs: int) -> Codes:
        """Whole numbers, scales and zero points, (N, K) and (N, G)."""
        scale, zero, bits = given.scale, given.zero, of.bits
        outputs = self.outputs(of, tuple(given.data.shape), inputs)
        assert scale is not None
        if of.scheme == "compressed-tensors":
            numbers = unpacked(given.data, bits, inputs)
            if zero is not None and of.zeros == "signed":
                zero = (zero.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
            elif zero is not None:
                zero = unpacked(zero.t(), bits, outputs).t()
        else:
            assert zero is not None
            scale, zero = scale.t(), unpacked(zero, bits, outputs)
            if of.scheme == "gptq":
                numbers = unpacked(given.data.t(), bits, inputs)
            else:
                numbers, zero = _in_order(unpacked(given.data, bits, outputs), _AWQ).t(), _in_order(zero, _AWQ)
            zero = zero.t()
            if of.zeros == "minus_one":
                zero = zero + 1 & ((1 << bits) - 1)
        return Codes(numbers.contiguous(), scale, zero, bits, of.group or inputs, given.group_index)

    def encoded(self, of: WeightFormat, codes: Codes) -> Fields:
        """The tensors of a weight with these numbers; the format has the codes' bits, group and index."""
        zero, bits = codes.zero if of.zeros != "none" else None, of.bits
        if of.zeros != "none" and zero is None:
            zero = torch.full(codes.scale.shape, codes.middle, dtype=torch.uint8, device=codes.scale.device)
        if of.scheme == "compressed-tensors":
            if zero is not None and of.zeros == "signed":
                zero = (zero.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
            elif zero is not None:
                zero = packed(zero.t(), bits).t().contiguous()
            return Fields(packed(codes.numbers, bits), codes.scale.contiguous(), zero, codes.group_index)
        assert zero is not None
        if of.zeros == "minus_one":
            zero = zero - 1 & ((1 << bits) - 1)
        scale, zero = codes.scale.t().contiguous(), zero.t()
        if of.scheme == "gptq":
            return Fields(packed(codes.numbers, bits).t().contiguous(), scale, packed(zero, bits), codes.group_index)
        return Fields(
            packed(_in_order(codes.numbers.t(), _OF_AWQ), bits), scale, packed(_in_order(zero, _OF_AWQ), bits)
        )

    def dequantized(self, of: WeightFormat, given: Fields, inputs: int, dtype: torch.dtype) -> Tensor:
        return self.codes(of, given, inputs).dequantized(dtype)

    def own_dtype(self, given: Fields) -> torch.dtype:
        assert given.scale is not None
        return given.scale.dtype

    def value_problems(self, of: WeightFormat, given: Fields) -> list[str]:
        problems, half = [], 1 << (of.bits - 1)
        if given.group_index is not None:
            for each in given.group_index.view(-1, given.group_index.shape[-1]):
                problems += _index_problems(of, each)
        if of.zeros == "signed" and given.zero is not None:
            low, high = int(given.zero.min()), int(given.zero.max())
            if low < -half or high >= half:
                problems.append(f"zero: wanted numbers from {-half} to {half - 1} with {of}, got {low} to {high}")
        return problems

    def quantized(self, of: WeightFormat, numbers: Tensor) -> Fields:
        """Each to the nearest code: of -1 to 1 times the largest value, or with zero points from the least to it."""
        return self.encoded(of, codes_of(numbers, of.bits, of.group, zeros=of.zeros != "none"))

    def random(self, of: WeightFormat, outputs: int, inputs: int, generator: torch.Generator | None) -> Fields:
        numbers = torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)
        codes = codes_of(numbers.to(torch.float16), of.bits, of.group, zeros=of.zeros != "none", clips=(1.0,))
        if of.permuted:
            order = torch.randperm(inputs, generator=generator)
            index = (order // (of.group or inputs)).to(torch.int32)
            codes = replace(codes, numbers=codes.numbers[:, order], group_index=index)
        return self.encoded(of, codes)

    def drawn(self, draw: Draw) -> tuple[WeightFormat, int, int]:
        group, bits = draw.of((0, 8, 16, 32, 64, 128)), draw.of(self.widths)
        permuted = self.permuted and draw.chance(0.3)
        of = WeightFormat(self.name, bits=bits, group=group, zeros=draw.of(self.zeros), permuted=permuted)
        unit = 1 if self.name == "compressed-tensors" else 32
        outputs = draw.of((1, 2, 3, 7, 33, 64, 100)) * unit if unit == 1 else draw.of((32, 64, 96, 160))
        return of, outputs, draw.of((1, 2, 3, 4, 5)) * math.lcm(group or draw.of((1, 8, 31)), unit)


class Marlin(Grouped):
    """Four bits without zero points in the order of the kernel that IST-DASLab's Marlin is.

    data int32 (K / 16, 2 N), named B; scale (G, N), named s, both in Marlin's order. Files have groups of 128,
    or one for a row, and columns and rows that 128 and 256 divide, which the order does not need.
    """

    def __init__(self) -> None:
        super().__init__("marlin", (4,), ("none",), permuted=False)

    def size_problems(self, of: WeightFormat, outputs: int, inputs: int) -> list[str]:
        problems = super().size_problems(of, outputs, inputs)
        if not problems and (inputs % 16 or outputs % 64):
            wanted = "multiples of 64 rows and 16 columns"
            problems.append(f"data: wanted {wanted} in {of}, got {outputs} x {inputs}")
        return problems

    def outputs(self, of: WeightFormat, data: tuple[int, ...], inputs: int) -> int:
        return data[1] // 2 if len(data) == 2 else 0

    def wanted(self, of: WeightFormat, outputs: int, inputs: int) -> Wanted:
        scale = (inputs // of.group if of.group else 1, outputs)
        return {"data": ((inputs // 16, 2 * outputs), _INT32), "scale": (scale, HALVES)}

    def step(self, of: WeightFormat, inputs: int) -> int:
        return 64

    def cut(self, of: WeightFormat, given: Fields, inputs: int, start: int, stop: int) -> Fields:
        assert given.scale is not None
        return given._replace(data=given.data[:, 2 * start : 2 * stop], scale=given.scale[:, start:stop])

    def codes(self, of: WeightFormat, given: Fields, inputs: int) -> Codes:
        assert given.scale is not None
        return Codes(codes_of_marlin(given.data, 4), scale_of_marlin(given.scale), None, 4, of.group or inputs)

    def encoded(self, of: WeightFormat, codes: Codes) -> Fields:
        return Fields(marlin_codes(codes.numbers, 4), marlin_scale(codes.scale, codes.scale.dtype))

    def drawn(self, draw: Draw) -> tuple[WeightFormat, int, int]:
        group = draw.of((0, 16, 32, 64, 128))
        of = WeightFormat(self.name, bits=4, group=group)
        return of, draw.of((64, 128, 192)), draw.of((1, 2, 3, 5)) * math.lcm(group or 16, 16)


CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that the codes cover: that with the least squared error is taken. With the first alone
normal numbers lose 0.114 in groups of 128 in four bits, with all of them 0.102."""

BLOCK, BLOCK_ELSEWHERE = 2**17, 2**24
"""Numbers of rows that are rounded together: on a CPU they stay in its caches; elsewhere a block is some 80 launches.

With the first for both a weight of 14336 x 4096 was 36,000 operators (counted on a CPU); to quantise 189 weights of an
8B model took about 80 s of an H200 (26 November 2026). The second has not run there.
"""


def codes_of(numbers: Tensor, bits: int, group: int, *, zeros: bool, clips: tuple[float, ...] = CLIPS) -> Codes:
    """Numbers as their nearest codes, by that scale of five of each group which loses least, in their dtype."""
    columns = numbers.shape[1]
    group = group or columns
    most = BLOCK if numbers.device.type == "cpu" else BLOCK_ELSEWHERE
    blocks = torch.split(numbers, max(most // max(columns, 1), 1))
    found = [_rounded(each, bits, group, zeros, clips) for each in blocks]
    codes, scale, zero = (torch.cat(each) for each in zip(*found, strict=True))
    return Codes(codes, scale, zero if zeros else None, bits, group)


def _rounded(
    rows: Tensor, bits: int, group: int, zeros: bool, clips: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, K), scales and zero points (N, G) of some rows."""
    parts, most = rows.float().reshape(rows.shape[0], -1, group), (1 << bits) - 1
    if zeros:
        low, high = parts.amin(-1, keepdim=True).clamp(max=0.0), parts.amax(-1, keepdim=True).clamp(min=0.0)
    else:
        high = parts.abs().amax(-1, keepdim=True)
        low = -high

    def scaled(clip: float) -> tuple[Tensor, Tensor]:
        scale = ((high - low) * (clip / most)).to(rows.dtype)
        scale = scale.masked_fill(scale == 0.0, SMALL).float()
        zero = (-low * clip / scale).round_().clamp_(0, most) if zeros else torch.full_like(scale, 1 << (bits - 1))
        return scale, zero

    def rounded(scale: Tensor, zero: Tensor) -> Tensor:
        return (parts / scale).round_().add_(zero).clamp_(0, most)

    best, (scale, zero) = torch.full_like(high, math.inf), scaled(clips[0])
    for clip in clips if len(clips) > 1 else ():
        one, other = scaled(clip)
        error = rounded(one, other).sub_(other).mul_(one).sub_(parts).square_().sum(-1, keepdim=True)
        scale, zero = torch.where(error < best, one, scale), torch.where(error < best, other, zero)
        best = torch.minimum(best, error)
    codes = rounded(scale, zero).to(torch.uint8).flatten(1)
    return codes, scale[..., 0].to(rows.dtype), zero[..., 0].to(torch.uint8)


SMALL = 2.0**-14
"""The scale of a group of zeros: kernels take an offset times the scale off their sums, which they round."""


def _index_problems(of: WeightFormat, group_index: Tensor) -> list[str]:
    """An act-order index puts each group's number of columns into it, whatever their order."""
    columns = group_index.numel()
    group = of.group or columns
    low, high = int(group_index.min()), int(group_index.max())
    if low < 0 or high >= columns // group:
        return [f"group_index: wanted groups from 0 to {columns // group - 1}, got {low} to {high}"]
    counts = torch.bincount(group_index, minlength=columns // group)
    if bool((counts == group).all()):
        return []
    place = int((counts != group).nonzero()[0])
    return [f"group_index: wanted {group} columns in each group, got {int(counts[place])} in group {place}"]


_AWQ, _OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7), (0, 2, 4, 6, 1, 3, 5, 7)
"""Where each of eight numbers lies in a word of awq, and which number lies at each place."""


def _in_order(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Every eight codes of a row in another order."""
    return codes.view(*codes.shape[:-1], codes.shape[-1] // 8, 8)[..., _at(order)].flatten(-2)


GROUPED = {
    "gptq": Grouped("gptq", (2, 3, 4, 8), ("minus_one", "stored"), permuted=True),
    "awq": Grouped("awq", (4,), ("stored",), permuted=False),
    "compressed-tensors": Grouped(
        "compressed-tensors", (2, 3, 4, 5, 6, 7, 8), ("none", "stored", "signed"), permuted=True
    ),
    "marlin": Marlin(),
}
"""By name."""

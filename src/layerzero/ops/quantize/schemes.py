"""Every scheme by name: whole numbers by group, blocks of float8, MX and NVFP4, codebooks, GGUF.

Each gives the numbers that the library which defines it gives, bit for bit in the dtype that this library computes in:
gptqmodel 7.7, autoawq 0.2.9, compressed-tensors 0.20, bitsandbytes 0.50, gguf 0.19; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.dtypes import dtype_named
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason
from layerzero.ops.draw import Draw
from layerzero.ops.quantize import formats, gguf
from layerzero.ops.quantize.groups import GROUPED, HALVES
from layerzero.ops.quantize.scheme import Scheme, Wanted, strange_options
from layerzero.ops.quantize.weight_format import Fields, WeightFormat, rotated

_BYTES, _FLOAT32 = frozenset({torch.uint8}), frozenset({torch.float32})
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_POWERS = frozenset({torch.float8_e8m0fnu, torch.uint8})


class Blocks(Scheme):
    """float8 with a scale for each block: data (N, K), scale (ceil(N / rows), ceil(K / group)).

    DeepSeek's and Transformers' ``finegrained_fp8`` has blocks of 128 x 128, ``fp8:group=128,rows=128``. A row has one
    scale, (N, 1), with ``group=0``; all numbers have one, (), with ``rows=0`` as well.
    """

    operation = "block"
    example = "fp8:group=128,rows=128"

    def problems(self, of: WeightFormat) -> list[str]:
        problems = strange_options(of, "group", "rows")
        if of.rows == 0 and of.group:
            problems.append(f"rows: wanted at least 1 with a group, got {of}")
        return problems

    def size_problems(self, of: WeightFormat, outputs: int, inputs: int) -> list[str]:
        return []

    def bits(self, of: WeightFormat, scale: str = "float16") -> float:
        return 8.0 + (8.0 * dtype_named(scale).itemsize / (of.rows * of.group) if of.rows and of.group else 0.0)

    def wanted(self, of: WeightFormat, outputs: int, inputs: int) -> Wanted:
        columns = -(-inputs // of.group) if of.group else 1
        shape = (-(-outputs // of.rows), columns) if of.rows else ()
        return {"data": ((outputs, inputs), _FLOAT8), "scale": (shape, HALVES)}

    def step(self, of: WeightFormat, inputs: int) -> int:
        return max(of.rows, 1)

    def cut(self, of: WeightFormat, given: Fields, inputs: int, start: int, stop: int) -> Fields:
        scale = given.scale
        if of.rows and scale is not None:
            scale = scale[start // of.rows : -(-stop // of.rows)]
        return given._replace(data=given.data[start:stop], scale=scale)

    def dequantized(self, of: WeightFormat, given: Fields, inputs: int, dtype: torch.dtype) -> Tensor:
        assert given.scale is not None
        numbers, scale = formats.as_floats(given.data, dtype), given.scale.to(dtype)
        if not of.rows:
            return numbers * scale
        if of.rows > 1:
            scale = scale.repeat_interleave(of.rows, 0)[: len(numbers)]
        if of.group and inputs % of.group:
            scale = scale.repeat_interleave(of.group, 1)[:, :inputs]
        return formats.multiplied(numbers, scale)

    def quantized(self, of: WeightFormat, numbers: Tensor) -> Fields:
        outputs, inputs = numbers.shape
        rows, columns = of.rows or max(outputs, 1), of.group or max(inputs, 1)  # one scale, too, of no number at all
        below, right = (
            max(-(-size // block), 0 if stated else 1) * block - size
            for size, block, stated in ((outputs, rows, of.rows), (inputs, columns, of.group))
        )
        whole = functional.pad(numbers.float().abs(), (0, right, 0, below))
        most = whole.view(len(whole) // rows, rows, whole.shape[1] // columns, columns).amax((1, 3))
        scale = (most / formats.E4M3_LARGEST).masked_fill(most == 0.0, 1.0)
        each = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        codes = formats.rounded(numbers.float() / each, formats.FORMATS["fp8_e4m3"])
        return Fields(codes, scale if of.rows else scale.reshape(()))

    def drawn(self, draw: Draw) -> tuple[WeightFormat, int, int]:
        rows, group = draw.of(((128, 128), (1, 128), (4, 32), (1, 0), (0, 0), (16, 0)))
        return (WeightFormat("fp8", group=group, rows=rows), draw.of((1, 3, 16, 130, 256)), draw.of((1, 32, 200, 256)))


class Micro(Scheme):
    """MX and NVFP4: data float8 (N, K), or uint8 (N, K / 2), of six bits (N, 3 K / 4), the first number in low bits.

    The scales of MX are powers of two for each 32 numbers, (N, K / 32), as float8_e8m0fnu or their bytes; those of
    nvfp4 float8_e4m3fn for each 16, (N, K / 16), and multiples of ``second_scale`` (), or with ``nvfp4:over``, as
    compressed-tensors has it, quotients by it. With ``rotation`` they are of columns that were rotated.
    """

    operation = "mx"
    positive = False

    def __init__(self, name: str) -> None:
        self.name = self.example = name
        self.narrow = formats.FORMATS["mxfp8_e4m3" if name == "mxfp8" else name]

    def problems(self, of: WeightFormat) -> list[str]:
        kinds = ("", "over") if self.name == "nvfp4" else ("",)
        problems = strange_options(of, "rotation", *(["kind"] if of.kind in kinds else []))
        if type(of.rotation) is not int or of.rotation < 0 or of.rotation.bit_count() > 1:
            problems.append(f"rotation: wanted 0 or a power of two, got {of.rotation!r} in {of}")
        return problems

    def size_problems(self, of: WeightFormat, outputs: int, inputs: int) -> list[str]:
        block = max(self.narrow.block, of.rotation)
        if inputs % block == 0:
            return []
        return [f"data: wanted a multiple of {block} columns, the block of {of}, got {inputs}"]

    def bits(self, of: WeightFormat, scale: str = "float16") -> float:
        return self.narrow.bits + 8.0 / self.narrow.block

    def wanted(self, of: WeightFormat, outputs: int, inputs: int) -> Wanted:
        width = inputs * self.narrow.bits // 8
        data = (outputs, width), _BYTES if self.narrow.is_packed else _FLOAT8
        dtypes = frozenset({torch.float8_e4m3fn}) if self.name == "nvfp4" else _POWERS
        found = {"data": data, "scale": ((outputs, inputs // self.narrow.block), dtypes)}
        return {**found, "second_scale": ((), _FLOAT32)} if self.name == "nvfp4" else found

    def dequantized(self, of: WeightFormat, given: Fields, inputs: int, dtype: torch.dtype) -> Tensor:
        scale = given.scale
        assert scale is not None
        factor = (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).to(dtype)
        if given.second_scale is not None:
            second = given.second_scale.to(dtype).reshape(())
            factor = factor / second if of.kind == "over" else factor * second
        return rotated(formats.multiplied(formats.widened(given.data, self.narrow, dtype), factor), of.rotation)

    def quantized(self, of: WeightFormat, numbers: Tensor) -> Fields:
        numbers = rotated(numbers.float(), of.rotation) if of.rotation else numbers
        if self.name != "nvfp4":
            return Fields(*formats.quantize_mx(numbers, self.narrow))
        most = numbers.float().abs().amax() if numbers.numel() else numbers.new_zeros((), dtype=torch.float32)
        second = (most / (formats.E2M1_LARGEST * formats.E4M3_LARGEST)).masked_fill(most == 0.0, 1.0)
        found = formats.quantize_nv(numbers, self.narrow, tensor_scale=second)
        return Fields(*found, second_scale=1.0 / second if of.kind == "over" else second)

    def drawn(self, draw: Draw) -> tuple[WeightFormat, int, int]:
        kind = draw.of(("", "over")) if self.name == "nvfp4" else ""
        inputs = self.narrow.block * draw.of((1, 2, 3, 8))
        rotation = draw.of((0, 0, self.narrow.block))
        return WeightFormat(self.name, kind, rotation=rotation), draw.of((1, 2, 7, 33, 64)), inputs


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)


class Codebook(Scheme):
    """bitsandbytes' nf4 and fp4: codes of 16 numbers, and the largest absolute value of each block of the whole weight.

    data uint8 (N * K / 2, 1), the first number in a byte's high bits; scale float32 (ceil(N * K / group),), as
    ``absmax`` is once double quantisation is undone.
    """

    operation = "codebook"
    positive = False

    def __init__(self, name: str, numbers: tuple[float, ...]) -> None:
        self.name, self.numbers = name, numbers
        self.example = str(WeightFormat(name, group=64))

    def problems(self, of: WeightFormat) -> list[str]:
        wanted = (
            [] if of.group >= 2 and of.group % 2 == 0 else [f"group: wanted an even number, got {of.group} in {of}"]
        )
        return strange_options(of, "group") + wanted

    def size_problems(self, of: WeightFormat, outputs: int, inputs: int) -> list[str]:
        if outputs * inputs > 0 and outputs * inputs % 2 == 0:
            return []
        return [f"data: wanted an even number of numbers in {of}, got {outputs} x {inputs}"]

    def bits(self, of: WeightFormat, scale: str = "float16") -> float:
        return 4.0 + 32.0 / of.group

    def outputs(self, of: WeightFormat, data: tuple[int, ...], inputs: int) -> int:
        return 2 * math.prod(data) // max(inputs, 1)

    def wanted(self, of: WeightFormat, outputs: int, inputs: int) -> Wanted:
        numbers = outputs * inputs
        return {"data": ((numbers // 2, 1), _BYTES), "scale": ((-(-numbers // of.group),), _FLOAT32)}

    def step(self, of: WeightFormat, inputs: int) -> int:
        return of.group // math.gcd(of.group, inputs)

    def cut(self, of: WeightFormat, given: Fields, inputs: int, start: int, stop: int) -> Fields:
        assert given.scale is not None
        first, last = start * inputs, stop * inputs
        scale = given.scale[first // of.group : -(-last // of.group)]
        return given._replace(data=given.data[first // 2 : last // 2], scale=scale)

    def dequantized(self, of: WeightFormat, given: Fields, inputs: int, dtype: torch.dtype) -> Tensor:
        assert given.scale is not None
        codes = torch.cat([given.data >> 4, given.data & 15], 1).flatten()
        numbers, scale = gguf.looked_up(codes, self.numbers, dtype), given.scale.to(dtype)
        if len(numbers) % of.group:
            scale = scale.repeat_interleave(of.group)[: len(numbers)]
        return formats.multiplied(numbers, scale).view(-1, inputs)

    def quantized(self, of: WeightFormat, numbers: Tensor) -> Fields:
        flat = numbers.float().flatten()
        blocks = functional.pad(flat, (0, -len(flat) % of.group)).view(-1, of.group)
        scale = blocks.abs().amax(1)
        table = torch.tensor(self.numbers, dtype=flat.dtype, device=flat.device)
        sorted_, order = table.sort(stable=True)
        shares = (blocks / scale.masked_fill(scale == 0.0, 1.0).unsqueeze(1)).flatten()[: len(flat)]
        codes = order[torch.bucketize(shares, (sorted_[1:] + sorted_[:-1]) / 2)].to(torch.uint8)
        return Fields((codes[::2] << 4 | codes[1::2]).unsqueeze(1), scale)

    def drawn(self, draw: Draw) -> tuple[WeightFormat, int, int]:
        return WeightFormat(self.name, group=draw.of((32, 64, 256))), draw.of((2, 6, 32, 66)), draw.of((1, 7, 32, 96))


class Gguf(Scheme):
    """Rows of GGUF's blocks: data uint8 (N, K / block * bytes of a block), and no other tensor."""

    operation = "gguf"
    example = "gguf:Q4_K"

    def problems(self, of: WeightFormat) -> list[str]:
        if of.kind in gguf.KINDS:
            return strange_options(of, "kind")
        known = ", ".join(gguf.KINDS)
        return [f"kind: wanted one of {known} with gguf, got {of.kind!r}; gguf.dequantize may know it, on the host"]

    def size_problems(self, of: WeightFormat, outputs: int, inputs: int) -> list[str]:
        block = gguf.KINDS[of.kind].block
        if inputs and inputs % block == 0:
            return []
        return [f"data: wanted a multiple of {block} columns, the block of {of}, got {inputs}"]

    def bits(self, of: WeightFormat, scale: str = "float16") -> float:
        return 8.0 * gguf.KINDS[of.kind].size / gguf.KINDS[of.kind].block

    def wanted(self, of: WeightFormat, outputs: int, inputs: int) -> Wanted:
        kind = gguf.KINDS[of.kind]
        return {"data": ((outputs, inputs // kind.block * kind.size), _BYTES)}

    def dequantized(self, of: WeightFormat, given: Fields, inputs: int, dtype: torch.dtype) -> Tensor:
        return gguf.dequantized(given.data, of.kind, dtype)

    def value_problems(self, of: WeightFormat, given: Fields) -> list[str]:
        kind = gguf.KINDS[of.kind]
        blocks = given.data.reshape(given.data.numel() // kind.size, kind.size)
        for place in kind.halves:
            wrong = ~gguf.half(blocks, place, torch.float32).isfinite()
            if bool(wrong.any()):
                where = int(wrong.nonzero()[0, 0])
                return [f"data: wanted finite scales in blocks of {of}, got one that is not in block {where}"]
        return []

    def random(self, of: WeightFormat, outputs: int, inputs: int, generator: torch.Generator | None) -> Fields:
        kind, shape = gguf.KINDS[of.kind], self.wanted(of, outputs, inputs)["data"][0]
        made = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(-1, kind.size)
        if not kind.halves:  # MXFP4: a power of two
            made[:, 0] = made[:, 0] % 4 + 123
        for place in kind.halves:
            made[:, place : place + 2] = torch.ones(1, dtype=torch.float16).view(torch.uint8)
        size = kind.read(made, torch.float32).std().clamp(min=1e-3) * math.sqrt(inputs)
        for place in kind.halves:
            half = ((torch.rand(len(made), 1, generator=generator) + 0.5) / size).to(torch.float16)
            made[:, place : place + 2] = half.view(torch.uint8)
        return Fields(made.view(shape))

    def drawn(self, draw: Draw) -> tuple[WeightFormat, int, int]:
        kind = draw.of(tuple(gguf.KINDS))
        inputs = gguf.KINDS[kind].block * draw.of((1, 2, 3))
        return WeightFormat("gguf", kind), draw.of((1, 2, 7, 33)), inputs


SCHEMES: dict[str, Scheme] = {
    **GROUPED,
    "fp8": Blocks(),
    **{name: Micro(name) for name in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "nvfp4")},
    "nf4": Codebook("nf4", _NF4),
    "fp4": Codebook("fp4", (*_FP4, *(-each for each in _FP4))),
    "gguf": Gguf(),
}
"""By name."""


def scheme_of(of: WeightFormat) -> Scheme:
    """The scheme of a format. Raises: KeyError for one that is unknown."""
    return SCHEMES[of.scheme]


def format_problems(of: WeightFormat) -> list[str]:
    """What is wrong with a format: an unknown scheme, or options that it has not."""
    if of.scheme not in SCHEMES:
        return [f"format: wanted one of {', '.join(SCHEMES)}, got {of.scheme!r}"]
    numbers = {name: getattr(of, name) for name in ("group", "rows")}
    wrong = [name for name, number in numbers.items() if type(number) is not int or number < 0]
    return [f"{name}: wanted 0 or more, got {numbers[name]!r}" for name in wrong] or scheme_of(of).problems(of)


_WHOLE = {2: 0.454, 3: 0.203, 4: 0.102, 5: 0.052, 6: 0.026, 7: 0.013, 8: 0.0065}
_OTHERS = {"fp8": 0.026, "mxfp6_e2m3": 0.028, "mxfp8": 0.029, "mxfp6_e3m2": 0.054, "nf4": 0.092, "nvfp4": 0.095}
_OTHERS |= {"mxfp4": 0.115, "fp4": 0.122}
"""What ``lz.quantize_weight`` loses of normal numbers, as a share of their norm: of whole numbers by bits in groups of
128, of others by scheme (512 x 4096 numbers, 2026-11-26)."""


LOSSES = {f"int{bits}": each for bits, each in _WHOLE.items()} | _OTHERS
LOSSES = dict(sorted(LOSSES.items(), key=lambda each: each[1]))
"""The same by what ``lz.quantize_weight`` calls them, the least first."""


def loss_of(of: WeightFormat) -> float:
    """What a format loses of normal numbers, as a share of their norm. Raises: KeyError for one that is not made."""
    return _OTHERS[of.scheme] if of.scheme in _OTHERS else _WHOLE[of.bits]


def nearest(of: WeightFormat) -> WeightFormat:
    """A format that is made here and holds numbers like those of another: of as many bits, as far as its name tells."""
    name = f"{of.scheme} {of.kind}".lower()
    if scheme := next((each for each in _OTHERS if each in name), None):
        return WeightFormat(scheme, group=64 if scheme in {"nf4", "fp4"} else 0)
    if re.search("float8|e4m3|e5m2", name):
        return WeightFormat("fp8")
    digits = re.search(r"\d+", name)
    bits = of.bits or (int(digits[0]) if digits else 4)
    group = of.group if of.group > 0 else 128
    return WeightFormat("compressed-tensors", bits=min(max(bits, min(_WHOLE)), max(_WHOLE)), group=group)


def conversion(to: WeightFormat, shape: Sequence[int] | None = None, numbers: str = "weight.dequantized()") -> str:
    """The call that converts, the memory of its result, and what it loses."""
    if format_problems(to) or to.permuted or to.scheme == "gguf":  # which are read, not made
        to = nearest(to)
    if shape is not None and to.scheme in GROUPED and to.group:
        to = replace(to, group=math.gcd(to.group, shape[-1]))
    bits = scheme_of(to).bits(to)
    memory = f"{bits:.3g} bits a number"
    if shape is not None:
        memory = f"{round(bits * math.prod(shape) / 8)} bytes for {' x '.join(map(str, shape))} numbers"
    lost = f"normal numbers lose {loss_of(to):.2g} of their norm"
    return f"lz.quantize_weight({numbers}, {str(to)!r}) quantises anew: {memory}, {lost}"


def instead(of: WeightFormat, shape: object = None) -> str:
    """What to do with a format that nothing here reads: the nearest one, and what it costs."""
    known = isinstance(shape, (tuple, list)) and len(shape) in (2, 3) and all(type(each) is int for each in shape)
    step = conversion(nearest(of), shape if known else None, "numbers")  # type: ignore[arg-type]  # integers
    return f"the library that defines it gives the numbers, and {step}"


FORMAT_FACTS = frozenset(
    {"weight_scheme", "weight_kind", "weight_bits", "weight_group", "weight_zeros", "weight_permuted", "weight_format"}
)
"""What a call says of its weight's format."""


def taken_instead(facts: Facts, refused: Mapping[str, Sequence[Reason]]) -> str:
    """The nearest format that a refused kernel takes, and what it costs; empty where none is refused for the format."""
    found: list[tuple[float, str]] = []
    for kernel_id, reasons in refused.items():
        if reasons and {each.fact for each in reasons} <= FORMAT_FACTS:
            to = _wanted(WeightFormat.of(str(facts["weight_format"])), reasons)
            if to is not None:
                shape = facts.size("out_features"), facts.size("in_features")
                found.append((loss_of(to), f"{kernel_id} takes {to}; {conversion(to, shape)}"))
    return min(found)[1] if found else ""


def _wanted(of: WeightFormat, reasons: Collection[Reason]) -> WeightFormat | None:
    """A format that a kernel takes which was refused for these reasons; None where they do not say one that is made."""
    wanted = {each.fact: str(each.wanted).split(" or ") for each in reasons}
    if "weight_format" in wanted:
        return WeightFormat.of(wanted["weight_format"][0])
    scheme = wanted.get("weight_scheme", [of.scheme])[0]
    bits = [int(each) for each in wanted.get("weight_bits", ()) if each.isdigit()]
    width = max([each for each in bits if each <= of.bits] or bits or [of.bits])
    group = 128 if "weight_group" in wanted else of.group
    for zeros in dict.fromkeys((wanted.get("weight_zeros", [of.zeros])[0], "stored", "none")):
        made = WeightFormat(scheme, of.kind, width, group, of.rows, zeros)
        if scheme in SCHEMES and not format_problems(made):
            return made
    return None

"""What a file's quantised weight is made of: a format by its text, the tensors of one weight, whole numbers by group.

    WeightFormat("gptq", bits=4, group=128, zeros="minus_one")     str() is "gptq:bits=4,group=128,zeros=minus_one"

The text is what calls, torch's operators and reports hold; :meth:`WeightFormat.of` reads it back. What the tensors of a
format look like and stand for is said by its scheme, in :mod:`layerzero.ops.quantize.schemes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.reasons import ReasonCode


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a file holds the numbers of a weight (N, K).

    Attributes:
        scheme: the way of laying it out: ``gptq``, ``awq``, ``marlin``, ``compressed-tensors``, ``fp8``, ``mxfp4``,
            ``mxfp8``, ``nvfp4``, ``nf4``, ``fp4`` or ``gguf``.
        kind: what else a scheme tells apart: GGUF's type, ``Q4_K``; of nvfp4 ``over`` where the second scale divides.
        bits: of a whole number; 0 where the scheme says it.
        group: numbers of a row (of nf4 and fp4, of the whole weight) that share a scale; 0 for a row.
        rows: rows that share a scale, too: 128 of fp8's blocks of 128 x 128.
        zeros: where the code that stands for 0 is: ``none`` (in the middle), ``stored``, ``minus_one`` (stored as one
            less, GPTQ's first version), ``signed`` (in int8, from the middle on).
        permuted: whether a group index says the group of each column (act-order).
        rotation: columns that were multiplied together by :func:`rotated` before they were quantised, as MR-GPTQ does
            (arXiv:2509.23202), of MX and NVFP4; 0 for none. The numbers of such a weight are those before.
    """

    scheme: str
    kind: str = ""
    bits: int = 0
    group: int = 0
    rows: int = 1
    zeros: str = "none"
    permuted: bool = False
    rotation: int = 0

    def __str__(self) -> str:
        return _text(self)

    @staticmethod
    def of(text: str) -> WeightFormat:
        """The format of a text such as ``gguf:Q4_K``. Raises: InvalidCallError for what is none."""
        if not isinstance(text, str):
            raise InvalidCallError("WeightFormat", [f"format: wanted a text such as 'gguf:Q4_K', got {told(text)}"])
        return _read(text)


@functools.lru_cache(512)
def _text(of: WeightFormat) -> str:
    options = [
        str(value) if each.name == "kind" else f"{each.name}={value}"
        for each in fields(of)[1:]
        if (value := getattr(of, each.name)) != each.default
    ]
    return ":".join([of.scheme, ",".join(options)]) if options else of.scheme


@functools.lru_cache(512)
def _read(text: str) -> WeightFormat:
    scheme, _, rest = text.partition(":")
    types: dict[str, type] = {"kind": str, "bits": int, "group": int, "rows": int, "zeros": str, "permuted": bool}
    types["rotation"] = int
    found: dict[str, object] = {}
    for option in filter(None, rest.split(",")):
        name, known, value = option.partition("=")
        if not known:
            name, value = "kind", option
        kind = types.get(name, type(None))
        if not {str: True, int: value.isdigit(), bool: value in ("True", "False")}.get(kind, False):
            wanted = ", ".join(f"{each}={known.__name__}" for each, known in types.items())
            raise InvalidCallError("WeightFormat", [f"format: wanted {wanted}, got {option!r} in {text!r}"])
        found[name] = value == "True" if kind is bool else kind(value)
    return WeightFormat(scheme, **found)  # type: ignore[arg-type]  # of the types that the fields have


class Fields(NamedTuple):
    """The tensors of one weight; those that its format has not are None.

    Attributes:
        data: the numbers, packed as the scheme says.
        scale: what they are multiples of.
        zero: the codes that stand for 0.
        group_index: (K,) int32, the group of each column.
        second_scale: what the scales are multiples of.
    """

    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    group_index: Tensor | None = None
    second_scale: Tensor | None = None

    def of_expert(self, number: int) -> Fields:
        """Those of one weight of a stack, as views."""
        return Fields(*[None if each is None else each[number] for each in self])  # type: ignore[arg-type]  # data is there


ARGUMENTS = dict(
    zip(Fields._fields, ("weight", "weight_scale", "weight_zero", "group_index", "second_scale"), strict=True)
)
"""By the name of a field, the argument of a call that it is."""


def arguments_of(weight: str) -> Mapping[str, str]:
    """The arguments that belong to one that is a weight, by field, and its ``format`` and ``packed``.

    Those of ``gate_up_weight`` are ``gate_up_scale``, ``gate_up_zero``, ..., ``gate_up_format``, ``packed_gate_up``.
    """
    found = _NAMED.get(weight)
    return _named(weight) if found is None else found


def _named(weight: str) -> Mapping[str, str]:
    part = weight.removesuffix("weight")
    if not part:
        return {**ARGUMENTS, "format": "weight_format", "packed": "packed"}
    named = {name: f"{part}{name}" for name in (*Fields._fields, "format")}
    return {**named, "data": weight, "packed": f"packed_{part.removesuffix('_')}"}


_NAMED = {name: _named(name) for name in ("weight", "gate_up_weight", "down_weight")}


def fields_of(arguments: Mapping[str, Any], weight: str = "weight") -> Fields:
    """The tensors of the weight of a call, or of one of its weights."""
    names = ARGUMENTS if weight == "weight" else arguments_of(weight)
    return Fields(*[arguments.get(names[each]) for each in Fields._fields])  # type: ignore[arg-type]  # the first is there


@dataclass(frozen=True, slots=True)
class Codes:
    """Whole numbers with a scale for each group: what every kernel for integer codes makes its own form of.

    The number in row n and column k is ``(numbers[n, k] - zero[n, g]) * scale[n, g]``, where g is ``group_index[k]``,
    or ``k // group`` without one.

    Attributes:
        numbers: (N, K) uint8, from 0 below ``2**bits``.
        scale: (N, G), floating.
        zero: (N, G) uint8; None where it is ``2**(bits - 1)`` everywhere.
        bits: of a number.
        group: columns that share a scale; K where a row has one.
        group_index: (K,) the group of each column; None where columns lie in order.
    """

    numbers: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int
    group_index: Tensor | None = None

    @property
    def middle(self) -> int:
        """The code of 0 where there are no zero points."""
        return int(1 << (self.bits - 1))

    @property
    def zero_points(self) -> Tensor | None:
        """The zero points where one of them is not in the middle, else None. Reads values: waits for the device."""
        return None if self.zero is None or not bool((self.zero != self.middle).any()) else self.zero

    @property
    def groups(self) -> Tensor:
        """The group of each column. Shapes: → (K,)."""
        if self.group_index is not None:
            return self.group_index
        return torch.arange(self.numbers.shape[1], device=self.numbers.device) // self.group

    def offset(self, dtype: torch.dtype) -> Tensor:
        """What the middle code stands for: the zero point of kernels that have it as a number. Shapes: → (N, G)."""
        zero = torch.zeros_like(self.scale) if self.zero is None else self.middle - self.zero.to(dtype)
        return zero.to(dtype) * self.scale.to(dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, in this dtype all along. Shapes: → (N, K)."""
        scale, zero = self.scale.to(dtype), self.middle if self.zero is None else self.zero.to(dtype)
        if self.group_index is not None:
            zero = zero if isinstance(zero, int) else zero.index_select(1, self.group_index)  # -1 is no group
            return (self.numbers.to(dtype) - zero) * scale.index_select(1, self.group_index)
        rows, groups = scale.shape
        numbers = self.numbers.to(dtype).view(rows, groups, self.group)
        return ((numbers - (zero if isinstance(zero, int) else zero.unsqueeze(-1))) * scale.unsqueeze(-1)).flatten(1)


def rotated(numbers: Tensor, size: int, matrix: Tensor | None = None) -> Tensor:
    """Each ``size`` columns times Hadamard's matrix (Sylvester's order) over the root of its size.

    Twice gives the numbers again, and two factors of a product may both be rotated. Without a matrix a row has the same
    bits in every batch.

    Dtype: computes in float32, or in the numbers' own dtype where that is wider, and returns the numbers' dtype.
    Args:
        size: a power of two that divides the columns; 0 for the numbers as they are.
        matrix: this matrix in float32, for one product in place of a step for each bit of the size.
    """
    if not size:
        return numbers
    wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    if matrix is not None:
        parts = wide.reshape(wide.numel() // size, size)
        return (parts @ matrix.to(wide.dtype)).view(wide.shape).to(numbers.dtype)
    found = wide
    for half in (1 << bit for bit in range(size.bit_length() - 1)):
        one, other = found.reshape(wide.numel() // (2 * half), 2, half).unbind(1)
        found = torch.stack((one + other, one - other), 1)
    return found.reshape(wide.shape).mul(size**-0.5).to(numbers.dtype)


def rotation_of(rotation: int | Tensor) -> int:
    """The size of a Hadamard matrix, or of none.

    Raises: InvalidCallError (QUANT_FORMAT_UNSUPPORTED) for another matrix: its numbers would be others in silence.
    """
    if not isinstance(rotation, Tensor):
        return rotation
    size = rotation.shape[-1] if rotation.ndim else 0
    given = rotation.detach().float()
    eye = torch.eye(size, dtype=given.dtype, device=given.device)
    if given.shape == eye.shape and torch.equal(given, eye):
        return 0
    fits = given.shape == eye.shape and size.bit_count() == 1
    if fits and torch.allclose(given, rotated(eye, size), rtol=2**-8, atol=0.0):  # of bfloat16, too
        return size
    wanted = "Hadamard's matrix in Sylvester's order over the root of its size, or the identity"
    problem = f"rotation: wanted {wanted}, got another matrix {tuple(rotation.shape)}"
    raise InvalidCallError("QuantizedWeight", [problem], ReasonCode.QUANT_FORMAT_UNSUPPORTED)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The codes of a stream of bits, the lowest first. Shapes: words (*, W) → (*, count). Dtype: → uint8."""
    data = _as(words, torch.uint8)
    if bits == 8:
        return data[..., :count]
    if bits == 4:
        return torch.stack((data & 15, data >> 4), -1).flatten(-2)[..., :count]
    data = functional.pad(data, (0, -data.shape[-1] % bits))
    groups = data.view(*data.shape[:-1], data.shape[-1] // bits, bits).to(torch.int16)  # of 8 codes each
    found = []
    for start in range(0, 8 * bits, bits):
        byte, shift = divmod(start, 8)
        code = groups[..., byte] >> shift
        if shift + bits > 8:
            code = code | groups[..., byte + 1] << (8 - shift)
        found.append((code & ((1 << bits) - 1)).to(torch.uint8))
    return torch.stack(found, -1).flatten(-2)[..., :count]


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes as a stream of bits in int32, the lowest first. Shapes: (*, count) → (*, ceil(count * bits / 32))."""
    count = codes.shape[-1]
    codes = functional.pad(codes, (0, -count % 32))
    if bits == 4:
        codes = in_bytes(codes)
    elif bits != 8:
        eights = codes.view(*codes.shape[:-1], codes.shape[-1] // 8, 8).to(torch.int64)
        joined = sum(eights[..., place] << place * bits for place in range(8))
        assert isinstance(joined, Tensor)
        codes = torch.stack([(joined >> 8 * byte & 255).to(torch.uint8) for byte in range(bits)], -1).flatten(-2)
    words = -(-count * bits // 32)
    return _as(codes[..., : 4 * words], torch.int32)


def in_bytes(codes: Tensor) -> Tensor:
    """Codes of four bits, two in a byte, the first lower. Shapes: (*, 2 n) → (*, n)."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes of rows as numbers of another size; a copy where axes of one element have strides of their own."""
    dense = [math.prod(tensor.shape[axis:]) for axis in range(1, tensor.ndim + 1)]
    if list(tensor.stride()) != dense:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(dtype)

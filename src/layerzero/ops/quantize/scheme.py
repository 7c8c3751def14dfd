"""What every scheme says of its formats: shapes, dtypes, what the tensors stand for, where they can be cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from layerzero.core.dtypes import names_of
from layerzero.core.errors import InvalidCallError
from layerzero.ops.draw import Draw
from layerzero.ops.quantize.weight_format import Fields, WeightFormat

Wanted = Mapping[str, tuple[tuple[int, ...], frozenset[torch.dtype]]]
"""By the field's name, its shape and the dtypes that it may have."""


class Scheme:
    """One way of laying out a weight.

    Attributes:
        operation: the last word of the operation that multiplies with it.
        example: a format of it, as text.
        positive: whether no scale may be 0: of formats that hold blocks of zeros they may.
        scale_dtype: that of the scales of its examples, where several are allowed.
    """

    operation = ""
    example = ""
    positive = True
    scale_dtype = torch.float32

    def problems(self, of: WeightFormat) -> list[str]:
        """What is wrong with the options of a format."""
        raise NotImplementedError

    def size_problems(self, of: WeightFormat, outputs: int, inputs: int) -> list[str]:
        """Why no weight of this size has this format."""
        raise NotImplementedError

    def value_problems(self, of: WeightFormat, given: Fields) -> list[str]:
        """What is wrong with values, apart from scales that are not finite; the shapes are right."""
        return []

    def bits(self, of: WeightFormat, scale: str = "float16") -> float:
        """Of a number, with its part of the scales and zero points; ``scale`` is their dtype where several may be."""
        raise NotImplementedError

    def outputs(self, of: WeightFormat, data: tuple[int, ...], inputs: int) -> int:
        """The rows N of a weight whose data has this shape; of what fits no shape any number."""
        return data[0] if data else 0

    def wanted(self, of: WeightFormat, outputs: int, inputs: int) -> Wanted:
        """The shapes and dtypes of the tensors of a weight (N, K)."""
        raise NotImplementedError

    def step(self, of: WeightFormat, inputs: int) -> int:
        """A multiple of so many rows can be cut off."""
        return 1

    def cut(self, of: WeightFormat, given: Fields, inputs: int, start: int, stop: int) -> Fields:
        """The tensors of some rows, from a multiple of :meth:`step` on; views."""
        return given._replace(
            data=given.data[start:stop], scale=None if given.scale is None else given.scale[start:stop]
        )

    def joined(self, of: WeightFormat, parts: Sequence[Fields], inputs: int) -> Fields | None:
        """The tensors of the rows of the first, then those of the second, and so on; None where they share too little.

        A tensor that has no rows (a second scale, an act-order index) must be the same in all of them, and each but
        the last must end at a multiple of :meth:`step`.
        """
        counts = [self.outputs(of, tuple(each.data.shape), inputs) for each in parts]
        if any(count % self.step(of, inputs) for count in counts[:-1]):
            return None
        one, two = (self.wanted(of, times * counts[0], inputs) for times in (1, 2))
        found: list[Tensor | None] = []
        for name, column in zip(Fields._fields, zip(*parts, strict=True), strict=True):
            first, there = column[0], [each for each in column if each is not None]
            if len(there) not in {0, len(column)} or len({(each.dtype, each.device) for each in there}) > 1:
                return None
            sizes = zip(one[name][0], two[name][0], strict=True) if there else ()
            axis = next((axis for axis, (small, large) in enumerate(sizes) if small != large), None)
            if axis is not None:
                found.append(torch.cat(there, axis))
            elif all(each is first or torch.equal(each, there[0]) for each in there):
                found.append(first)
            else:
                return None
        return Fields(*found)  # type: ignore[arg-type]  # the data of each is there

    def dequantized(self, of: WeightFormat, given: Fields, inputs: int, dtype: torch.dtype) -> Tensor:
        """The numbers (N, K), in this dtype all along."""
        raise NotImplementedError

    def own_dtype(self, given: Fields) -> torch.dtype:
        """The dtype of the numbers where nothing else is asked for: what the library that defines it gives."""
        return torch.float32

    def quantized(self, of: WeightFormat, numbers: Tensor) -> Fields:
        """The tensors of a weight that is near these numbers (N, K), which are floating and finite.

        Raises: InvalidCallError where this format is read and not made.
        """
        step = "the library that defines it makes such weights"
        raise InvalidCallError("quantize_weight", [f"format: wanted one that is made here, got {of}; {step}"])

    def random(self, of: WeightFormat, outputs: int, inputs: int, generator: torch.Generator | None) -> Fields:
        """A weight whose products are of order 1, on the CPU."""
        return self.quantized(of, torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs))

    def drawn(self, draw: Draw) -> tuple[WeightFormat, int, int]:
        """A format of this scheme, and sizes N and K that it has."""
        raise NotImplementedError

    def field_problems(self, of: WeightFormat, given: Fields, inputs: int) -> list[str]:
        """What is wrong with the tensors of a weight with so many columns, by the names of fields; no value is read."""
        outputs = self.outputs(of, tuple(given.data.shape), inputs)
        problems = self.size_problems(of, outputs, inputs)
        if problems:
            return problems
        wanted = self.wanted(of, outputs, inputs)
        for name, tensor in given._asdict().items():
            if name not in wanted:
                if tensor is not None:
                    problems.append(f"{name}: wanted None with {of}, which has none, got {_told(tensor)}")
                continue
            shape, dtypes = wanted[name]
            if not isinstance(tensor, Tensor):
                problems.append(f"{name}: wanted a tensor {shape} with {of}, got {type(tensor).__name__}")
            elif tuple(tensor.shape) not in _alike(shape) or tensor.dtype not in dtypes:
                wish = f"{names_of(dtypes)} {shape} for {outputs} x {inputs} numbers of {of}"
                problems.append(f"{name}: wanted {wish}, got {_told(tensor)}")
        return problems

    def problems_of_values(self, of: WeightFormat, given: Fields) -> list[str]:
        """What is wrong with the values of a weight's tensors or of a stack's, whose shapes are right."""
        if given.data.is_meta:
            return []
        problems = []
        for name in ("scale", "second_scale"):
            tensor: Tensor | None = getattr(given, name)
            if tensor is None:
                continue
            numbers = (tensor.view(torch.float8_e8m0fnu) if tensor.dtype is torch.uint8 else tensor).to(torch.float32)
            nonzero = self.positive or name == "second_scale"
            wrong = ~numbers.isfinite() | (numbers == 0.0) if nonzero else ~numbers.isfinite()
            if bool(wrong.any()):
                place, wanted = tuple(int(each) for each in wrong.nonzero()[0]), "finite numbers"
                wanted += " other than 0" if nonzero else ""
                problems.append(f"{name}: wanted {wanted} with {of}, got {numbers[place]:g} at {place}")
        return problems + self.value_problems(of, given)


def strange_options(of: WeightFormat, *known: str) -> list[str]:
    """The options of a format that its scheme has not."""
    return [
        f"{each.name}: wanted nothing with {of.scheme}, which has none, got {value!r} in {of}"
        for each in fields(of)[1:]
        if each.name not in known and (value := getattr(of, each.name)) != each.default
    ]


def _alike(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """One number is one number, with an axis or without."""
    return (shape, (1,)) if shape == () else (shape,)


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"

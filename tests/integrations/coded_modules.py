"""Modules whose weights are codes."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import layerzero as lz
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight_format import Codes

OUTPUTS, INPUTS, GROUP = 64, 128, 32


class OfCodes(Tensor):
    """A weight as a library that quantises has it: parts in a class of its own, which computes its product itself."""

    PARTS: ClassVar[tuple[str, ...]] = ("codes",)

    @staticmethod
    def __new__(cls, codes: Tensor, *others: Tensor) -> Self:
        dtype = others[0].dtype if others else torch.float32
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)  # type: ignore[attr-defined]

    def __init__(self, *parts: Tensor) -> None:
        vars(self).update(zip(self.PARTS, parts, strict=True))

    def numbers(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            rows, weight, *bias = args
            return functional.linear(rows, weight.numbers().to(rows.dtype), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(*(getattr(args[0], name) for name in cls.PARTS))
        raise NotImplementedError(f"{function} of a quantised weight")


def weight(text: str) -> lz.QuantizedWeight:
    """A weight of a format whose products are of order 1."""
    torch.manual_seed(0)
    numbers = torch.randn(OUTPUTS, INPUTS) / INPUTS**0.5
    made = lz.quantize_weight(numbers.to(torch.bfloat16), "int4", group_size=GROUP)
    if text.startswith("compressed-tensors"):
        return made
    codes = made.codes
    zero = torch.randint(6, 11, codes.scale.shape, dtype=torch.uint8)
    of = lz.WeightFormat.of(text)
    index = (torch.randperm(INPUTS) // GROUP).to(torch.int32) if of.permuted else None
    codes = Codes(codes.numbers, codes.scale.to(torch.float16), None if of.zeros == "none" else zero, 4, GROUP, index)
    return lz.QuantizedWeight(of, (OUTPUTS, INPUTS), *scheme_of(of).encoded(of, codes))


class Product(nn.Module):
    """As a library keeps a weight: its tensors are buffers, and each call dequantises."""

    def __init__(self, of: lz.QuantizedWeight, dtype: torch.dtype, **names: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.of = of.shape[1], of.shape[0], of
        for name, each in names.items():
            self.register_buffer(name, each)
        self.register_buffer("bias", torch.randn(OUTPUTS).to(dtype))
        self.times = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.of.dequantized(input.dtype), self.bias) * self.times


def module(text: str, dtype: torch.dtype) -> Product:
    of = weight(text)
    data, scale, zero, index, _ = of.fields
    if of.format.scheme == "compressed-tensors":
        shape = torch.tensor(of.shape)
        return Product(of, dtype, weight_packed=data, weight_scale=scale, weight_shape=shape)
    if of.format.scheme == "marlin":
        return Product(of, dtype, B=data, s=scale)
    index = torch.arange(INPUTS, dtype=torch.int32) // GROUP if index is None else index
    return Product(of, dtype, qweight=data, qzeros=zero, scales=scale, g_idx=index)


def off(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def numbers() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(OUTPUTS, 256) / 16


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Blocks(nn.Module):
    """Two products, the second of which sees one number that is far larger than the others."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(functional.silu(self.up(x)) * self.scale)
        return made


def taken(report: Any) -> dict[str, str]:
    return {each.path: each.calls for each in report.replaced if each.kind == "int8"}

"""A module that may be replaced: how, what for, and whether both give the same on random input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.dtypes import dtype_name
from layerzero.integrations.optimize.swapping import Forward, State, Swap, stock_forward

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-6,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""Largest difference from the original, in units of the original's largest value: a few roundings, of results and of
what lies between them. Norms of Transformers compute in float32 whatever the input is, which bounds float64."""

STRUCTURE = 1e-4
"""The same where float32 copies are compared to learn a formula: another formula is off by far more."""


@dataclass
class Candidate:
    """What would be put in a module's place.

    Attributes:
        kind: what such modules are, for people: those of one kind are timed together.
        calls: what the new forward calls.
        swap: the new forward.
        example: input to try it on.
        others: what it is called with beside that, by place.
        asked: the call that the new forward makes of the example, to ask which kernel gets it: a function's name, its
            arguments by place and by name.
        stock: whether the module is torch's own function already, so that only another kernel than torch's is a gain.
        error: how far it is from the original, in units of the largest value; set by :func:`compared`.
    """

    kind: str
    calls: str
    swap: Swap
    example: Tensor
    asked: tuple[str, tuple[Any, ...], Mapping[str, Any]]
    stock: bool = False
    error: float = 0.0
    covered: tuple[Module, ...] = field(default=())
    others: tuple[Tensor, ...] = ()

    @property
    def kernel(self) -> str | None:
        """The kernel that its example gets now."""
        name, given, named = self.asked
        with torch.no_grad():
            found = lz.which(name, *given, **named)["kernel_id"]
        return None if found is None else str(found)

    @property
    def is_torchs(self) -> bool:
        """Whether torch's own kernel would be chosen for what is torch's function already."""
        if not self.stock:
            return False
        name, given, named = self.asked
        with torch.no_grad():
            report = lz.explain(name, *given, **named)
        chosen = next((each for each in report.candidates if each.kernel.id == report.kernel_id), None)
        return chosen is None or (chosen.kernel.backend.name == "torch" and chosen.kernel.grad)


def candidate(module: Module, forward: Forward, state: State, **fields: Any) -> Candidate:
    """Make one for a module."""
    return Candidate(swap=Swap(module, forward, state), covered=tuple(each for _, each in state.covers), **fields)


def compared(found: Candidate) -> str:
    """Run the original and the new forward on the example; say what is wrong, empty where they agree."""
    module, dtype = found.swap.module, found.example.dtype
    with quiet(module):
        expected = stock_forward(module)(found.example.clone(), *found.others)
        found.swap.on()
        try:
            got = module.forward(found.example.clone(), *found.others)
        finally:
            found.swap.off()
    found.error = distance(got, expected)
    tolerance = TOLERANCE.get(dtype, 0.0)
    if got.dtype != expected.dtype or not found.error <= tolerance:
        wanted = f"at most {tolerance:.2g} of the largest value in {dtype_name(dtype)}"
        return f"{found.calls} by {found.kernel} was off by {found.error:.2g} on random input, wanted {wanted}"
    return ""


def distance(got: Any, expected: Any) -> float:
    """The largest difference of two results in units of the largest value; infinity for what cannot be compared."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor) or got.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    if expected.numel() == 0:
        return 0.0
    wide, other = expected.double(), got.double()
    largest = wide.abs().max().item()
    error = (other - wide).abs().max().item()
    return error / largest if largest > 0 else error


def random_rows(module: Module, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Six rows in three axes, their mean away from 0, made without a draw from the caller's random numbers."""
    generator = torch.Generator().manual_seed(len(list(module.parameters())) + size)
    return (torch.randn(2, 3, size, generator=generator, device="cpu", dtype=torch.float32) + 0.25).to(device, dtype)


@contextmanager
def quiet(module: Module) -> Iterator[None]:
    """Run a module as it is served: no gradients, no autocast, and whatever mode it is in, not training."""
    modes = [(each, each.training) for each in module.modules()]
    for each, _ in modes:
        each.training = False
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for each, training in modes:
            each.training = training

"""Random calls by the operation that they are routed to."""

from __future__ import annotations

import functools

import torch

from layerzero.core.operation import Operation
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS
from layerzero.testing.generate import RandomCall, random_call


def function_of(operation: Operation) -> str | None:
    """The public function that leads to an operation, None where there is none."""
    for name, function in FUNCTIONS.items():
        if any(each.name == operation.name for each in function.operations):
            return name
    return None


@functools.cache
def _numbers(function: str, dtype: torch.dtype, seed: int, draws: int) -> dict[str, list[int]]:
    """Numbers of random calls, by the operation that they are routed to."""
    found: dict[str, list[int]] = {}
    for number in range(draws):
        call = random_call(seed, number, function=function, dtype=dtype)
        routed = CALLS[function].function
        name = routed.route(routed.bind((), call.arguments), None).operation.name
        found.setdefault(name, []).append(number)
    return found


def drawn_numbers(operation: Operation, dtype: torch.dtype, seed: int, draws: int) -> list[int]:
    """Numbers of the random calls of an operation among so many draws of its function."""
    function = function_of(operation)
    return [] if function is None else _numbers(function, dtype, seed, draws).get(operation.name, [])


def draw(operation: Operation, dtype: torch.dtype, seed: int, number: int, device: str) -> RandomCall:
    """One of these calls."""
    return random_call(seed, number, function=function_of(operation), dtype=dtype, device=device)

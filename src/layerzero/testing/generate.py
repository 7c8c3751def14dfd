"""Random valid calls: (seed, number) always gives the same one, on every machine.

Sizes, arguments and memory layouts come from one stream of random numbers and data from another, so that the same call
can be drawn again with other data: it must then reuse the plan of the first.

Data is about unit normal, what tolerances are meant for. What no finite precision can answer is not drawn: rows of a
layer norm whose variance is almost zero, mask rows in which every score drowns in a huge finite number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.core.bundle import Bundle
from layerzero.core.dtypes import dtype_name
from layerzero.core.handle import CAPTURABLE, FOREIGN
from layerzero.core.operation import Case, Operation
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS as FUNCTIONS_BY_NAME
from layerzero.ops.calls import accepted, arguments_of, function_for
from layerzero.ops.draw import Draw, drawn_of_cases

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_WEIGHTS = (4, 3, 3, 1)


@dataclass(frozen=True, slots=True, repr=False)
class RandomCall:
    """One call of a public function.

    Attributes:
        function: its name, ``attention``.
        arguments: what the caller passes, by name; what is left out has its default.
        name: where it comes from, ``seed 3, call 17``.
    """

    function: str
    arguments: Mapping[str, Any]
    name: str = ""

    def __post_init__(self) -> None:
        """Put what an object of several arguments brings in its place, and give a call handles of its own tensors.

        A handle belongs to its very tensors, which may have been copied or moved since.
        """
        function = FUNCTIONS_BY_NAME[self.function]
        if any(isinstance(each, Bundle) for each in self.arguments.values()):
            defaults = {each.name: each.default for each in function.parameters}
            bound = function.bind((), self.arguments)
            whole = {name: each for name, each in bound.items() if name in self.arguments or each is not defaults[name]}
            object.__setattr__(self, "arguments", whole)
        own = {}
        for name in function.handles:
            param, handle = function.param(name), self.arguments.get(name)
            if param is None or param.make is None or handle is None:
                continue
            if param.kind_of(handle, self.arguments) == FOREIGN:
                own[name] = param.make(self.arguments, getattr(handle, "kind", "") == CAPTURABLE)
        if own:
            object.__setattr__(self, "arguments", {**self.arguments, **own})

    @property
    def text(self) -> str:
        """The call in one line: shapes, strides that are not contiguous, dtypes, and every other argument."""
        return f"{self.function}({', '.join(f'{name}={_shown(value)}' for name, value in self.arguments.items())})"

    def __repr__(self) -> str:
        return f"<{self.name or 'a call'}: {self.text}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002  # the protocol of IPython
        """Show the same in IPython and in hypothesis, which would print every element otherwise."""
        printer.text(repr(self))


def _shown(value: object) -> str:
    if isinstance(value, torch.Generator):
        return f"a generator of {value.device}, seed {value.initial_seed()}"
    if not isinstance(value, Tensor):
        return repr(value)
    strides = "" if value.is_contiguous() else f" strides {value.stride()}"
    offset = f" offset {value.storage_offset()}" if value.storage_offset() else ""
    return f"{dtype_name(value.dtype)}{tuple(value.shape)}{strides}{offset}"


FUNCTIONS = FUNCTIONS_BY_NAME
"""The public functions that calls are drawn of: all of them."""


def random_call(
    seed: int,
    number: int,
    *,
    function: str | None = None,
    dtype: torch.dtype | None = None,
    data: int = 0,
    device: torch.device | str = "cpu",
) -> RandomCall:
    """Draw call ``number`` of a seed.

    Args:
        function: draw a call of this one; otherwise each as often as its weight says.
        dtype: use this dtype instead of drawing one.
        data: another number gives the same call with other data.
        device: where the tensors lie; the values are the same everywhere.
    """
    draw = Draw(f"{seed}:{number}", data, device)
    names = tuple(FUNCTIONS_BY_NAME)
    drawn = draw.of(names, [FUNCTIONS_BY_NAME[name].weight for name in names])
    drawn_dtype = draw.of(DTYPES, _DTYPE_WEIGHTS)
    function, dtype = function or drawn, dtype or drawn_dtype
    chosen = FUNCTIONS_BY_NAME[function]
    arguments = chosen.draw(draw, dtype) if chosen.draw is not None else drawn_of_cases(chosen, draw, dtype)
    return RandomCall(function, arguments, f"seed {seed}, call {number}")


def case_call(
    operation: Operation,
    case: Case,
    dtype: torch.dtype,
    *,
    layout: str | None = None,
    device: torch.device | str = "cpu",
    promised: bool = False,
) -> RandomCall:
    """The call that one of an operation's own cases describes, with random data; with handles if ``promised``."""
    draw = Draw(f"{operation.name}:{case.name}", 0, device)
    function = function_for(operation)
    made = arguments_of(operation, case, dtype, device, layout=layout or None, generator=draw.data, promised=promised)
    return RandomCall(function.name, accepted(function, made), f"{operation.name} {case.name}")


def function_of(operation: Operation) -> str | None:
    """The public function that leads to an operation, None where there is none."""
    for name, function in FUNCTIONS_BY_NAME.items():
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

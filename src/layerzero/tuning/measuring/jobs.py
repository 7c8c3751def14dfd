"""What to measure, as data: an operation with sizes and a dtype, or a recorded call; made when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from layerzero.asking.answers import facts as facts_of
from layerzero.core.dtypes import dtype_named
from layerzero.core.facts import Facts, plain
from layerzero.core.operation import Case
from layerzero.core.recipe import CallRecipe
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, function_of
from layerzero.ops.calls import accepted, arguments_of, as_shapes, case_of_shapes, function_for, is_call_of
from layerzero.ops.recipes import arguments_of_recipe
from layerzero.testing.generate import RandomCall
from layerzero.tuning.proving.child import rebuilt

Shape = Sequence[int] | Sequence[Sequence[int]]
"""Of the first tensor, or of the first several."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call to measure kernels on.

    Attributes:
        operation: its name.
        case: sizes and parameters, where no recipe stands for them.
        dtype: by name.
        layout: of tensors that have one; the operation's first if None.
        recipe: a recorded call, in place of case, dtype and layout.
        count: how often a workload made it.
        for_graph: its handles are such as a captured graph can go on reading.
    """

    operation: str
    case: Case
    dtype: str
    layout: str | None = None
    recipe: CallRecipe | None = None
    count: int = 1
    for_graph: bool = False

    @property
    def name(self) -> str:
        """Operation, case and dtype in a line."""
        return f"{self.operation} {self.case.name} {self.dtype}"

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells two jobs apart, however they are called."""
        params = tuple(sorted(self.case.params.items(), key=str))
        sizes = tuple(sorted(self.case.sizes.items()))
        return self.operation, self.dtype, self.layout, sizes, str(params), self.recipe and str(self.recipe)

    def make(self, device: torch.device | str) -> RandomCall:
        """The call, with random data on a device."""
        if self.recipe is not None:
            call = rebuilt(self._recipe)
            return RandomCall(call.function, call.arguments, self.name)
        torch.manual_seed(0)
        return RandomCall(self._function, self._arguments(device), self.name)

    def facts(self, device: torch.device | str) -> Facts:
        """The facts of the call on a device, without making its data."""
        if self.recipe is not None:
            return _facts_of_recipe(self._recipe)
        return facts_of(self._function, device=str(device), **self._arguments("meta"))

    @property
    def _recipe(self) -> CallRecipe:
        assert self.recipe is not None
        if not self.for_graph:
            return self.recipe
        return self.recipe.for_graph(REGISTRY.operation(self.operation).schema.handles)

    @property
    def _function(self) -> str:
        return function_for(self.operation).name

    def _arguments(self, device: torch.device | str) -> dict[str, Any]:
        operation, dtype = REGISTRY.operation(self.operation), dtype_named(self.dtype)
        made = arguments_of(
            operation, self.case, dtype, device, layout=self.layout, promised=True, capturable=self.for_graph
        )
        return accepted(function_for(operation), made)


def _facts_of_recipe(recipe: CallRecipe) -> Facts:
    """The facts of a written call, whose tensors are not made: a cache that some machine had may not fit into this one.

    What has no address counts as aligned, so the alignment is what was written down.
    """
    function, arguments = arguments_of_recipe(recipe, REGISTRY.operation(recipe.operation), "meta")
    facts = facts_of(function.name, device=recipe.device, **arguments)
    return facts.with_tensors(
        {
            name: msgspec.structs.replace(each, alignment_bytes=recipe.tensors[name].alignment_bytes)
            for name, each in facts.tensors.items()
        }
    )


def jobs_of_cases(
    operations: Sequence[str], dtypes: Sequence[str], layout: str | None = None, params: Mapping[str, Any] | None = None
) -> Iterator[Job]:
    """The named cases of operations; with further parameters those that are calls with them."""
    for name in operations:
        operation = REGISTRY.operation(name)
        for named in operation.cases:
            case = named
            if params:
                case = replace(named, name=f"{named.name} {_text(params)}", params={**named.params, **params})
                if not is_call_of(operation, case, next(iter(operation.dtypes), torch.float32), layout):
                    continue
            names_dtype = any(isinstance(value, torch.dtype) for value in case.params.values())
            for dtype in dtypes:
                if names_dtype and not is_call_of(operation, case, dtype_named(dtype), layout):
                    continue  # float32 out of float64 is no product
                yield Job(name, case, dtype, layout)


def _text(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={plain(value)}" for name, value in params.items())


def operations_named(name: str) -> tuple[dict[str, object], list[str]]:
    """What a name implies about parameters, and the operations that it covers: a function, operation, alias or glob.

    Raises: KeyError naming the nearest operation.
    """
    if name in FUNCTIONS:
        return {}, [each.name for each in FUNCTIONS[name].operations]
    if name in OPERATION_ALIASES:
        names, implied = OPERATION_ALIASES[name]
        return dict(implied), list(names)
    return {}, sorted(each for each in REGISTRY.operations_named(name) if function_of(each) is not None)


def jobs_of_shape(
    names: Sequence[str], shape: Shape, dtype: str, params: Mapping[str, Any], layout: str | None
) -> list[Job]:
    """Jobs from the shapes of the first tensors, for each of these operations that has such calls.

    Raises: ValueError if none has.
    """
    shapes = as_shapes(shape)
    text = ":".join("x".join(map(str, each)) for each in shapes)
    found = []
    for name in names:
        case = case_of_shapes(REGISTRY.operation(name), shapes, layout, params)
        if case is not None:
            found.append(Job(name, case, dtype, layout))
    if not found:
        raise ValueError(
            f"shapes: {text} is no call of {' or '.join(names) or 'any operation'}{f' in {layout}' if layout else ''}: "
            f"wanted the shapes of {_shapes_wanted(names)}; calls that shapes do not say have cases only"
        )
    return found


def _shapes_wanted(names: Sequence[str]) -> str:
    """What shapes an operation is asked about by: its first tensors, each with its axes."""
    said = []
    for name in names:
        tensors = REGISTRY.operation(name).schema.required[:2]
        said.append(" and ".join(f"{each.name} ({', '.join(each.shape_vars)})" for each in tensors))
    return ", or ".join(dict.fromkeys(said)) or "its first tensors"

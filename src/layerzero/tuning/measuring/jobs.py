"""What to measure, as data: an operation with sizes and a dtype, or a recorded call; made when it is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.asking.answers import facts as facts_of
from layerzero.core.dtypes import dtype_named
from layerzero.core.facts import Facts
from layerzero.core.operation import Case, Operation
from layerzero.core.recipe import CallRecipe
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, function_of
from layerzero.ops.calls import case_tensors
from layerzero.ops.paged.step import StepMetadata
from layerzero.testing.generate import RandomCall
from layerzero.tuning.proving.child import rebuilt

Shape = Sequence[int] | Sequence[Sequence[int]]
"""Of the first tensor, or of query and key."""


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
    """

    operation: str
    case: Case
    dtype: str
    layout: str | None = None
    recipe: CallRecipe | None = None
    count: int = 1

    @property
    def name(self) -> str:
        """Operation, case and dtype in a line."""
        return f"{self.operation} {self.case.name} {self.dtype}"

    def make(self, device: torch.device | str) -> RandomCall:
        """The call, with random data on a device."""
        if self.recipe is not None:
            call = rebuilt(self.recipe)
            return RandomCall(call.function, call.arguments, self.name)
        torch.manual_seed(0)
        return RandomCall(self._function, self._arguments(device), self.name)

    def facts(self, device: torch.device | str) -> Facts:
        """The facts of the call on a device, without making its data."""
        if self.recipe is not None:
            call = rebuilt(self.recipe)
            return facts_of(call.function, **call.arguments)
        return facts_of(self._function, device=str(device), **self._arguments("meta"))

    @property
    def _function(self) -> str:
        function = function_of(self.operation)
        if function is None:
            raise KeyError(f"{self.operation} belongs to no public function, so nothing calls it")
        return function.name

    def _arguments(self, device: torch.device | str) -> dict[str, Any]:
        operation = REGISTRY.operation(self.operation)
        tensors = case_tensors(operation, self.case, dtype_named(self.dtype), device)
        arguments: dict[str, Any] = {**self.case.params, **tensors}
        if operation.layouts:
            layout = self.layout or operation.layouts[0]
            arguments["layout"] = layout
            if layout != operation.layouts[0]:
                moving = [schema.name for schema in operation.schema.inputs if schema.has_layout]
                arguments |= {name: tensors[name].transpose(1, 2).contiguous() for name in moving if name in tensors}
        if "normalized_shape" in operation.schema.chosen:
            arguments["normalized_shape"] = (self.case.sizes["hidden"],)
        if "max_context_len" in operation.schema.bounds:  # all layers of a step share what a kernel plans on the host
            longest = self.case.sizes["max_blocks"] * self.case.sizes["page_size"]
            tables, lens = tensors["block_tables"], tensors["context_lens"]
            arguments |= {"max_context_len": longest, "step": StepMetadata(tables, lens, max_context_len=longest)}
        return arguments


def jobs_of_cases(operations: Sequence[str], dtypes: Sequence[str], layout: str | None = None) -> Iterator[Job]:
    """The named cases of operations."""
    for name in operations:
        operation = REGISTRY.operation(name)
        for case in operation.cases:
            for dtype in dtypes:
                yield Job(name, case, dtype, layout)


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
    """Jobs from the shape of the query or input, or of query and key, for each of these operations that has such calls.

    Raises: ValueError if none has.
    """
    several = [tuple(each) for each in shape if isinstance(each, (tuple, list))]
    query, key = several if len(several) == 2 else [tuple(each for each in shape if isinstance(each, int))] * 2
    text = "x".join(map(str, query)) + ("" if query == key else ":" + "x".join(map(str, key)))
    found = []
    for name in names:
        operation = REGISTRY.operation(name)
        sizes = _sizes(operation, query, key, layout)
        if sizes is not None:
            case = {parameter: value for parameter, value in params.items() if parameter in operation.schema.chosen}
            found.append(Job(name, Case(text, sizes, case), dtype, layout))
    if not found:
        raise ValueError(
            f"shapes: {text} is no call of {' or '.join(names) or 'any operation'}: wanted BxSxHxD, or BxSxHxD:BxSxKxD "
            "for other keys than queries, or rows and hidden size of a norm; calls over pages have cases only"
        )
    return found


def _sizes(
    operation: Operation, query: tuple[int, ...], key: tuple[int, ...], layout: str | None
) -> dict[str, int] | None:
    """Axis sizes of a call with these shapes; None if the operation has no such calls."""
    axes = operation.schema.inputs[0].axes_in(layout, operation.schema.canonical)
    if operation.examples is not None:
        return None
    if axes[0] == "...":
        return {"rows": math.prod(query[:-1]), "hidden": query[-1]} if query else None
    if len(query) != 4 or len(key) != 4:
        return None
    of_key = operation.schema.inputs[1].axes_in(layout, operation.schema.canonical)
    sizes = dict(zip(of_key, key, strict=True)) | dict(zip(axes, query, strict=True))
    sizes["value_dim"] = sizes["head_dim"]
    grouped, single = sizes["heads"] != sizes["kv_heads"], sizes["seq_q"] == 1
    fits = grouped == bool(operation.sibling) and single == operation.name.endswith("decode")
    return sizes if fits and query[0] == key[0] and query[3] == key[3] else None

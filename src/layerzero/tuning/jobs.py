"""What to measure, as data: an operation with sizes and a dtype, or a recorded call; made when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.core.dtypes import dtype_named
from layerzero.core.facts import Facts
from layerzero.core.operation import Case
from layerzero.core.recipe import CallRecipe
from layerzero.core.step import StepMetadata
from layerzero.engine.answers import facts as facts_of
from layerzero.engine.registry import REGISTRY
from layerzero.engine.warmup import case_tensors
from layerzero.ops import function_of
from layerzero.testing.generate import RandomCall
from layerzero.tuning.child import rebuilt


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
        if "normalized_shape" in operation.schema.params:
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

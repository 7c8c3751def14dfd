"""The command that lets a kernel prove itself for the sizes of one call."""

from __future__ import annotations

import torch

from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import class_text, home_of
from layerzero.core.operation import Case
from layerzero.ops.calls import case_of_shapes, facts_of


def how_to_vet(kernel: Kernel, facts: Facts) -> str:
    """What to type, for a reason's hint. Calls whose class no shapes can say are vetted from a recorded workload."""
    dtype: object = facts["dtype"]
    shapes = _shapes(facts)
    words = ["layerzero vet", f"--kernel {kernel.id}", f"--operation {facts.operation.name}"]
    words += [f"--shapes {shapes}", f"--dtype {dtype_name(dtype)}"] if shapes else ["--manifest FILE"]  # type: ignore[arg-type]
    words += ["--device cpu"] if facts.device.platform == "cpu" else []
    home = home_of(kernel)
    if kernel.backend.origin != "entry_point" and not home.startswith("layerzero."):
        words.append(f"--module {home}")
    origin = "or lz.warmup with these shapes" if shapes else "with a workload that lz.record wrote"
    return f"Vet it for these sizes: `{' '.join(words)}`, {origin}"


def _shapes(facts: Facts) -> str:
    """The call's shapes as the command takes them; empty where they would make a call of another class."""
    wanted = class_text(facts)
    shapes = [facts.tensors[each.name].shape for each in facts.operation.schema.required]
    for count in (1, 2):
        try:
            case = case_of_shapes(facts.operation, shapes[:count], facts.layout)
            if case is not None and class_text(_facts_of(case, facts)) == wanted:
                return case.name
        except KeyError:  # no function calls the operation: nothing that can be typed does
            return ""
    return ""


def _facts_of(case: Case, facts: Facts) -> Facts:
    dtype = facts["dtype"]
    assert isinstance(dtype, torch.dtype)
    return facts_of(facts.operation, case, dtype, facts.device, facts.layout)

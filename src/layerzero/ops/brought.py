"""The cases of an operation as kernels take them that serve no call without an optional tensor, such as sinks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.core.reasons import Reason


def with_demanded(operation: Operation, case: Case, kernel: Kernel, reasons: Iterable[Reason]) -> Case | None:
    """The case with the optional tensors that a kernel accepts and refuses the case for lacking.

    None where it lacks none: the kernel refuses the case for something else, or takes it.
    """
    lacking = {reason.fact for reason in reasons if reason.got in ("none", None)}
    able = [each.name for each in operation.schema.optional if each.name in kernel.accepts]
    names = tuple(name for name in able if name in lacking and name not in case.given)
    return replace(case, given=(*case.given, *names)) if names else None

"""``python -m layerzero.tuning.proving.vet_child``: check classes of calls, where a crash hurts nobody.

A :class:`Job` in JSON on stdin. On stdout one JSON document a line: which class begins, what is about to run, what was
found. Importing torch takes seconds, so one process answers for as many classes as it survives.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.recipe import CallRecipe
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from layerzero.testing import brief
from layerzero.testing.sizes import Setting
from layerzero.testing.trial import lost_context
from layerzero.tuning.proving.child import rebuilt

UNKNOWN = "unknown"
"""The state of a class that could not be asked about."""

CONTEXT_LOST = 17
"""The exit code after a device error that stays."""


class Ask(msgspec.Struct, frozen=True):
    """One class: the kernel, a call of the class, and the size of every axis that the operation's cases name."""

    kernel: str
    call: CallRecipe
    sizes: dict[str, int]


class Job(msgspec.Struct, frozen=True):
    """Classes to check, by their number, and modules to import first because they register kernels."""

    asks: list[tuple[int, Ask]]
    modules: list[str]


def answer(ask: Ask, note: Callable[[str], None]) -> brief.Found:
    """Check one class."""
    try:
        kernel, operation = REGISTRY.kernel(ask.kernel), REGISTRY.operation(ask.call.operation)
    except KeyError as error:
        more = "register it through an entry point, or name the module that registers it"
        return brief.Found(UNKNOWN, f"{error.args[0]} in a child process: {more}")
    function = function_of(operation.name)
    if function is None:
        return brief.Found(UNKNOWN, f"{operation.name} belongs to no public function, so nothing can call it")
    dtype = dtype_named(ask.call.tensors[operation.schema.inputs[0].name].dtype)
    accepted = {parameter.name for parameter in function.parameters}
    case = brief.case_of(operation, ask.sizes, ask.call.params, accepted)
    setting = Setting(operation, dtype, ask.call.device, ask.call.layout or "")
    small = case is None or brief.fits(operation, case, ask.call.device)
    call = rebuilt(ask.call) if small else None
    return brief.look(kernel, operation, call, setting, case, note)


def main() -> None:
    """Do a job."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what libraries print, from Python or from C, is not an answer

    def write(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    for module in job.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            write(error=f"the module {module!r} does not import: {error}")
            return
    warnings.simplefilter("ignore", LayerZeroWarning)
    torch.set_num_threads(1)  # small tensors gain nothing from more
    for number, ask in job.asks:
        write(start=number)
        try:
            found = answer(ask, lambda text: write(at=text))
        except (LookupError, ValueError, ImportError) as error:  # the call cannot be made again
            found = brief.Found(UNKNOWN, str(error))
        lost = lost_context(Device.detect(ask.call.device))
        if lost:  # the parent hears of it as of any other end of a process
            sys.stderr.write(f"{lost}\n")
            os._exit(CONTEXT_LOST)
        write(found=number, state=found.state, detail=found.detail)


if __name__ == "__main__":
    main()

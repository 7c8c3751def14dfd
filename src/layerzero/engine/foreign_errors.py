"""Exceptions that come up through a kernel and are not its own: hooks of autograd and signal handlers raise them.

Activation checkpointing ends a recomputation by an exception out of a saved-tensor hook, a hook that offloads tensors
may run out of memory, and a program's signal handler may raise anywhere. Somebody further up waits for it, so it passes
through as it is: no kernel failed, and none is tried in its place.
"""

from __future__ import annotations

import signal
import sys
from types import CodeType
from typing import Any

import torch

_OF_TORCH = (("torch.utils.checkpoint", "_StopRecomputationError"), ("torch.utils.checkpoint", "CheckpointError"))
"""Classes that mean the same without a hook: where torch does not tell which hooks are set, they are looked up."""


def let_pass(error: BaseException) -> None:
    """Raise an exception again that a hook of autograd or a signal handler raised; return for every other one."""
    kinds = tuple(kind for kind in (_class(*each) for each in _OF_TORCH) if kind is not None)
    if isinstance(error, kinds) or not _codes(error).isdisjoint(_codes_of_hooks() | _codes_of_handlers()):
        raise error


def _class(module: str, name: str) -> type | None:
    found = getattr(sys.modules.get(module), name, None)  # what was not imported was not raised
    return found if isinstance(found, type) else None


def _codes(error: BaseException) -> set[CodeType]:
    """The code of every frame that the exception came through."""
    found, trace = set(), error.__traceback__
    while trace is not None:
        found.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return found


def _codes_of_hooks() -> set[CodeType]:
    """The hooks that are set around the call: those that a kernel sets are gone when its exception arrives here."""
    asked = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = asked(True) if asked is not None else None
    return set() if hooks is None else {code for hook in hooks if (code := _code(hook)) is not None}


def _codes_of_handlers() -> set[CodeType]:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return {code for handler in handlers if (code := _code(handler)) is not None}


def _code(function: Any) -> CodeType | None:
    """The code that runs when something is called; None for what is not Python."""
    function = getattr(function, "func", function)  # functools.partial
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)  # a bound method has that of its function
    return code if isinstance(code, CodeType) else None

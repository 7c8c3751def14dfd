"""What an import changed in its process: a snapshot before, one after, the difference in words.

A kernel that is imported may define its own module, its submodules and its own operators. Libraries that it names are
imported before: what they do is theirs. This finds what a kernel does openly; code that hides is not found, and runs
with the rights of the process.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_OWNERS = ("torch", "layerzero", "builtins")
"""Packages whose classes are compared attribute by attribute."""

_MOST_TOLD = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A process at one time.

    Attributes:
        state: settings by name.
        callables: functions and classes by where they are bound, of every module and of the classes of ``_OWNERS``.
        modules: every module by name.
        operators: what the dispatcher has for each operator of torch.
    """

    state: dict[str, Any]
    callables: dict[tuple[str, str], object]
    modules: dict[str, object]
    operators: dict[str, str]


def taken() -> Snapshot:
    """This process now; half a second."""
    modules = {name: each for name, each in list(sys.modules.items()) if isinstance(each, ModuleType)}
    operators = {name: torch._C._dispatch_dump(name) for name in torch._C._dispatch_get_all_op_names()}
    return Snapshot(_state(), dict(_callables(modules)), dict(modules), operators)


def changes(before: Snapshot, after: Snapshot, name: str, folder: Path) -> list[str]:
    """What the import of a module of this name from this folder changed, beyond itself; a line each."""
    found = [
        f"{what}: {_short(before.state[what])} became {_short(value)}"
        for what, value in after.state.items()
        if before.state[what] != value
    ]
    found += _changed_callables(before, after, name)
    found += _changed_modules(before, after, name, folder)
    found += _changed_operators(before, after, name)
    return found


def told(lines: list[str]) -> str:
    """The first few changes, and how many more there are."""
    more = f"; and {len(lines) - _MOST_TOLD} more" if len(lines) > _MOST_TOLD else ""
    return "; ".join(lines[:_MOST_TOLD]) + more


def import_libraries_of(folder: Path) -> None:
    """Import what the files of a kernel import by absolute names, so that its effects are not taken for the kernel's.

    What does not import is left to the kernel, which may do without.
    """
    for path in sorted(folder.rglob("*.py")):
        with suppress(SyntaxError, ValueError, OSError):
            source = path.read_bytes()
            if b"torch.compile" in source:  # it imports this, which replaces functions of torch's
                importlib.import_module("torch._dynamo")
            for each in ast.walk(ast.parse(source)):
                names = [part.name for part in each.names] if isinstance(each, ast.Import) else []
                if isinstance(each, ast.ImportFrom) and not each.level and each.module:
                    names = [each.module]
                for module in names:
                    with suppress(Exception):
                        importlib.import_module(module)


def _state() -> dict[str, Any]:
    cuda: Any = torch.backends.cuda
    accelerator: Any = torch.cuda
    backends = torch.backends
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": str(torch.get_default_device()),
        "torch's threads": torch.get_num_threads(),
        "torch's threads between operators": torch.get_num_interop_threads(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's gradients": torch.is_grad_enabled(),
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "torch's anomaly mode": torch.is_anomaly_enabled(),
        "torch's precision of float32 products": torch.get_float32_matmul_precision(),
        "torch's flushing of denormal numbers": float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) == 0.0,
        "torch's random numbers": torch.get_rng_state().tolist(),
        "torch's attention": (
            *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
            *(cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        ),
        "torch.backends.cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "torch.backends.mkldnn": backends.mkldnn.enabled,
        "a CUDA context": accelerator.is_initialized(),
        "os.environ": dict(os.environ),
        "the working folder": str(Path.cwd()),
        "sys.path": list(sys.path),
        "sys.meta_path": [repr(type(each)) + repr(getattr(each, "__name__", "")) for each in sys.meta_path],
        "sys.path_hooks": list(map(repr, sys.path_hooks)),
        "the recursion limit": sys.getrecursionlimit(),
        "tracing": (repr(sys.gettrace()), repr(sys.getprofile())),
        "the streams": (id(sys.stdout), id(sys.stderr), id(sys.stdin)),
        "signal handlers": [_handler(each) for each in signal.Signals],
        "threads": sorted(each.name for each in threading.enumerate()),
        "child processes": _children(),
        "sockets": _sockets(),
        "functions at exit": atexit._ncallbacks(),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "filters of warnings": list(map(repr, warnings.filters)),
        "handlers of the root logger": (
            logging.root.level,
            list(map(repr, logging.root.handlers)),
            logging.root.disabled,
        ),
        "LayerZero's settings": repr(
            getattr(sys.modules.get("layerzero.engine.config"), "CONFIGURATION", None)
            and sys.modules["layerzero.engine.config"].CONFIGURATION.policy
        ),
    }


def _handler(number: signal.Signals) -> str:
    try:
        return repr(signal.getsignal(number))
    except ValueError:
        return ""


def _children() -> str:
    with suppress(OSError):
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return ""


def _sockets() -> list[str]:
    found = []
    with suppress(OSError):
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found.append(str(each.readlink()))
    return sorted(each for each in found if each.startswith("socket:"))


def _callables(modules: dict[str, ModuleType]) -> Iterator[tuple[tuple[str, str], object]]:
    for module, each in modules.items():
        for attribute, value in list(vars(each).items()):
            if callable(value):
                yield (module, attribute), value
                if isinstance(value, type) and str(value.__module__).partition(".")[0] in _OWNERS:
                    for inner, function in list(vars(value).items()):
                        yield (f"{value.__module__}.{value.__qualname__}", inner), function
    yield ("builtins", "__build_class__"), builtins.__build_class__


_OFTEN = frozenset({"__doc__", "__abstractmethods__", "_abc_impl", "__annotations__", "__dict__", "__weakref__"})
"""Attributes of classes that Python itself writes."""


def _changed_callables(before: Snapshot, after: Snapshot, name: str) -> Iterator[str]:
    for (owner, attribute), value in after.callables.items():
        was = before.callables.get((owner, attribute))
        if attribute in _OFTEN or owner == name or owner.startswith(f"{name}."):
            continue
        if was is not None and was is not value:
            yield f"{owner}.{attribute} was replaced"
        elif was is None and _home(value) == name:
            yield f"{owner}.{attribute} was added"
    for owner, attribute in before.callables.keys() - after.callables.keys():
        if attribute not in _OFTEN and owner in after.modules:
            yield f"{owner}.{attribute} was removed"


def _home(value: object) -> str:
    """The first part of the module that defines a function or class."""
    return str(getattr(value, "__module__", "") or "").partition(".")[0]


def _changed_modules(before: Snapshot, after: Snapshot, name: str, folder: Path) -> Iterator[str]:
    for module, value in after.modules.items():
        was, inside = before.modules.get(module), module == name or module.startswith(f"{name}.")
        place = getattr(value, "__file__", None)
        if was is not None and was is not value:
            yield f"the module {module} was replaced"
        elif was is None and not inside and (place is None or Path(place).is_relative_to(folder)):
            yield f"the module name {module} was taken"
    yield from (f"the module {module} was removed" for module in before.modules.keys() - after.modules.keys())


def _changed_operators(before: Snapshot, after: Snapshot, name: str) -> Iterator[str]:
    for operator, dump in after.operators.items():
        was = before.operators.get(operator)
        if was != dump and not operator.startswith(f"{name}::"):
            yield f"torch.ops.{operator.replace('::', '.')} was {'defined' if was is None else 'changed'}"
    yield from (f"torch.ops {each} was removed" for each in before.operators.keys() - after.operators.keys())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}…{text[-28:]}"

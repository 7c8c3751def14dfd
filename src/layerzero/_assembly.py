"""Where the layers meet: what the engine gets from those above it. The one file that the import order does not bind."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger, MemoryLedger
from layerzero.core.operation import Function
from layerzero.core.plan import Plan

_DESCRIPTORS = "layerzero.asking.descriptors"


def ledger() -> Ledger:
    """The ledger of this process: files in the cache folder, or memory where ``LAYERZERO_CACHE_DIR`` is empty."""
    from layerzero.tuning.keeping.files import FileLedger, cache_folder
    from layerzero.tuning.keeping.store import StoreLedger

    folder = cache_folder()
    return StoreLedger(MemoryLedger() if folder is None else FileLedger(folder)).watched()


def descriptors_in_force() -> None:
    """Have the capability descriptors that are configured; they work on the registry, and lie above it."""
    from layerzero.engine.config import CONFIGURATION

    if _DESCRIPTORS in sys.modules:
        try:
            descriptors = sys.modules[_DESCRIPTORS].DESCRIPTORS  # asked at each miss: an import makes eight calls
        except AttributeError:  # another thread imports it now: this waits
            descriptors = import_module(_DESCRIPTORS).DESCRIPTORS
        descriptors.sync()
    elif CONFIGURATION.policy.descriptors:
        import_module(_DESCRIPTORS).DESCRIPTORS.sync()


def register_function(function: Function) -> None:
    """Give the operations of a plugin their public function."""
    from layerzero.engine import functions

    functions.register_function(function)


def brings_function(name: str) -> bool:
    """Whether a plugin that policy lets in brings a public function of this name; it is imported to know."""
    if find_spec(f"layerzero.{name}") is not None:  # a module of its own, which an import asks for
        return False
    registry = getattr(import_module("layerzero.engine.registry"), "REGISTRY", None)
    if registry is None or registry.plugins is None or not registry.plugins.unknown():
        return False
    registry.ready()
    from layerzero.ops import FUNCTIONS

    return name in FUNCTIONS


def importing(plugin: str, version: str) -> AbstractContextManager[str]:
    """Have a plugin's name on disk while it is imported; gives how it ended an earlier process, if it did."""
    from layerzero.tuning.keeping.files import cache_folder
    from layerzero.tuning.keeping.imports import importing as marked

    folder = cache_folder()
    return nullcontext("") if folder is None else marked(folder, plugin, version)


def vet(calls: Iterable[tuple[Kernel, Facts]]) -> None:
    """Let kernels prove themselves for the classes of calls, in a child process, as far as one can; for warmup."""
    from layerzero.tuning.proving.vetting import vet_calls

    vet_calls(calls, go_on=True)


def tune(calls: Iterable[Facts]) -> None:
    """Measure every legal kernel on calls; for warmup."""
    from layerzero.tuning.measuring.tune import tune_calls

    tune_calls(calls)


def vet_later(kernels: Iterable[Kernel], facts: Facts) -> None:
    """The same in the background, for a call that was just made."""
    from layerzero.tuning.proving.vet_later import BACKGROUND

    for kernel in kernels:
        BACKGROUND.add(kernel, facts)


def build_later(kernels: Iterable[Kernel], facts: Facts) -> None:
    """Build, in the background, what a call that was just made would choose if it were built."""
    from layerzero.serving.building import BUILDS

    BUILDS.add(kernels, facts)


def builds() -> list[str]:
    """What calls of this machine would choose and is not built, or failed to: a line each, with the next step."""
    from layerzero.serving.readiness import lines_of_builds

    return lines_of_builds()


def sample(plan: Plan, function: Function, rate: float) -> None:
    """Let a plan time a share of its calls."""
    from layerzero.tuning.measuring.online import attach

    attach(plan, function, rate)

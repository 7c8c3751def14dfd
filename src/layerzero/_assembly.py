"""What the engine gets from the layers above it. The import order does not bind this file; no other file imports it.

:func:`install` fills the ports of :mod:`layerzero.engine.services`; each imports its layer when it is first called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.core.recipe import Workspace

if TYPE_CHECKING:
    from layerzero.backends.hub.build import Build
    from layerzero.engine.call import Call
    from layerzero.engine.policy import Policy
    from layerzero.engine.services import Services

_DESCRIPTORS = "layerzero.inspection.descriptors"


def ledger() -> Ledger:
    """The ledger of this process: files in the cache folder, or memory where ``LAYERZERO_CACHE_DIR`` is empty."""
    from layerzero.tuning.storage.files import FileLedger, cache_folder
    from layerzero.tuning.storage.store import StoreLedger

    folder = cache_folder()
    return StoreLedger(Ledger() if folder is None else FileLedger(folder)).watched()


def update_descriptors() -> bool:
    """Load the capability descriptors that are configured; they work on the registry, and lie above it."""
    from layerzero.engine.config import CONFIGURATION

    if _DESCRIPTORS in sys.modules:
        try:
            descriptors = sys.modules[_DESCRIPTORS].DESCRIPTORS
        except AttributeError:  # another thread imports it now: this waits
            descriptors = import_module(_DESCRIPTORS).DESCRIPTORS
        return bool(descriptors.sync())
    return not CONFIGURATION.policy.descriptors or bool(import_module(_DESCRIPTORS).DESCRIPTORS.sync())


def call(name: str) -> Call:
    """The public function of a name; the first of a process imports what calls need."""
    from layerzero.engine.functions import CALLS

    return CALLS[name]


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
    from layerzero.tuning.storage.files import cache_folder
    from layerzero.tuning.storage.host_notes import importing as marked

    folder = cache_folder()
    return nullcontext("") if folder is None else marked(folder, plugin, version)


def try_hub(builds: Sequence[Build]) -> Mapping[str, str]:
    """Import builds of the hub in a child process; gives what is wrong with each, by its hash."""
    from layerzero.testing.hub_trial import tried

    return tried(builds)


def vet_later(kernels: Iterable[Kernel], facts: Facts) -> None:
    """Run kernels in a child process, in the background, for a call that was just made."""
    from layerzero.tuning.verification.vetting import BACKGROUND

    for kernel in kernels:
        BACKGROUND.add(kernel, facts)


def build_later(kernels: Iterable[Kernel], facts: Facts) -> None:
    """Build, in the background, what a call that was just made would choose if it were built."""
    from layerzero.serving.background_builds import BUILDS

    BUILDS.add(kernels, facts)


def builds() -> list[str]:
    """What calls of this machine would choose and is not built, or failed to: a line each, with the next step."""
    from layerzero.serving.readiness import lines_of_builds

    return lines_of_builds()


def sample(plan: Plan, function: Function, rate: float) -> None:
    """Let a plan time a share of its calls."""
    from layerzero.tuning.measurement.online import attach

    attach(plan, function, rate)


def workspace(kernel: Kernel, facts: Facts) -> Workspace | None:
    """What was measured of the memory that a kernel takes, as the ledger has it."""
    from layerzero.engine.dispatch import ENGINE

    return ENGINE.ledger.workspace(kernel, facts)


def isolate(kernel: Kernel, facts: Facts) -> Callable[..., Any]:
    """Load a kernel in a process of its own."""
    from layerzero.serving.isolation.kernels import IsolatedKernel

    return IsolatedKernel(kernel, facts)


def unable_to_isolate(kernel: Kernel, policy: Policy) -> tuple[str, object, object, str] | None:
    """What keeps a kernel's library from a process of its own here."""
    from layerzero.serving.isolation.kernels import unable

    return unable(kernel, policy)


def install(services: Services) -> None:
    """Fill the engine's ports: each has a function of its name here."""
    for port in services.__slots__:
        setattr(services, port, globals()[port])

"""What the engine gets from the layers above it. The import order does not bind this file; no other file imports it.

:func:`install` fills the ports of :mod:`layerzero.engine.services`; each imports its layer when it is first called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.operation import Function
from layerzero.core.plan import Plan

if TYPE_CHECKING:
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


def vet_later(kernels: Iterable[Kernel], facts: Facts) -> None:
    """Run kernels in a child process, in the background, for a call that was just made."""
    from layerzero.tuning.verification.vetting import BACKGROUND

    for kernel in kernels:
        BACKGROUND.add(kernel, facts)


def sample(plan: Plan, function: Function, rate: float) -> None:
    """Let a plan time a share of its calls."""
    from layerzero.tuning.measurement.online import attach

    attach(plan, function, rate)


_FORWARDED = {
    "build_later": "layerzero.serving.background_builds:BUILDS.add",
    "builds": "layerzero.serving.readiness:lines_of_builds",
    "call": "layerzero.engine.functions:CALLS.__getitem__",
    "isolate": "layerzero.serving.isolation.kernels:IsolatedKernel",
    "register_function": "layerzero.engine.functions:register_function",
    "try_hub": "layerzero.testing.hub_trial:tried",
    "unable_to_isolate": "layerzero.serving.isolation.kernels:unable",
    "workspace": "layerzero.engine.dispatch:ENGINE.ledger.workspace",
}
"""Ports that are functions of another module as they are, found when they are called."""


_module = functools.cache(import_module)  # in C: each miss asks some of the ports


def _forwarding(place: str) -> Callable[..., Any]:
    module, _, names = place.partition(":")
    found = attrgetter(names)

    def forwarded(*given: Any) -> Any:
        return found(_module(module))(*given)

    return forwarded


def install(services: Services) -> None:
    """Fill the engine's ports: each has a function of its name here, or a place in ``_FORWARDED``."""
    for port in services.__slots__:
        setattr(services, port, _forwarding(_FORWARDED[port]) if port in _FORWARDED else globals()[port])

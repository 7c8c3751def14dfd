"""Kernels and operations of other packages: which policy lets in, and what is known of those that end the process.

Importing a plugin runs its code, so the settings are read first: ``plugins``, ``enabled``, ``deny`` and ``allow`` say
whether it may be. Before an import its name is on disk. A plugin that ends the process is named by the next one and
left out there, until another version of it is installed or ``layerzero doctor`` has seen it survive in a child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import importlib.metadata
import sys
import time
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import NamedTuple, Protocol

from layerzero.core.errors import LayerZeroWarning, RegistrationError
from layerzero.core.kernel import Kernel, Trust
from layerzero.core.operation import Function, Operation
from layerzero.core.system import log, warn
from layerzero.engine import health
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.policy import Policy
from layerzero.engine.services import SERVICES

ENTRY_POINTS = "layerzero.backends"

SLOW_S = 2.0
"""A longer import is reported: the first call of a process waits for it."""


class Brought(NamedTuple):
    """What an entry point brings; at least one of them."""

    kernels: Sequence[Kernel] = ()
    operations: Sequence[Operation] = ()
    functions: Sequence[Function] = ()


class Registry(Protocol):
    """What plugins and hub kernels are put into."""

    def add_operations(self, operations: Sequence[Operation]) -> None: ...

    def holds(self, kernel: Kernel) -> bool: ...

    def add_all(self, kernels: Sequence[Kernel]) -> None: ...

    def drop_all(self, kernels: Sequence[Kernel]) -> None: ...


class Plugins:
    """The plugins of a registry: imported once each, and in force as long as ``plugins`` admits them.

    Attributes:
        errors: plugins that did not load, and why.
        left_out: plugins that were not imported, or are out of force, and whose word that is.
        functions: public functions that plugins bring and that are not registered yet, each with its plugin.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._kernels: dict[str, Sequence[Kernel]] = {}
        self._policy: Policy | None = None
        self._harmful: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.functions: list[tuple[str, Function]] = []

    def awaited(self) -> bool:
        """Whether the settings changed since plugins were last looked at."""
        return CONFIGURATION.policy is not self._policy

    def told(self) -> dict[str, str]:
        """Every plugin whose kernels are not here, and why."""
        return self.errors | {name: f"left out: {why}" for name, why in self.left_out.items()}

    def admitted(self) -> list[str]:
        """Names of the plugins that this process imports, or would: those that a child of it may."""
        unfit = self._harmful | self.errors
        return [each.name for each in installed() if each.name not in unfit and not refused(each, CONFIGURATION.policy)]

    def unknown(self) -> list[str]:
        """Plugins that are installed and whose kernels are unknown: not imported yet, left out, or broken."""
        return [each.name for each in installed() if each.name not in self._kernels]

    def leave_out(self, name: str, why: str) -> None:
        """Do not import a plugin in this process: a child has shown what it does."""
        self._harmful[name] = why

    def let_others_import(self) -> None:
        """Wait for other threads that import a plugin; without the registry's lock, which its code may ask for."""
        for each in installed():
            names = (each.module.partition(".")[0], each.module) if not refused(each, CONFIGURATION.policy) else ()
            for name in names:
                if name in sys.modules:
                    with contextlib.suppress(Exception):  # the import that counts raises it again
                        importlib.import_module(name)

    def load(self) -> None:
        """Import what policy admits and was not imported yet; take out what it admits no more."""
        policy = CONFIGURATION.policy
        left_out = {}
        for each in installed():
            why = self._harmful.get(each.name) or refused(each, policy)
            if why:
                left_out[each.name] = why
            elif each.name not in self._kernels and each.name not in self.errors:
                self._import(each)
            self._put(each.name, in_force=not unlisted(each, policy))
        self.left_out = {**left_out, **{name: why for name, why in self._harmful.items() if name not in left_out}}
        self._policy = policy

    def _put(self, name: str, *, in_force: bool) -> None:
        """Add the kernels of a plugin that was imported, or take them out, as far as that is still to be done."""
        kernels = self._kernels.get(name, ())
        there = [kernel for kernel in kernels if self._registry.holds(kernel)]
        if there and not in_force:
            self._registry.drop_all(there)
        elif kernels and not there and in_force:
            try:
                self._registry.add_all(kernels)
            except RegistrationError as error:
                del self._kernels[name]
                self.failed(name, error)

    def _import(self, plugin: EntryPoint) -> None:
        started = time.monotonic()
        try:
            with SERVICES.importing(plugin.name, version_of(plugin)) as before:
                if before:
                    self._harmful[plugin.name] = before
                    warn(f"the plugin {plugin.name!r} is left out: {before}", LayerZeroWarning, stacklevel=2)
                    return
                loaded = brought(plugin.load())
            self._registry.add_operations(loaded.operations)
            self.functions += [(plugin.name, function) for function in loaded.functions]
            self._kernels[plugin.name] = [_of_plugin(kernel, plugin) for kernel in loaded.kernels]
        except (Exception, SystemExit) as error:  # noqa: BLE001  # it may fail in any way; it must not take LayerZero along
            health.let_pass(error)
            self.failed(plugin.name, error, f" ({plugin.value})")
        took_s = time.monotonic() - started
        if took_s > SLOW_S:
            log.warning("the plugin %s took %.1f s to import; the first call waited for it", plugin.name, took_s)

    def failed(self, name: str, error: BaseException, where: str = "") -> None:
        """Say that a plugin, or a part of it, is not here."""
        self.errors[name] = f"{type(error).__name__}: {error}"
        warn(f"the plugin {name!r}{where} was not loaded: {error!r}", LayerZeroWarning, stacklevel=2)


@functools.cache
def installed() -> tuple[EntryPoint, ...]:
    """Every plugin that is installed, by name; none of them is imported."""
    return tuple(sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda each: each.name))


def version_of(plugin: EntryPoint) -> str:
    """What a record about a plugin holds for: its package's version, and where its code is found."""
    package = f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else "no package"
    return f"{package} {plugin.value}"


def refused(plugin: EntryPoint, policy: Policy) -> str:
    """Whose word it is that a plugin is not imported; empty if it may be.

    A plugin is known by its name and by its package's. A list in ``plugins`` stands above ``allow``, which names
    libraries and kernels: a plugin's are not known before it is imported.
    """
    if not policy.enabled:
        return "enabled: false"
    left_out, names = unlisted(plugin, policy), names_of(plugin)
    if left_out:
        return left_out
    for pattern in policy.deny:
        if any(fnmatch.fnmatchcase(name, pattern.removesuffix(".*")) for name in names):
            return f"deny: {pattern}"
    if policy["plugins"] == "all" and policy.allow:
        parts = {pattern.partition(".")[0] for pattern in policy.allow}
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in {*policy.allow, *parts}):
            return f"allow: {', '.join(policy.allow)}; plugins: [{plugin.name}] would import it"
    return ""


def unlisted(plugin: EntryPoint, policy: Policy) -> str:
    """What ``plugins`` says against a plugin; empty if nothing."""
    wanted = policy["plugins"]
    if wanted == "all" or (wanted != "none" and not names_of(plugin).isdisjoint(wanted)):
        return ""
    return f"plugins: {wanted if isinstance(wanted, str) else ', '.join(wanted)}"


def names_of(plugin: EntryPoint) -> set[str]:
    """What a plugin is called: by its entry point, and by its package."""
    return {plugin.name, *([plugin.dist.name] if plugin.dist else [])}


def brought(loaded: object) -> Brought:
    """What an entry point names: a module with KERNELS, OPERATIONS or FUNCTIONS, a sequence of Kernel, or a callable.

    A callable gives one of the others. Operations are registered before kernels, and functions last.
    """
    if isinstance(loaded, ModuleType):
        parts = [getattr(loaded, name, ()) for name in ("KERNELS", "OPERATIONS", "FUNCTIONS")]
    elif callable(loaded):
        return brought(loaded())
    else:
        parts = [loaded, (), ()]
    for part, kind in zip(parts, (Kernel, Operation, Function), strict=True):
        if not isinstance(part, (tuple, list)) or not all(isinstance(each, kind) for each in part):
            got = type(part).__name__ if not isinstance(part, (tuple, list)) else [type(each).__name__ for each in part]
            raise RegistrationError(f"wanted a sequence of {kind.__name__}, got {got}")
    if not any(parts):
        wanted = "a module with KERNELS, OPERATIONS or FUNCTIONS, or a sequence of Kernel"
        raise RegistrationError(
            f"wanted {wanted}, got {getattr(loaded, '__name__', type(loaded).__name__)}, which has none"
        )
    return Brought(*parts)


def _of_plugin(kernel: Kernel, plugin: EntryPoint) -> Kernel:
    package = plugin.dist.name if plugin.dist else ()
    backend = dataclasses.replace(
        kernel.backend, origin="entry_point", distribution=kernel.backend.distribution or package
    )
    return dataclasses.replace(kernel, backend=backend, trust=Trust.PLUGIN)

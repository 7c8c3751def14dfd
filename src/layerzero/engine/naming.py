"""Whether what a policy prefers, avoids, allows and denies is the name of anything: a misspelt denial denies nothing.

Settings that a program makes are looked at as they are made, without importing a plugin; those of a file and of the
environment at the first choice under them, when a program has registered its own kernels.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from layerzero.core.errors import LayerZeroWarning, PolicyError
from layerzero.core.kernel import REFERENCE_BACKEND, Kernel
from layerzero.engine.config import CONFIGURATION, VARIABLES
from layerzero.engine.of_functions import USER_BACKEND
from layerzero.engine.plugins import Plugins, installed, names_of
from layerzero.engine.policy import Policy
from layerzero.engine.settings import nearest

_KEYS = ("prefer_sources", "avoid_sources", "allow", "deny")
_ACTIONS = ("prefer", "avoid", "deny")
_MAX_CHECKED = 256


class _Registry(Protocol):
    plugins: Plugins | None

    def read_declarations(self) -> Mapping[str, Kernel]: ...


class Names:
    """The names that policies may use in this process."""

    def __init__(self, registry: _Registry) -> None:
        self._registry = registry
        self._checked: set[Policy] = set()

    def check_values(self, values: Mapping[str, Any], origin: str) -> None:
        """Look at settings as a program makes them.

        A name that only a plugin can have that was not imported yet is left to :meth:`check`.
        Raises: PolicyError naming the nearest.
        """
        named = [(key, pattern) for key in _KEYS for pattern in values.get(key, ())]
        for index, rule in enumerate(values.get("rules", ())):
            for key, said in rule.items():
                if key != "match":
                    patterns = [said] if isinstance(said, str) else said
                    named += [(f"rules[{index}].{key}", pattern) for pattern in patterns]
        plugins = self._registry.plugins
        if plugins is None or not plugins.unknown():
            for key, pattern in self._unknown(named):
                raise PolicyError(f"{origin}: {key}: {self._problem(pattern)}")

    def check(self, policy: Policy) -> None:
        """Look at every name that is in force, once for each policy.

        Raises: PolicyError naming the nearest. Where a plugin is left out, whose names nobody knows, it is a warning.
        """
        if policy in self._checked or not policy.enabled:
            return
        plugins = self._registry.plugins
        left_out = ", ".join(plugins.unknown()) if plugins is not None else ""
        for text in self.problems(policy):
            if not left_out:
                raise PolicyError(text)
            warnings.warn(f"{text} Plugins that are left out may have it: {left_out}", LayerZeroWarning, stacklevel=2)
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked.add(policy)

    def problems(self, policy: Policy) -> Iterator[str]:
        """Names in force that name nothing, and who said them."""
        named = [(key, pattern) for key in _KEYS for pattern in policy[key]]
        for index, rule in enumerate(policy.rules):
            named += [(f"rules[{index}].{key}", pattern) for key in _ACTIONS for pattern in getattr(rule, key)]
        for key, pattern in self._unknown(named):
            origin = CONFIGURATION.effective_with_origin()[key.partition("[")[0]][1]
            said = f"{origin}: {key}" if origin != "environment" else f"environment: {VARIABLES.get(key, key)}"
            yield f"{said}: {self._problem(pattern)}"

    def _unknown(self, named: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        names: set[str] | None = None
        for key, pattern in named:
            names = self._names() if names is None else names
            if pattern not in names and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                yield key, pattern

    def _names(self) -> set[str]:
        kernels = self._registry.read_declarations().values()
        names = {name for kernel in kernels for name in (kernel.id, *kernel.aliases, kernel.source)}
        plugins = {name for plugin in installed() for name in names_of(plugin)} if self._registry.plugins else set()
        sources = {kernel.source for kernel in kernels} | plugins | {USER_BACKEND.name, REFERENCE_BACKEND.name}
        return names | sources | {f"{each}." for each in sources}  # `user.*` may come later

    def _problem(self, pattern: str) -> str:
        names = sorted(name for name in self._names() if not name.endswith("."))
        close = nearest(pattern, names) or nearest(pattern.removesuffix(".*"), names)
        own = "what a program registers itself it registers first"
        return f"wanted a library, kernel or glob, got {pattern!r}, which names none here{close}; {own}"

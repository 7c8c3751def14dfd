"""Whether what settings name is the name of anything: a misspelt denial denies nothing, a misspelt lock stops calls.

Settings that a program makes are looked at as they are made, without importing a plugin; those of a file and of the
environment at the first choice under them, when a program has registered its own kernels.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from layerzero.core.errors import LayerZeroWarning, PolicyError, UnknownOperationError
from layerzero.core.facts import FACT_ALIASES
from layerzero.core.kernel import REFERENCE_BACKEND, Kernel
from layerzero.core.system import warn
from layerzero.engine.config import CONFIGURATION, SCOPES
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.plugins import Plugins, installed, names_of
from layerzero.engine.policy import Policy, is_above, names_kernel
from layerzero.engine.settings import nearest

MODEL_COMPILERS = ("onnxruntime", "openvino", "torch.inductor")
"""What compiles whole models, as settings call it; the first one has kernels as well."""

_KEYS = (*("prefer_sources", "avoid_sources", "allow", "deny"), *("isolate", "isolation.pythons", "backend_containers"))
_ACTIONS = ("prefer", "avoid", "deny")
_MAX_CHECKED = 256
_UNKNOWN = "unknown operation"


class _Registry(Protocol):
    plugins: Plugins | None

    @property
    def loaded(self) -> bool: ...

    def read_declarations(self) -> Mapping[str, Kernel]: ...

    def operations_named(self, pattern: str) -> list[str]: ...


class _Name(NamedTuple):
    """A name that a setting has.

    Attributes:
        key: the setting; ``place`` is what it says besides its key: the place in a list of rules, a lock's operation.
        said: the name itself.
        of: the operation that a lock binds to the kernel of that name, None elsewhere.
        operation: whether it is the name of an operation.
    """

    key: str
    place: str
    said: str
    of: str | None = None
    operation: bool = False


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
        plugins = self._registry.plugins
        left_out = plugins.unknown() if plugins is not None else []
        if left_out and not self._registry.loaded:
            return
        problems = [
            f"{origin}: {name.key}{name.place}: {problem}"
            for name, problem in self._wrong(_named(values))
            if name.of is not None or not left_out
        ]
        if problems:
            raise _error(problems)

    def check(self, policy: Policy) -> None:
        """Look at every name that is in force, once for each policy.

        Raises: PolicyError naming the nearest. Where a plugin is left out, whose names are unknown, it is a warning,
        but for a lock: what it binds to is not here, whatever it is.
        """
        if policy in self._checked or not policy.enabled:
            return
        plugins = self._registry.plugins
        left_out = ", ".join(plugins.unknown()) if plugins is not None else ""
        wrong = [(name, self._told(name, problem)) for name, problem in self._wrong(_in_force(policy))]
        more = f" Plugins that are left out may have it: {left_out}" if left_out else ""
        strict = [f"{text}{more}" for name, text in wrong if name.of is not None or not left_out]
        if strict:
            raise _error(strict)
        for _, text in wrong:
            warn(f"{text}{more}", LayerZeroWarning, stacklevel=2)
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked.add(policy)

    def problems(self, policy: Policy, file: str = "") -> Iterator[str]:
        """Names in force that name nothing, and what said them: ``file`` where that is known."""
        for name, problem in self._wrong(_in_force(policy)):
            yield f"{file}: {name.key}{name.place}: {problem}" if file else self._told(name, problem)

    def _told(self, name: _Name, problem: str) -> str:
        said = name.said if name.of is None else name.of
        return f"{CONFIGURATION.said_by(name.key, said, *SCOPES.layers())}{name.place}: {problem}"

    def _wrong(self, named: Iterable[_Name]) -> Iterator[tuple[_Name, str]]:
        """The names that name nothing, with what is wrong about each."""
        names: set[str] | None = None
        for name in named:
            if name.operation:
                problem = self._no_operation(name.said)
            elif name.of is not None:
                problem = self._no_lock(name.of, name.said)
            else:
                names = self._names() if names is None else names
                problem = "" if _any(names, name.said) else self._problem(name.said)
            if problem:
                yield name, problem

    def _no_operation(self, pattern: str) -> str:
        try:
            self._registry.operations_named(pattern)
        except UnknownOperationError as error:
            return str(error)
        return ""

    def _no_lock(self, operation: str, pattern: str) -> str:
        """What is wrong with a lock; empty if its operation has a kernel of that name, installed or not."""
        problem = self._no_operation(operation)
        if problem:
            return problem
        kernels, covered = self._registry.read_declarations().values(), set(self._registry.operations_named(operation))

        def is_covered(name: str) -> bool:
            return name in covered or is_above(operation, name)

        own = [kernel for kernel in kernels if any(map(is_covered, kernel.operations))]
        if any(names_kernel(pattern, kernel) for kernel in own):
            return ""
        others = sorted({each for kernel in kernels if names_kernel(pattern, kernel) for each in kernel.operations})
        more = f" and {len(others) - 2} others" if len(others) > 3 else ""
        got = f"serves {', '.join(others[: 2 if more else 3])}{more}" if others else "names none here"
        close = nearest(
            pattern, sorted({name for kernel in own for name in (kernel.id, *kernel.aliases, kernel.source)})
        )
        step = f"{close or ';'} `layerzero kernels {operation}` lists them"
        return f"wanted a kernel of {operation}, got {pattern!r}, which {got}{step}"

    def _names(self) -> set[str]:
        kernels = self._registry.read_declarations().values()
        names = {name for kernel in kernels for name in (kernel.id, *kernel.aliases, kernel.source)}
        plugins = {name for plugin in installed() for name in names_of(plugin)} if self._registry.plugins else set()
        sources = {kernel.source for kernel in kernels} | plugins | {USER_BACKEND.name, REFERENCE_BACKEND.name}
        sources |= set(MODEL_COMPILERS)
        return names | sources | {f"{each}." for each in sources}  # `user.*` may come later

    def _problem(self, pattern: str) -> str:
        names = sorted(name for name in self._names() if not name.endswith("."))
        close = nearest(pattern, names) or nearest(pattern.removesuffix(".*"), names)
        own = "what a program registers itself it registers first"
        return f"wanted a library, kernel or glob, got {pattern!r}, which names none here{close}; {own}"


def _error(problems: list[str]) -> PolicyError:
    """The error for what is wrong with settings: of its own kind where all that is wrong is an operation's name."""
    unknown = len(problems) == 1 and _UNKNOWN in problems[0]
    return UnknownOperationError(problems[0]) if unknown else PolicyError(*problems)


def _any(names: set[str], pattern: str) -> bool:
    return pattern in names or any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _named(values: Mapping[str, Any]) -> Iterator[_Name]:
    """The names in settings as a program or a file gives them, checked."""
    yield from (_Name(key, "", each) for key in _KEYS for each in values.get(key, ()))
    for operation, target in values.get("locks", {}).items():
        kernel = target if isinstance(target, str) else target["kernel"]
        yield _Name("locks", f": {operation}", kernel, of=operation)
    for index, rule in enumerate(values.get("rules", ())):
        for key, said in rule.items():
            if key == "match":
                of = [each for fact, each in said.items() if FACT_ALIASES.get(fact, fact) == "operation"]
                yield from (_Name("rules", f"[{index}]", str(each), operation=True) for each in of)
            else:
                patterns = [said] if isinstance(said, str) else said
                yield from (_Name("rules", f"[{index}].{key}", each) for each in patterns)


def _in_force(policy: Policy) -> Iterator[_Name]:
    """The names in a policy."""
    said = ((key, each) for key in _KEYS for each in policy[key])
    yield from (_Name(key, "", each if isinstance(each, str) else each[0]) for key, each in said)  # or name and value
    yield from (_Name("locks", f": {each.operation}", each.kernel, of=each.operation) for each in policy.locks)
    for index, rule in enumerate(policy.rules):
        yield _Name("rules", f"[{index}]", rule.operation, operation=True)
        for key in _ACTIONS:
            yield from (_Name("rules", f"[{index}].{key}", each) for each in getattr(rule, key))

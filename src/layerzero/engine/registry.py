"""Operations and their kernels: built in, from plugins, and registered by decorator. Operation first."""

from __future__ import annotations

import copyreg
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from layerzero import backends
from layerzero.core.errors import RegistrationError, UnknownOperationError
from layerzero.core.facts import Facts
from layerzero.core.graph_capture import held_off
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.operation import Operation, OpKind
from layerzero.core.system import forking
from layerzero.engine import function_kernels as fitting
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.function_kernels import reference_kernel
from layerzero.engine.hub import Hub
from layerzero.engine.plugins import Plugins
from layerzero.engine.policy import Lock, Policy, meant, names_kernel
from layerzero.engine.services import SERVICES
from layerzero.engine.setting_names import Names
from layerzero.engine.settings import nearest
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, OPERATIONS, PLAIN_FUNCTIONS, PLAIN_OPERATIONS, current_name


class _Known(NamedTuple):
    """What is registered; replaced as a whole, so that readers without a lock see no half of it."""

    operations: dict[str, Operation]
    kernels: dict[str, tuple[Kernel, ...]]
    by_id: dict[str, Kernel]

    def plus(self, kernels: Sequence[Kernel]) -> _Known:
        """The same with further kernels: one copy for all of them, since each holds all that was there."""
        rows: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            for name in kernel.operations:
                rows.setdefault(name, []).append(kernel)
        more = {name: (*self.kernels[name], *row) for name, row in rows.items()}
        return self._replace(kernels=self.kernels | more, by_id=self.by_id | {each.id: each for each in kernels})

    def without(self, kernel: Kernel) -> _Known:
        rows = {name: tuple(each for each in self.kernels[name] if each is not kernel) for name in kernel.operations}
        by_id = {kernel_id: each for kernel_id, each in self.by_id.items() if each is not kernel}
        return self._replace(kernels=self.kernels | rows, by_id=by_id)

    def revised(self, changed: dict[str, Kernel]) -> _Known:
        """The same with kernels in place of those that have their ids."""
        rows = {name: tuple(changed.get(each.id, each) for each in row) for name, row in self.kernels.items()}
        return self._replace(kernels=rows, by_id=self.by_id | changed)


class Registry:
    """Every operation and every kernel that this process knows."""

    def __init__(self, entry_points: bool = True, before_use: Callable[[], bool] = lambda: True) -> None:
        self.lock = self._lock = forking.rlock()
        self._before_use = before_use
        self.revise: Callable[[Kernel], Kernel] = lambda kernel: kernel
        self._known = _Known({}, {}, {})
        self._read = self._loading = self._loaded = False
        self._ready_for: Policy | None = None
        self.names = Names(self)
        self.plugins = Plugins(self) if entry_points else None
        self.hub = Hub(self) if entry_points else None
        self._listeners: list[Callable[[], None]] = []
        for operation in (*OPERATIONS.values(), *PLAIN_OPERATIONS.values()):
            self.register_operation(operation)

    @property
    def _by_id(self) -> Mapping[str, Kernel]:
        return self._known.by_id

    @property
    def loaded(self) -> bool:
        """Whether the plugins that policy admits were imported, so that names can be looked for among theirs."""
        return self._loaded

    @property
    def has_own(self) -> bool:
        """Whether the program itself registered a kernel, as far as is known: nothing is loaded for it."""
        return any(kernel.backend.origin in ("code", "decorator") for kernel in self._by_id.values())

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever kernels or operations are added or removed."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change what is known, all or nothing, and tell it: also where an interruption comes between the two."""
        changed = False
        try:
            with self._lock:
                before = self._known
                try:
                    yield
                except BaseException:
                    self._known = before
                    raise
                finally:
                    changed = self._known is not before
        finally:
            if changed:
                self._changed()

    def register_operation(self, operation: Operation) -> None:
        """Add an operation; its reference becomes its last candidate.

        Raises: RegistrationError for a name that is taken, or parts that its kind does not have or needs.
        """
        tensors = bool(operation.schema.inputs)
        if tensors == (operation.kind is OpKind.TOKENIZATION):
            wanted = "no tensors" if tensors else "at least one tensor"
            problem = f"wanted {wanted} among its inputs, got {[each.name for each in operation.schema.inputs]}"
            raise RegistrationError(f"operation {operation.name!r} of kind {operation.kind}: {problem}")
        with self._change():
            known, name = self._known, operation.name
            if name in known.operations:
                raise RegistrationError(f"operation {name!r} is registered already")
            self._known = _Known(known.operations | {name: operation}, known.kernels | {name: ()}, known.by_id)
            if operation.has_fallback:
                self.add_all([reference_kernel(operation)])

    def unregister_operation(self, name: str) -> None:
        """Remove an operation and the kernels that implement it.

        Raises: KeyError for one that is not known; RegistrationError for a built-in one, and for a kernel that
            implements other operations, too.
        """
        operation = self.operation(name)
        if operation in (OPERATIONS.get(name), PLAIN_OPERATIONS.get(name)):
            raise RegistrationError(f"operation {name!r}: wanted one that was registered, got a built-in one")
        with self._change():
            for kernel in self._known.kernels[name]:
                others = [each for each in kernel.operations if each != name]
                if others:
                    problem = f"kernel {kernel.id!r} implements {', '.join(others)}, too; lz.unregister_kernel first"
                    raise RegistrationError(f"operation {name!r}: {problem}")
                self._known = self._known.without(kernel)
            operations = {each: value for each, value in self._known.operations.items() if each != name}
            kernels = {each: value for each, value in self._known.kernels.items() if each != name}
            self._known = self._known._replace(operations=operations, kernels=kernels)

    def add_operations(self, operations: Sequence[Operation]) -> None:
        """Add operations, all or none. Raises: as :meth:`register_operation`."""
        with self._change():
            for operation in operations:
                self.register_operation(operation)

    def register_kernel(self, kernel: Kernel) -> None:
        """Add a kernel to each of its operations.

        Raises: RegistrationError for an unknown operation, argument or fact, or an id that is taken.
        """
        self.register_kernels([kernel])

    def register_kernels(self, kernels: Sequence[Kernel]) -> None:
        """Add several kernels, all or none. Raises: as :meth:`register_kernel`."""
        if self.plugins is not None and not self._loaded:
            self.plugins.let_others_import()
        with self._lock:
            self._load()
            with self._change():
                self.add_all(kernels)

    def holds(self, kernel: Kernel) -> bool:
        """Whether a declared kernel is registered, as it is or as a descriptor left it."""
        found = self._by_id.get(kernel.id)
        return found is not None and found.declared is kernel

    def add_all(self, kernels: Sequence[Kernel]) -> None:
        """Add kernels, all or none; the caller holds the lock and announces the change."""
        added: dict[str, Kernel] = {}
        for declared in kernels:
            if declared.id in self._by_id or declared.id in added:
                raise RegistrationError(f"kernel {declared.id!r} is registered already; ids are unique")
            kernel = self.revise(declared)
            self.check(kernel)
            added[kernel.id] = kernel
        self._known = self._known.plus(list(added.values()))

    def drop_all(self, kernels: Sequence[Kernel]) -> None:
        """Remove kernels; the caller holds the lock and announces the change."""
        for kernel in kernels:
            self._known = self._known.without(self._by_id[kernel.id])

    def revise_kernels(self) -> None:
        """Ask ``revise`` about every kernel again, all or none. Raises: RegistrationError as on registering."""
        with self._change():
            pairs = [(kernel, self.revise(kernel.declared)) for kernel in self._by_id.values()]
            changed = {kernel.id: kernel for before, kernel in pairs if before != kernel}
            for kernel in changed.values():
                self.check(kernel)
            if changed:
                self._known = self._known.revised(changed)

    def unregister_kernel(self, kernel_id: str) -> None:
        with self._change():
            self._known = self._known.without(self.kernel(kernel_id))

    def check(self, kernel: Kernel) -> None:
        """Raise RegistrationError if the kernel's declaration does not fit its operations."""
        fitting.check(kernel, self._known.operations)

    def read_declarations(self) -> Mapping[str, Kernel]:
        """Read the declarations of built-in backends, once; every kernel that is known without importing a plugin."""
        if not self._read:
            with self._change():
                if not self._read:
                    with held_off():
                        self.add_all(list(backends.builtin_kernels()))
                self._read = True
        return self._by_id

    def _load(self) -> None:
        """Read all declarations once, and import the plugins that policy admits; all or nothing.

        An interruption, as by Ctrl-C while a library is imported, leaves what was there before: the next call loads.
        """
        if self._loading:  # done, or read by a plugin while it is being loaded
            return
        try:
            self._loading = True
            self.read_declarations()
            if self.plugins is not None and self.hub is not None:
                with self._change():
                    self.plugins.load()
                    self.hub.load()
        except BaseException:
            self._loading = False
            raise
        self._loaded = True  # last: other threads read it without the lock

    def ready(self) -> None:
        """Have every declaration, every plugin that policy admits now, and every configured descriptor in force.

        A policy is looked at once: two questions of each miss come here.
        """
        policy, plugins = CONFIGURATION.policy, self.plugins
        if policy is self._ready_for and self._loaded and not (plugins is not None and plugins.functions):
            return
        if plugins is not None and (not self._loaded or plugins.awaited()):
            plugins.let_others_import()
        if not self._loaded:
            with self._lock:
                self._load()
        if self._loaded:  # not for a plugin that asks while it is loaded
            if plugins is not None and plugins.awaited():
                with self._change():
                    plugins.load()
            if self.hub is not None and self.hub.awaited():
                with self._change():
                    self.hub.load()
            if plugins is not None and plugins.functions:
                self._register_functions(plugins)
            if self._before_use():
                self._ready_for = policy

    def _register_functions(self, plugins: Plugins) -> None:
        """Give the operations of plugins their functions, which are tried on them; outside of any change."""
        with self._lock:
            waiting, plugins.functions = plugins.functions, []
        for name, function in waiting:
            try:
                SERVICES.register_function(function)
            except RegistrationError as error:
                plugins.failed(name, error)

    def operations(self) -> dict[str, Operation]:
        return dict(self._known.operations)

    def operation(self, name: str) -> Operation:
        """One operation. Raises: UnknownOperationError naming the nearest."""
        if name not in self._known.operations:
            self.ready()  # a plugin may bring it
        known = self._known.operations
        if name not in known:
            raise self._unknown(name, nearest(name, known))
        return known[name]

    def candidates(self, operation: str) -> Sequence[Kernel]:
        """Every kernel of an operation, the reference first as it came first."""
        self.ready()
        return self._known.kernels[operation]

    def lock_for(self, policy: Policy, facts: Facts) -> Lock | None:
        """The lock that decides a call: one on a kernel that only other operations have does not reach this one.

        Raises: PolicyError where a setting names nothing.
        """
        self.names.check(policy)
        if not policy.locks or not policy.enabled:
            return None
        return policy.lock_for(facts, self.candidates(str(facts["operation"])))

    def kernels(self, pattern: str = "*") -> list[Kernel]:
        """Kernels of the operations that a name, alias, function or glob covers, by priority, then id."""
        self.ready()
        names = self.operations_named(pattern)
        found = {kernel.id: kernel for name in names for kernel in self._known.kernels[name]}
        return sorted(found.values(), key=lambda kernel: (-kernel.priority, kernel.id))

    def check_named(self, patterns: Sequence[str], option: str = "--kernel") -> None:
        """Refuse a pattern that names no kernel. Raises: ValueError with the nearest name; TypeError for a text."""
        if isinstance(patterns, str):  # each of its letters would be one
            raise TypeError(f"{option}: wanted a list of libraries or kernels, got {patterns!r}; pass [{patterns!r}]")
        kernels = self.kernels()
        for pattern in patterns:
            if not any(names_kernel(pattern, each) for each in kernels):
                known = sorted({name for each in kernels for name in (each.id, each.source)})
                near = nearest(pattern, known) or "; `layerzero kernels` lists them, --module brings yours"
                raise ValueError(f"{option}: wanted a library or kernel, got {pattern!r}, which names none here{near}")

    def operations_named(self, pattern: str) -> list[str]:
        """Names of the operations that a name, alias, function or glob covers; an operation's name means itself alone.

        Plugins are imported to look for what is not built in. Raises: UnknownOperationError naming the nearest.
        """
        names = [] if any(mark in pattern for mark in "*?[") else self._named(pattern)
        if not names:
            self.ready()
            names = self._named(pattern)
        if not names:
            known = [*self._known.operations, *OPERATION_ALIASES, *FUNCTIONS, *PLAIN_FUNCTIONS]
            raise self._unknown(pattern, meant(pattern, known))
        return names

    def _unknown(self, name: str, near: str) -> UnknownOperationError:
        failed = self.plugins.errors if self.plugins is not None else {}
        broken = "".join(f"; the plugin {each!r} may bring it and did not load: {why}" for each, why in failed.items())
        return UnknownOperationError(f"unknown operation {name!r}{near}{broken}")

    def _named(self, pattern: str) -> list[str]:
        pattern = current_name(pattern)
        if pattern in OPERATION_ALIASES:
            return list(OPERATION_ALIASES[pattern][0])
        if pattern in FUNCTIONS:
            return [operation.name for operation in FUNCTIONS[pattern].operations]
        if pattern in PLAIN_FUNCTIONS:
            return [operation.name for operation in PLAIN_FUNCTIONS[pattern].operations]
        return [name for name in self._known.operations if fnmatch.fnmatchcase(name, pattern)]

    def kernel(self, kernel_id: str) -> Kernel:
        """One kernel by id or alias. Raises KeyError naming the nearest."""
        self.ready()
        if kernel_id in self._by_id:
            return self._by_id[kernel_id]
        for kernel in self._by_id.values():
            if kernel_id in kernel.aliases:
                return kernel
        raise KeyError(f"unknown kernel {kernel_id!r}{nearest(kernel_id, self._by_id)}")

    def backends(self) -> list[Backend]:
        """Every backend that owns a kernel, by name."""
        self.ready()
        unique = {kernel.backend: None for kernel in self._by_id.values()}
        return sorted(unique, key=lambda backend: (backend.name, backend.import_name))


REGISTRY = Registry(before_use=SERVICES.update_descriptors)
"""The registry of this process."""


def _operation(name: str) -> Operation:
    return REGISTRY.operation(name)


def _kernel(kernel_id: str) -> Kernel:
    return REGISTRY.kernel(kernel_id)


copyreg.pickle(Operation, lambda each: (_operation, (each.name,)))  # declarations hold functions without a name
copyreg.pickle(Kernel, lambda each: (_kernel, (each.id,)))
copyreg.pickle(Facts, lambda each: (Facts, (each.operation, each.device, each.layout, each.tensors, each._values)))

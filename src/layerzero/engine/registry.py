"""Operations and their kernels: built in, from plugins, and registered by decorator. Operation first."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from layerzero import backends
from layerzero.core import forking
from layerzero.core import limits as limit
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.errors import RegistrationError
from layerzero.core.facts import Facts
from layerzero.core.kernel import REFERENCE_BACKEND, Backend, Kernel
from layerzero.core.limit import Limit
from layerzero.core.operation import Operation, OpKind
from layerzero.engine import declared as fitting
from layerzero.engine.plugins import Plugins
from layerzero.engine.policy import Lock, Policy, meant, names_kernel
from layerzero.engine.settings import nearest
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, OPERATIONS

USER_BACKEND = Backend(name="user", summary="Registered by @lz.register_kernel", origin="decorator")


class _Known(NamedTuple):
    """What is registered; replaced as a whole: readers without a lock, and whoever is interrupted, leave no half."""

    operations: dict[str, Operation]
    kernels: dict[str, tuple[Kernel, ...]]
    by_id: dict[str, Kernel]

    def plus(self, kernel: Kernel) -> _Known:
        rows = {name: (*self.kernels[name], kernel) for name in kernel.operations}
        return self._replace(kernels=self.kernels | rows, by_id=self.by_id | {kernel.id: kernel})

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

    def __init__(self, entry_points: bool = True, before_use: Callable[[], None] = lambda: None) -> None:
        self.lock = self._lock = forking.rlock()
        self._before_use = before_use
        self.revise: Callable[[Kernel], Kernel] = lambda kernel: kernel
        self._known = _Known({}, {}, {})
        self._loading = self._loaded = False
        self.plugins = Plugins(self) if entry_points else None
        self._listeners: list[Callable[[], None]] = []
        for operation in OPERATIONS.values():
            self.register_operation(operation)

    @property
    def _by_id(self) -> Mapping[str, Kernel]:
        return self._known.by_id

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
                self._add(reference_kernel(operation))

    def register_kernel(self, kernel: Kernel) -> None:
        """Add a kernel to each of its operations.

        Raises: RegistrationError for an unknown operation, argument or fact, or an id that is taken.
        """
        self.register_kernels([kernel])

    def register_kernels(self, kernels: Sequence[Kernel]) -> None:
        """Add several kernels, all or none. Raises: as :meth:`register_kernel`."""
        with self._lock:
            self._load()
            with self._change():
                self.add_all(kernels)

    def holds(self, kernel: Kernel) -> bool:
        """Whether a declared kernel is registered, as it is or as a descriptor left it."""
        found = self._by_id.get(kernel.id)
        return found is not None and found.declared is kernel

    def add_all(self, kernels: Sequence[Kernel]) -> None:
        """Add kernels, all or none; whoever calls holds the lock and tells it."""
        before = self._known
        try:
            for kernel in kernels:
                self._add(kernel)
        except BaseException:
            self._known = before
            raise

    def drop_all(self, kernels: Sequence[Kernel]) -> None:
        """Remove kernels; whoever calls holds the lock and tells it."""
        for kernel in kernels:
            self._known = self._known.without(self._by_id[kernel.id])

    def revise_kernels(self) -> None:
        """Ask :attr:`revise` about every kernel again, all or none. Raises: RegistrationError as on registering."""
        with self._change():
            pairs = [(kernel, self.revise(kernel.declared)) for kernel in self._by_id.values()]
            changed = {kernel.id: kernel for before, kernel in pairs if before != kernel}
            for kernel in changed.values():
                self.check(kernel)
            if changed:
                self._known = self._known.revised(changed)

    def unregister_kernel(self, kernel_id: str) -> None:
        """Remove a kernel."""
        with self._change():
            self._known = self._known.without(self.kernel(kernel_id))

    def _add(self, kernel: Kernel) -> None:
        if kernel.id in self._by_id:
            raise RegistrationError(f"kernel {kernel.id!r} is registered already; ids are unique")
        kernel = self.revise(kernel)
        self.check(kernel)
        self._known = self._known.plus(kernel)

    def check(self, kernel: Kernel) -> None:
        """Raise RegistrationError if the kernel's declaration does not fit its operations."""
        fitting.check(kernel, self._known.operations)

    def _load(self) -> None:
        """Read the declarations of built-in backends once, and import the plugins that policy admits; all or nothing.

        An interruption, as by Ctrl-C while a library is imported, leaves what was there before: the next call loads.
        """
        if self._loading:  # done, or asked for by a plugin while it is being loaded
            return
        with self._change():
            try:
                self._loading = True
                for kernel in backends.builtin_kernels():
                    self._add(kernel)
                if self.plugins is not None:
                    self.plugins.load()
            except BaseException:
                self._loading = False
                raise
        self._loaded = True  # last: other threads read it without the lock

    def ready(self) -> None:
        """Have every declaration, every plugin that policy admits now, and every configured descriptor in force."""
        if not self._loaded:
            with self._lock:
                self._load()
        if self._loaded:  # not for a plugin that asks while it is loaded
            if self.plugins is not None and self.plugins.awaited():
                with self._change():
                    self.plugins.load()
            self._before_use()

    def operations(self) -> dict[str, Operation]:
        """Every operation by name."""
        return dict(self._known.operations)

    def operation(self, name: str) -> Operation:
        """One operation. Raises KeyError naming the nearest."""
        known = self._known.operations
        if name not in known:
            raise KeyError(f"unknown operation {name!r}{nearest(name, known)}")
        return known[name]

    def candidates(self, operation: str) -> Sequence[Kernel]:
        """Every kernel of an operation, the reference first as it came first."""
        self.ready()
        return self._known.kernels[operation]

    def lock_for(self, policy: Policy, facts: Facts) -> Lock | None:
        """The lock that decides a call: one on a kernel that only other operations have does not reach this one.

        A lock on a kernel that nobody has stays in force, so that a misspelt one is an error and no silence.
        """
        lock = policy.lock_for(facts) if policy.enabled else None
        if lock is None or any(names_kernel(lock.kernel, each) for each in self.candidates(str(facts["operation"]))):
            return lock
        return None if any(names_kernel(lock.kernel, each) for each in self._by_id.values()) else lock

    def kernels(self, pattern: str = "*") -> list[Kernel]:
        """Kernels of the operations that a name, alias, function or glob covers, by priority, then id."""
        self.ready()
        names = self.operations_named(pattern)
        found = {kernel.id: kernel for name in names for kernel in self._known.kernels[name]}
        return sorted(found.values(), key=lambda kernel: (-kernel.priority, kernel.id))

    def operations_named(self, pattern: str) -> list[str]:
        """Names of the operations that a name, alias, function or glob covers; an operation's name means itself alone.

        Raises: KeyError naming the nearest.
        """
        if pattern in OPERATION_ALIASES:
            return list(OPERATION_ALIASES[pattern][0])
        if pattern in FUNCTIONS:
            return [operation.name for operation in FUNCTIONS[pattern].operations]
        operations = self._known.operations
        names = [name for name in operations if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            known = [*operations, *OPERATION_ALIASES, *FUNCTIONS]
            raise KeyError(f"unknown operation {pattern!r}{meant(pattern, known)}")
        return names

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


def reference_kernel(operation: Operation) -> Kernel:
    """Make a kernel of an operation's reference: it takes everything, and has priority 0."""
    schema = operation.schema
    idle = schema.promises.difference(schema.bounds)  # handles that it has no use for
    taken = [name for name in (*schema.chosen, *schema.passed) if name not in idle]
    return Kernel(
        id=f"reference.{operation.name}",
        operations=(operation.name,),
        backend=REFERENCE_BACKEND,
        load=lambda _facts: operation.reference,
        layout=operation.layouts[0] if operation.layouts else None,
        accepts=(*(tensor.name for tensor in schema.optional), *taken),
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_empty=True,
        handles_negated=True,
        device_guard=True,
        priority=0,
    )


def kernel_of_function(
    function: Callable[..., Any],
    *,
    operation: str,
    kernel_id: str,
    platform: str | Sequence[str] = "cpu",
    min_sm: int | tuple[int, int] | None = None,
    max_sm: int | tuple[int, int] | None = None,
    supported_dtypes: Iterable[torch.dtype | str] | None = None,
    max_head_dim: int | None = None,
    limits: Sequence[Limit] = (),
    known: dict[str, Operation],
    **declared: Any,
) -> Kernel:
    """Turn a decorated function into a kernel: what it takes by name is what it is offered.

    The first parameters are the operation's required tensors, under any name. Each further parameter is named like the
    operation's argument. Raises RegistrationError for anything else.
    """
    operations, implied = _operations_of(operation, known)
    _check_declared(kernel_id, declared)
    schema = known[operations[0]].schema
    arguments = list(dict.fromkeys(name for each in operations for name in known[each].schema.arguments))
    parameters = list(inspect.signature(function).parameters.values())
    required, optional = parameters[: len(schema.required)], parameters[len(schema.required) :]
    if len(required) < len(schema.required):
        wanted = ", ".join(tensor.name for tensor in schema.required)
        raise RegistrationError(
            f"{kernel_id}: wanted a function that takes {wanted}, got {inspect.signature(function)}"
        )
    accepts = tuple(parameter.name for parameter in optional)
    unknown = [name for name in accepts if name not in arguments]
    if unknown:
        raise RegistrationError(
            f"{kernel_id}: {', '.join(unknown)} is no argument of {operation}; it has {', '.join(arguments)}"
        )
    for name in operations[1:]:  # those of one function take the same tensors, and not always the same parameters
        fitting.check_shared(kernel_id, known[name].schema, schema, optional)
    platforms = (platform,) if isinstance(platform, str) else tuple(platform)
    rules: list[Limit] = [limit.platform(*platforms)]
    if min_sm is not None or max_sm is not None:
        rules.append(limit.arch(_sm(min_sm), _sm(max_sm)))
    if supported_dtypes is not None:
        rules.append(limit.dtype(*(dtype_name(dtype_named(each)) for each in supported_dtypes)))
    if max_head_dim is not None:
        rules.append(limit.dim("head_dim", max=max_head_dim))
    if known[operations[0]].layouts:
        declared.setdefault("layout", known[operations[0]].layouts[0])
    rules += [limit.one_of(fact, value) for fact, value in implied.items()]

    def load(facts: Facts) -> Callable[..., Any]:
        return function

    load.__module__ = function.__module__  # where a child process finds it
    return Kernel(
        id=kernel_id,
        operations=operations,
        backend=USER_BACKEND,
        load=load,
        accepts=accepts,
        implies=tuple(fact for fact in implied if fact not in accepts),
        limits=(*rules, *limits),
        **declared,
    )


def _check_declared(kernel_id: str, declared: dict[str, Any]) -> None:
    derived = {"id", "operations", "backend", "load", "accepts", "implies", "revision"}
    fields = {each.name for each in dataclasses.fields(Kernel)} - derived
    for name in declared:
        if name in ("supports_gqa", "supports_mqa"):
            raise RegistrationError(f"{kernel_id}: {name} does not exist; register for attention.gqa.* instead")
        if name not in fields:
            raise RegistrationError(f"{kernel_id}: a kernel has no {name!r}{nearest(name, fields)}")


def _operations_of(name: str, known: dict[str, Operation]) -> tuple[tuple[str, ...], dict[str, object]]:
    if name in OPERATION_ALIASES:
        # The flat names meant equal head counts; a kernel that groups heads says so by naming a gqa operation.
        operations, implied = OPERATION_ALIASES[name]
        return operations[:1], implied
    if name in FUNCTIONS:
        return tuple(each.name for each in FUNCTIONS[name].operations), {}
    if name not in known:
        raise RegistrationError(f"Unknown operation {name!r}{nearest(name, [*known, *OPERATION_ALIASES, *FUNCTIONS])}")
    return (name,), {}


def _sm(version: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return divmod(version, 10) if isinstance(version, int) else version


def _descriptors_in_force() -> None:
    from layerzero import _assembly

    _assembly.descriptors_in_force()


REGISTRY = Registry(before_use=_descriptors_in_force)
"""The registry of this process."""

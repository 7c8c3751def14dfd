"""Capability descriptors in force: read, checked against kernels, hashed, and put into the registry.

The registry holds the kernels as descriptors leave them, so everything that reads limits (selection, tables, tests)
reads the narrowed ones; putting them there starts a new epoch, which drops every kept plan. Descriptors of schema
version 1.0 are read as today's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from layerzero.core.capability import entry_of, platforms_of, problems_of
from layerzero.core.descriptor import VERSION, Descriptor, Descriptor1, Entry, Entry1, decode, parse, sha256
from layerzero.core.descriptor_kernels import built, misfits, narrowed, unbuildable, version_range
from layerzero.core.device import PLATFORMS
from layerzero.core.errors import DescriptorError, RegistrationError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit_kinds import Equal, Limit, OneOf
from layerzero.core.limits import limit_data
from layerzero.core.operation import Operation
from layerzero.core.reasons import ReasonCode
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.probe import check_requirement
from layerzero.engine.registry import REGISTRY, Registry
from layerzero.engine.settings import nearest
from layerzero.ops import OPERATION_ALIASES
from layerzero.ops.attention.limits import SquareCausal

_SHARED = tuple(field.name for field in msgspec.structs.fields(Entry1) if field.name in Entry.__struct_fields__)


def translated(old: Descriptor1, known: Mapping[str, Operation]) -> tuple[Descriptor, list[str]]:
    """The same in today's terms, and what is wrong with it.

    ``attention.causal`` and ``attention.full`` are prefill with that value of ``causal``. ``supports_gqa`` adds the
    operation with grouped heads. What version 1.0 has no word for is not allowed: other value dims, a causal mask over
    unequal lengths, a scale. ``fuses_ops`` and ``transform_cost_hint`` change nothing: a fused operation is an
    operation of its own here, and costs of adaptations are not declared.
    """
    ops: dict[str, list[Entry | str]] = {}
    problems: list[str] = []
    for name, entries in old.ops.items():
        implied = OPERATION_ALIASES.get(name, ((), {}))[1]
        for index, entry in enumerate(entries):
            operations = _operations(name, entry, known)
            if entry.supports_gqa and len(operations) == 1 and not known[operations[0]].sibling:
                problems.append(f"ops.{name}[{index}].supports_gqa: wanted false, since {name} has no heads, got true")
            if not entry.supports_gqa and known.get(name) and known[name].sibling:
                problems.append(f"ops.{name}[{index}].supports_gqa: wanted true under {name}, got false")
            ops.setdefault(operations[0], []).append(_entry(entry, known.get(operations[0]), implied))
            for operation in operations[1:]:
                ops.setdefault(operation, []).append(entry.kernel_id)
    return (
        Descriptor(
            schema_version=VERSION,
            backend=old.backend,
            backend_version=old.backend_version,
            platforms=[old.platform],
            ops=ops,
        ),
        problems,
    )


def _operations(name: str, entry: Entry1, known: Mapping[str, Operation]) -> Sequence[str]:
    """The operation, and also the one with grouped heads if the kernel has them."""
    if name in OPERATION_ALIASES:
        name = OPERATION_ALIASES[name][0][0]
    if name not in known:
        return [name]  # the reader of the translation says that there is none
    grouped = [each.name for each in known.values() if each.sibling == name] if entry.supports_gqa else []
    return [name, *grouped]


def _entry(old: Entry1, operation: Operation | None, implied: Mapping[str, object]) -> Entry:
    shared: dict[str, Any] = {name: getattr(old, name) for name in _SHARED}
    facts = operation.facts if operation else frozenset()
    limits: list[Limit] = [OneOf(fact, (value,)) for fact, value in implied.items()]
    limits += [Equal("value_dim", "head_dim")] if {"value_dim", "head_dim"} <= facts else []
    limits += [SquareCausal()] if {"causal", "seq_q", "seq_k"} <= facts else []
    accepts = ["attn_mask"] * old.supports_attn_mask + ["dropout_p"] * old.supports_dropout
    return Entry(**shared, limits=[limit_data(each) for each in limits], accepts=accepts)


Source = str | os.PathLike[str] | Mapping[str, Any]
"""A JSON file, or its content."""


@dataclass(frozen=True, slots=True)
class LoadedDescriptor:
    """A descriptor that was read and found right.

    Attributes:
        name: the file; of a dict, the backend and the start of the hash.
        sha256: hash of the content; the order of keys does not change it.
        kernels: ids that it speaks of.
    """

    name: str
    sha256: str
    kernels: tuple[str, ...]
    descriptor: Descriptor = field(repr=False)
    entries: Mapping[str, tuple[Entry, tuple[Operation, ...]]] = field(repr=False)

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "sha256": self.sha256, "kernels": list(self.kernels)}


def understood(source: Source, known: Mapping[str, Operation]) -> LoadedDescriptor:
    """Read a descriptor; whether its kernels exist is not checked. Raises: DescriptorError with every problem."""
    name, data = _content(source)
    read, problems = decode(data)
    if isinstance(read, Descriptor1):
        read, problems = translated(read, known)
    if read is None:
        raise DescriptorError(name, problems, ReasonCode.CAPABILITIES_SCHEMA_MISMATCH)
    entries = _gathered(read, known, problems)
    problems += _top_problems(read)
    for kernel_id, (entry, operations) in entries.items():
        problems += [f"{kernel_id}: {each}" for each in problems_of(entry, operations, read.platforms)]
    if problems:
        problems = list(dict.fromkeys(problems))  # several operations may lack the same
        raise DescriptorError(name, problems, ReasonCode.CAPABILITIES_SCHEMA_MISMATCH)
    return LoadedDescriptor(name, sha256(data), tuple(entries), read, entries)


def _content(source: Source) -> tuple[str, object]:
    """Name and plain values of what was given."""
    if isinstance(source, Mapping):
        try:
            data = parse(msgspec.json.encode(source))
        except TypeError as error:  # torch.float16 in place of its name
            raise DescriptorError(str(source.get("backend")), [f"wanted values that JSON has: {error}"]) from None
        return f"{source.get('backend')}@{sha256(data)[:12]}", data
    name = os.fspath(source)
    try:
        return name, parse(Path(name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else f"not valid JSON: {error}"
        raise DescriptorError(name, [f"wanted a JSON file, got {said}"]) from error


def _gathered(
    descriptor: Descriptor, known: Mapping[str, Operation], problems: list[str]
) -> dict[str, tuple[Entry, tuple[Operation, ...]]]:
    """Each kernel with its one entry and its operations."""
    entries: dict[str, Entry] = {}
    operations: dict[str, list[Operation]] = {}
    for name, kernels in descriptor.ops.items():
        if name not in known:
            problems.append(f"ops: wanted an operation, got {name!r}{nearest(name, known)}")
            continue
        for each in kernels:
            kernel_id = each if isinstance(each, str) else each.kernel_id
            owners = operations.setdefault(kernel_id, [])
            if known[name] in owners or (kernel_id in entries and not isinstance(each, str)):
                problems.append(f"ops.{name}: wanted the entry of every kernel once, got {kernel_id!r} twice")
                continue
            owners.append(known[name])
            if not isinstance(each, str):
                entries[kernel_id] = each
    for kernel_id, owners in operations.items():
        if kernel_id not in entries:
            problems.append(f"ops.{owners[0].name}: wanted an entry of {kernel_id!r} somewhere, got its id alone")
    return {kernel_id: (entry, tuple(operations[kernel_id])) for kernel_id, entry in entries.items()}


def _top_problems(descriptor: Descriptor) -> Iterable[str]:
    for platform in descriptor.platforms:
        if platform not in PLATFORMS:
            yield f"platforms: wanted {', '.join(PLATFORMS)}, got {platform!r}"
    checks: list[tuple[str, Callable[[], object]]] = [("", lambda: version_range(descriptor))]
    checks += [("requires: ", lambda each=each: check_requirement(each)) for each in descriptor.requires]  # type: ignore[misc]
    for where, check in checks:
        try:
            check()
        except ValueError as error:
            yield f"{where}{error}"


class Descriptors:
    """The descriptors of a process: those of the setting, then those loaded by a program, in order."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = registry.lock  # one lock: registering reads descriptors, and descriptors register
        self._configured: dict[str, LoadedDescriptor] = {}
        self._paths: tuple[str, ...] = ()
        self._loaded: dict[str, LoadedDescriptor] = {}
        self._syncing = False
        registry.revise = self.revised

    def in_force(self) -> list[LoadedDescriptor]:
        """What is loaded, in the order in which it is applied."""
        self.sync()
        return [*self._configured.values(), *self._loaded.values()]

    def sync(self, *, again: bool = False) -> bool:
        """Put the files of the setting in force, and tell whether they are; ``again`` reads them anew.

        Raises: DescriptorError each time.
        """
        paths = CONFIGURATION.policy.descriptors
        if paths == self._paths and not again:
            return True
        with self._lock:
            if self._syncing:  # applying descriptors asks for kernels
                return False
            self._syncing = True
            try:
                self._set({path: self._configured_by(path) for path in paths}, self._loaded)
                self._paths = paths
            finally:
                self._syncing = False
        return True

    def _configured_by(self, path: str) -> LoadedDescriptor:
        try:
            return self.check(path)
        except DescriptorError as error:  # the file's name alone does not say which setting to mend
            name = f"{CONFIGURATION.said_by('descriptors', path)}: {path}"
            raise DescriptorError(name, error.problems, error.code) from error.__cause__

    def check(self, source: Source) -> LoadedDescriptor:
        """Read a descriptor that narrows kernels; nothing changes. Raises: DescriptorError with every problem."""
        with self._lock:
            loaded = understood(source, self._registry.operations())
            problems: list[str] = []
            seen: dict[str, str] = {}
            for kernel_id, (entry, operations) in loaded.entries.items():
                try:
                    kernel = self._registry.kernel(kernel_id).declared
                except KeyError as error:
                    problems.append(f"{kernel_id}: wanted a kernel, got an {error.args[0]}")
                    continue
                if kernel.id in seen:
                    problems.append(f"{kernel_id}: wanted every kernel once, got {kernel.id} as {seen[kernel.id]}, too")
                seen[kernel.id] = kernel_id
                wrong = list(misfits(entry, operations, loaded.descriptor, kernel))
                problems += [f"{kernel_id}: {each}" for each in wrong]
                if not wrong:
                    try:
                        self._registry.check(self._narrowed(kernel, loaded, kernel_id))
                    except RegistrationError as error:
                        problems.append(str(error))
            if problems:
                raise DescriptorError(loaded.name, problems)
        return loaded

    def load(self, source: Source) -> LoadedDescriptor:
        """Put a descriptor in force. Raises: DescriptorError with every problem, and then nothing changed."""
        self.sync()
        with self._lock:
            loaded = self.check(source)
            self._set(self._configured, self._loaded | {loaded.name: loaded})
        return loaded

    def unload(self, name: str) -> None:
        """Undo :meth:`load`. Raises: KeyError naming what is loaded."""
        with self._lock:
            if name not in self._loaded:
                held = ", ".join(self._loaded) or "none by lz.load_descriptor"
                raise KeyError(f"no descriptor {name!r} is loaded; loaded: {held}{nearest(name, self._loaded)}")
            self._set(self._configured, {key: each for key, each in self._loaded.items() if key != name})

    def clear(self) -> None:
        """Unload everything; files of the setting come back on the next use."""
        with self._lock:
            self._set({}, {})
            self._paths = ()

    def revised(self, kernel: Kernel) -> Kernel:
        """A kernel as the descriptors in force leave it."""
        for loaded in (*self._configured.values(), *self._loaded.values()):
            for kernel_id in loaded.entries:
                # another kernel may have this one's alias for its id
                alias = kernel_id in kernel.aliases and kernel_id not in self._registry._by_id
                if kernel_id == kernel.id or alias:
                    kernel = self._narrowed(kernel, loaded, kernel_id)
        return kernel

    def _narrowed(self, kernel: Kernel, loaded: LoadedDescriptor, kernel_id: str) -> Kernel:
        entry, operations = loaded.entries[kernel_id]
        return narrowed(kernel, entry, operations, loaded.descriptor, loaded.name, loaded.sha256)

    def _set(self, configured: dict[str, LoadedDescriptor], loaded: dict[str, LoadedDescriptor]) -> None:
        """Change what is in force and every kernel that it concerns, or nothing."""
        before = self._configured, self._loaded
        self._configured, self._loaded = configured, loaded
        try:
            self._registry.revise_kernels()
        except Exception:
            self._configured, self._loaded = before
            raise


DESCRIPTORS = Descriptors(REGISTRY)
"""The descriptors of this process."""


def load_descriptor(source: Source) -> LoadedDescriptor:
    """Narrow kernels by a capability descriptor: a JSON file, or its content as a dict.

    Takes effect on the next call. The result tells its ``name``, ``sha256`` and ``kernels``; the same name loaded again
    takes its own place. Raises: DescriptorError with every problem, and then nothing changed.
    """
    return DESCRIPTORS.load(source)


def unload_descriptor(descriptor: LoadedDescriptor | str) -> None:
    """Undo :func:`load_descriptor`. Raises: KeyError if nothing of that name was loaded by it."""
    DESCRIPTORS.unload(descriptor if isinstance(descriptor, str) else descriptor.name)


def kernels_from_descriptor(
    descriptor: Source, loads: Mapping[str, Callable[[Facts], Callable[..., Any]]]
) -> tuple[Kernel, ...]:
    """Build kernels of which everything but ``load`` is data, for a plugin's ``KERNELS``.

    Args:
        descriptor: a JSON file, or its content.
        loads: for each kernel id, the function that imports the library and returns the callable (``lz.Kernel.load``).
    Raises: DescriptorError with every problem.
    """
    loaded = understood(descriptor, REGISTRY.operations())
    problems = [f"{each}: wanted its load function, got none" for each in loaded.kernels if each not in loads]
    problems += [
        f"loads: wanted {', '.join(loaded.kernels)}, got {each!r}" for each in loads if each not in loaded.kernels
    ]
    for kernel_id, (entry, _) in loaded.entries.items():
        problems += [f"{kernel_id}: {each}" for each in unbuildable(entry)]
    if problems:
        raise DescriptorError(loaded.name, problems)
    return tuple(
        built(entry, operations, loaded.descriptor, loads[kernel_id])
        for kernel_id, (entry, operations) in loaded.entries.items()
    )


def descriptor(backend: str) -> dict[str, Any]:
    """A backend's kernels as the capability descriptor that says what they declare, ready for ``json.dumps``.

    Args:
        backend: a library as policies name it (``torch``); or its package, where two libraries share a name.
    Raises: KeyError naming the libraries there are.
    """
    libraries = by_backend()
    found = {each: kernels for each, kernels in libraries.items() if backend == each.name}
    found = found or {each: kernels for each, kernels in libraries.items() if backend in each.distributions}
    if len(found) > 1:
        names = " or ".join(" or ".join(each.distributions) for each in found)
        raise KeyError(f"{backend!r} is several libraries; name one by its package: {names}")
    if not found:
        known = [each.name for each in by_backend()]
        raise KeyError(f"no library {backend!r} has kernels{nearest(backend, known)}; known: {', '.join(known)}")
    (owner, kernels), *_ = found.items()
    return exported(owner, kernels)


def by_backend() -> dict[Backend, list[Kernel]]:
    """Every library with its kernels as they were declared; references take everything and need no description."""
    found: dict[Backend, list[Kernel]] = {}
    for kernel in (each.declared for each in REGISTRY.kernels()):
        if not kernel.is_reference:
            found.setdefault(kernel.backend, []).append(kernel)
    return dict(sorted(found.items(), key=lambda each: (each[0].name, each[0].distributions)))


def exported(backend: Backend, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The descriptor of one library as plain values."""
    known = REGISTRY.operations()
    ops: dict[str, list[Entry | str]] = {name: [] for kernel in kernels for name in kernel.operations}
    for kernel in kernels:
        first, *others = kernel.operations
        ops[first].append(entry_of(kernel, [known[name] for name in kernel.operations]))
        for name in others:
            ops[name].append(kernel.id)
    platforms = {name: None for kernel in kernels for name in platforms_of(kernel)}
    written = Descriptor(
        schema_version=VERSION,
        backend=backend.name,
        backend_version=backend.versions or None,
        platforms=[name for name in PLATFORMS if name in platforms],
        ops=ops,
        distributions=[name for name in backend.distributions if name],
        requires=list(backend.requires),
        summary=backend.summary,
    )
    data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(written))
    return data

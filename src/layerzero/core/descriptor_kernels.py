"""Kernels from entries of descriptors: one that exists is narrowed, one that is all data is built."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from layerzero.core.capability import code_texts, dtypes_of, limits_of, platforms_of
from layerzero.core.descriptor import Descriptor, Entry
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel, Revision
from layerzero.core.limit_kinds import Arch, Dim, Dtype, Limit, OneOf, Platform
from layerzero.core.limits import CODE, is_data
from layerzero.core.operation import Operation

_KEPT = (Dtype, Platform)
"""Limits that ``replace`` keeps, too: the code was written for these dtypes and platforms."""


def misfits(entry: Entry, operations: Sequence[Operation], descriptor: Descriptor, kernel: Kernel) -> Iterator[str]:
    """Why an entry cannot speak of this kernel, with wanted and got."""
    if kernel.is_reference:
        yield "kernel_id: wanted a kernel of a library, got a reference, which takes everything"
        return
    backend = kernel.backend
    if descriptor.backend != backend.name:
        yield f"kernel_id: wanted a kernel of {descriptor.backend}, got {kernel.id}, which belongs to {backend.name}"
    if descriptor.distributions and set(descriptor.distributions) != set(backend.distributions):
        wanted = " or ".join(name for name in backend.distributions if name) or "[]"
        yield f"distributions: wanted {wanted}, the library of {kernel.id}, got {descriptor.distributions}"
    if descriptor.backend_version is not None and not any(backend.distributions):
        yield f"backend_version: wanted null, since {backend.name} has no version of its own; say it in requires"
    for operation in operations:
        if operation.name not in kernel.operations:
            yield f"ops: wanted {' or '.join(kernel.operations)} for {kernel.id}, got {operation.name}"
    if kernel.layout is not None and kernel.layout not in entry.requires_layouts:
        yield f"requires_layouts: wanted {kernel.layout}, the layout of its code, got {entry.requires_layouts}"
    have = dtypes_of(kernel, operations)
    if have and not set(have) & {dtype_name(dtype_named(name)) for name in entry.dtypes}:
        yield f"dtypes: wanted some of {', '.join(have)}, got {entry.dtypes}"
    if not set(platforms_of(kernel)) & set(descriptor.platforms):
        yield f"platforms: wanted some of {', '.join(platforms_of(kernel))}, got {descriptor.platforms}"
    texts = code_texts(kernel)
    for data in entry.limits:
        if data.get("kind") == CODE and data["text"] not in texts:
            yield f"limits: wanted code that {kernel.id} has ({'; '.join(texts) or 'none'}), got {data['text']!r}"
    said = {"jit": entry.jit, "renames": entry.renames, "aliases": entry.aliases}
    declared: dict[str, Any] = {"jit": kernel.jit, "renames": dict(kernel.renames), "aliases": list(kernel.aliases)}
    for name, value in said.items():
        if value is not None and value != declared[name]:
            yield f"{name}: wanted {declared[name]}, what the code says, got {value}"


def _pins(kernel: Kernel, limit: Limit) -> bool:
    """Whether a limit says the one value of an argument that the code computes for."""
    return isinstance(limit, OneOf) and limit.fact in kernel.implies


def narrowed(
    kernel: Kernel, entry: Entry, operations: Sequence[Operation], descriptor: Descriptor, name: str, sha256: str
) -> Kernel:
    """The kernel as an entry leaves it: what either of them refuses is refused.

    With ``mode: replace``, the entry's limits stand in place of the kernel's own that are data, except dtypes and
    platforms; code limits, flags and arguments are never extended.
    """
    base = kernel.limits
    if entry.mode == "replace":
        base = tuple(limit for limit in base if not is_data(limit) or type(limit) in _KEPT or _pins(kernel, limit))
    said = limits_of(entry, operations)
    limits = merged(base, said)
    if not set(platforms_of(kernel)) <= set(descriptor.platforms):
        limits = merged(limits, [Platform(tuple(descriptor.platforms))])
    described = tuple(operation.name for operation in operations)
    if set(kernel.operations) - set(described):
        limits = merged(limits, [OneOf("operation", described)])
    fixed = {limit.fact for limit in said if isinstance(limit, OneOf) and len(limit.values) == 1}
    layout = kernel.layout
    if layout is None and len(entry.requires_layouts) == 1:
        layout = entry.requires_layouts[0]
    accepts = tuple(each for each in kernel.accepts if each in entry.accepts or each in fixed)
    adapters = [adapter for operation in operations for adapter in operation.adapters.values()]
    folded_into = {adapter.gives for adapter in adapters if adapter.gives}
    return dataclasses.replace(
        kernel,
        backend=_narrowed_backend(kernel.backend, descriptor),
        limits=limits,
        layout=layout,
        accepts=accepts,
        renames={each: theirs for each, theirs in kernel.renames.items() if each in accepts},
        folds=tuple(each for each in kernel.folds if each in entry.folds) if folded_into <= set(accepts) else (),
        grad=kernel.grad and entry.grad,
        deterministic=entry.deterministic and kernel.deterministic,
        graph_safe=kernel.graph_safe and entry.is_cuda_graph_safe,
        handles_empty=kernel.handles_empty and entry.handles_empty,
        handles_negated=kernel.handles_negated and entry.handles_negated,
        priority=kernel.priority if entry.priority is None else entry.priority,
        priority_since=kernel.priority_since if entry.priority in (None, kernel.priority) else {},
        revision=Revision(name, sha256, kernel),
    )


def merged(limits: Sequence[Limit], more: Sequence[Limit]) -> tuple[Limit, ...]:
    """Limits that hold where all of both hold; bounds on the same thing become one limit, as tables and tests read."""
    found = list(limits)
    for limit in more:
        if limit in found:
            continue
        for index, other in enumerate(found):
            both = _both(other, limit)
            if both is not None:
                found[index] = both
                break
        else:
            found.append(limit)
    return tuple(found)


def _both(left: Limit, right: Limit) -> Limit | None:
    """One limit that says what two say; None where they speak of different things."""
    if isinstance(left, Dtype) and isinstance(right, Dtype):
        return Dtype(tuple(name for name in left.names if name in right.names))
    if isinstance(left, Arch) and isinstance(right, Arch):
        return Arch(_tightest(max, left.min, right.min), _tightest(min, left.max, right.max))
    if isinstance(left, Dim) and isinstance(right, Dim) and left.name == right.name and not left.one_of + right.one_of:
        multiple = math.lcm(left.multiple or 1, right.multiple or 1)
        low, high = _tightest(max, left.min, right.min), _tightest(min, left.max, right.max)
        return Dim(left.name, low, high, multiple if left.multiple or right.multiple else None)
    return None


def _tightest(choose: Callable[..., Any], *bounds: Any) -> Any:
    given = [bound for bound in bounds if bound is not None]
    return choose(given) if given else None


def _narrowed_backend(backend: Backend, descriptor: Descriptor) -> Backend:
    versions, requires = version_range(descriptor), tuple(descriptor.requires)
    if versions and versions != backend.versions:
        backend = dataclasses.replace(backend, versions=",".join(filter(None, [backend.versions, versions])))
    more = tuple(each for each in requires if each not in backend.requires)
    return dataclasses.replace(backend, requires=(*backend.requires, *more)) if more else backend


def version_range(descriptor: Descriptor) -> str:
    """The accepted versions as a PEP 440 specifier; a lone version is that one. Raises: ValueError if it is neither."""
    text = descriptor.backend_version or ""
    try:
        return f"=={Version(text)}" if text else ""
    except InvalidVersion:
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            raise ValueError(f"backend_version: wanted a version or a range such as '>=2.5,<3', got {text!r}") from None
        return text


def built(
    entry: Entry, operations: Sequence[Operation], descriptor: Descriptor, load: Callable[[Facts], Callable[..., Any]]
) -> Kernel:
    """A kernel of which everything but ``load`` is data."""
    limits = limits_of(entry, operations)
    params = {name for operation in operations for name in operation.schema.chosen}
    fixed = [limit.fact for limit in limits if isinstance(limit, OneOf) and len(limit.values) == 1]
    return Kernel(
        id=entry.kernel_id,
        operations=tuple(operation.name for operation in operations),
        backend=Backend(
            name=descriptor.backend,
            summary=descriptor.summary or f"Described by data, schema {descriptor.schema_version}",
            distribution=tuple(descriptor.distributions),
            versions=version_range(descriptor),
            requires=tuple(descriptor.requires),
            platforms=tuple(descriptor.platforms),
        ),
        load=load,
        layout=entry.requires_layouts[0] if len(entry.requires_layouts) == 1 else None,
        accepts=tuple(entry.accepts),
        implies=tuple(fact for fact in fixed if fact in params and fact not in entry.accepts),
        renames=entry.renames or {},
        folds=tuple(entry.folds),
        limits=limits,
        grad=entry.grad,
        deterministic=entry.deterministic,
        graph_safe=entry.is_cuda_graph_safe,
        jit=bool(entry.jit),
        handles_empty=entry.handles_empty,
        handles_negated=entry.handles_negated,
        priority=50 if entry.priority is None else entry.priority,
        aliases=tuple(entry.aliases or ()),
    )


def unbuildable(entry: Entry) -> Iterator[str]:
    """Why an entry alone does not make a kernel."""
    if entry.mode != "narrow":
        yield f"mode: wanted none, since there is no kernel yet, got {entry.mode!r}"
    for data in entry.limits:
        if data.get("kind") == CODE:
            yield f"limits: wanted data alone, since what code refuses it cannot say, got the code {data['text']!r}"

"""What one entry of a descriptor says about a kernel, as limits; and what a kernel declares, as an entry."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from layerzero.core.descriptor import Entry
from layerzero.core.device import generations
from layerzero.core.dtypes import DTYPES, dtype_name, dtype_named
from layerzero.core.errors import did_you_mean
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Arch, Dim, Dtype, LastStrideOne, Limit, Platform
from layerzero.core.limits import CODE, limit_data, limit_of
from layerzero.core.operation import Operation

_BOUNDS = {"head_dim": ("min_head_dim", "max_head_dim", "head_dim_multiple"), "seq_k": ("max_seq_len",)}
"""Axis of an operation to the fields that must be said where it has that axis."""

_ID = re.compile(r"[A-Za-z0-9_.+:/-]+")
"""What an id is made of."""

_SEQUENCES = ("seq_q", "seq_k")


def entry_of(kernel: Kernel, operations: Sequence[Operation]) -> Entry:
    """Write a kernel as an entry: :func:`limits_of` gives its data limits back."""
    rest = list(kernel.limits)
    arch = _taken(rest, Arch) or Arch()
    dim = _taken(rest, Dim, lambda each: each.name == "head_dim" and not each.one_of) or Dim("head_dim")
    longest = _longest(rest)
    dense = LastStrideOne(_tensors(operations))
    stride = dense in rest
    if stride:
        rest.remove(dense)
    fields: dict[str, Any] = {}
    if "cuda" in platforms_of(kernel):
        fields |= {"min_sm": _number(arch.min), "max_sm": _number(arch.max), "gpu_generation": _generations(arch)}
    if _has_axis("head_dim", operations):
        fields |= {"min_head_dim": dim.min, "max_head_dim": dim.max, "head_dim_multiple": dim.multiple}
    if _has_axis("seq_k", operations):
        fields["max_seq_len"] = longest
    layouts = list(dict.fromkeys(layout for operation in operations for layout in operation.layouts))
    only = kernel.layout if layouts else None
    return Entry(
        kernel_id=kernel.id,
        dtypes=list(dtypes_of(kernel, operations)),
        requires_layouts=[only] if only else layouts,
        produces_layout=only,
        requires_last_dim_stride1=stride,
        is_cuda_graph_safe=kernel.graph_safe,
        deterministic=bool(kernel.deterministic),
        grad=kernel.grad,
        handles_empty=kernel.handles_empty,
        handles_negated=kernel.handles_negated,
        accepts=list(kernel.accepts),
        folds=list(kernel.folds),
        limits=[limit_data(limit) for limit in rest if type(limit) is not Dtype] + _workspace(kernel),
        priority=kernel.priority,
        jit=kernel.jit,
        renames=dict(kernel.renames),
        aliases=list(kernel.aliases),
        **fields,
    )


def limits_of(entry: Entry, operations: Sequence[Operation]) -> tuple[Limit, ...]:
    """The limits that an entry without problems says; those that are code are left out."""
    found: list[Limit] = []
    if entry.dtypes:
        found.append(Dtype(tuple(dtype_name(dtype_named(name)) for name in entry.dtypes)))
    if entry.min_sm or entry.max_sm:
        found.append(Arch(_version(entry.min_sm), _version(entry.max_sm)))
    span = _span(entry.gpu_generation or ())
    if span is not None and span not in found:
        found.append(span)
    if entry.min_head_dim or entry.max_head_dim or entry.head_dim_multiple:
        low, high, multiple = (
            each or None for each in (entry.min_head_dim, entry.max_head_dim, entry.head_dim_multiple)
        )
        found.append(Dim("head_dim", low, high, multiple))
    if entry.max_seq_len:
        found += [Dim(axis, max=entry.max_seq_len) for axis in _SEQUENCES]
    if entry.requires_last_dim_stride1:
        found.append(LastStrideOne(_tensors(operations)))
    return (*found, *(limit_of(data) for data in entry.limits if data.get("kind") != CODE))


def code_texts(kernel: Kernel) -> list[str]:
    """What of a kernel is code, as entries name it."""
    return [data["text"] for data in (*map(limit_data, kernel.limits), *_workspace(kernel)) if data["kind"] == CODE]


def problems_of(entry: Entry, operations: Sequence[Operation], platforms: Sequence[str]) -> Iterator[str]:
    """What is wrong, incomplete or ambiguous in an entry under these operations, with wanted and got."""
    tensors = any(operation.schema.inputs for operation in operations)
    if bool(entry.dtypes) is not tensors:
        wanted = "one or more" if tensors else "none, since its operations have no tensors"
        yield f"dtypes: wanted {wanted}, got {entry.dtypes}"
    for name in entry.dtypes:
        try:
            dtype_named(name)
        except ValueError as error:
            yield f"dtypes: {error}"
    yield from _layout_problems(entry, operations)
    limits: list[Limit] = []
    for index, data in enumerate(entry.limits):
        problem = _limit_problem(data, limits)
        if problem:
            yield f"limits[{index}]: {problem}"
    named = [set(limit.names) for limit in limits if isinstance(limit, Platform)]
    yield from _sm_problems(entry, cuda=all("cuda" in names for names in (set(platforms), *named)))
    for axis, fields in _BOUNDS.items():
        for operation in operations:
            for field in fields:
                said = getattr(entry, field)
                if axis not in operation.facts and said not in (None, UNSET):
                    yield f"{field}: wanted nothing, since {operation.name} has no {axis}, got {said}"
                elif axis in operation.facts and said is UNSET:
                    yield f"{field}: wanted a number, or null for no bound, got nothing"
    yield from _ordered(entry, "min_sm", "max_sm")
    yield from _ordered(entry, "min_head_dim", "max_head_dim")
    yield from _name_problems(entry)
    known = sorted({argument for operation in operations for argument in operation.schema.arguments})
    owners = ", ".join(operation.name for operation in operations)
    for field in ("accepts", "folds"):
        for name in getattr(entry, field):
            if name not in known:
                yield f"{field}: wanted an argument of {owners}, got {name!r}{did_you_mean(name, known)}"


def _name_problems(entry: Entry) -> Iterator[str]:
    """What turns text round in tables, or is no name that a call can have."""
    for field, names in (("kernel_id", [entry.kernel_id]), ("aliases", entry.aliases or [])):
        for name in names:
            if not _ID.fullmatch(name):
                yield f"{field}: wanted letters of ASCII, digits and _ . - + : /, got {name!a}"
    for name in (entry.renames or {}).values():
        if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name) or name == "__debug__":
            yield f"renames: wanted a name that a Python call can have, got {name!a}"


def _layout_problems(entry: Entry, operations: Sequence[Operation]) -> Iterator[str]:
    for operation in operations:
        wrong = [layout for layout in entry.requires_layouts if layout not in operation.layouts]
        if wrong or bool(entry.requires_layouts) != bool(operation.layouts):
            wanted = " or ".join(operation.layouts) or "[], since it has none"
            yield f"requires_layouts: wanted {wanted} for {operation.name}, got {entry.requires_layouts}"
    if entry.produces_layout is not None and entry.produces_layout not in entry.requires_layouts:
        wanted = " or ".join(entry.requires_layouts) or "null"
        yield f"produces_layout: wanted {wanted}, as the inputs have it, got {entry.produces_layout!r}"


def _limit_problem(data: Mapping[str, Any], limits: list[Limit]) -> str:
    """What is wrong with one further limit; it is added to the list if nothing is."""
    if data.get("kind") == CODE:
        right = set(data) == {"kind", "text"} and isinstance(data["text"], str)
        return "" if right else f"code: wanted text and nothing else, got {dict(data)}"
    if data.get("kind") == "dtype":
        return "wanted dtypes in the field `dtypes` alone, got them twice"
    try:
        limits.append(limit_of(data))
    except ValueError as error:
        return str(error)
    return ""


def _sm_problems(entry: Entry, *, cuda: bool) -> Iterator[str]:
    names = entry.gpu_generation
    bounds = {"min_sm": entry.min_sm, "max_sm": entry.max_sm}
    if not cuda:
        said = {**bounds, "gpu_generation": names}
        for field, value in said.items():
            if value not in (None, UNSET):
                yield f"{field}: wanted nothing, since this kernel does not run on cuda, got {value}"
        return
    if names is None:
        for field, value in bounds.items():
            if value is UNSET:
                yield f"{field}: wanted a compute capability as 80, or null for no bound, got nothing"
        return
    order = [each.name for each in generations()]
    known = [name for name in names if name in order]
    if len(known) == len(names):
        places = sorted(order.index(name) for name in known)
        if not places or places != list(range(places[0], places[-1] + 1)):
            yield f"gpu_generation: wanted consecutive ones of {', '.join(order)}, got {names}"
    elif known or not all(isinstance(value, int) for value in bounds.values()):
        # A generation that this version does not know is what its compute capabilities say.
        yield f"gpu_generation: wanted {', '.join(order)}, or another name along with min_sm and max_sm, got {names}"


def _ordered(entry: Entry, low: str, high: str) -> Iterator[str]:
    least, most = getattr(entry, low), getattr(entry, high)
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield f"{low}: wanted at most {high}, {most}, got {least}"


def platforms_of(kernel: Kernel) -> tuple[str, ...]:
    """Platforms that a kernel runs on."""
    named = [limit.names for limit in kernel.limits if isinstance(limit, Platform)]
    if kernel.backend.origin == "decorator" and named:  # its backend stands for every decorated function
        return tuple(name for name in named[0] if all(name in names for names in named))
    return tuple(name for name in kernel.backend.platforms if all(name in names for names in named))


def dtypes_of(kernel: Kernel, operations: Sequence[Operation]) -> tuple[str, ...]:
    """Names of the dtypes that a kernel takes; what its operations take where it names none."""
    named = [limit.names for limit in kernel.limits if isinstance(limit, Dtype)]
    if named:
        return tuple(name for name in named[0] if all(name in names for names in named))
    allowed = [each.schema.inputs[0].dtype_constraint for each in operations if each.schema.inputs]
    if not allowed:  # operations without tensors have no dtypes
        return ()
    return tuple(name for name, dtype in DTYPES.items() if all(some is None or dtype in some for some in allowed))


def _taken(limits: list[Limit], kind: type[Any], fits: Any = lambda _: True) -> Any:
    """Take the first limit of a kind out of the list."""
    for limit in limits:
        if type(limit) is kind and fits(limit):
            limits.remove(limit)
            return limit
    return None


def _longest(limits: list[Limit]) -> int | None:
    """Take out a bound on the lengths of queries and keys, where there is one and the same."""
    for limit in limits:
        if type(limit) is Dim and limit.max is not None:
            both = [Dim(axis, max=limit.max) for axis in _SEQUENCES]
            if all(each in limits for each in both):
                for each in both:
                    limits.remove(each)
                return limit.max
    return None


def _workspace(kernel: Kernel) -> list[dict[str, Any]]:
    return [{"kind": CODE, "text": "workspace_bytes"}] if kernel.workspace_bytes is not None else []


def _tensors(operations: Sequence[Operation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tensor.name for operation in operations for tensor in operation.schema.required))


def _has_axis(axis: str, operations: Sequence[Operation]) -> bool:
    return any(axis in operation.facts for operation in operations)


def _number(sm: tuple[int, int] | None) -> int | None:
    return None if sm is None else sm[0] * 10 + sm[1]


def _version(number: Any) -> tuple[int, int] | None:
    return divmod(number, 10) if number else None


def _span(names: Sequence[str]) -> Arch | None:
    """The compute capabilities of known, consecutive generations."""
    known = [(each.low, each.high) for each in generations() if each.name in names]
    return Arch(min(known)[0], max(high for _, high in known)) if known else None


def _generations(arch: Arch) -> list[str] | None:
    """The generations that these bounds are, exactly; None where they cut through one."""
    names = [
        each.name for each in generations() if arch.min and arch.max and arch.min <= each.low and each.high <= arch.max
    ]
    return names if names and _span(names) == arch else None

"""Capability descriptors: the JSON form of declarations, its strict reading, and its hash.

What a descriptor does not say, it does not allow: flags that are missing are false, bounds that are missing make it
invalid (null says that there is none), and so does every unknown field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from layerzero.core.errors import did_you_mean

VERSION: Final = "2.0"
"""The schema version that is written."""

VERSION_1: Final = "1.0"
"""The schema version with flags for attention variants; it is read and translated."""

Bound = Annotated[int, Meta(ge=1)] | None | UnsetType


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel, under one of its operations; the others name it by its id."""

    kernel_id: Annotated[str, Meta(min_length=1, description="the kernel, said once")]
    dtypes: Annotated[
        list[str], Meta(description="dtypes of the first tensor; empty only where the operation has none")
    ]
    requires_layouts: Annotated[
        list[str], Meta(description="layouts of its tensors; empty only where the operation has none")
    ]
    mode: Annotated[
        Literal["narrow", "replace"],
        Meta(description="`narrow` adds to the code's limits; `replace` takes the place of those that are data"),
    ] = "narrow"
    produces_layout: Annotated[str | None, Meta(description="layout of its results: one of `requires_layouts`")] = None
    min_sm: Annotated[Bound, Meta(description="lowest NVIDIA compute capability, as 80; null for none")] = UNSET
    max_sm: Annotated[Bound, Meta(description="highest NVIDIA compute capability, inclusive")] = UNSET
    gpu_generation: Annotated[
        list[str] | None,
        Meta(description="consecutive NVIDIA generations; a name that is not known needs both sm bounds"),
    ] = None
    min_head_dim: Annotated[Bound, Meta(description="smallest head dim")] = UNSET
    max_head_dim: Annotated[Bound, Meta(description="largest head dim")] = UNSET
    head_dim_multiple: Annotated[Bound, Meta(description="what head dims are multiples of")] = UNSET
    max_seq_len: Annotated[Bound, Meta(description="largest number of queries, and of keys")] = UNSET
    requires_last_dim_stride1: Annotated[
        bool, Meta(description="whether required tensors must be dense along their last axis")
    ] = True
    is_cuda_graph_safe: Annotated[bool, Meta(description="may run under CUDA graph capture")] = False
    deterministic: Annotated[bool, Meta(description="gives the same bits each time, where its code says so")] = False
    grad: Annotated[bool, Meta(description="its backward pass is right")] = False
    handles_empty: Annotated[bool, Meta(description="takes tensors without elements")] = False
    handles_negated: Annotated[bool, Meta(description="reads the negative bit rightly")] = False
    accepts: Annotated[list[str], Meta(description="optional arguments that it honours")] = []
    folds: Annotated[list[str], Meta(description="arguments that may be folded into its mask")] = []
    limits: Annotated[list[dict[str, Any]], Meta(description="further limits, see below")] = []
    priority: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | None, Meta(description="what decides where nothing was measured")
    ] = None
    jit: Annotated[bool | None, Meta(description="compiles on first use; the code's word where there is code")] = None
    renames: Annotated[
        dict[str, str] | None, Meta(description="the callable's names of arguments; the code's word likewise")
    ] = None
    aliases: Annotated[list[str] | None, Meta(description="other names of the kernel; the code's word likewise")] = None


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kernels of one library."""

    schema_version: Annotated[Literal["2.0"], Meta(description="version of this format")]
    backend: Annotated[str, Meta(min_length=1, description="the library, as policies name it")]
    backend_version: Annotated[
        str | None, Meta(description="a version, or a range of them (PEP 440); null for a library without one")
    ]
    platforms: Annotated[list[str], Meta(min_length=1, description="cpu, cuda, rocm, hpu, xpu, mps")]
    ops: Annotated[
        dict[str, list[Entry | str]],
        Meta(description="operation to its kernels: each kernel's entry once, its id under further operations"),
    ]
    distributions: Annotated[list[str], Meta(description="packages whose version counts, tried in order")] = []
    requires: Annotated[list[str], Meta(description="further demands: `torch>=2.10`, `nvidia-cutlass>=4`")] = []
    summary: Annotated[str, Meta(description="one line for tables")] = ""


class Entry1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel in schema version 1.0."""

    kernel_id: Annotated[str, Meta(min_length=1)]
    dtypes: Annotated[list[str], Meta(min_length=1)]
    requires_layouts: list[str]
    min_sm: Bound = UNSET
    max_sm: Bound = UNSET
    gpu_generation: list[str] | None = None
    min_head_dim: Bound = UNSET
    max_head_dim: Bound = UNSET
    head_dim_multiple: Bound = UNSET
    max_seq_len: Bound = UNSET
    supports_gqa: bool = False
    supports_attn_mask: bool = False
    supports_dropout: bool = False
    produces_layout: str | None = None
    requires_last_dim_stride1: bool = True
    is_cuda_graph_safe: bool = False
    deterministic: bool = False
    fuses_ops: list[str] = []
    transform_cost_hint: float = 0.0


class Descriptor1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kernels of one library in schema version 1.0."""

    schema_version: Literal["1.0"]
    backend: Annotated[str, Meta(min_length=1)]
    backend_version: Annotated[str, Meta(min_length=1)]
    platform: str
    ops: dict[str, list[Entry1]]


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def decode(data: object) -> tuple[Descriptor | Descriptor1 | None, list[str]]:
    """Read plain values; all problems, each with field, wanted and got. The descriptor is None if there are any."""
    if not isinstance(data, Mapping):
        return None, [f"wanted an object with schema_version, backend and ops, got {_shown(data)}"]
    version = data.get("schema_version")
    if version not in (VERSION, VERSION_1):
        return None, [f"schema_version: wanted {VERSION!r} or {VERSION_1!r}, got {_shown(version)}"]
    top, entry = (Descriptor, Entry) if version == VERSION else (Descriptor1, Entry1)
    problems = list(_problems(top, {**data, "ops": {}}, ""))
    operations = data.get("ops")
    if not isinstance(operations, Mapping) or not operations:
        return None, [*problems, f"ops: wanted operations with lists of kernels, got {_shown(operations)}"]
    for operation, entries in operations.items():
        if not isinstance(entries, list) or not entries:
            problems.append(f"ops.{operation}: wanted a list of kernels, got {_shown(entries)}")
            continue
        for index, each in enumerate(entries):
            if version == VERSION and isinstance(each, str):  # a kernel whose entry stands under another operation
                continue
            problems += _problems(entry, each, f"ops.{operation}[{index}].")
    if problems:
        return None, problems
    if version == VERSION:
        return msgspec.convert(data, Descriptor, strict=True), []
    return msgspec.convert(data, Descriptor1, strict=True), []


def _problems(kind: type[_Struct], data: object, where: str) -> Iterator[str]:
    """Everything that is wrong with the fields of one object."""
    if not isinstance(data, Mapping):
        yield f"{where[:-1]}: wanted an object, got {_shown(data)}"
        return
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in data:
        if name not in fields:
            if kind is Entry and str(name).startswith("supports_"):
                yield f"{where}{name}: belongs to schema_version {VERSION_1!r}; name operations and `accepts` instead"
                continue
            yield f"{where}{name}: wanted a known field, got {name!r}{did_you_mean(str(name), fields)}"
    for name, field in fields.items():
        if name not in data:
            if field.required:
                yield f"{where}{name}: wanted a value, got nothing"
            continue
        try:
            msgspec.convert(data[name], field.type, strict=True)
        except msgspec.ValidationError as error:
            wanted = str(error).partition(", got ")[0].replace("Expected", "wanted")
            yield f"{where}{name}: {wanted}, got {_shown(data[name])}"


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse(text: str | bytes) -> object:
    """Parse JSON; an object that says a key twice is ambiguous. Raises: ValueError."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"wanted every key once, got {twice!r} twice in one object")
    return values


def sha256(data: object) -> str:
    """Hash the content: neither the order of keys nor white space changes it."""
    return hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest()

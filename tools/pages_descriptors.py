"""The generated page about capability descriptors: their fields, their limits, and one that narrows a kernel."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta

from layerzero.cli import listing
from layerzero.core.descriptor import VERSION_1, Descriptor, Entry
from layerzero.core.limit_kinds import Dtype
from layerzero.core.limits import KINDS
from layerzero.inspection.descriptors import exported
from tools.pages import HEADER, builtin_kernels, code, table

INTRO = """\
A capability descriptor says in JSON what a library's kernels can do. `layerzero kernels --descriptor --backend NAME`
writes one from the declarations; `layerzero descriptor check FILE` lists every problem of one.

**What a descriptor does not say, it does not allow.** A missing flag is false, and a missing operation is refused. A
missing bound, an unknown field or an unknown version makes the descriptor invalid. A bound of `null` is none."""

NARROW = """\
## Narrow a kernel without code

Write the descriptor of a library, leave out the kernels that stay as they are, and change a bound. Name the file in the
setting `descriptors`, in `LAYERZERO_DESCRIPTORS` (paths separated as in `PATH`), or in `lz.load_descriptor`. From the
next call on, its kernels take what both their code and the descriptor allow. `lz.unload_descriptor` undoes the loading.
Each descriptor has a hash: SHA-256 of its content, whatever the order of keys. Loading one that changes a kernel
drops every kept plan. `lz.explain` names the descriptor for what it alone refuses, and `layerzero doctor` lists what
is loaded. A file of the setting that is wrong stops every call with an error that says what is wrong, until it is
mended.

With `"mode": "replace"`, the entry's limits take the place of the kernel's limits that are data. A bound may then be
wider than the declared one, on the word of the descriptor's author. Limits that are code, dtypes, platforms,
layout, operations, arguments and flags are narrowed in this mode, too; they are never extended.

This one lets torch's CPU kernel have heads of at most 32:"""

BUILD = """\
## Build kernels from data

A plugin may ship a descriptor with its load functions:

```python
from pathlib import Path

import layerzero as lz


def load_attention(facts):
    import mine

    return mine.attention


KERNELS = lz.kernels_from_descriptor(Path(__file__).with_name("kernels.json"), {"mine.attention": load_attention})
```

An argument that a `one_of` limit pins to one value, and that the kernel does not accept, is not passed. A limit of kind
`code` cannot be built; such a kernel is declared in Python."""

CODE_KIND = """\
What is not in this table is code. A descriptor names it as `{"kind": "code", "text": ...}`. It stays in force whatever
a descriptor says. Code that the kernel does not have is an error."""

BOUNDS = """\
The sm bounds belong to kernels that run on cuda, the head dim and sequence bounds to operations with these axes.
Elsewhere they are left out or null."""

OLD = f"""\
## Version {VERSION_1}

It is read and translated. `platform` is one platform. `attention.causal` and `attention.full` are prefill with that
value of `causal`. `supports_gqa` adds the operation with grouped heads, `supports_attn_mask` and `supports_dropout`
accept those arguments. It allows nothing that it has no word for: other value dims, a causal mask over unequal lengths,
a scale.
`backend_version` is required and means that version. `fuses_ops` and `transform_cost_hint` change nothing: a fused
operation is an operation of its own, and costs of adaptations are not declared."""


def descriptors() -> str:
    """docs/descriptors.md."""
    blocks = [
        HEADER,
        "# Capability descriptors",
        INTRO,
        NARROW,
        f"```json\n{json.dumps(example(), indent=2)}\n```",
        BUILD,
        "## Fields",
        table(["field", "type", "when missing", "meaning"], _fields(Descriptor)),
        "Each kernel in `ops`:",
        table(["field", "type", "when missing", "meaning"], _fields(Entry)),
        BOUNDS,
        "## Limits",
        table(["kind", "fields", "meaning"], _kinds()),
        CODE_KIND,
        OLD,
    ]
    return "\n\n".join(blocks) + "\n"


def example() -> dict[str, Any]:
    """What torch's CPU kernel declares, with one bound changed."""
    kernel = next(each for each in builtin_kernels() if each.id == "torch.sdpa.cpu_flash")
    data = exported(kernel.backend, [kernel])
    data["ops"][kernel.operations[0]][0]["max_head_dim"] = 32
    return data


def _fields(kind: type[msgspec.Struct]) -> Iterator[list[str]]:
    for field in msgspec.structs.fields(kind):
        missing = "invalid" if field.required else "invalid where it applies" if field.default is UNSET else ""
        if not missing:
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            missing = f"`{json.dumps(default)}`"
        yield [f"`{field.name}`", _kind(field.type), missing, _meaning(field.type)]


def _kind(type_: Any) -> str:
    """The JSON type in words."""
    if get_origin(type_) is Annotated:
        return _kind(get_args(type_)[0])
    names = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
    if type_ in names:
        return names[type_]
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "object" if arguments[1] is Any else f"object of {_kind(arguments[1])}"
    if arguments and all(isinstance(each, str) for each in arguments):
        return " or ".join(f"`{each}`" for each in arguments)
    parts = [_kind(each) for each in arguments if each is not msgspec.UnsetType]
    return " or ".join(parts) if parts else "kernel"


def _meaning(type_: Any) -> str:
    return next(each.description or "" for each in get_args(type_)[1:] if isinstance(each, Meta))


def _kinds() -> Iterator[list[str]]:
    for name, kind in sorted(KINDS.items()):
        if kind is Dtype:  # a field of its own
            continue
        fields = [f"{each.name}: {listing.kind(each.type)}" for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
        meaning = (kind.__doc__ or "").splitlines()[0].replace("``", "`")
        yield [f"`{name}`", code(fields) or "none", meaning]

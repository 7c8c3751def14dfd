"""The tables of fields in docs/backends.md and docs/adding_operations.md, as docstrings of the declarations say."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from layerzero.cli.pages import table
from layerzero.core.arguments import REQUIRED, Axis, Param, TensorSchema
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Function, Operation
from layerzero.core.schema import OperationSchema


def kernel_fields() -> str:
    """The fields of a kernel."""
    return _fields(Kernel)


def operation_fields() -> str:
    """The fields of all that an operation and its function are declared with."""
    kinds = (OperationSchema, TensorSchema, Axis, Param, Case, Operation, Function)
    return "\n\n".join(f"### `lz.{kind.__name__}`\n\n{_fields(kind)}" for kind in kinds)


def _fields(kind: Any) -> str:
    """A row for each field: its default, what it says and when to set it. Raises: KeyError for one without a text."""
    meanings = dict(_described(kind))
    rows = [
        [f"`{each.name}`", _default(each), meanings[each.name].replace("``", "`")]
        for each in dataclasses.fields(kind)
        if each.init
    ]
    return table(["field", "default", "what it says, and when to set it"], rows)


def _described(kind: type) -> Iterator[tuple[str, str]]:
    """Names and texts of a docstring's section of attributes; a text goes on where its lines are indented further."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    for names, text in re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        yield from ((name, " ".join(text.split())) for name in names.split(", "))


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        told = repr(field.default) if isinstance(field.default, (tuple, frozenset)) else str(field.default)
        empty = field.default in ("", (), frozenset())
        return "empty" if empty else "required" if field.default is REQUIRED else f"`{told}`"
    return "required" if field.default_factory is dataclasses.MISSING else "empty"

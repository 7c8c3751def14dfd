"""The generated part of docs/backends.md: every field of ``Kernel``, as its docstring describes it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

from layerzero.cli.pages import table
from layerzero.core.kernel import Kernel


def kernel_fields() -> str:
    """A row for each field: its default, what it says and when to set it. Raises: KeyError for one without a text."""
    meanings = dict(_described(Kernel))
    rows = [
        [f"`{each.name}`", _default(each), meanings[each.name].replace("``", "`")]
        for each in dataclasses.fields(Kernel)
    ]
    return table(["field", "default", "what it says, and when to set it"], rows)


def _described(kind: type) -> Iterator[tuple[str, str]]:
    """Names and texts of a docstring's section of attributes; a text goes on where its lines are indented further."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        yield name, " ".join(text.split())


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!s}`" if field.default != "" else "empty"
    return "required" if field.default_factory is dataclasses.MISSING else "empty"

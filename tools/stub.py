"""The stub that editors read, ``__init__.pyi``: every exported name, imported from where it is written.

A function is written out where a flag decides what it returns: its module does not say so to a type checker.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping

import layerzero
from layerzero.core.operation import Function
from layerzero.core.plain import PlainFunction
from layerzero.ops import EXPORTS, FUNCTIONS, PLAIN_FUNCTIONS

_PACKAGE = vars(layerzero)
_WIDTH = 120
_SOURCES = {
    "Any": "typing",
    "Literal": "typing",
    "Mapping": "collections.abc",
    "ProcessGroup": "torch.distributed",
    "Sequence": "collections.abc",
    "Tensor": "torch",
    "overload": "typing",
}
"""Where names of signatures come from, beside what layerzero exports itself."""


def stub() -> str:
    """Write the stub from what is exported and declared."""
    known: dict[str, Function | PlainFunction] = {**FUNCTIONS, **PLAIN_FUNCTIONS}
    homes = {name: function.signature.__module__ for name, function in known.items() if not _flag(function)}
    functions = [known[name] for name in sorted(known.keys() - homes.keys())]
    written = "\n".join(part for function in functions for part in _functions(function))
    aliases = [f"{alias} = {name}" for alias, name in _PACKAGE["_ALIASES"].items()]
    exported = [f'    "{name}",' for name in layerzero.__all__]
    parts = [
        "# ruff: noqa: PYI021, A001  # editors show these docstrings; one name is a built-in's",
        "# Written by `python -m tools docs` from the declarations; edit those.",
        "\n".join(_imports(written, homes)),
        "",
        "__all__ = [",
        *exported,
        "]",
        "",
        "__version__: str",
        "",
        *aliases,
        "",
        written,
    ]
    return "\n".join(parts)


def _flag(function: Function | PlainFunction) -> str:
    """The flag that decides how many results there are, empty if none does."""
    return next((each.when for each in function.operations[0].schema.outputs if each.when), "")


def _imports(written: str, functions: Mapping[str, str]) -> Iterator[str]:
    used: dict[str, list[str]] = defaultdict(list)
    named = {node.id for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Name)}
    for name, module in _SOURCES.items():
        if name in named:
            used[module].append(name)
    for module in ("collections.abc", "typing"):
        if used[module]:
            yield _import(module, used[module])
    yield ""
    if "torch" in named:
        yield "import torch"
    yield from (_import(module, used[module]) for module in ("torch", "torch.distributed") if used[module])
    yield ""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, module in {**_PACKAGE["_HOME"], **EXPORTS, **functions}.items():
        homes[module].append(name)
    for name, module in _PACKAGE["_MODULES"].items():
        parent, _, last = module.rpartition(".")
        homes[parent].append(last if last == name else f"{last} as {name}")
    for module in sorted(homes):
        yield _import(module, homes[module])


def _import(module: str, names: list[str]) -> str:
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in ordered), ")"])


def _functions(function: Function | PlainFunction) -> Iterator[str]:
    """A function, with an overload for each value of the flag that decides what it returns."""
    returns, flag = str(inspect.signature(function.signature).return_annotation), _flag(function)
    without, with_it = returns.split(" | ")
    yield "\n".join(["@overload", _written(function, {flag: ("Literal[False]", "False")}, without, "...")])
    yield "\n".join(["@overload", _written(function, {flag: ("Literal[True]", None)}, with_it, "...")])
    yield "\n".join(["@overload", _written(function, {}, returns, "")])


def _written(
    function: Function | PlainFunction, changed: dict[str, tuple[str, str | None]], returns: str, body: str
) -> str:
    parameters, keyword_only = [], False
    for each in inspect.signature(function.signature).parameters.values():
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            parameters.append("*")
            keyword_only = True
        annotation, default = str(each.annotation), None if each.default is each.empty else _literal(each.default)
        if each.name in changed:
            annotation, default = changed[each.name]
        parameters.append(f"{each.name}: {annotation}" + (f" = {default}" if default is not None else ""))
    head = f"def {function.name}({', '.join(parameters)}) -> {returns}:"
    if len(head) + 4 > _WIDTH or not body:
        lines = [f"def {function.name}(", *(f"    {each}," for each in parameters), f") -> {returns}:"]
        head = head if len(head) <= _WIDTH and not body else "\n".join(lines)
    if body:
        return f"{head} {body}"
    doc = (inspect.getdoc(function.signature) or "").splitlines()
    text = [f'    """{doc[0]}', *(f"    {line}" if line else "" for line in doc[1:])]
    if len(doc) == 1:
        return f'{head}\n    """{doc[0]}"""\n'
    return "\n".join([head, *text, '    """', ""])


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)

"""What editors see is what there is: ``__init__.pyi`` names everything that is exported, with the real signatures."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.ops import FUNCTIONS, PLAIN_FUNCTIONS

STUB = ast.parse(Path(lz.__file__).with_name("__init__.pyi").read_text())


def defined():
    for node in STUB.body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("layerzero"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id
        elif isinstance(node, ast.Assign) and node.targets[0].id != "__all__":
            yield node.targets[0].id


def test_the_stub_names_everything_that_is_exported():
    assert sorted(set(defined())) == lz.__all__
    exported = next(node for node in STUB.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    assert ast.literal_eval(exported.value) == lz.__all__


def test_imported_names_are_the_exported_objects():
    functions = FUNCTIONS | PLAIN_FUNCTIONS
    for node in STUB.body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("layerzero"):
            source = __import__(node.module, fromlist=[alias.name for alias in node.names])
            for name in [alias.name for alias in node.names]:  # of functions a module has the signature alone
                real = functions[name].signature if name in functions else getattr(lz, name)
                assert getattr(source, name) is real, (node.module, name)


@pytest.mark.parametrize("node", [n for n in STUB.body if isinstance(n, ast.Assign)][1:], ids=ast.unparse)
def test_aliases_are_the_same_object(node):
    assert getattr(lz, node.targets[0].id) is getattr(lz, node.value.id)


def parameters(node):
    """(name, kind, default, annotation) of a stub's function, as text."""
    arguments = node.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    pairs = [(arg, default, "POSITIONAL_OR_KEYWORD") for arg, default in zip(arguments.args, defaults, strict=True)]
    pairs += [(a, d, "KEYWORD_ONLY") for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for arg, default, kind in pairs:
        value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        yield arg.arg, kind, value, ast.unparse(arg.annotation)


def real(function):
    for each in inspect.signature(function).parameters.values():
        yield each.name, each.kind.name, each.default, each.annotation


@pytest.mark.parametrize("name", ["attention", "paged_attention"])
def test_signatures_are_those_of_the_functions(name):
    *overloads, last = [node for node in STUB.body if isinstance(node, ast.FunctionDef) and node.name == name]
    function = FUNCTIONS[name].signature  # a builtin shows the same without annotations
    signature = inspect.signature(function)
    assert list(parameters(last)) == list(real(function))
    assert ast.unparse(last.returns) == signature.return_annotation
    for node in overloads:  # they differ in the flag that decides the result, and in the result
        assert [each for each in parameters(node) if each[0] != "return_lse"] == [
            each for each in real(function) if each[0] != "return_lse"
        ]
    results = [ast.unparse(node.returns) for node in overloads]
    assert " | ".join(results) == signature.return_annotation

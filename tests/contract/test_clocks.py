"""No test passes or fails by how long something took: two cores that others share take any time for anything."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = {f"{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")}


def _reads_a_clock(node):
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in CLOCKS and getattr(node.func.value, "id", "") == "time"
    return getattr(node.func, "id", "") in CLOCKS - {"time"}


def _is_a_duration(node):
    """A difference of which one side is read from a clock now."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and any(map(_reads_a_clock, ast.walk(node)))


def asserted(source):
    """Lines of a module that assert something of a duration that their function took from a clock."""
    if not any(f"{clock}()" in source for clock in CLOCKS):  # most modules read none
        return []
    found = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        durations = set()
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.NamedExpr, ast.AugAssign)) and any(
                map(_is_a_duration, ast.walk(node.value))
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                durations |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                read = list(ast.walk(node.test))
                names = {each.id for each in read if isinstance(each, ast.Name)}
                if names & durations or any(map(_reads_a_clock, read)):
                    found.add(node.lineno)
    return sorted(found)


@pytest.mark.parametrize("test", [
    "assert time.perf_counter() - before < 1",
    "took = time.monotonic() - before\n    assert took < 5",
    "took = (perf_counter_ns() - before) / 1e9\n    assert 0 < took",
])  # fmt: skip
def test_a_planted_duration_is_found(test):
    assert asserted(f"def test_it():\n    before = 0\n    {test}\n")


def test_no_test_asserts_how_long_something_took():
    files = [path for path in sorted(TESTS.rglob("*.py")) if "gpu" not in path.relative_to(TESTS).parts]
    assert len(files) > 100
    found = [f"{path.relative_to(TESTS)}:{line}" for path in files for line in asserted(path.read_text())]
    assert not found, f"wanted counts, orders or a clock of the test's own, got durations: {', '.join(found)}"

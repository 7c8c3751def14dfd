"""Declarations and choices are those of the golden files; what changes one is a decision that its commit explains."""

from __future__ import annotations

import pytest

from golden import choices, declarations
from golden.files import difference, read


def test_declarations():
    """Schemas, cases, derived facts, work, signatures, docstrings, torch schemas and errors are as they were."""
    assert not (found := difference("declarations.txt", read("declarations.txt"), list(declarations.lines()))), found


@pytest.mark.parametrize("part", [pytest.param(range(0, 100)), pytest.param(range(100, 2000), marks=pytest.mark.slow)])
def test_choices(part):
    """Drawn calls choose the same kernels, in the same order, by the same terms, on six devices."""
    wanted = [line for line in read("choices.txt") if int(line.split(" ", 1)[0]) in part]
    assert not (found := difference("choices.txt", wanted, list(choices.lines(part)))), found

"""Declarations and choices are those of the golden files; what changes one is a decision that its commit explains."""

from __future__ import annotations

import pytest
import torch

from golden import choices
from golden.files import computed, difference, read

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the golden files are of torch 2.13, whose names stand in texts"
)


def test_declarations():
    """Schemas, cases, derived facts, work, signatures, docstrings, torch schemas and errors are as they were."""
    name = "declarations.txt"
    assert not (found := difference(name, read(name), computed(name))), found


@pytest.mark.parametrize(
    ("first", "end"), [(0, 100), pytest.param(100, choices.CALLS, marks=pytest.mark.slow)], ids=["few", "rest"]
)
def test_choices(first, end):
    """Drawn calls choose the same kernels, in the same order, by the same terms, on six devices."""
    name = "choices.txt"
    wanted = [line for line in read(name) if first <= int(line.split(" ", 1)[0]) < end]
    assert not (found := difference(name, wanted, computed(name, first, end))), found

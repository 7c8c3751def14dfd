"""Declarations, choices and calls are those of the golden files; a commit that changes one explains it."""

from __future__ import annotations

import pytest
import torch

from golden import choices
from golden.files import computed, difference, read
from layerzero.engine import accelerator

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the golden files are of torch 2.13, whose names stand in texts"
)


def _assert_choices(found: list[str], first: int, end: int) -> None:
    name = "choices.txt"
    wanted = [line for line in read(name) if first <= int(line.split(" ", 1)[0]) < end]
    assert not (differs := difference(name, wanted, found)), differs


def test_declarations_calls_and_choices():
    """Schemas, cases, derived facts, work, signatures, docstrings, torch schemas and errors are as they were.

    The calls whose overhead is measured give the same numbers and make the same calls of functions. Drawn calls choose
    the same kernels, in the same order, by the same terms, on six devices; here two of each function.
    """
    few = computed(0, 2)
    for name in ("declarations.txt", "calls.txt") if accelerator.HOT is not None else ("declarations.txt",):
        assert not (found := difference(name, read(name), few[name])), found
    _assert_choices(few["choices.txt"], 0, 2)


@pytest.mark.slow
def test_more_choices():
    """The rest of them do, too."""
    _assert_choices(computed(2, choices.DRAWS)["choices.txt"], 2, choices.DRAWS)

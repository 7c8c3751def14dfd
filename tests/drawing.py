"""How often a law is drawn, and which of many alike are tested each time."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def examples(whole: int) -> int:
    """So many in ``make test-all``; 10 in 100 of them where slow tests are left out."""
    return max(1, whole * settings().max_examples // 100)


def mostly(each: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Parameters of a test: those that are not quick are ``slow``."""
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in each]


def pairs(first: Iterable[Any], second: Sequence[Any], quick: Container[Any]) -> list[Any]:
    """Parameters of a test of both: of the first that are quick each comes with one of the second; others are slow."""
    first = list(first)
    fast = {(one, second[place % len(second)]) for place, one in enumerate(each for each in first if each in quick)}
    both = itertools.product(first, second)
    return [each if each in fast else pytest.param(*each, marks=pytest.mark.slow) for each in both]


def at_once(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``pytest.mark.parametrize`` as one test, of cases that take less than a test does and leave nothing behind.

    What fails says which it was. A test of which every case is skipped is skipped.
    """
    named, cases = [name.strip() for name in names.split(",")], list(cases)

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def each(**fixtures: Any) -> None:
            ran, skipped = 0, None
            for case in cases:
                given = dict(zip(named, case if len(named) > 1 else (case,), strict=True))
                try:
                    function(**fixtures, **given)
                    ran += 1
                except pytest.skip.Exception as skip:
                    skipped = skip
                except BaseException as error:
                    error.add_note(f"the case: { {name: str(value)[:120] for name, value in given.items()} }")
                    raise
            if skipped is not None and not ran:
                raise skipped

        left = [parameter for name, parameter in signature.parameters.items() if name not in named]
        each.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return each

    return wrap

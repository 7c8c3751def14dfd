"""How long ``lz.optimize`` may take: one end for all that it runs, and what it left out to keep it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from layerzero.tuning.measuring.timing import Deadline

CLOCK: Callable[[], float] = time.monotonic
"""Tests set another one."""

RUN = "a run of the model"
"""What a run of the caller's inputs is called among steps."""


@dataclass
class LeftOut:
    """A step that was not begun.

    Attributes:
        what: the step, and what is done without it.
        needed_s: what it was expected to take, by steps like it; 0 where there was none.
        left_s: what was left then.
        times: how often it was left out.
    """

    what: str
    needed_s: float
    left_s: float
    times: int = 1

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        needed = f"about {self.needed_s:.2g} s" if self.needed_s else "an unknown time"
        return f"{self.what}{often}: {needed}, {self.left_s:.2g} s were left"


class TimeLeft:
    """What is left of the time for one model, and how long its steps take.

    Attributes:
        budget_s: seconds from now; None for no end.
        deadline: when that is over.
        left_out: the steps that there was no time for.
    """

    def __init__(self, budget_s: float | None) -> None:
        self.budget_s, self.deadline = budget_s, Deadline(budget_s, CLOCK)
        self.left_out: list[LeftOut] = []
        self._least_s: dict[str, float] = {}

    @contextmanager
    def taking(self, like: str) -> Iterator[None]:
        """Learn what a step takes: the least that one like it took, for the first also loads and compiles."""
        began = self.deadline.spent_s
        yield
        self._least_s[like] = min(self._least_s.get(like, float("inf")), self.deadline.spent_s - began)

    def expected_s(self, like: str, times: float = 1.0) -> float:
        """What so many steps are likely to take; 0 before the first."""
        return times * self._least_s.get(like, 0.0)

    def fits(self, like: str, times: float = 1.0) -> bool:
        """Whether so many steps are likely to end in time."""
        left = self.deadline.left_s
        return left > 0.0 and self.expected_s(like, times) <= left

    def allows(self, what: str, like: str, times: float = 1.0) -> bool:
        """Whether a step may begin; one that may not is kept for the report."""
        if self.fits(like, times):
            return True
        self.leave(what, like, times)
        return False

    def leave(self, what: str, like: str, times: float = 1.0, left_s: float | None = None) -> None:
        """Keep for the report that a step was left out; ``left_s``: what was left then, if not now."""
        needed = self.expected_s(like, times)
        left = max(self.deadline.left_s if left_s is None else left_s, 0.0)
        for each in self.left_out:
            if each.what == what:
                each.times, each.needed_s = each.times + 1, each.needed_s + needed
                return
        self.left_out.append(LeftOut(what, needed, left))

    def lines(self) -> list[str]:
        """What a report says of it."""
        if self.budget_s is None or not self.left_out:
            return []
        over = f"left out for want of time, of which budget_s gave {self.budget_s:g} s:"
        return [over, *(f"  {each}" for each in self.left_out)]

"""How long a run may take, what is left of it, and how long a call is likely to take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from layerzero.core.facts import Facts

_FLOP_S = {"cuda": 1e12}
_BYTE_S = {"cuda": 1e11}
_CPU_FLOP_S, _CPU_BYTE_S = 5e9, 5e8
"""What is assumed of measuring a call, with its comparisons in float64, before the first of its operation was measured:
a tenth of what devices do, since each of some kernels runs some dozens of times."""

_LARGE_ELEMENTS, _ELEMENT_S = 2**24, 4.5e6
"""On a CPU, tensors from here on are drawn, widened, copied and compared for every kernel: decoding over 268 million
elements took 56 s in float32, where its work says 2.4, and in bfloat16 it was the last call of a run that took 116 s of
90 (AMD EPYC, two cores, 2026-11-23)."""


class TimeOverError(Exception):
    """The time of a run is over before a call could be measured; nothing of it is kept."""


class Deadline:
    """The end of a run: so many seconds from now, or never. ``now`` reads a clock that only goes forward."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds >= 0):
            raise ValueError(f"budget_s: wanted seconds, 0 or more, got {seconds!r}")
        self._now = now
        self.began = now()
        self.until = math.inf if seconds is None else self.began + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite where there is no end."""
        return self.until - self._now()

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return self._now() - self.began

    def passed(self) -> bool:
        """Whether it is over."""
        return self.left_s <= 0.0

    def sooner(self, seconds: float) -> Deadline:
        """The end of a part of the run that leaves so many seconds for what follows it."""
        return Deadline(None if self.until == math.inf else max(self.left_s - seconds, 0.0), self._now)

    def part(self, share: float) -> Callable[[], bool]:
        """A question whether this share of what is left now is over."""
        left = self.left_s
        until = math.inf if left == math.inf else self._now() + share * left
        return lambda: self._now() >= until


SHOWS_S = 0.05
"""Assumed seconds from which on a call's own time says something of larger ones. What a small one takes is loading,
proving and sampling: by that alone, an H100 left half of its calls as too large after the first (2026-11-22)."""


class Pace:
    """How long measuring a call takes: what any call of its operation does, and what grows with its work."""

    def __init__(self) -> None:
        self._least_s: dict[str, float] = {}
        self._largest: dict[str, tuple[float, float]] = {}

    def seconds(self, facts: Facts) -> float:
        """How long measuring a call is likely to take; 0 where the operation does not say its work."""
        name, assumed = facts.operation.name, _assumed_s(facts)
        if assumed <= 0:
            return 0.0
        _, factor = self._largest.get(name, (0.0, 1.0))
        return self._least_s.get(name, 0.0) + factor * assumed

    def took(self, facts: Facts, seconds: float) -> None:
        """Learn from a call that was measured: of small ones the quickest, of large ones the largest tells most."""
        name, assumed = facts.operation.name, _assumed_s(facts)
        if assumed < SHOWS_S:
            self._least_s[name] = min(self._least_s.get(name, math.inf), seconds)
            return
        factor = max(seconds - self._least_s.get(name, 0.0), 0.0) / assumed
        self._largest[name] = max(self._largest.get(name, (0.0, 0.0)), (assumed, factor))


def _assumed_s(facts: Facts) -> float:
    if facts.operation.work is None:
        return 0.0
    work, kind = facts.operation.work(facts), facts.device.torch_type
    sizes = [(math.prod(each.shape), each.dtype.itemsize) for each in facts.tensors.values()]
    elements = sum(count for count, _ in sizes)
    moved = max(work.bytes, sum(count * size for count, size in sizes))  # what is not read is drawn all the same
    handled_s = elements / _ELEMENT_S if kind == "cpu" and elements >= _LARGE_ELEMENTS else 0.0
    return max(work.flops / _FLOP_S.get(kind, _CPU_FLOP_S), moved / _BYTE_S.get(kind, _CPU_BYTE_S), handled_s)

"""Whether a model is faster as a whole: stock first, rounds in turn, kind by kind; what does not pay is taken out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

LEAST = 0.01
"""Gain below which a kind of modules is left as it was: less is within the noise, and stock is known to users."""

Sample = Callable[[], float]
"""Runs the model once, as it is now, and tells the seconds."""

Switch = Callable[[bool], None]
"""Puts the modules of one kind on or off."""


@dataclass
class Timed:
    """Medians of a gate.

    Attributes:
        stock_s, after_s: a run before, and with what was kept.
        gains: of each kind, how much longer a run takes without it, in parts of a run with everything.
        dropped: kinds that were taken out again.
        rounds: how many times each was timed.
    """

    stock_s: float
    after_s: float
    gains: dict[str, float] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    rounds: int = 0

    @property
    def speedup(self) -> float:
        """How many times as fast."""
        return self.stock_s / self.after_s

    def __str__(self) -> str:
        times = f"before {self.stock_s * 1e3:.2f} ms, after {self.after_s * 1e3:.2f} ms"
        lines = [f"{times}: {self.speedup:.2f} times as fast (medians of {self.rounds} rounds, taken in turn)"]
        for kind, gain in self.gains.items():
            kept = "taken out again" if kind in self.dropped else "kept"
            lines.append(f"  {kind}: {gain:+.1%} for the whole model, {kept}")
        return "\n".join(lines)


def gate(switches: Mapping[str, Switch], sample: Sample, rounds: int) -> Timed:
    """Time stock, everything, and everything without each kind, in turn; leave on what gains.

    Before it, and after it where nothing gains, everything is off.
    """

    def set_on(kinds: Sequence[str]) -> None:
        for kind, switch in switches.items():
            switch(kind in kinds)

    everything = list(switches)
    variants: dict[str, list[str]] = {"": [], "*": everything}
    if len(everything) > 1:
        variants |= {kind: [each for each in everything if each != kind] for kind in everything}
    times = _race(variants, set_on, sample, rounds)
    gains = {}
    for kind in everything:
        without = times[kind] if kind in times else times[""]
        gains[kind] = gain(without, times["*"])
    kept = [kind for kind in everything if gains[kind] >= LEAST]
    dropped = [kind for kind in everything if kind not in kept]
    after = times["*"]
    if dropped and kept:
        again = _race({"": [], "*": kept}, set_on, sample, rounds)
        times[""], after = again[""], again["*"]
    if kept and gain(times[""], after) < LEAST:
        dropped, kept = everything, []
    set_on(kept)
    stock_s = statistics.median(times[""])
    return Timed(stock_s, statistics.median(after) if kept else stock_s, gains, dropped, rounds)


def gain(before: Sequence[float], after: Sequence[float]) -> float:
    """How much longer runs took before, in parts of those after: by pairs or by medians, whichever says less.

    Either alone may be fooled where something else takes the machine for a while: of two pairs the median is their
    mean, and one slow run in it may count as ten.
    """
    by_pairs = statistics.median(a / b for a, b in zip(before, after, strict=True))
    return min(by_pairs, statistics.median(before) / statistics.median(after)) - 1


def _race(
    variants: Mapping[str, Sequence[str]], set_on: Callable[[Sequence[str]], None], sample: Sample, rounds: int
) -> dict[str, list[float]]:
    """Samples of each variant; the first runs, in which kernels are chosen and weights packed, do not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, kinds in variants.items():
            set_on(kinds)
            seconds = sample()
            if turn:
                times[name].append(seconds)
    return times

"""Whether a model is faster as a whole: rounds of all variants in turn, ratios within each; what does not pay goes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

LEAST = 0.01
"""Gain below which a kind of modules is left as it was: less is within the noise, and stock is known to users."""

MOST_ROUNDS = 4
"""Rounds at most, in those that were asked for, where ratios lie on both sides of :data:`LEAST`."""

Sample = Callable[[], float]
"""Runs the model once, as it is now, and tells the seconds."""

Pair = tuple[float, float]
"""Seconds of one round: without something, and with it."""

Switch = Callable[[bool], None]
"""Puts the modules of one kind on or off."""


@dataclass
class Timed:
    """What a gate found.

    Attributes:
        stock_s, after_s: a run before, and with what was kept; medians.
        gains: of each kind, how much longer a run takes without it, in parts of a run with everything.
        dropped: kinds that were taken out again.
        rounds: how many rounds the model before and after was timed in.
        speedup: how many times as fast, the median of the rounds' ratios.
        together: whether there was no time to time kinds apart; each then has the gain of all.
    """

    stock_s: float
    after_s: float
    gains: dict[str, float] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    rounds: int = 0
    speedup: float = 1.0
    together: bool = False

    def __str__(self) -> str:
        lines = [f"a run takes {self.stock_s * 1e3:.2f} ms; nothing was kept, so it is as before"]
        if len(self.dropped) < len(self.gains):
            times = f"before {self.stock_s * 1e3:.2f} ms, after {self.after_s * 1e3:.2f} ms"
            how = f"median of the ratios of {self.rounds} rounds, in each of which both ran"
            lines = [f"{times}: {self.speedup:.2f} times as fast ({how})"]
        if self.together:
            kinds = ", ".join(self.gains)
            verdict = "taken out again" if self.dropped else "kept"
            return "\n".join((*lines, f"  {kinds}: {verdict} together; there was no time to time each apart"))
        for kind, gain in self.gains.items():
            kept = "taken out again" if kind in self.dropped else "kept"
            lines.append(f"  {kind}: {gain:+.1%} for the whole model, {kept}")
        return "\n".join(lines)


Fits = Callable[[int], bool]
"""Whether there is time for so many samples."""


def gate(
    switches: Mapping[str, Switch],
    sample: Sample,
    rounds: int,
    tell: Callable[[int, int], None] = lambda *_: None,
    fits: Fits = lambda _: True,
) -> Timed | None:
    """Time stock, everything, and everything without each kind, in turn; leave on what gains.

    What a round's samples have in common, such as a neighbour that takes half of the cores, their ratio does not have.
    Rounds go on, to :data:`MOST_ROUNDS` times ``rounds``, for variants whose ratios do not say yet on which side of
    :data:`LEAST` they lie; ``tell`` is told before each, of how many at least.
    Where nothing gains, everything is off afterwards.

    No round begins that ``fits`` says there is no time for. Kinds are timed together, and no gain of each is told,
    where there is none for ``rounds`` of each. None, and everything off, where there is no time for one round.
    """

    def set_on(kinds: Sequence[str]) -> None:
        for kind, switch in switches.items():
            switch(kind in kinds)

    everything = list(switches)
    variants: dict[str, list[str]] = {"": []}
    several = len(everything) > 1
    together = several and not fits((len(everything) + 2) * (rounds + 1))
    if several and not together:
        variants |= {kind: [each for each in everything if each != kind] for kind in everything}
    pairs = _race(variants, everything, set_on, sample, rounds, tell, fits)
    if not pairs[""]:
        set_on([])
        return None
    gains = {kind: gain(pairs.get(kind, pairs[""])) for kind in everything}
    kept = [kind for kind in everything if gains[kind] >= LEAST]
    whole = pairs[""]
    if kept and len(kept) < len(everything):
        whole = _race({"": []}, kept, set_on, sample, rounds, tell, fits)[""]
        if not whole:  # nothing is kept that was not timed as a whole
            whole, kept = pairs[""], everything
    if gain(whole) < LEAST:
        kept = []
    dropped = [kind for kind in everything if kind not in kept]
    set_on(kept)
    stock_s, after_s = (statistics.median(each) for each in zip(*whole, strict=True))
    if not kept:
        return Timed(stock_s, stock_s, gains, dropped, len(whole), together=together)
    return Timed(stock_s, after_s, gains, dropped, len(whole), 1 + gain(whole), together)


def gain(pairs: Sequence[Pair]) -> float:
    """How much longer runs took before, in parts of those after: the median of the rounds' ratios.

    Of an even number it is the lower one of the middle: the mean of two would let one slow run count as ten.
    """
    return statistics.median_low([before / after for before, after in pairs]) - 1


def _is_decided(pairs: Sequence[Pair]) -> bool:
    """Whether ratios lie on one side of :data:`LEAST` more often than a coin does, by two standard deviations."""
    above = sum(before / after - 1 >= LEAST for before, after in pairs)
    return abs(2 * above - len(pairs)) >= 2 * math.sqrt(len(pairs))


def _race(
    variants: Mapping[str, Sequence[str]],
    against: Sequence[str],
    set_on: Callable[[Sequence[str]], None],
    sample: Sample,
    rounds: int,
    tell: Callable[[int, int], None],
    fits: Fits,
) -> dict[str, list[Pair]]:
    """Seconds of each variant and of what it is compared with, by rounds, of which every second goes backwards.

    The first runs, in which kernels are chosen and weights packed, do not count.
    """
    pairs: dict[str, list[Pair]] = {name: [] for name in variants}
    if not fits(2 * (len(variants) + 1)):
        return pairs
    for kinds in (*variants.values(), against):
        set_on(kinds)
        sample()
    for turn in range(rounds * MOST_ROUNDS):
        open_ = [name for name in variants if turn < rounds or not _is_decided(pairs[name])]
        if not open_ or not fits(len(open_) + 1):
            break
        tell(turn, max(rounds, turn + 1))
        seconds: dict[str | None, float] = {}
        order: list[str | None] = [*open_, None]
        for name in order if turn % 2 == 0 else reversed(order):
            set_on(against if name is None else variants[name])
            seconds[name] = sample()
        for name in open_:
            pairs[name].append((seconds[name], seconds[None]))
    return pairs

"""Times of variants beside each other: interleaved rounds, ratios within each, until the rounds agree.

With a caller's inputs the whole model is timed. Without them nothing says what a model will be called with: modules are
timed at a few sizes, by their own code, with packed weights, and with weights as they lie. Decoders see one token, a
few, and a prompt. Each has another fastest way: at one token of a small model the Python around kernels decides, and a
packed product may cost more than torch's. A decision is made once a process for modules of one shape.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from layerzero.core.errors import LayerZeroError, in_short
from layerzero.engine.config import current_policy
from layerzero.engine.frozen_choices import ranks_choose
from layerzero.integrations.optimize.swaps.swap import FROM_MANY, SIZES, Way
from layerzero.tuning.measurement.timing import TimeOverError

LEAST = 0.01
"""A gain below this is noise, and so is a loss: stock stays, which users know."""

OUTWEIGHED: Mapping[bool, tuple[float, float]] = {False: (0.5, 0.1), True: (0.7, 0.2)}
"""What takes at most the first part of the time at one size may lose the second part at another; by whether the CPU
emulates its dtype. Products of 64 to 512 features then take for 64 rows 0.15 to 0.33 of their time in float16 and 0.50
to 0.67 in bfloat16, and with Python around them 1.04 to 1.16 for one, a few us (AMD EPYC Zen 4, bfloat16 as on AVX-512
without it, one thread, 2026-11-26)."""

FINE_S = 1e-6
"""A norm takes 10 us. Windows counts a thread's time in steps of 15.6 ms, in which it would take none."""

WALL: Callable[[], float] = time.perf_counter
"""What a caller waits for; runs of the whole model count by it."""


def _alone() -> Callable[[], float]:
    """The time of this thread, which no neighbour disturbs; the clock on the wall where that is too coarse."""
    return time.thread_time if time.get_clock_info("thread_time").resolution <= FINE_S else WALL


_ALONE = _alone()


def _seconds() -> float:
    """The time of this thread where it computes alone; else the clock on the wall."""
    return _ALONE() if torch.get_num_threads() == 1 else WALL()


CLOCK: Callable[[], float] = _seconds
"""The clock for modules on random rows; tests set another one."""


def wait(device: torch.device | None) -> None:
    """Wait for what a GPU was given to do, where it is one."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def taken(run: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds of a run, and of what a GPU was given by it, whose backward passes run in threads of their own."""
    clock = WALL if device is not None and device.type == "cuda" else CLOCK
    began = clock()
    run()
    wait(device)
    return clock() - began


_Name = TypeVar("_Name", bound=Hashable)
_Found = TypeVar("_Found")


def race(
    names: Sequence[_Name],
    sample: Callable[[_Name], float],
    open_: Callable[[Mapping[_Name, Sequence[float]], int], Sequence[_Name]],
) -> dict[_Name, list[float]]:
    """Seconds of each variant by rounds, of which every second one goes backwards.

    What a round's samples have in common, such as a neighbour that takes half of the cores, their ratio does not have.

    Args:
        sample: runs a variant.
        open_: the variants that run in the next round, given the times and its number; none ends the race. A variant
            that is left out once stays out, so that entries of one place are of one round.
    """
    times: dict[_Name, list[float]] = {name: [] for name in names}
    for turn in itertools.count():
        running = open_(times, turn)
        for name in running if turn % 2 == 0 else reversed(running):
            times[name].append(sample(name))
        if not running:
            break
    return times


def agree(said: Sequence[bool], deviations: float) -> bool:
    """Whether so many rounds say yes that a coin does not, by so many of its standard deviations."""
    return 2 * sum(said) - len(said) >= deviations * math.sqrt(len(said))


def sure(said: Sequence[bool], deviations: float) -> bool:
    """Whether rounds :func:`agree` on yes or on no."""
    return agree(said, deviations) or agree([not each for each in said], deviations)


Pair = tuple[float, float]
"""Seconds of one round: without something, and with it."""


def gain(pairs: Sequence[Pair]) -> float:
    """How much longer runs took before, in parts of those after: the median of the rounds' ratios.

    Of an even number it is the lower one of the middle: the mean of two would let one slow run count as ten.
    """
    return statistics.median_low([before / after for before, after in pairs]) - 1


def in_fastest(seconds: Sequence[float]) -> int:
    """How many samples of the fastest variant take as long as one of each."""
    least = min(seconds)
    return math.ceil(sum(seconds) / least - LEAST) if least > 0.0 else len(seconds)


TIMED = frozenset({"cpu"})
"""Devices on which modules are timed on random rows: on others a first run may build kernels for minutes."""

FEWEST, MOST, SECONDS = 4, 60, 0.4
"""Rounds of one size, and the time after which there are no more; a round runs every way once."""

DOUBTS = 2.5
"""Standard deviations of a coin by which rounds lie to one side before it counts as theirs: 7 rounds of 7, 13 of 17.
That is tested after every one of up to 60 rounds, and so more strictly than of the few of a whole model."""

LOWEST = 5
"""Of so many runs the fastest counts: a neighbour on the same cores makes runs slower, and none faster."""

Prepare = Callable[[], Callable[[], Any]]
"""Puts a way on and gives what is to be timed."""


@dataclass(frozen=True)
class Sizes:
    """What was found for modules of one shape.

    Attributes:
        ratios: of each size, the time of each way in units of stock's.
        noise: the same of the even rounds alone, as far as it is from that of the odd ones, halved.
        rounds: of each size, how many.
        seconds: what all of it took.
        stock_s: of each size, what stock takes.
    """

    ratios: tuple[Mapping[Way, float], ...]
    noise: tuple[Mapping[Way, float], ...]
    rounds: tuple[int, ...]
    seconds: float
    stock_s: tuple[float, ...] = ()

    def best(self, *, among: Sequence[Way]) -> tuple[Way, ...]:
        """The fastest way at each size; of two within half of :data:`LEAST`, the later one named.

        Own code that loses nothing stays where no way is surely faster: 0.97 +- 0.04 became 1.07 (2026-11-27).
        """
        found = []
        for ratios, noise in zip(self.ratios, self.noise, strict=True):
            known = [way for way in among if way in ratios]
            best = [way for way in known if ratios[way] <= min(ratios[each] for each in known) + LEAST / 2][-1]
            if Way.OWN in known and ratios[best] + max(LEAST, noise[best]) > ratios[Way.OWN]:
                loses = [ratios[way] > 1 + max(LEAST, noise[way]) for way in (best, Way.OWN)]
                best = best if loses == [False, True] else Way.OWN
            found.append(best)
        return tuple(found)

    def gains(self, ways: Sequence[Way], *, emulated: bool = False) -> bool:
        """Whether these ways are faster than stock at one size by more than the noise, and slower at none.

        Where one size gains much, another may be slower by :data:`OUTWEIGHED`.
        """
        taken = [(ratios[way], noise[way]) for ratios, noise, way in zip(self.ratios, self.noise, ways, strict=True)]
        much, outweighed = OUTWEIGHED[emulated]
        loss = outweighed if any(each + noise <= much for each, noise in taken) else LEAST
        slower = any(each > 1 + max(loss, noise) for each, noise in taken)
        return not slower and any(each <= 1 - max(LEAST, noise) for each, noise in taken)

    def many(self, ways: Sequence[Way]) -> int:
        """From how many rows the last way takes 0.8 of the other's time, if times grow evenly; one number for ranks."""
        few, most, known = *ways[1:], self.ratios[1].keys() & self.ratios[2].keys()
        if ranks_choose(current_policy()) or not self.stock_s or not {few, most} <= known:
            return FROM_MANY
        lost, left = (  # 0.8: models cost it more
            (each[most] - 0.8 * each[few]) * s for each, s in zip(self.ratios[1:], self.stock_s[1:], strict=True)
        )
        return SIZES[1] + math.ceil((SIZES[2] - SIZES[1]) * (lost / (lost - min(left, 0.0)))) if lost > 0 else FROM_MANY

    def text(self, ways: Sequence[Way]) -> str:
        """The time at each size in units of stock's, and how sure it is."""
        cells = [
            f"{ratios[way]:.2f} ± {noise[way]:.2f} on {count} ({way})"
            for ratios, way, noise, count in zip(self.ratios, ways, self.noise, SIZES, strict=True)
        ]
        return ", ".join(cells)


@dataclass
class Paced:
    """What was decided for modules of one shape.

    Attributes:
        module, paths: their class and names.
        ways: of each size of :data:`SIZES`.
        sizes: what it rests on.
        kept: whether they are LayerZero's; else each is as it was.
        known: whether a model before had modules of this shape, so that nothing was timed for this one.
    """

    module: str
    ways: tuple[Way, ...]
    sizes: Sizes
    kept: bool
    known: bool = False
    paths: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"{self.sizes.text(self.ways)}{', as measured before' if self.known else ''}"


@dataclass(frozen=True)
class Untimed:
    """Modules of one shape that were not timed.

    Attributes:
        module: their class.
        why: the reason.
        stays: whether they are LayerZero's all the same: each could be run, and a clock that stands still, or a lock
            on kernels, says nothing against them.
        late: whether there was no time.
    """

    module: str
    why: str
    stays: bool = False
    late: bool = False


_KNOWN: dict[Hashable, Any] = {}
"""What was measured by shape, for as long as the process lives."""


def measured_once(about: Hashable, measure: Callable[[], _Found]) -> _Found:
    """What was measured about the same before, or is now."""
    if about not in _KNOWN:
        _KNOWN[about] = measure()
    found: _Found = _KNOWN[about]
    return found


def decided(
    about: Hashable,
    module: str,
    paths: list[str],
    measure: Callable[[], Sizes | None],
    passed: Callable[[], bool],
    *,
    emulated: bool = False,
) -> Paced | Untimed:
    """Which way modules of one shape compute at which size, and whether they gain; or why not, whatever one raises.

    Args:
        about: all that their time hangs on; what was measured about the same holds.
        passed: whether the time is over.
        emulated: whether the CPU emulates their products: these are known to gain, so they stay where there is no time.
    """
    found: Sizes | None = _KNOWN.get(about)
    known = found is not None
    try:
        if found is None and passed():
            raise TimeOverError  # noqa: TRY301
        found = measure() if found is None else replace(found, seconds=0.0)
    except TimeOverError:
        why = "no time was left to time it against the model's own code (budget_s)"
        return Untimed(module, why, stays=emulated, late=True)
    except Exception as error:  # noqa: BLE001  # what a model raises on arguments that were made for another
        return Untimed(module, f"it could not be timed against the model's own code ({in_short(error)})")
    if found is None:
        return Untimed(module, "the clock stood still, or locks leave no kernel", stays=True)
    _KNOWN.setdefault(about, found)
    ways = found.best(among=(Way.OWN, Way.PLAIN, Way.PACKED))
    kept = found.gains(ways, emulated=emulated) and any(way is not Way.OWN for way in ways)
    return Paced(module, ways, found, kept, known, paths)


def forget() -> None:
    """Time every shape again."""
    _KNOWN.clear()


def timed(
    sizes: Sequence[Mapping[Way, Prepare]],
    around: Callable[[], object] | None = None,
    passed: Callable[[], bool] = lambda: False,
) -> Sizes | None:
    """Time every way at each size, in turn; None where the clock stood still.

    ``around`` runs before each: what a model runs between two calls, so that the host's caches hold no more of a way
    than they do there. A way takes no part in further rounds once another is faster for sure, and there are no more
    once the fastest is faster or slower than stock, or as fast, for sure.

    Raises: TimeOverError where ``passed`` says that the time is over before :data:`FEWEST` rounds of each size.
    """
    began = CLOCK()
    ratios: list[Mapping[Way, float]] = []
    noise: list[Mapping[Way, float]] = []
    rounds, stock_s = [], list[float]()
    for ways in sizes:
        times = _rounds(ways, around, passed)
        if not all(times[Way.STOCK]) or len(times) == 1:  # no way but stock: a real call says why
            return None
        halves = [_ratios({way: each[first::2] for way, each in times.items()}) for first in (0, 1)]
        ratios.append(_ratios(times))
        noise.append({way: abs(halves[0][way] - halves[1][way]) / 2 for way in times})
        rounds.append(len(times[Way.STOCK]))
        stock_s.append(min(times[Way.STOCK]))
    return Sizes(tuple(ratios), tuple(noise), tuple(rounds), CLOCK() - began, tuple(stock_s))


def _ratios(times: Mapping[Way, Sequence[float]]) -> dict[Way, float]:
    """The fastest runs of each way in units of stock's."""
    fast = {way: statistics.mean(sorted(each)[: -(-len(each) // LOWEST)]) for way, each in times.items()}
    return {way: each / fast[Way.STOCK] for way, each in fast.items()}


def _runs(way: Way, prepare: Prepare) -> bool:
    """Run a way first, for kernels to be chosen, proved and packed for; whether there is one for it."""
    try:
        prepare()()
    except LayerZeroError:  # a lock on a kernel of packed weights leaves none for weights as they lie
        if way is Way.STOCK:
            raise
        return False
    return True


def _worse(times: Mapping[Way, Sequence[float]], order: Sequence[Way]) -> set[Way]:
    """The ways that are slower than the fastest for sure."""
    fast = _ratios(times)
    best = times[min((way for way in order if way is not Way.STOCK), key=lambda way: fast[way])]
    return {
        way
        for way in order
        if way is not Way.STOCK and agree([one > other for one, other in zip(times[way], best, strict=True)], DOUBTS)
    }


def _is_decided(times: Sequence[float], stock: Sequence[float]) -> bool:
    """Whether a way is faster than stock for sure, or slower, or neither."""
    ratios = [one / other if other else 1.0 for one, other in zip(times, stock, strict=True)]
    gain, loss = ([each <= 1 - LEAST for each in ratios], [each >= 1 + LEAST for each in ratios])
    neither = [not (one or other) for one, other in zip(gain, loss, strict=True)]
    return any(agree(each, DOUBTS) for each in (gain, loss, neither))


def _rounds(
    ways: Mapping[Way, Prepare], around: Callable[[], object] | None, passed: Callable[[], bool]
) -> dict[Way, list[float]]:
    ways = {way: prepare for way, prepare in ways.items() if _runs(way, prepare)}
    began, order = CLOCK(), [*(way for way in ways if way is not Way.STOCK), Way.STOCK]

    def sample(way: Way) -> float:
        ways[way]()()  # what the way before left in caches is not its own
        run = ways[way]()
        if around is not None:
            around()
        return taken(run)

    def undecided(times: Mapping[Way, Sequence[float]], turn: int) -> Sequence[Way]:
        nonlocal order
        stock = times[Way.STOCK]
        if turn == MOST or (turn and not stock[-1]) or (turn >= FEWEST and CLOCK() - began > SECONDS):
            return ()
        if turn >= FEWEST and len(order) > 1:
            out = _worse(times, order)
            order = [way for way in order if way not in out]
        if turn and len(order) == 2 and _is_decided(times[order[0]], stock):
            return ()
        if passed():
            if turn < FEWEST:
                raise TimeOverError
            return ()
        return order

    return race(order, sample, undecided)

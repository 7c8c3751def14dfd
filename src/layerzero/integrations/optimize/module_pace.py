"""The time of single modules each way: norms, products, blocks and experts, on random rows."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.engine.config import current_policy
from layerzero.integrations.optimize import pace
from layerzero.integrations.optimize.candidate import Candidate, quiet
from layerzero.integrations.optimize.layer_pace import Around
from layerzero.integrations.optimize.pace import SIZES, Paced, Prepare, Sizes, Untimed, Way, decided, timed
from layerzero.integrations.optimize.swapping import Packs
from layerzero.integrations.optimize.time_left import TimeLeft
from layerzero.tuning.measuring.timing import TimeOverError

SAMPLE_S, MOST_RUNS = 2e-4, 20
"""A sample runs a module as often as fills this, at most so many times: a norm takes 10 us."""


def pace_modules(
    found: Sequence[tuple[str, Candidate]], around: Around | None, time: TimeLeft
) -> Iterator[tuple[Paced | Untimed, list[Candidate]]]:
    """Decide for modules of each shape whether they are kept, and which weights are packed at which size; set that.

    What takes no longer than a sample runs once, after ``around`` if that is there. Over and over, the final norm of a
    Llama (512 x 4, float32) took 13 us where its own code took 18; after a layer as it was it took 37, and that 30
    (AMD EPYC, one thread, 2026-11-26): its code had left the host's caches, where the layers' norms had kept theirs.
    """
    alike: dict[Hashable, list[tuple[str, Candidate]]] = defaultdict(list)
    for path, each in found:
        alike[_shape_of(each)].append((path, each))
    for about, group in alike.items():
        first = group[0][1]
        beside = None if around is None else around.about
        name = type(first.swap.module).__name__
        found_out = decided((about, beside), name, time, lambda: _measured(first, around, time.deadline.passed))  # noqa: B023
        if isinstance(found_out, Untimed):
            yield found_out, [each for _, each in group]
            continue
        sizes, known = found_out
        ways = sizes.best(among=(Way.OWN, Way.PLAIN, Way.PACKED))
        for _, each in group:
            each.swap.state.take(ways)
        paths = [path for path, _ in group]
        kept = sizes.gains(ways)
        yield Paced(name, ways, sizes, kept, known, paths), [each for _, each in group]


def _shape_of(found: Candidate) -> Hashable:
    module = found.swap.module
    learned = tuple((name, tuple(each.shape), each.dtype, each.device) for name, each in module.named_parameters())
    others = tuple(tuple(each.shape) for each in found.others)
    return type(module), found.kind, found.calls, learned, others, torch.get_num_threads(), current_policy()


def _measured(found: Candidate, around: Around | None, passed: Callable[[], bool]) -> Sizes | None:
    if passed():
        raise TimeOverError
    state = found.swap.state
    packs = isinstance(state, Packs) and state.may_pack
    ways = (Way.STOCK, Way.OWN, Way.PLAIN, *([Way.PACKED] if packs else []))
    try:
        with quiet(found.swap.module):
            rows, others = _given(found, 1)
            found.swap.off()
            if around is not None and _lasts(functools.partial(found.swap.module, rows, *others)) >= SAMPLE_S:
                around = None
            sizes = [_prepared(found, ways, *_given(found, count), once=around is not None) for count in SIZES]
            return timed(sizes, around, passed)
    finally:
        state.take(())
        found.swap.on()


def _given(found: Candidate, count: int) -> tuple[Tensor, list[Tensor]]:
    """So many rows of an example, over and over, and what is called with each of them."""
    example = found.example
    rows = example.reshape(-1, example.shape[-1])
    places = torch.arange(count, device=rows.device) % rows.shape[0]
    others = [each[places] if each.ndim and each.shape[0] == rows.shape[0] else each for each in found.others]
    taken = rows[places]
    return taken.view(1, count, -1) if example.ndim == 3 else taken, others


def _lasts(run: Callable[[], object]) -> float:
    """The seconds of a second run."""
    run()
    began = pace.CLOCK()
    run()
    return pace.CLOCK() - began


def _prepared(
    found: Candidate, ways: Sequence[Way], rows: Tensor, others: Sequence[Tensor], *, once: bool
) -> dict[Way, Prepare]:
    """What puts each way on, and then runs the module ``once`` or as often as fills a sample."""
    module: Any = found.swap.module
    state = found.swap.state

    def on(way: Way) -> None:
        if way is Way.STOCK:
            found.swap.off()
            return
        if not found.swap.is_on:  # what its proof rests on is looked at anew then
            found.swap.on()
        state.take((way,) * len(SIZES))

    def run() -> None:
        for _ in range(often):
            module(rows, *others)

    def prepare(way: Way) -> Callable[[], Any]:
        on(way)
        return run

    often = 1
    if not once:
        often = max(1, min(MOST_RUNS, int(SAMPLE_S / max(_lasts(prepare(Way.STOCK)), 1e-6))))
    return {way: functools.partial(prepare, way) for way in ways}

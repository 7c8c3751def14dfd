"""Steps of a whole decoder, some in a row as a generation runs them: what makes them slower is taken off.

A layer's own times leave a doubt of a few percent, and say nothing of the mask and of what runs between layers. A
Llama of two layers of 256 in float32 kept layers that took 1.03 ± 0.04 of their own time for one token, and its steps
took 1.06 (AMD EPYC Zen 4, one thread, 2026-11-27).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Container, Hashable, Mapping, Sequence

import torch

from layerzero.core.errors import in_short
from layerzero.engine.config import current_policy
from layerzero.integrations.optimize.attention.dynamic_cache import name_of
from layerzero.integrations.optimize.attention.transformers import AttentionSwap
from layerzero.integrations.optimize.layers.encoders import Encoder
from layerzero.integrations.optimize.layers.layer_timing import PAST, called_with, filled
from layerzero.integrations.optimize.swaps.swap import SIZES, Swap, Way
from layerzero.integrations.optimize.swaps.trial import as_served
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import Optimized, Replaced, switch_all
from layerzero.integrations.optimize.times.timing import DOUBTS, LEAST, OUTWEIGHED, Paced, agree

STEPS, ROW_S = 16, 0.02
"""Steps in a row, and the time after which there are no more."""

LONGEST_S = 0.05
"""Longer steps are not looked at: there the Python around kernels, which layers alone do not show, is no 1 %."""

ROUNDS, SECONDS = 48, 1.5
"""Of one number of tokens."""

Settled = tuple[Paced, list[Replaced]]
"""What was decided for layers of one shape, and these."""


def keep_what_steps_gain(
    exchange: AttentionSwap,
    whole: Sequence[Replaced],
    inside: Container[int],
    settled: Sequence[Settled],
    report: Optimized,
) -> None:
    """Let layers compute another way where steps are slower for sure; take off what makes them so in any way.

    First layers and attention go, then all else in the model.

    Args:
        exchange: of the model's attention.
        whole: all layers of the model that were found, on or not.
        inside: ids of the model's modules.
        settled: what was decided for them.
    """
    mine = [one for one in report.replaced if one.exchange is exchange or _is_in(one, inside)]
    first = [one for one in mine if one.exchange is exchange or one.kind == "layer"]
    kept = [(each, group) for each, group in settled if each.kept]
    if not first or not settled or isinstance(whole[0].swap.state, Encoder):  # no encoder's, nor where no clock goes
        return
    much, outweighed = OUTWEIGHED[bool(report.emulated)]  # as of layers alone
    loss = outweighed if any(ratio + noise <= much for each, _ in kept for ratio, noise in _times(each)) else LEAST
    for on, ways, out in ((mine, kept, first), ([one for one in mine if one not in first], [], mine)):
        if not on or report.time.deadline.passed():
            return
        steps = _Steps(exchange, whole, on, loss, report.time.deadline.passed)
        before = [(each, group, each.ways) for each, group in ways]
        try:
            slower = next(filter(None, (_slower(number, steps, ways) for number in range(len(SIZES) - 1))), "")
        except Exception as error:  # noqa: BLE001  # what a model raises on arguments that were made for another
            for each in before:
                _compute(*each)
            report.tune.append(f"steps of the whole model were not timed ({in_short(error)}); pass inputs= to measure")
            return
        finally:
            steps.switch(ours=True)
        if not slower:
            return
        for one in out:
            if one in on:
                report.take_out([one], f"{one.kind}: steps of the model took {slower}")


def _is_in(found: Replaced, modules: Container[int]) -> bool:
    return isinstance(found.exchange, Swap) and id(found.swap.module) in modules


def _times(found: Paced) -> list[tuple[float, float]]:
    """Of each size, the time of layers in units of their own, and how sure it is."""
    sizes = found.sizes
    return [(ratio[way], noise[way]) for ratio, noise, way in zip(sizes.ratios, sizes.noise, found.ways, strict=True)]


def _slower(number: int, steps: _Steps, settled: Sequence[Settled]) -> str:
    """How much steps of one of :data:`SIZES` lose, whichever way layers compute them; empty where one loses nothing."""
    lost = steps.lost(SIZES[number])
    text = f"{lost:.2f} times its own time at {SIZES[number]} a step"
    sizes = [each.sizes.ratios[number] for each, _ in settled]
    now = {each.ways[number] for each, _ in settled}
    for way in [
        way for way in (Way.PACKED, Way.PLAIN, Way.OWN) if way not in now and all(way in each for each in sizes)
    ]:
        if not lost or not settled:
            break
        for each, group in settled:
            _compute(each, group, (*each.ways[:number], way, *each.ways[number + 1 :]))
        lost = steps.lost(SIZES[number])
    return text if lost else ""


def _compute(found: Paced, group: Sequence[Replaced], ways: tuple[Way, ...]) -> None:
    """Let modules compute in these ways, one for each size."""
    found.ways = ways
    for one in group:
        one.swap.state.take(ways, found.sizes.many(ways))


class _Steps:
    """Steps of a model with what is on, against its own.

    Args:
        loss: what steps may lose, as a share.
    """

    def __init__(
        self,
        exchange: AttentionSwap,
        whole: Sequence[Replaced],
        on: Sequence[Replaced],
        loss: float,
        passed: Callable[[], bool],
    ) -> None:
        self._exchange, self._whole, self._on, self._loss, self._passed = exchange, whole, on, loss, passed

    def lost(self, count: int) -> float:
        """The time of steps of so many tokens in units of the model's own where they lose for sure; else 0."""
        return timing.measured_once((self._about(), count), functools.partial(self._lost, count))

    def _about(self) -> Hashable:
        """All that their time hangs on."""
        model = self._exchange.model
        shapes = tuple((name, each.shape, each.dtype, each.device) for name, each in model.named_parameters())
        ways = []
        for one in self._on:
            state = getattr(one.exchange, "state", None)
            parts = (state, *state.parts) if state else ()
            ways.append((one.path, one.kind, *[(each.own_at, getattr(each, "plain", ())) for each in parts]))
        return "steps", type(model), shapes, tuple(ways), self._loss, torch.get_num_threads(), current_policy()

    def _lost(self, count: int) -> float:
        with as_served(self._exchange.model):
            for ours in (True, True, False):  # the first one chooses kernels and packs
                longest = self._row(count, 1, ours=ours)
            if not 0.0 < longest <= LONGEST_S:
                return 0.0
            steps = min(STEPS, math.ceil(ROW_S / longest))
            times = timing.race((True, False), lambda ours: self._row(count, steps, ours=ours), self._undecided)
        slow = self._slow(times)
        ratios = [mine / other for mine, other in zip(times[True], times[False], strict=True) if other]
        return statistics.median(ratios) if agree(slow, DOUBTS) and ratios else 0.0

    def switch(self, *, ours: bool) -> None:
        switch_all([one for one in self._on if one.exchange is not self._exchange], on=ours)
        if any(one.exchange is self._exchange for one in self._on):
            self._exchange.flip(ours=ours)

    def _row(self, count: int, steps: int, *, ours: bool) -> float:
        """Seconds of so many steps in a row."""
        model = self._exchange.model
        self.switch(ours=ours)
        given = {**called_with(model, count), name_of(model): filled(self._whole, PAST)}
        model(**given)  # looks anew at what proofs rest on
        return timing.taken(lambda: [model(**given) for _ in range(steps)])

    def _slow(self, times: Mapping[bool, Sequence[float]]) -> list[bool]:
        return [mine > other * (1 + self._loss) for mine, other in zip(times[True], times[False], strict=True)]

    def _undecided(self, times: Mapping[bool, Sequence[float]], turn: int) -> Sequence[bool]:
        slow = self._slow(times)
        spent = sum(times[True]) + sum(times[False])
        return (
            ()
            if (turn and timing.sure(slow, DOUBTS)) or turn == ROUNDS or spent > SECONDS or self._passed()
            else (True, False)
        )

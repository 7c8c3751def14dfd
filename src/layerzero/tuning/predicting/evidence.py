"""What measured times are worth together: one for each kernel, with a confidence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

import msgspec

from layerzero.core.evidence import HOST_MARGIN, Evidence, Provenance
from layerzero.tuning.predicting.prediction import waits

FULL_SAMPLES = 10
"""A median of fewer samples counts in proportion."""

SPREAD_AT_HALF = 0.1
"""Relative error of a median at which it counts half."""

OTHER_CONDITION = 0.8
"""What a time counts that was taken under another condition of the machine than the other times."""

FROM_ELSEWHERE = 0.9
"""What an imported time counts: the same device by name, not this one."""

OTHER_LAYOUT = 0.9
"""What a prediction counts that was learnt from tensors with their axes in another order: a view or a copy apart.

So does one from a mask whose rows are aligned otherwise, or that is for one batch in place of each.
"""

TOGETHER_S = 10.0
"""Times of one contest are written within a second of each other."""


class Time(msgspec.Struct, frozen=True):
    """One measured time that holds here."""

    kernel: str
    environment: bytes
    condition: str
    source: str
    median_us: float
    noise: float
    samples: int
    variance_us2: float
    written_at: str
    adapts: str = ""
    device_us: float | None = None
    host_us: float | None = None
    as_measured_us: float | None = None
    """The median that was measured, where ``median_us`` is another number that stands for a replay."""

    @property
    def waits(self) -> bool:
        """Whether the host decided about it."""
        return waits(self.device_us, self.host_us)


def weighed(
    times: Sequence[Time],
    hosts: Mapping[tuple[str, str], float] | None = None,
    present: Callable[[], str] | None = None,
) -> dict[str, Evidence]:
    """One time for each kernel, all under one condition as far as they go, since times are for comparing.

    That is the ``present`` condition of the machine where two kernels have times of it, else the one that most have,
    the latest of several. It is read only where times of several conditions are known.

    Of several times, those measured here come first, then enough samples, then the latest. ``hosts`` says what the host
    takes as a rule for a kernel with its adaptations over its family: by that, the host's pace just then is known, and
    taken out.
    """
    shared = _shared(times, present)

    def rank(time: Time) -> tuple[object, ...]:
        return time.source == "", time.condition == shared, time.samples >= FULL_SAMPLES, time.written_at

    best: dict[str, Time] = {}
    for time in times:
        other = best.get(time.kernel)
        if other is None or rank(time) > rank(other):
            best[time.kernel] = time
    apart = all(time.device_us is not None for time in best.values())  # else it is unknown which of the two waited
    margin = HOST_MARGIN if apart else 1.0
    paces: dict[str, float] = {}
    for run in _runs([time for time in best.values() if time.host_us is not None and time.waits]):
        paces |= dict.fromkeys([time.kernel for time in run], _pace(run, hosts or {}))
    return {
        kernel: _evidence(time, alike=time.condition == shared, pace=paces.get(kernel, 1.0), margin=margin)
        for kernel, time in best.items()
    }


def _shared(times: Sequence[Time], present: Callable[[], str] | None) -> str:
    """The condition that times are compared under."""
    kernels: dict[str, set[str]] = {time.condition: set() for time in times}
    if len(kernels) < 2:
        return next(iter(kernels), "")
    latest: dict[str, str] = {}
    for time in times:
        kernels[time.condition].add(time.kernel)
        latest[time.condition] = max(latest.get(time.condition, ""), time.written_at)
    now = "" if present is None else present()
    if now and len(kernels.get(now, ())) > 1:
        return now
    return max(kernels, key=lambda condition: (len(kernels[condition]), latest[condition]))


def _runs(times: Iterable[Time]) -> Iterator[list[Time]]:
    """Times that were measured side by side: of one contest, written one after another."""
    run: list[Time] = []
    for time in sorted(times, key=lambda each: (each.source, each.written_at)):
        if run and (time.source != run[-1].source or not _together(run[-1].written_at, time.written_at)):
            yield run
            run = []
        run.append(time)
    if run:
        yield run


def _together(one: str, other: str) -> bool:
    try:
        return abs((datetime.fromisoformat(other) - datetime.fromisoformat(one)).total_seconds()) <= TOGETHER_S
    except (ValueError, TypeError):  # a file from elsewhere may say anything, with a time zone or without
        return one == other


def _pace(times: Iterable[Time], hosts: Mapping[tuple[str, str], float]) -> float:
    """How many times longer than as a rule the host took when these were measured; 1 where nothing tells.

    One kernel alone may need more of the host at some sizes; all at once, each compared with its own family, is the
    machine: over 373 calls of an H200 the pace went from 0.74 to 1.9, and half of what was left was below 1.2 %
    (2026-11-22).
    """
    factors = [
        time.host_us / hosts[time.kernel, time.adapts]
        for time in times
        if time.host_us is not None and hosts.get((time.kernel, time.adapts))
    ]
    return statistics.median_low(factors) if len(factors) > 1 else 1.0


def _evidence(time: Time, *, alike: bool, pace: float, margin: float) -> Evidence:
    confidence = min(1.0, time.samples / FULL_SAMPLES) / (1 + (_spread(time) / SPREAD_AT_HALF) ** 2)
    confidence *= (1.0 if alike else OTHER_CONDITION) * (FROM_ELSEWHERE if time.source else 1.0)
    provenance = Provenance.IMPORTED if time.source else Provenance.MEASURED
    measured_us = time.median_us if time.as_measured_us is None else time.as_measured_us
    cost_us = _cost_us(time, pace, margin)
    return Evidence(measured_us, provenance, confidence, time.noise, time.device_us, cost_us=cost_us)


def _cost_us(time: Time, pace: float, margin: float) -> float:
    """What a call takes while the host runs at its usual pace."""
    if time.device_us is None:
        return time.median_us
    if time.waits and time.host_us is not None:
        return max(time.device_us, margin * time.host_us / pace)
    return time.device_us


def _spread(time: Time) -> float:
    """Relative error of a median.

    Half the difference between two halves of the samples; a variance is made by outliers, which no median feels, unless
    there are too few samples to halve.
    """
    if time.samples >= FULL_SAMPLES:
        return time.noise / 2
    return max(time.noise / 2, math.sqrt(time.variance_us2 / time.samples) / time.median_us)

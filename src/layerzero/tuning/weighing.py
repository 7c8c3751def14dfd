"""What measured times are worth beside each other: one for each kernel, with a confidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from layerzero.core.evidence import Evidence, Provenance
from layerzero.tuning.prediction import WAITS

FULL_SAMPLES = 10
"""A median of fewer samples counts in proportion."""

SPREAD_AT_HALF = 0.1
"""Relative error of a median at which it counts half."""

OTHER_CONDITION = 0.8
"""What a time counts that was taken under another condition of the machine than the times beside it."""

FROM_ELSEWHERE = 0.9
"""What an imported time counts: the same device by name, not this one."""

OTHER_LAYOUT = 0.9
"""What a prediction counts that was learnt from tensors with their axes in another order: a view or a copy apart."""

DECIDED = 2.0
"""A kernel that is so many times slower, noise aside, is slower for sure: rough times of it blur nothing."""

SLOW_PHASE = 1.25
"""Where all kernels that wait for the host take so many times what their families do, the host was slow just then."""

MAX_NOISE = 0.01
"""A wider claim of a prediction lowers its confidence and makes no ties: the estimate is the better guess in one."""


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

    @property
    def waits(self) -> bool:
        """Whether the host decided about it."""
        return self.host_us is not None and self.device_us is not None and self.host_us > WAITS * self.device_us


def weighed(times: Sequence[Time], hosts: Mapping[tuple[str, str], float] | None = None) -> dict[str, Evidence]:
    """One time for each kernel: under the condition that most have, since times are for comparing, the latest of those.

    Of several times, those measured here come first, then enough samples, then the latest. ``hosts`` says what the host
    takes for a kernel with its adaptations over its family; by that, a slow phase of the host is told, and taken out.
    """
    kernels: dict[str, set[str]] = {}
    latest: dict[str, str] = {}
    for time in times:
        kernels.setdefault(time.condition, set()).add(time.kernel)
        latest[time.condition] = max(latest.get(time.condition, ""), time.written_at)
    shared = max(kernels, key=lambda condition: (len(kernels[condition]), latest[condition]), default="")

    def rank(time: Time) -> tuple[object, ...]:
        return time.source == "", time.condition == shared, time.samples >= FULL_SAMPLES, time.written_at

    best: dict[str, Time] = {}
    for time in times:
        if time.kernel not in best or rank(time) > rank(best[time.kernel]):
            best[time.kernel] = time
    slow = _slowness(best.values(), hosts or {})
    return {kernel: _evidence(time, alike=time.condition == shared, slow=slow) for kernel, time in best.items()}


def _slowness(times: Iterable[Time], hosts: Mapping[tuple[str, str], float]) -> float:
    """By how much the host was slow when these were taken; 1 where it was not.

    One kernel alone may need more of the host at some sizes. All at once, each beside its own family, is the machine;
    beyond the least of their factors, a time is the kernel's own.
    """
    factors = [
        time.host_us / hosts[time.kernel, time.adapts]
        for time in times
        if time.waits and time.host_us is not None and hosts.get((time.kernel, time.adapts))
    ]
    return slow if len(factors) > 1 and (slow := min(factors)) > SLOW_PHASE else 1.0


def _evidence(time: Time, *, alike: bool, slow: float) -> Evidence:
    confidence = min(1.0, time.samples / FULL_SAMPLES) / (1 + (_spread(time) / SPREAD_AT_HALF) ** 2)
    confidence *= (1.0 if alike else OTHER_CONDITION) * (FROM_ELSEWHERE if time.source else 1.0)
    provenance = Provenance.IMPORTED if time.source else Provenance.MEASURED
    time_us = time.median_us
    if slow > 1.0 and time.waits:
        time_us = max(time.device_us or 0.0, time.median_us / slow)
        confidence *= OTHER_CONDITION
    return Evidence(time_us, provenance, confidence, time.noise)


def _spread(time: Time) -> float:
    """Relative error of a median.

    Half the difference between two halves of the samples; a variance is made by outliers, which no median feels, unless
    there are too few samples to halve.
    """
    if time.samples >= FULL_SAMPLES:
        return time.noise / 2
    return max(time.noise / 2, math.sqrt(time.variance_us2 / time.samples) / time.median_us)


def settled(found: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """The same times; what is slower for sure is as certain as the best, since a set has its lowest confidence."""
    best = min(found.values(), key=lambda each: each.time_us)
    bound = DECIDED * best.time_us * (1 + best.noise)
    weighed = {}
    for kernel, each in found.items():
        decided = each.time_us / (1 + each.noise) > bound
        confidence = max(each.confidence, best.confidence) if decided else each.confidence
        noise = min(each.noise, MAX_NOISE) if each.provenance is Provenance.PREDICTED else each.noise
        same = confidence == each.confidence and noise == each.noise
        weighed[kernel] = each if same else replace(each, confidence=confidence, noise=noise)
    return weighed

"""What decides among kernels that a caller waits for about as long: plans that are not made, then the device's time.

Calls back to back wait for the longer of host and device, and of small calls that is the host, whose pace is a
machine's: by it alone, an H200 behind a slow host took kernels of 1.6 times the best one's device time (2026-11-22).
Who captures a step, or launches it behind longer work, waits for the device. And a library that plans anew for every
size makes the first call of each take a thousand times as long, of which no repeated measurement says anything.
docs/decisions/0059 has what else was thought of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from layerzero.core.evidence import Evidence, Provenance
from layerzero.tuning.predicting.prediction import HOST_MARGIN

NEARLY = 1.1
"""Times the best: who is nearer is waited for about as long."""

NEARLY_MEASURED = 1.5
"""The same where all that are so near were measured here: of those the product of both decides.

The device's time repeats itself, the host's does not. An H200 and an H100 were tuned to a kernel that takes the device
28 and 31 us for one of 19 and 20; callers waited 37 us for 39 on one and, with a host half as quick, 44 for 60 on the
other (2026-11-24). By what was measured of 826 calls for the tables that ship, the least product within 1.5 takes 1.012
(H100) and 1.008 (H200) of the least device time of all, and callers wait 1.005 and 1.002 of the shortest; the device
alone within 1.1 takes 1.019, 1.010 and 1.001, within 1.2 1.015, 1.007 and 1.004, within 1.5 1.010, 1.005 and 1.011.
"""

DEVICE_NOISE = 0.02
"""A device repeats itself within a percent or two, whatever its host does."""

_ESTIMATED = frozenset({Provenance.PREDICTED, Provenance.PRIOR})
"""Of sizes that were not measured here, so that nothing is planned for them yet."""


def waited_us(each: Evidence) -> float:
    """What a call is waited for at the host's usual pace: that a host may be slower counts elsewhere."""
    return each.time_us if each.device_us is None else max(each.device_us, each.time_us / HOST_MARGIN)


def decided(found: Mapping[str, Evidence], planning: Collection[str] = ()) -> dict[str, Evidence]:
    """The same times, but among those that are waited for about as long as the best the least costly is the best.

    That is who makes no plan for a size that was not measured here, and of these who takes the device least, where all
    of them tell it; measured ones, which may be further apart, go by the product of device and wait. The others follow
    by what they cost more, at most by :data:`NEARLY`.

    Args:
        planning: ids of kernels that plan anew for every size.
    """
    if not planning and all(each.device_us is None for each in found.values()):  # as on a CPU, in every choice
        return dict(found)
    waits = {name: waited_us(each) for name, each in found.items()}
    best_us = min(waits.values(), default=0.0)
    near = {name: each for name, each in found.items() if waits[name] <= NEARLY_MEASURED * best_us}
    measured = all(each.provenance is Provenance.MEASURED for each in near.values())
    if not measured:
        near = {name: each for name, each in near.items() if waits[name] <= NEARLY * best_us}
    plans = {name for name, each in near.items() if name in planning and each.provenance in _ESTIMATED}
    free = {name: each for name, each in near.items() if name not in plans} or near
    told = all(each.device_us is not None for each in free.values())
    if len(near) < 2 or (not told and len(free) == len(near)):
        return dict(found)
    cost = {name: (each.device_us if told else None) or waits[name] for name, each in free.items()}
    if measured:
        cost = {name: math.sqrt(us * waits[name]) for name, us in cost.items()}
    least = min(cost.values())
    decisive = {}
    for name, each in near.items():
        more = min(cost.get(name, math.inf) / least, NEARLY)
        noise = min(each.noise, DEVICE_NOISE) if told else each.noise
        decisive[name] = msgspec.structs.replace(each, time_us=best_us * more, noise=noise)
    return {**found, **decisive}

"""What decides among kernels that a caller waits for about as long: plans that are not made, then the device's part.

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
"""The same of a kernel that was measured here, in whose calls the product of wait and device's time decides.

The device's time repeats itself, the host's does not. An H200 and an H100 were tuned to a kernel that takes the device
28 and 31 us for one of 19 and 20; callers waited 37 us for 39 on one and, with a host half as quick, 44 for 60 on the
other (2026-11-24). By what was measured of 1,014 calls for the tables that ship, the least product within 1.5 takes
1.010 (H100) and 1.008 (H200) of the least device time of all, and callers wait 1.004 and 1.002 of the shortest; the
device alone takes 1.016 and 1.010 within 1.1, and within 1.5 1.008 and 1.005 for waits of 1.011 and 1.010.

By so much at most one follows the best, too. Where that was :data:`NEARLY`, bursts on an H100's host in the middle
of builds, off by a quarter and a third, made a tie of 18 and 30 us of the device, and torch's own came first
(2026-11-24).
"""

DEVICE_NOISE = 0.02
"""A device repeats itself within a percent or two, whatever its host does."""

_ESTIMATED = frozenset({Provenance.PREDICTED, Provenance.PRIOR})
"""Of sizes that were not measured here, so that nothing is planned for them yet."""


def waited_us(each: Evidence) -> float:
    """What a call is waited for at the host's usual pace: that a host may be slower counts elsewhere."""
    return each.cost_us if each.device_us is None else max(each.device_us, each.cost_us / HOST_MARGIN)


def decided(found: Mapping[str, Evidence], planning: Collection[str] = ()) -> dict[str, Evidence]:
    """The same evidence, with costs by which, of kernels that are waited for about as long, the least costly is first.

    That is who makes no plan for a size that was not measured here, and of these who takes the device least, where all
    of them tell it; in a call of which anything was measured here, the least product of wait and device's time, so
    that there no measured kernel is behind one that it beats by both. The others follow by what they cost more, at most
    by the bound, and never after one that is not near; that one keeps its cost, in which the host counts
    :data:`HOST_MARGIN` times. Times stay as they were measured.

    Args:
        planning: ids of kernels that plan anew for every size.
    """
    if not found or (not planning and all(each.device_us is None for each in found.values())):  # as on a CPU
        return dict(found)
    waits = {name: waited_us(each) for name, each in found.items()}
    best_us = min(waits.values(), default=0.0)
    near = {name: each for name, each in found.items() if waits[name] <= _bound(each) * best_us}
    plans = {name for name, each in near.items() if name in planning and each.provenance in _ESTIMATED}
    free = {name: each for name, each in near.items() if name not in plans} or near
    told = all(each.device_us is not None for each in free.values())
    measured = any(each.provenance is Provenance.MEASURED for each in found.values())  # one rule, whoever is near
    shortest = min(found, key=lambda name: found[name].cost_us)
    alone = len(near) < 2 and (not measured or shortest in near)  # then nothing is decided by who is near
    if alone or (not told and len(free) == len(near)):
        return dict(found)
    cost = {name: each.device_us if told and each.device_us else waits[name] for name, each in free.items()}
    if measured:
        cost = {name: math.sqrt(us * waits[name]) for name, us in cost.items()}
    least = min(cost.values())
    most = NEARLY_MEASURED if measured else NEARLY
    further_us = min([each.cost_us for name, each in found.items() if name not in near], default=math.inf)
    decisive = {}
    for name, each in near.items():
        costs_us = min(best_us * min(cost.get(name, math.inf) / least, most), further_us)
        noise = min(each.cost_noise, DEVICE_NOISE) if told else each.cost_noise
        if told and each.provenance is Provenance.MEASURED:  # half of what decides is the wait
            noise = (noise + each.cost_noise) / 2
        decisive[name] = msgspec.structs.replace(each, cost_us=costs_us, cost_noise=noise)
    return {**found, **decisive}


def _bound(each: Evidence) -> float:
    return NEARLY_MEASURED if each.provenance is Provenance.MEASURED else NEARLY

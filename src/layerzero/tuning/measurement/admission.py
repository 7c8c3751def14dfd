"""Which kernels are timed: those that may still win.

*Memory.* Whatever a plan does, it reads and writes the operation's tensors, and what it copies besides. That takes at
least what this machine's measured copy takes, or, from a cache, a part of it. A kernel above the best time of the same
contest is out, and so is, in later runs, one above the best time that is kept for the very call. What the machine can
do at best is measured once for each device, dtype and number of threads; a data sheet tells of another machine.

*Neighbours.* Calls of other sizes, measured on this machine, say about what each kernel takes here. A kernel that is
predicted to be :data:`HOPELESS` times slower than the best, with little doubt, is out unless everything is measured
``again``.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from layerzero.core.dtypes import dtype_named
from layerzero.core.evidence import Evidence, Provenance
from layerzero.core.facts import Facts
from layerzero.core.operation import Work
from layerzero.core.plan import Candidate
from layerzero.engine.failures import out_of_memory
from layerzero.tuning.measurement.clocks import Clock, clock_of
from layerzero.tuning.measurement.timing import Effort, race

_COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
"""Beyond every cache."""

_LEAST_BYTES = 2**27
"""What is copied where memory holds no more: twice as much is still beyond a GPU's cache."""

_MATRIX = {"cuda": 8192, "cpu": 1024}
"""The largest square."""

_FIRST, _ENOUGH_US = 128, 5_000.0
"""The first square, which doubles until its product takes so long: torch multiplies float8 on a CPU number by number,
and ten products of 1024 took 42 s of a comparison of 8 (AMD EPYC, two cores, 2026-11-23)."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The measured best of a device.

    Attributes:
        gb_s: 1e9 bytes a second, read and written, of a copy beyond the caches.
        tflop_s: 1e12 multiplications and additions a second of a square product in the dtype.
    """

    gb_s: float
    tflop_s: float

    def least_us(self, work: Work) -> float:
        """Microseconds below which the work cannot be done from memory; what lies in a cache can be quicker."""
        return max(work.bytes / self.gb_s / 1e3, work.flops / self.tflop_s / 1e6)


def copy_gb_s(device: torch.device) -> float:
    """1e9 bytes a second, read and written, of a copy beyond the caches; measured once in this process.

    Infinite where memory holds no such copy: then no kernel's copies rule it out.
    """
    try:
        return _copy_gb_s(str(device), torch.get_num_threads())
    except Exception as error:
        if not out_of_memory(error):
            raise
        return math.inf


@functools.lru_cache(maxsize=32)
def _copy_gb_s(device: str, threads: int) -> float:  # what was measured depends on them
    with torch.no_grad():
        size = _COPY_BYTES.get(torch.device(device).type, _LEAST_BYTES)
        while (blocks := _blocks(size, device)) is None:
            size //= 2
        source, target = blocks
        return 2 * size / _best_us(clock_of(device), lambda: target.copy_(source)) / 1e3


def _blocks(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Two blocks of so many bytes; None where memory does not hold them, and less would do."""
    try:
        source = torch.ones(size, dtype=torch.uint8, device=device)
        return source, torch.empty_like(source)
    except Exception as error:
        if size <= _LEAST_BYTES or not out_of_memory(error):
            raise
        return None  # the first of them goes with this frame


def ceiling(device: torch.device, dtype: str) -> Ceiling:
    """Measure a copy and a product, or say what was measured before in this process."""
    return _measured(str(device), dtype, torch.get_num_threads())


@functools.lru_cache(maxsize=32)
def _measured(device: str, dtype: str, threads: int) -> Ceiling:  # what was measured depends on them
    kind = torch.device(device).type
    clock, most = clock_of(device), _MATRIX.get(kind, 1024)
    size = min(_FIRST, most)
    with torch.no_grad():
        while True:
            left = torch.ones(size, size, dtype=dtype_named(dtype), device=device)
            right = torch.ones_like(left)
            product = functools.partial(torch.matmul, left, right)
            if size >= most or min(clock.once(product) for _ in range(2)) >= _ENOUGH_US:  # the first loads a library
                break
            size *= 2
        product_us = _best_us(clock, product)
    return Ceiling(_copy_gb_s(device, threads), 2 * size**3 / product_us / 1e6)


def _best_us(clock: Clock, run: object) -> float:
    """The lower quartile of a few samples: a ceiling is what a machine can do, not what it did while disturbed."""
    assert callable(run)
    samples = race({"": run}, clock, Effort(samples=8, budget_s=0.5, steady_s=0.5))[""].samples
    return statistics.quantiles(samples, n=4)[0] if len(samples) > 1 else samples[0]


CACHED = 4.0
"""How many times quicker data may come from a cache than from memory."""

MATTERS = 2**20
"""Bytes of copies below which the machine's copy is not measured: the answer takes a part of a second, once."""

HOPELESS = 2.5
"""Times the best, as in :class:`layerzero.tuning.measurement.timing.Effort`."""

SURE = 0.95
"""Confidence from which on a prediction rules out: a claimed error of 37 %."""


def copied_bytes(candidate: Candidate, facts: Facts) -> int:
    """Bytes that the copies of a candidate's plan read and write at least."""
    moved = {each.argument for each in candidate.adaptations if each.kind in ("copy", "expand")}
    tensors = [tensor for name, tensor in facts.tensors.items() if name in moved]
    return sum(2 * math.prod(each.shape) * each.dtype.itemsize for each in tensors)


def least_us(candidate: Candidate, facts: Facts, device: torch.device) -> float:
    """Microseconds below which a candidate's plan cannot be done; 0 where it copies nothing that matters."""
    copied = copied_bytes(candidate, facts)
    if copied < MATTERS:
        return 0.0
    least = 0.0 if facts.operation.work is None else facts.operation.work(facts).bytes
    return (least + copied) / copy_gb_s(device) / 1e3 / CACHED


def outdone(
    candidates: Iterable[Candidate], evidence: Mapping[str, Evidence], facts: Facts, device: torch.device
) -> set[str]:
    """Ids of the candidates whose copies alone take longer than another one was measured to take for this very call.

    It is checked anew each time: the quicker kernel may be gone tomorrow.
    """
    own = {
        name: each.time_us
        for name, each in evidence.items()
        if each.provenance is Provenance.MEASURED and not each.stands_in
    }
    best = min(own.values(), default=math.inf)
    return {
        each.kernel.id
        for each in candidates
        if math.isfinite(best) and each.kernel.id not in own and least_us(each, facts, device) > best
    }


def hopeless(evidence: Mapping[str, Evidence]) -> set[str]:
    """Ids of the kernels that this machine's own times of other calls rule out."""
    own = {
        name: each
        for name, each in evidence.items()
        if each.provenance in (Provenance.MEASURED, Provenance.PREDICTED) and each.confidence >= SURE
    }
    best = min((each.cost_us for each in own.values()), default=math.inf)
    return {
        name for name, each in own.items() if each.provenance is Provenance.PREDICTED and each.cost_us > HOPELESS * best
    }

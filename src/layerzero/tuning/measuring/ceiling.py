"""What this machine can do at best: bytes a second of a copy, and arithmetic a second of a matrix product.

Measured where somebody asks, once for each device, dtype and number of threads; a number from a data sheet says what a
machine could do elsewhere.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import torch

from layerzero.core.dtypes import dtype_named
from layerzero.core.operation import Work
from layerzero.tuning.measuring.clocks import Clock, clock_of
from layerzero.tuning.measuring.timing import Effort, race

_COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
"""Beyond every cache."""

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
    """1e9 bytes a second, read and written, of a copy beyond the caches; measured once in this process."""
    return _copy_gb_s(str(device), torch.get_num_threads())


@functools.lru_cache(maxsize=32)
def _copy_gb_s(device: str, threads: int) -> float:  # what was measured depends on them
    with torch.no_grad():
        source = torch.ones(_COPY_BYTES.get(torch.device(device).type, 2**27), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * source.numel() / _best_us(clock_of(device), lambda: target.copy_(source)) / 1e3


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

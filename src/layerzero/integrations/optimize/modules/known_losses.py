"""What the weight of a layer loses in a format, kept in the database of times for later requests.

A row is of the kernel that computed the product, in its environment, as a time is. Its work has one fact more, the
weight itself, so that no call finds it; its one sample is too noisy for a prediction.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.integrations.optimize.swaps.candidate import Candidate, quiet
from layerzero.integrations.optimize.swaps.codes import CodedProduct, bias_of, call
from layerzero.integrations.optimize.times import timing
from layerzero.tuning.storage.rows import Work
from layerzero.tuning.storage.store import StoreLedger

SURELY = 1.25
"""A format is left out unseen where it lost so many times what is allowed: other rows lose a little less or more."""

_SAMPLE = 1 << 16
"""Numbers of a weight that are hashed, spread over all of its columns; sums stand for the others."""


def work_of(weight: Tensor, of: str, activations: str | None, *, on_inputs: bool) -> Work:
    """The work under which the loss of a weight (N, K) in a format is kept."""
    facts = {
        "operation": f"optimize.weights.{of}",
        "dtype": dtype_name(weight.dtype),
        "shape": " x ".join(map(str, weight.shape)),
        "activations": str(activations),
        "rows": "of inputs" if on_inputs else "random",
        "weight": _mark_of(weight.detach()),
        "device_name": Device.detect(weight.device).name,
    }
    return Work(tuple(sorted(facts.items())))


def _mark_of(weight: Tensor) -> str:
    """What tells the numbers of a weight from others: a sample of their bits, and sums of all and of their squares.

    Sums of whole numbers, modulo 2^64, are the same in any order and by any number of threads.
    """
    bits = weight.contiguous().view(_BITS[weight.element_size()]).flatten()
    step = max(len(bits) // _SAMPLE, 1)
    while math.gcd(step, len(bits)) > 1:  # else some columns are never looked at
        step += 1
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _AT_ONCE):
        wide = bits[start : start + _AT_ONCE].long()
        sums += torch.stack([wide.sum(), wide.square().sum()])
    sample = bits[::step].contiguous().view(torch.uint8).tolist()
    return hashlib.blake2b(bytes(sample) + repr(sums.tolist()).encode(), digest_size=16).hexdigest()


_AT_ONCE = 1 << 18
"""Numbers that are summed together. 4096 x 4096 take 0.13 s so, and 0.5 s by 2^22 (AMD EPYC Zen 4, 2026-11-27)."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""


def known(work: Work, device: torch.device) -> float | None:
    """The loss that is kept for a work, by kernels as they are here; None where there is none."""
    ledger = ENGINE.ledger
    if not isinstance(ledger, StoreLedger):
        return None
    found = ledger.times.errors(work, Device.detect(device))
    return max(found.values()) if found else None


def keep(found: Candidate, work: Work, loss: float) -> None:
    """Keep what a layer lost, with the time of its product with the example's rows."""
    ledger, state, kernel = ENGINE.ledger, found.swap.state, found.kernel
    assert isinstance(state, CodedProduct)
    if not isinstance(ledger, StoreLedger) or kernel is None or not math.isfinite(loss):
        return
    module, rows = found.swap.module, found.example
    with quiet(module):
        took_us = max(1e6 * timing.taken(lambda: call(state, rows, bias_of(module)), rows.device), 0.1)
    told = Measurement(took_us, took_us, 0.0, 1, noise=1.0, origin="optimize", error=loss)
    ledger.times.record_work(REGISTRY.kernel(kernel), work, Device.detect(rows.device), told)

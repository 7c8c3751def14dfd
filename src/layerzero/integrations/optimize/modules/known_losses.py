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
"""Numbers of a weight that tell it from others, spread over all of it."""


def work_of(weight: Tensor, of: str, activations: str | None, *, on_inputs: bool) -> Work:
    """The work under which the loss of a weight (N, K) in a format is kept."""
    flat = weight.detach().flatten()
    some = flat[:: max(len(flat) // _SAMPLE, 1)].float().cpu()
    facts = {
        "operation": f"optimize.weights.{of}",
        "dtype": dtype_name(weight.dtype),
        "shape": " x ".join(map(str, weight.shape)),
        "activations": str(activations),
        "rows": "of inputs" if on_inputs else "random",
        "weight": hashlib.blake2b(some.numpy().tobytes(), digest_size=16).hexdigest(),
        "device_name": Device.detect(weight.device).name,
    }
    return Work(tuple(sorted(facts.items())))


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

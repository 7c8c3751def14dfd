"""Times that are known of a call's kernels and do not count here, with what differs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from layerzero.core.device import Device
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.keeping import archive
from layerzero.tuning.keeping.environment import Environment, surroundings
from layerzero.tuning.keeping.store import StoreLedger

MOST = 20_000
"""Rows that are looked at: a folder that many machines share may have more than anybody waits for."""


def refused(operations: Collection[str], device: torch.device) -> Counter[str]:
    """Why times of operations do not count on a device, and how many."""
    ledger: Any = ENGINE.ledger
    found: Counter[str] = Counter()
    if not isinstance(ledger, StoreLedger):
        return found
    here = surroundings(Device.detect(str(device)))
    known = {kernel.id: kernel for kernel in REGISTRY.kernels()}
    for row in itertools.islice(archive.rows(ledger.times.database), MOST):
        kernel = known.get(row.kernel)
        platform = row.environment.platform
        if kernel is None or row.facts.get("operation") not in operations or platform != here.device.platform:
            continue
        why = differs(here.environment(kernel)[0], row.environment)
        if why:
            found[why] += 1
    return found


def differs(here: Environment, there: Environment) -> str:
    """The first thing in which two environments differ; empty where they do not."""
    for name in ("device", "capability", "driver", "runtime", "torch", "library", "version", "threads"):
        wanted, got = getattr(here, name), getattr(there, name)
        if wanted != got:
            what = f"{here.library}'s version" if name == "version" else name
            return f"{what}: wanted {wanted or 'none'}, got {got or 'none'}"
    return ""

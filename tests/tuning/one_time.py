"""One time of one call, and a store as a process that was just born has it."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.tuning.storage.store import TimeStore

TIME = Measurement(10.0, 12.0, 0.01, 20, noise=0.02, first_call_us=900.0)


def right(input, weight, *, eps=1e-6):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def facts(rows=4, hidden=64, **state):
    found = lz.facts("rms_norm", torch.randn(rows, hidden), torch.randn(hidden))
    return found.on(found.device, capturing=state["capturing"]) if state else found


def fresh():
    """What a process that was just born would read."""
    return TimeStore()


def times(store, kernels, asked):
    return {name: found.time_us for name, found in store.evidence(kernels, asked).items()}


def run(script, folder, *arguments, **options):
    variables = {**os.environ, "LAYERZERO_CACHE_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, env=variables, timeout=120, **options)

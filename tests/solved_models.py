"""Small models with calls of two functions, what they are solved with, and kernels for them: for the tests of plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement.comparison import record_times

BUCKETS = {"seq_len": [8, 32], "batch": [1, 4]}


class Layer(nn.Module):
    def __init__(self, width=64, heads=2):
        super().__init__()
        self.weight, self.heads = nn.Parameter(torch.ones(width)), heads

    def forward(self, rows):
        heads = lz.rms_norm(rows, self.weight).unflatten(-1, (self.heads, -1))
        return rows + lz.attention(heads, heads, heads, causal=True, layout="BSHD").flatten(2)


def model(width=64, layers=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def inputs(seq_len=8, batch=1):
    return torch.empty(batch, seq_len, 64, device="meta")


def solve(asked=None, given=inputs, buckets=BUCKETS, **more):
    return lz.solve(asked or model(), given, buckets, **{"budget_s": 0, **more})


def run(asked, seq_len, batch):
    with torch.no_grad():
        return asked(torch.randn(batch, seq_len, 64))


def own(name, priority=100, **declared):
    ran = []

    def kernel(input, weight, *, eps=1e-6):
        ran.append(input.shape)
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel("norm.rms", f"user.{name}", priority=priority, **declared)(kernel)
    return ran


def timed(seq_len, batch, **times_us):
    """Times of kernels of our own, as a tuning run writes them."""
    facts = lz.facts("rms_norm", torch.randn(batch, seq_len, 64), torch.randn(64))
    record_times(
        facts,
        {
            REGISTRY.kernel(f"user.{name}"): Measurement(median_us=time, p95_us=time, variance_us2=0.0, samples=30)
            for name, time in times_us.items()
        },
    )


def refused(plan, problem, **more):
    """Loading is refused in these words; or told once, and the process goes on."""
    with pytest.raises(lz.FrozenChoiceError, match=problem):
        lz.freeze(plan, **more)
    assert lz.frozen() is None
    with pytest.warns(lz.LayerZeroWarning, match=problem) as told:
        document = lz.freeze(plan, otherwise="select", **more)
    assert len(told) == 1
    assert not document.choices
    assert lz.frozen() is None
    run(model(), 8, 1)

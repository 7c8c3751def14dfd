"""What a hit costs beside its kernel, as ratios with slack: loaded machines change nanoseconds, not these."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

import layerzero as lz
from layerzero.engine import accelerator
from layerzero.engine.functions import CALLS


def noop(query, key, value, *, causal=False, scale=None):
    return query


@pytest.fixture
def over():
    """Nanoseconds beyond the direct call of each way, medians of interleaved rounds."""
    lz.register_kernel("attention.standard.prefill", "user.noop", priority=100, grad=True, handles_negated=True)(noop)

    def measure(calls, rounds=25, repeat=300):
        times = {name: [] for name in calls}
        for call in calls.values():
            for _ in range(3):
                call()
        for _ in range(rounds):
            for name, call in calls.items():
                started = time.perf_counter_ns()
                for _ in range(repeat):
                    call()
                times[name].append((time.perf_counter_ns() - started) / repeat)
        direct = statistics.median(times["direct"])
        return {name: statistics.median(each) - direct for name, each in times.items()}

    with torch.no_grad():
        yield measure


def test_a_hit_costs_a_fraction_of_what_torchs_operators_cost(over):
    @torch.library.custom_op("layerzero_test::overhead", mutates_args=())
    def custom(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.clone()

    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    operator, python = torch.ops.aten._fused_sdp_choice.default, CALLS["attention"].python
    bound, unguarded = (lz.bind(lz.attention, q, k, v, layout="BSHD", guard=guard) for guard in (True, False))
    found = over({
        "direct": lambda: noop(q, k, v, causal=True, scale=None),
        "hit": lambda: lz.attention(q, k, v, layout="BSHD"),
        "bound": lambda: bound(q, k, v),
        "unguarded": lambda: unguarded(q, k, v),
        "python": lambda: python(q, k, v, layout="BSHD"),
        "operator": lambda: operator(q, k, v, None, 0.0, True),
        "custom_op": lambda: custom(q, k, v),
    })  # fmt: skip
    assert found["python"] < found["custom_op"] / 2
    if accelerator.HOT is None:
        pytest.skip(accelerator.ABSENT)
    assert found["hit"] < 0.45 * found["operator"]
    assert found["hit"] < found["custom_op"] / 15
    assert found["bound"] < found["hit"] * 1.1
    assert found["unguarded"] < found["bound"] / 2

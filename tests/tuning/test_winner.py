"""A new epoch begins when new times change the winner, and not before."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Ledger
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement.comparison import record_times
from layerzero.tuning.storage.store import StoreLedger

X, W = torch.randn(4, 64), torch.randn(64)


@pytest.fixture(autouse=True)
def kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    ENGINE.ledger = StoreLedger(Ledger())

    def run(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    for name, priority in (("a", 80), ("b", 60)):
        lz.register_kernel("norm.rms", f"user.{name}", priority=priority, graph_safe=True)(run)
    lz.configure(allow=["user"])


@pytest.fixture
def bumps(monkeypatch):
    counted = []
    monkeypatch.setattr(ENGINE, "bump", lambda: counted.append(1))
    return counted


def record(graph=False, noise=0.02, **medians):
    times = {
        REGISTRY.kernel(f"user.{name}"): Measurement(median, median, 0.0, 20, noise=noise, graph=graph)
        for name, median in medians.items()
    }
    return record_times(lz.facts("rms_norm", X, W), times)


def test_only_a_changed_winner_starts_an_epoch(bumps):
    assert not record(a=10.0, b=20.0), "what priority says as well"
    assert not record(a=11.0, b=19.0)
    assert not record(a=10.5)
    assert bumps == []
    assert record(b=5.0)
    assert len(bumps) == 1


def test_a_new_winner_has_to_be_ahead_by_more_than_the_noise(bumps):
    record(a=20.0, b=10.0)
    assert not record(a=9.9, b=10.0), "a wins by priority now, and as much faster as noise is"
    assert not record(a=10.1, b=10.0)
    assert record(a=9.0, b=10.0)


def test_graph_times_change_the_winner_of_graphs(bumps):
    record(a=10.0, b=20.0)
    assert record(graph=True, a=10.0, b=5.0)
    assert not record(graph=True, a=10.0, b=5.1)
    assert not record(a=10.0)


def test_a_plan_that_was_chosen_is_chosen_again_after_the_winner_changed():
    with lz.scope(allow=["user"]):
        record(a=10.0, b=20.0)
        lz.rms_norm(X, W)
        assert lz.which("rms_norm", X, W)["kernel_id"] == "user.a"
        record(b=5.0)
        assert lz.which("rms_norm", X, W)["kernel_id"] == "user.b"


def test_what_was_held_before_another_epoch_counts_no_more():
    with lz.scope(allow=["user"]):
        assert record(a=150.0, b=100.0)
        assert not record(a=97.0, noise=0.05), "b is held within the noise"
        ENGINE.bump()
        lz.rms_norm(X, W)
        assert lz.which("rms_norm", X, W)["kernel_id"] == "user.a", "by priority"
        (plan,) = CALLS["rms_norm"].dispatcher.cache.table(current_policy()).values()
        assert record(b=50.0), "plans are on a, whatever was held before them"
        assert plan not in CALLS["rms_norm"].dispatcher.cache.table(current_policy()).values()


def test_what_may_not_run_wins_nothing(bumps):
    lz.configure(deny=["user.b"])
    assert not record(a=10.0, b=5.0)
    assert not record(b=1.0)
    assert bumps == []

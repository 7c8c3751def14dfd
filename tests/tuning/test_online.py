"""Sampling times a share of the calls, waits for nothing, loses nothing in silence, and tells where times have aged."""

from __future__ import annotations

import logging

import pytest
import torch

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import MemoryLedger
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.tuning import online, store
from layerzero.tuning.online import Sampler
from layerzero.tuning.store import StoreLedger

X, W = torch.randn(4, 64), torch.randn(64)


@pytest.fixture
def sampler(monkeypatch):
    """A sampler of its own, whose thread the test is: it reads when it is told to."""
    sampler = Sampler()
    sampler._thread = object()
    monkeypatch.setattr(online, "SAMPLER", sampler)
    monkeypatch.setattr(store, "SAMPLER", sampler)
    lz.configure(allow=["torch"])
    return sampler


def measured(time_us, *arguments):
    """Let the database say how long a call takes."""
    ENGINE.ledger = StoreLedger(MemoryLedger())
    kernel = REGISTRY.kernel("torch.rms_norm")
    ENGINE.ledger.record_time(kernel, lz.facts("rms_norm", *arguments), Measurement(time_us, time_us, 0.0, 20))
    ENGINE.bump()


def kept_plans():
    return list(CALLS["rms_norm"].dispatcher.cache.current.values())


def test_nothing_is_added_to_a_plan_while_it_is_off(sampler):
    lz.rms_norm(X, W)
    (plan,) = kept_plans()
    assert plan.run.__name__ != "counted"
    lz.configure(sampling_rate=0.5)
    lz.rms_norm(X, W)
    (plan,) = kept_plans()
    assert plan.run.__name__ == "counted"
    assert plan.direct is None
    lz.configure(sampling_rate=0.0)
    lz.rms_norm(X, W)
    (plan,) = kept_plans()
    assert plan.run.__name__ != "counted"


def test_the_share_that_was_asked_for_is_timed_and_results_stay(sampler, path):
    lz.configure(sampling_rate=0.25)
    want = torch.nn.functional.rms_norm(X, (64,), W, 1e-6)
    for _ in range(400):
        torch.testing.assert_close(lz.rms_norm(X, W), want)
    sampler.read()
    assert 60 <= lz.sampled().taken <= 140
    assert lz.sampled().dropped == 0
    assert lz.sampled().drifted == ()


def test_times_that_have_aged_are_told_once_and_by_doctor(sampler, caplog):
    lz.configure(sampling_rate=1.0)
    measured(0.001, X, W)
    with caplog.at_level(logging.WARNING, "layerzero"):
        for _ in range(3 * online.SAMPLES):
            lz.rms_norm(X, W)
        sampler.read()
    (drift,) = lz.sampled().drifted
    assert (drift.kernel_id, drift.measured_us) == ("torch.rms_norm", 0.001)
    assert drift.seen_us > 0.001
    told = [each.message for each in caplog.records if "in production" in each.message]
    assert len(told) == 1
    assert "`layerzero tune norm.rms`" in told[0]
    assert any("`layerzero tune norm.rms`" in issue for issue in lz.doctor().issues)


def test_times_that_are_as_measured_are_not_told(sampler):
    lz.configure(sampling_rate=1.0)
    measured(100.0, X, W)
    plan = None
    for _ in range(2):
        lz.rms_norm(X, W)
        (plan,) = kept_plans()
    arguments = {"input": online._shape(X), "weight": online._shape(W), "eps": 1e-6}
    for time_us in range(80, 140):
        sampler.put(online._Sample(plan, CALLS["rms_norm"].function, arguments, lambda time_us=time_us: float(time_us)))
    sampler.read()
    assert lz.sampled().taken >= 60
    assert lz.sampled().drifted == ()


def test_a_call_counts_for_its_own_sizes_not_for_those_its_plan_was_chosen_for(sampler):
    lz.configure(sampling_rate=1.0)
    measured(0.001, torch.randn(7, 64), W)
    for _ in range(5):
        lz.rms_norm(X, W)
    sampler.read()
    assert lz.sampled().unmeasured == lz.sampled().taken > 0
    for _ in range(2 * online.SAMPLES):
        lz.rms_norm(torch.randn(7, 64), W)
    sampler.read()
    (drift,) = lz.sampled().drifted
    assert drift.samples >= online.SAMPLES


def test_what_the_queue_has_no_room_for_is_counted_and_told(sampler, monkeypatch):
    monkeypatch.setattr(online, "MAX_WAITING", 4)
    ENGINE.ledger = StoreLedger(MemoryLedger())
    lz.configure(sampling_rate=1.0)
    for _ in range(40):
        lz.rms_norm(X, W)
    sampler.read()
    found = lz.sampled()
    assert found.taken == 4
    assert found.dropped > 20
    assert any(f"sampling dropped {found.dropped}" in issue for issue in lz.doctor().issues)


def test_a_sample_that_is_not_ready_waits_without_anybody_waiting_for_it(sampler):
    lz.configure(sampling_rate=1.0)
    lz.rms_norm(X, W)
    (plan,) = kept_plans()
    answers = iter([None, None, 5.0])
    arguments = {"input": online._shape(X), "weight": online._shape(W)}
    sampler.put(online._Sample(plan, CALLS["rms_norm"].function, arguments, lambda: next(answers)))
    for taken in (0, 0, 1):
        sampler.read()
        assert sampler.taken == taken


def test_calls_with_gradients_are_left_alone(sampler):
    lz.configure(sampling_rate=1.0)
    for _ in range(20):
        lz.rms_norm(X.clone().requires_grad_(), W)
    sampler.read()
    assert lz.sampled().taken == 0


def test_the_thread_reads_by_itself(monkeypatch):
    sampler = Sampler()
    monkeypatch.setattr(online, "SAMPLER", sampler)
    monkeypatch.setattr(online, "PAUSE_S", 0.01)
    lz.configure(sampling_rate=1.0, allow=["torch"])
    for _ in range(20):
        lz.rms_norm(X, W)
    for _ in range(500):
        if lz.sampled().taken:
            break
        torch.randn(256, 256) @ torch.randn(256, 256)
    assert lz.sampled().taken > 0


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_share_is_between_nothing_and_all(rate):
    with pytest.raises(lz.PolicyError, match=r"sampling_rate: wanted a number of at (least 0|most 1), got"):
        lz.configure(sampling_rate=rate)

"""Sampling times a share of the calls, waits for nothing, loses nothing in silence, and tells where times have aged."""

from __future__ import annotations

import logging
import os

import pytest
import torch

import layerzero as lz
from layerzero.cli.flags import shapes_of
from layerzero.core.evidence import Measurement, call_work
from layerzero.core.ledger import Ledger
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement import online
from layerzero.tuning.measurement.jobs import RECORDED, command_for
from layerzero.tuning.measurement.online import Sampler
from layerzero.tuning.storage import store
from layerzero.tuning.storage.store import StoreLedger
from layerzero.tuning.verification import vetting

X, W = torch.randn(4, 64), torch.randn(64)


@pytest.fixture
def sampler(monkeypatch):
    """A sampler of its own, whose thread the test is: it reads when it is told to."""
    sampler = Sampler()
    sampler._thread = object()
    monkeypatch.setattr(online, "SAMPLER", sampler)
    monkeypatch.setattr(store, "NOTES", [sampler.notes])
    lz.configure(allow=["torch"])
    return sampler


def measured(time_us, *arguments):
    """Let the database say how long a call takes."""
    ENGINE.ledger = StoreLedger(Ledger())
    kernel = REGISTRY.kernel("torch.rms_norm")
    ENGINE.ledger.record_time(kernel, lz.facts("rms_norm", *arguments), Measurement(time_us, time_us, 0.0, 20))
    ENGINE.bump()


def kept_plans():
    return list(CALLS["rms_norm"].dispatcher.cache.current.values())


def test_a_share_that_no_call_will_ever_meet_leaves_calls_alone(sampler):
    lz.configure(sampling_rate=5e-324)
    torch.testing.assert_close(lz.rms_norm(X, W), torch.nn.functional.rms_norm(X, W.shape, W, 1e-6))
    assert not sampler._waiting


def test_samples_behind_one_that_cannot_be_read_are_read_next(sampler):
    def lost():
        raise RuntimeError("planted")

    lz.configure(sampling_rate=1.0)
    for _ in range(online.FIRST + 2):
        lz.rms_norm(X, W)
    sampler._waiting[0].time_us = lost
    sampler._wake.clear()
    with pytest.raises(RuntimeError, match="planted"):
        sampler.read()
    assert sampler._wake.is_set()
    sampler.read()
    assert sampler.taken == 1


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
    command = "`layerzero tune norm.rms --shapes 4x64 --dtype float32 --again`"
    assert command in told[0]
    assert "in this process, lz.sampled() and lz.doctor()" in told[0]
    assert any(command in issue for issue in lz.doctor().issues)


def test_a_drift_is_forgotten_once_its_call_was_measured_anew(sampler, caplog):
    lz.configure(sampling_rate=1.0)
    measured(0.001, X, W)
    for _ in range(3 * online.SAMPLES):
        lz.rms_norm(X, W)
    sampler.read()
    (drift,) = lz.sampled().drifted
    kernel, facts = REGISTRY.kernel("torch.rms_norm"), lz.facts("rms_norm", X, W)
    ENGINE.ledger.record_time(kernel, facts, Measurement(0.002, 0.002, 0.0, 20))
    assert lz.sampled().drifted == ()
    assert not any("in production" in issue for issue in lz.doctor().issues)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "layerzero"):
        for _ in range(3 * online.SAMPLES):
            lz.rms_norm(X, W)
        sampler.read()
    (again,) = lz.sampled().drifted
    assert (drift.measured_us, again.measured_us) == (0.001, 0.002)
    assert sum("in production" in each.message for each in caplog.records) == 1


def test_drifts_are_bounded(sampler, monkeypatch):
    monkeypatch.setattr(online, "MAX_KEPT", 2)
    monkeypatch.setattr(online, "MAX_NOTES", 1)
    lz.configure(sampling_rate=1.0)
    ENGINE.ledger = StoreLedger(Ledger())
    for rows in (3, 5, 7):
        x = torch.randn(rows, 64)
        kernel = REGISTRY.kernel("torch.rms_norm")
        ENGINE.ledger.record_time(kernel, lz.facts("rms_norm", x, W), Measurement(0.001, 0.001, 0.0, 20))
        for _ in range(3 * online.SAMPLES):
            lz.rms_norm(x, W)
        sampler.read()
    assert len(lz.sampled().drifted) == 2
    notes = [each for each in sampler.notes() if "dropped" not in each]
    assert len(notes) == 2
    assert notes[1].startswith("1 further calls")


@pytest.mark.parametrize(
    ("function", "arguments", "line"),
    [
        ("rms_norm", {"input": (2, 3, 64), "weight": (64,)}, "norm.rms --shapes 2x3x64 --dtype float32"),
        (
            "attention",
            {"query": (1, 8, 4, 16), "key": (1, 9, 2, 16), "value": (1, 9, 2, 16), "causal": False},
            "attention.full --shapes 1x8x4x16:1x9x2x16 --dtype float32",
        ),
        (
            "attention",
            {"query": (1, 4, 8, 16), "key": (1, 4, 8, 16), "value": (1, 4, 8, 16), "layout": "BHSD"},
            "attention.standard.prefill --shapes 1x4x8x16 --dtype float32 --layout BHSD",
        ),
    ],
)
def test_the_advice_measures_the_very_call(function, arguments, line):
    tensors = {name: torch.randn(each) if isinstance(each, tuple) else each for name, each in arguments.items()}
    facts = lz.facts(function, **tensors)
    assert command_for(facts) == f"`layerzero tune {line} --again`"
    lz.configure(allow=["torch"])
    name, _, shape, *_ = line.split()
    tuned = lz.tune(name, shapes_of([shape]), "float32", "cpu", layout=arguments.get("layout"), samples=3, again=True)
    assert call_work(facts) in [call_work(each.facts) for each in tuned.contests]
    assert ENGINE.ledger.evidence(lz.list_kernels(facts.operation.name), facts)


def test_what_no_shape_says_is_recorded(sampler):
    facts = lz.facts("rms_norm", torch.randn(4, 128)[:, ::2], W)
    assert command_for(facts) == RECORDED


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("what", [online.SAMPLER, vetting.BACKGROUND])
def test_a_forked_process_has_a_thread_of_its_own(monkeypatch, what):
    monkeypatch.setattr(what, "_thread", object())
    with what._lock:  # as another thread of the parent may hold it
        child = os.fork()
        if child == 0:
            free = what._lock.acquire(blocking=False)
            os._exit(0 if free and what._thread is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert what._thread is not None


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
    ENGINE.ledger = StoreLedger(Ledger())
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

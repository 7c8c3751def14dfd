"""Who cannot win a call, and is not measured: by its copies, or by what its neighbours took."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch.nn.functional import rms_norm

import layerzero as lz
from layerzero.core.evidence import Evidence, Measurement, Provenance
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.ops.norm.declare import norm_case
from layerzero.testing.generate import RandomCall
from layerzero.tuning.measurement import admission
from layerzero.tuning.measurement.bench import bench
from layerzero.tuning.measurement.clocks import clock_of
from layerzero.tuning.measurement.contest import Status, contest
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.timing import Effort
from layerzero.tuning.measurement.tune import run_jobs
from layerzero.tuning.measurement.workload import jobs_of
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger
from others import OTHERS

QUICK = Effort(samples=3, budget_s=0.05)


def norm(rows, hidden=64):
    return Job(*norm_case("norm.rms", rows, hidden), "float32")


@pytest.mark.parametrize(("gb_s", "status"), [(1e-3, Status.HOPELESS), (1e6, Status.TIMED)])
def test_who_only_copies_for_longer_than_another_takes_is_not_measured(monkeypatch, gb_s, status):
    monkeypatch.setattr(admission, "copy_gb_s", lambda device: gb_s)
    ran = []

    @lz.register_kernel("norm.rms", "mine.dense", supported_dtypes=["float32"], limits=[lz.limits.contiguous("input")])
    def dense(input, weight, *, eps):
        ran.append(1)
        return rms_norm(input, weight.shape, weight, eps)

    wide = torch.randn(512, 2048)[:, ::2]
    call = RandomCall("rms_norm", {"input": wide, "weight": torch.randn(1024)}, "strided")
    found = contest(call, effort=QUICK, leave_out=OTHERS)
    (entry,) = (each for each in found.entries if each.kernel.id == "mine.dense")
    assert entry.status is status
    assert bool(ran) is (status is Status.TIMED)
    if status is Status.HOPELESS:
        assert "its copies alone take" in entry.detail


def evidence(time_us, provenance=Provenance.PREDICTED, confidence=0.99):
    return Evidence(time_us, provenance, confidence)


def test_only_what_is_sure_rules_out_and_only_predictions_are_ruled_out():
    found = {"a": evidence(10.0), "b": evidence(24.0), "c": evidence(26.0)}
    assert admission.hopeless(found) == {"c"}
    assert admission.hopeless(found | {"c": evidence(26.0, Provenance.MEASURED)}) == set()
    assert admission.hopeless(found | {"c": evidence(26.0, confidence=0.9)}) == set()
    assert admission.hopeless(found | {"a": evidence(10.0, Provenance.PRIOR)}) == set(), "of another machine"
    assert admission.hopeless({}) == set()


def test_what_neighbours_rule_out_is_measured_only_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "ledger"))

    @lz.register_kernel("norm.rms", "mine.slow", supported_dtypes=["float32"])
    def slow(input, weight, *, eps):
        time.sleep(0.002)
        return rms_norm(input, weight.shape, weight, eps)

    kernel = REGISTRY.kernel("mine.slow")
    quick = next(each for each in REGISTRY.candidates("norm.rms") if each.id == "torch.rms_norm")
    for rows in (1, 2, 4, 8, 32, 64):
        facts = norm(rows).facts("cpu")
        for each, time_us in ((kernel, 2000.0), (quick, 5.0)):
            ENGINE.ledger.record_time(each, facts, Measurement(time_us, time_us, 0.01, 20, noise=0.01))
    tuned = run_jobs([norm(16)], torch.device("cpu"), effort=QUICK, isolate=False, leave_out=OTHERS)
    assert [entry.kernel.id for entry in tuned.contests[0].entries] == ["torch.rms_norm"]
    assert tuned.spared == 1
    assert "1 times were spared" in str(tuned)
    again = run_jobs([norm(16)], torch.device("cpu"), effort=QUICK, isolate=False, leave_out=OTHERS, again=True)
    assert {entry.kernel.id for entry in again.contests[0].entries} == {"torch.rms_norm", "mine.slow"}
    assert again.spared == 0


def jobs_of_a_kernel_that_copies():
    """One call of rows that step, which this kernel gets a copy of."""

    @lz.register_kernel("norm.rms", "mine.dense", supported_dtypes=["float32"], limits=[lz.limits.contiguous("input")])
    def dense(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    with lz.record() as recording:
        lz.rms_norm(torch.randn(512, 2048)[:, ::2], torch.randn(1024))
    return jobs_of(recording.manifest(), "cpu")


def test_who_only_copies_for_too_long_does_not_make_each_run_begin_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "ledger"))
    speed = [1e-3]
    monkeypatch.setattr(admission, "copy_gb_s", lambda device: speed[0])

    jobs = jobs_of_a_kernel_that_copies()

    def run(**more):
        return run_jobs(jobs, torch.device("cpu"), effort=QUICK, isolate=False, leave_out=OTHERS, **more)

    (first,) = run().contests
    assert {entry.kernel.id: entry.status for entry in first.entries}["mine.dense"] is Status.HOPELESS
    steady = Measurement(50.0, 50.0, 0.01, 20, noise=0.01)  # whatever else this machine does meanwhile
    ENGINE.ledger.record_time(REGISTRY.kernel("torch.rms_norm"), jobs[0].facts("cpu"), steady)
    second = run()
    assert (second.known, second.contests) == (1, ())
    (again,) = run(again=True).contests
    assert {entry.kernel.id for entry in again.entries} == {"mine.dense", "torch.rms_norm"}
    speed[0] = 1e6
    (quick,) = run().contests
    assert {entry.kernel.id: entry.status for entry in quick.entries}["mine.dense"] is Status.TIMED, "it may win now"


@pytest.fixture
def full(monkeypatch):
    """A device whose memory holds no copy; what was measured before is forgotten."""
    monkeypatch.setattr(admission, "_COPY_BYTES", {"cpu": 2**60})
    monkeypatch.setattr(admission, "_LEAST_BYTES", 2**59)
    admission._copy_gb_s.cache_clear()
    admission._measured.cache_clear()
    yield
    admission._copy_gb_s.cache_clear()
    admission._measured.cache_clear()


@pytest.mark.usefixtures("full")
def test_calls_are_measured_where_memory_holds_no_copy_to_judge_them_by():
    assert admission.copy_gb_s(torch.device("cpu")) == math.inf

    jobs = jobs_of_a_kernel_that_copies()
    tuned = run_jobs(jobs, torch.device("cpu"), effort=QUICK, isolate=False, leave_out=OTHERS)
    assert not tuned.skipped
    assert {entry.status for entry in tuned.contests[0].entries} <= {Status.TIMED, Status.STOPPED}
    found = bench(jobs[0], torch.device("cpu"), effort=QUICK, clock=clock_of("cpu"), leave_out=OTHERS)
    assert found.ceiling is None
    assert any(line.median_us for line in found.lines)


def test_a_smaller_copy_tells_where_memory_holds_no_larger_one(monkeypatch):
    monkeypatch.setattr(admission, "_COPY_BYTES", {"cpu": 2**60})
    monkeypatch.setattr(admission, "_LEAST_BYTES", 2**20)
    monkeypatch.setattr(admission, "_best_us", lambda clock, run: 1000.0)
    admission._copy_gb_s.cache_clear()
    found = admission.copy_gb_s(torch.device("cpu"))
    admission._copy_gb_s.cache_clear()
    assert 2 * 2**20 / 1e6 <= found < math.inf

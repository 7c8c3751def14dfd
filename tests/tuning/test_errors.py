"""How far results were from the reference, kept beside times; what a bound on it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from one_time import TIME, fresh, right
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.core.ledger import Ledger
from layerzero.core.reasons import ReasonCode
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.testing.generate import RandomCall
from layerzero.tuning.measurement.contest import Status, contest
from layerzero.tuning.measurement.timing import Effort
from layerzero.tuning.storage import archive
from layerzero.tuning.storage.store import StoreLedger
from layerzero.tuning.verification.child import truth_of

EFFORT = Effort(3, 0.01)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    monkeypatch.setattr(ENGINE, "ledger", StoreLedger(Ledger()))
    for name in ("exact", "coarse"):
        lz.register_kernel("norm.rms", f"user.{name}", priority=50)(right)
    return [REGISTRY.kernel("user.exact"), REGISTRY.kernel("user.coarse")]


def call():
    torch.manual_seed(0)
    return torch.randn(4, 64), torch.randn(64)


def recorded(kernels, *errors):
    facts = lz.facts("rms_norm", *call())
    for kernel, error, factor in zip(kernels, errors, (2.0, 1.0), strict=True):
        ENGINE.ledger.record_time(kernel, facts, replace(TIME, median_us=factor * TIME.median_us, error=error))
    ENGINE.bump()
    return facts


def test_a_contest_says_how_far_each_result_is_from_the_reference():
    def off_by_a_bit(input, weight, *, eps=1e-6):
        return right(input, weight, eps=eps) * (1 + 2.0**-7)

    lz.register_kernel("norm.rms", "user.off", priority=50)(off_by_a_bit)
    lz.register_kernel("norm.rms", "user.right", priority=50)(right)
    input, weight = (each.bfloat16() for each in call())
    given = RandomCall("rms_norm", {"input": input, "weight": weight}, "one")
    found = {each.kernel.id: each for each in contest(given, effort=EFFORT, only=["user.*"]).entries}
    assert {each.status for each in found.values()} <= {Status.TIMED, Status.STOPPED}
    assert all(each.measurement.error == each.error for each in found.values())
    assert 0 < found["user.right"].error < 2.0**-8 < found["user.off"].error < 2.0**-6


def test_the_error_is_relative_and_leaves_out_what_is_infinite():
    facts = lz.facts("rms_norm", *call())
    truth = truth_of(RandomCall("rms_norm", dict(zip(("input", "weight"), call(), strict=True)), "one"), facts)
    want = truth.whole.results[0]
    assert truth.error(want) == 0.0
    assert math.isclose(truth.error(want * 1.5), 0.5, rel_tol=1e-6)
    want[0, 0] = -math.inf
    assert math.isclose(truth.error(want * 1.5), 0.5, rel_tol=1e-6)
    assert truth.error(want.fill_(1.0) / 0.0) is None


def test_an_error_outlives_the_process_and_is_told_beside_the_time(kernels):
    facts = recorded(kernels, 1e-7, 0.004)
    assert {row.kernel: row.error for row in archive.rows(fresh().database)} == {
        "user.exact": 1e-7,
        "user.coarse": 0.004,
    }
    assert fresh().evidence(kernels, facts)["user.coarse"].error == 0.004
    assert "10.0 us measured, error 4.0e-03" in str(lz.explain("rms_norm", *call()))
    assert "error 4.0e-03" in CliRunner().invoke(main, ["perfdb", "show"]).stdout


def test_a_later_time_without_an_error_keeps_the_largest(kernels):
    facts = recorded(kernels, 1e-7, 0.004)
    ENGINE.ledger.record_time(kernels[1], facts, replace(TIME, origin="online"))
    ENGINE.ledger.record_time(kernels[1], facts, replace(TIME, origin="bench", error=0.001))
    assert fresh().evidence(kernels, facts)["user.coarse"].error == 0.004


def test_a_bound_refuses_the_faster_kernel_whose_result_was_farther_off(kernels):
    recorded(kernels, 1e-7, 0.004)
    assert lz.explain("rms_norm", *call()).kernel_id == "user.coarse"
    with lz.scope(max_error=0.001):
        report = lz.explain("rms_norm", *call())
    assert report.kernel_id == "user.exact"
    (reason,) = report.failures["user.coarse"]
    assert reason.code is ReasonCode.QUANT_ACCURACY_THRESHOLD_EXCEEDED
    assert "0.004 measured" in str(reason)


def test_torchs_own_stays_where_all_others_are_refused_or_of_unknown_error(kernels):
    recorded(kernels, 0.004, None)
    with lz.scope(max_error=1e-9):
        report = lz.explain("rms_norm", *call())
    assert report.chosen.kernel.is_stock(report.facts)
    assert "within max_error" in str(report.notes)
    assert [str(report.failures[each.id][0]).partition("got ")[2] for each in kernels] == [
        "0.004 measured",
        "no error measured",
    ]


def test_torchs_own_is_not_refused_whatever_its_error_is(kernels):
    facts = recorded(kernels, 0.004, 0.004)
    stock = REGISTRY.kernel("torch.rms_norm")
    ENGINE.ledger.record_time(stock, facts, replace(TIME, error=0.1))
    ENGINE.bump()
    with lz.scope(max_error=0.001):
        assert lz.explain("rms_norm", *call()).kernel_id == stock.id


def test_a_kernel_without_a_time_does_not_win_under_a_bound_before_anything_is_measured(kernels):
    with lz.scope(max_error=0.001):
        report = lz.explain("rms_norm", *call())
    assert report.chosen.kernel.is_stock(report.facts)


def test_a_time_that_was_predicted_from_a_refused_one_does_not_win(kernels):
    recorded(kernels, 0.004, 0.004)
    fewer = torch.randn(2, 64), torch.randn(64)
    assert "predicted" in lz.explain("rms_norm", *fewer).chosen.evidence.told
    with lz.scope(max_error=0.001):
        report = lz.explain("rms_norm", *fewer)
    assert report.chosen.kernel.is_stock(report.facts)


def test_of_unknown_errors_one_runs_where_nothing_of_torchs_may(kernels):
    recorded(kernels, 0.004, None)
    with lz.scope(max_error=0.001, deny=["torch"]):
        assert lz.explain("rms_norm", *call()).kernel_id == "user.coarse"

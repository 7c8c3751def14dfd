"""The order of legal kernels: evidence decides, priority fills the gaps, policy bends, ties are stable."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from layerzero.core.evidence import Evidence, Provenance
from layerzero.core.ledger import Ledger, Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY

CALL = torch.randn(8, 64), torch.randn(64)


class KnownTimes(Ledger):
    """A ledger that knows the times that a test gave it, for whatever call."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def untimed(self, facts):
        return not self.known

    def evidence(self, kernels, facts):
        return {each.id: self.known[each.id] for each in kernels if each.id in self.known}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(ENGINE, "_ledger", KnownTimes())
    for name, priority in (("a", 80), ("b", 60), ("c", 60)):

        def run(input, weight, *, eps=1e-6):
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

        lz.register_kernel("norm.rms", f"user.{name}", priority=priority)(run)
    with lz.scope(allow=["user"]):
        yield


def ranked():
    return [each for each in lz.explain("rms_norm", *CALL).candidates if each.legal]


def order():
    return [each.kernel.id for each in ranked()]


def score(kernel_id):
    return next(each.score for each in ranked() if each.kernel.id == kernel_id)


def measured(kernel_id, time_us, **evidence):
    ENGINE.ledger.known[kernel_id] = Evidence(time_us, **evidence)


def test_without_evidence_priority_decides_and_ties_go_by_id():
    assert order() == ["user.a", "user.b", "user.c", "reference.norm.rms"]


def test_evidence_decides_over_priority():
    measured("user.a", 20.0)
    measured("user.c", 10.0)
    assert order()[0] == "user.c"
    assert score("user.c") == pytest.approx(80)
    assert score("user.a") == pytest.approx(80 - 50)
    assert score("user.b") == pytest.approx(60 - 30), "unmeasured beside measured"


def test_a_stray_measurement_of_the_reference_does_not_outrank_an_unmeasured_kernel():
    measured("reference.norm.rms", 5.0)
    assert order()[0] == "user.a"


def test_a_preferred_kernel_wins_up_to_132_percent_of_the_best_time():
    measured("user.a", 13.0, noise=0.0)
    measured("user.c", 10.0, noise=0.0)
    with lz.prefer("user.a"):
        assert order()[0] == "user.a"
    measured("user.a", 13.4, noise=0.0)
    with lz.prefer("user.a"):
        assert order()[0] == "user.c"
    assert 2 ** (20 / 50) == pytest.approx(1.32, abs=0.01)


def test_an_avoided_kernel_wins_only_below_half_the_time():
    lz.unregister_kernel("user.b")
    measured("user.a", 10.0, noise=0.0)
    measured("user.c", 5.5, noise=0.0)
    with lz.avoid("user.c"):
        assert order()[0] == "user.a"
    measured("user.c", 4.5, noise=0.0)
    with lz.avoid("user.c"):
        assert order()[0] == "user.c"


def test_within_the_noise_priority_and_id_decide():
    measured("user.a", 10.2, noise=0.05)
    measured("user.c", 10.0, noise=0.05)
    assert order()[0] == "user.a"
    measured("user.b", 10.0, noise=0.05)
    measured("user.a", 20.0, noise=0.05)
    assert order()[:2] == ["user.b", "user.c"]


def test_one_low_confidence_moves_the_whole_set_towards_priority():
    measured("user.a", 12.0, confidence=0.0, noise=0.2)
    measured("user.c", 10.0, confidence=1.0, noise=0.2)
    assert order()[0] == "user.a"
    terms = {term.name: term.points for term in ranked()[0].terms}
    assert terms == {"cost": 0.0, "priority": 80.0}


def test_doubts_lift_nobody_over_one_that_is_quicker_beyond_the_noise_of_both():
    measured("user.a", 12.0, confidence=0.1, noise=0.05)
    measured("user.c", 10.0, confidence=0.1, noise=0.05)
    assert order()[0] == "user.c"
    terms = {term.name: term.points for term in next(each for each in ranked() if each.kernel.id == "user.a").terms}
    assert terms["priority"] == pytest.approx(0.9 * REGISTRY.kernel("user.c").priority)


def test_what_is_unmeasured_loses_as_much_as_the_evidence_counts():
    measured("user.a", 10.0, confidence=0.1)
    assert score("user.b") == pytest.approx(60 - 3)


def test_explain_shows_every_term_and_where_it_comes_from():
    measured("user.a", 10.0, provenance=Provenance.PRIOR, confidence=0.5)
    report = lz.explain("rms_norm", *CALL)
    winner = next(each for each in report.candidates if each.kernel.id == "user.a")
    assert winner.to_dict()["evidence"] == "prior"
    assert winner.to_dict()["confidence"] == 0.5
    assert sum(winner.to_dict()["terms"].values()) == pytest.approx(winner.score)
    for candidate in report.candidates:
        assert math.isfinite(candidate.score)


def test_adaptations_cost_points_where_nothing_was_measured():
    lz.unregister_kernel("user.a")

    def run(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel("norm.rms", "user.a", priority=62, limits=[lz.limits.contiguous("input")])(run)
    strided = torch.randn(64, 8).t(), torch.randn(64)
    report = lz.explain("rms_norm", *strided)
    assert report.kernel_id == "user.b"
    assert lz.explain("rms_norm", *CALL).kernel_id == "user.a"


@pytest.mark.parametrize("verdict", [Verdict.WRONG, Verdict.CRASHED])
def test_a_kernel_that_was_wrong_here_is_not_chosen_not_even_by_a_lock(verdict):
    kernel = next(each.kernel for each in ranked() if each.kernel.id == "user.a")
    ENGINE.ledger.record_verdict(kernel, lz.facts("rms_norm", *CALL), verdict)
    assert order()[0] == "user.b"
    with lz.scope(locks={"norm.rms": "user.a"}), pytest.raises(lz.NoKernelFoundError, match="UNHEALTHY"):
        lz.rms_norm(*CALL)


def test_the_noise_of_a_hopeless_third_blurs_nothing():
    measured("user.a", 10.5, noise=0.01)
    measured("user.b", 10.0, noise=0.01)
    measured("user.c", 90.0, noise=0.6)
    assert order()[:2] == ["user.b", "user.a"]
    measured("user.a", 10.05, noise=0.01)
    assert order()[:2] == ["user.a", "user.b"]  # within their own noise, priority decides

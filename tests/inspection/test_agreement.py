"""Ranks hold the same choices: the lowest rank's, where all can run them; else nothing changes, and all are told."""

from __future__ import annotations

import gc

import msgspec
import pytest
import torch

import layerzero as lz
from agreeing_ranks import WEIGHT, X, of_rank, own, ranks, said_of, torch_norm
from layerzero.core.evidence import Measurement
from layerzero.engine import dispatch
from layerzero.engine.frozen_choices import Agreed
from layerzero.engine.registry import REGISTRY
from layerzero.inspection import arrivals
from layerzero.inspection.arrivals import Known
from layerzero.inspection.board import Board
from layerzero.tuning.measurement.comparison import record_times

pytestmark = pytest.mark.usefixtures("_two_kernels")


def chosen(x=X, weight=WEIGHT):
    return lz.which("rms_norm", x, weight)["kernel_id"]


def tuned(name, us, x=X, weight=WEIGHT):
    record_times(lz.facts("rms_norm", x, weight), {REGISTRY.kernel(name): Measurement(us, us, 0.0, 30)})


def test_one_process_holds_what_it_chose_and_agrees_again():
    lz.rms_norm(X, WEIGHT)
    found = lz.agree()
    assert isinstance(lz.frozen(), Agreed)
    assert lz.agree() is found
    assert found.hash == lz.thaw().hash


def test_the_lowest_ranks_kernel_runs_on_all(monkeypatch):
    name, told = of_rank("mine.two")
    assert chosen() != "mine.two"
    ranks(monkeypatch, told)
    found = lz.agree()
    assert found.choices[name].kernel == "mine.two"
    assert chosen() == "mine.two"


def test_each_class_is_chosen_for_by_the_lowest_rank_that_knows_it(monkeypatch):
    name, told = of_rank("mine.two")
    lz.rms_norm(torch.ones(4, 96), torch.ones(96))
    asked, real = [], arrivals.alone
    monkeypatch.setattr(arrivals, "alone", lambda call: asked.append(call["hidden"]) or real(call))
    ranks(monkeypatch, told)
    found = lz.agree()
    assert 96 in asked
    assert 64 not in asked
    assert found.choices[name].kernel == "mine.two"
    assert any("hidden=96 " in each for each in found.choices)


def test_what_the_first_rank_chose_comes_with_it_where_others_know_no_more(monkeypatch):
    stages, real = [], Board.settle
    monkeypatch.setattr(Board, "settle", lambda board, *rest: stages.append(rest[0]) or real(board, *rest))
    name, told = of_rank("mine.two")
    ranks(monkeypatch, told)
    assert lz.agree().choices[name].kernel == "mine.two"
    assert stages == ["arrive", "able"]
    lz.rms_norm(torch.ones(4, 96), torch.ones(96))
    ranks(monkeypatch, told)
    assert len(lz.agree().choices) == 2
    assert stages[2:] == ["arrive", "choose", "able"]


def test_no_garbage_is_collected_while_others_wait_for_a_choice(monkeypatch):
    seen, real = [], arrivals.alone
    monkeypatch.setattr(arrivals, "alone", lambda call: seen.append(gc.isenabled()) or real(call))
    lz.rms_norm(X, WEIGHT)
    lz.agree()
    lz.thaw()
    monkeypatch.setattr(arrivals, "alone", lambda call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lz.agree()
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_new_times_count_at_the_next_agreement_alone():
    for name in ("mine.one", "mine.two"):
        tuned(name, 5.0 if name == "mine.one" else 9.0)
    lz.rms_norm(X, WEIGHT)
    lz.agree()
    assert chosen() == "mine.one"
    tuned("mine.two", 0.5)
    assert chosen() == "mine.one"
    lz.agree()
    assert chosen() == "mine.two"


def test_a_class_that_came_since_is_held_by_the_next_agreement(monkeypatch):
    lz.rms_norm(X, WEIGHT)
    lz.agree()
    x, weight = torch.ones(4, 96), torch.ones(96)
    lz.rms_norm(x, weight)
    assert len(lz.frozen().added) == 1
    assert "ranks have not agreed on this class" in str(lz.explain("rms_norm", x, weight).notes)
    found = lz.agree()
    assert len(found.choices) == 2
    assert lz.frozen().added == ()


def test_a_class_that_came_since_gets_no_kernel_that_times_or_builds_of_one_rank_allow():
    lz.rms_norm(torch.ones(4, 96), torch.ones(96))
    lz.agree()
    for name in ("mine.one", "mine.two"):
        tuned(name, 9.0 if name == "mine.one" else 0.1)
    assert chosen() == "mine.one"

    @lz.register_kernel("norm.rms", "mine.built", priority=100, jit=True, supported_dtypes=["float32"])
    def built(input, weight, *, eps):
        return torch_norm(input, weight, eps=eps)

    try:
        with lz.scope(allow_jit_compile=True, unmeasured="priority"):
            assert chosen() != "mine.built"
            lz.thaw()
            assert chosen() == "mine.built"
    finally:
        lz.unregister_kernel("mine.built")


def test_before_ranks_agreed_times_decide_nothing(monkeypatch):
    for name in ("mine.one", "mine.two"):
        tuned(name, 9.0 if name == "mine.one" else 0.1)
    assert chosen() == "mine.two"
    lz.configure(distributed_selection="agree")
    try:
        assert chosen() == "mine.two"  # no process group: nothing changes
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        assert chosen() == "mine.one"
    finally:
        lz.configure(distributed_selection="independent")


def test_where_nothing_changed_ranks_tell_a_hash_alone(monkeypatch):
    lz.rms_norm(X, WEIGHT)
    lz.agree()
    epoch = dispatch.ENGINE.epoch
    boards = ranks(monkeypatch, lz.frozen().document)
    assert lz.agree() is lz.frozen().document
    assert not boards[1].store.check(["layerzero/1/choose/1"])
    assert dispatch.ENGINE.epoch == epoch


def test_a_kernel_that_another_rank_cannot_run_changes_nothing(monkeypatch):
    lz.rms_norm(X, WEIGHT)
    ranks(monkeypatch, own(), unable={"norm.rms": ("mine.two", "wanted mine.two, got none")}.items())
    with pytest.raises(lz.FrozenChoiceError, match=r"rank 0: norm\.rms: wanted mine\.two, got none"):
        lz.agree()
    assert lz.frozen() is None


def test_a_kernel_that_this_rank_has_in_another_version_is_told_to_all(monkeypatch):
    name, told = of_rank("mine.two")
    choices = {name: msgspec.structs.replace(told.choices[name], version="9")}
    ranks(monkeypatch, msgspec.structs.replace(told, choices=choices).sealed())
    with pytest.raises(lz.FrozenChoiceError, match=r"rank 1: norm\.rms .*: wanted mine\.two of user 9, got"):
        lz.agree()


def mismatch(how):
    lz.configure(on_version_mismatch=how)


@pytest.fixture
def _stock_settings():
    yield
    lz.configure(on_version_mismatch="error", log_selections=False, deterministic=False)


@pytest.mark.usefixtures("_stock_settings")
@pytest.mark.parametrize("held", [True, False])
def test_other_versions_are_told_and_refused(monkeypatch, held):
    lz.rms_norm(X, WEIGHT)
    before = lz.agree() if held else None
    versions = {**said_of(own()).versions, "torch": "1.13.0", "mine": "2"}
    ranks(monkeypatch, own(), versions=versions)
    with pytest.raises(lz.VersionMismatchError) as caught:
        lz.agree()
    assert f"rank 1: torch: wanted 1.13.0 as on the first rank, got {torch.__version__}" in caught.value.problems
    assert "rank 1: mine: wanted 2 as on the first rank, got none" in caught.value.problems
    assert (lz.frozen().document if held else lz.frozen()) is before


@pytest.mark.usefixtures("_stock_settings")
def test_other_versions_let_all_ranks_run_torchs_own_kernels(monkeypatch):
    mismatch("fallback")
    name, told = of_rank("mine.two")
    versions = {**said_of(told).versions, "torch": "1.13.0"}
    ranks(monkeypatch, told, versions=versions)
    with pytest.warns(lz.LayerZeroWarning, match=r"rank 1: torch: wanted 1\.13\.0"):
        lz.agree()
    with lz.scope(prefer=["mine.*"]):
        report = lz.explain("rms_norm", X, WEIGHT)
    assert report.chosen.kernel.source == "torch"
    assert "on_version_mismatch: fallback" in str(report.notes)
    assert not lz.frozen().choices
    monkeypatch.undo()
    lz.agree()  # alone again, of one version
    assert name in lz.frozen().choices


@pytest.mark.usefixtures("_stock_settings")
def test_ranks_of_one_version_agree_among_themselves(monkeypatch):
    mismatch("best_effort")
    _, told = of_rank("mine.two")
    own = chosen()
    ranks(monkeypatch, told, versions={**said_of(told).versions, "torch": "1.13.0"})
    with pytest.warns(lz.LayerZeroWarning, match="ranks agree within their kind: 0 .*; 1 "):
        lz.agree()
    assert chosen() == own


@pytest.mark.usefixtures("_stock_settings")
@pytest.mark.filterwarnings("ignore:agree")  # no class is left
def test_a_kernel_that_a_rank_cannot_run_runs_on_none_for_classes_without_agreement(monkeypatch):
    """It is first by priority here, and the plan that calls it goes, too."""
    mismatch("best_effort")
    lz.register_kernel("norm.rms", "mine.first", priority=100, supported_dtypes=["float32"])(torch_norm)
    try:
        with lz.scope(unmeasured="priority"):
            first = chosen()
        name, told = of_rank("mine.first")
        ranks(monkeypatch, told)
        lz.agree()
        lz.rms_norm(X, WEIGHT)
        assert chosen() == first == "mine.first"
        ranks(monkeypatch, told, unable={name: ("mine.first", "it failed")}.items(), held="other")
        monkeypatch.setattr(Known, "unable", lambda known, shared, own: {})
        assert name not in lz.agree().choices
        lz.rms_norm(X, WEIGHT)
        plans = {plan.kernel.id for cache in dispatch.ENGINE.caches for _, plan in cache.plans()}
        new, strided = chosen(torch.ones(4, 96), torch.ones(96)), chosen(torch.ones(4, 128)[:, ::2])
        assert "mine.first" not in {*plans, chosen(), new, strided}
    finally:
        lz.unregister_kernel("mine.first")


def test_a_class_that_is_held_no_more_changes_plans():
    _, told = of_rank("mine.two")
    held, without = Agreed(told.choices), Agreed({})
    assert held.would_change(without)
    assert not without.would_change(held)
    assert not held.would_change(Agreed(told.choices))
    without.refused = frozenset({"mine.one"})
    assert Agreed({}).would_change(without)


def test_ranks_with_other_processors_agree_within_their_kind(monkeypatch):
    name, told = of_rank("mine.two")
    own = chosen()
    ranks(monkeypatch, told, told, device="another", named="H200")
    with pytest.warns(lz.LayerZeroWarning, match=r"ranks agree within their kind: 0, 1 \(H200\); 2 \("):
        found = lz.agree()
    assert found.choices[name].kernel == own


@pytest.mark.usefixtures("_stock_settings")
def test_other_settings_are_refused_unless_they_decide_nothing(monkeypatch):
    lz.rms_norm(X, WEIGHT)
    told = own()
    ranks(monkeypatch, told, settings={"deterministic": "True"})
    with pytest.raises(lz.FrozenChoiceError, match=r"rank 1: settings: deterministic: wanted True .* got its default"):
        lz.agree()
    assert lz.frozen() is None
    ranks(monkeypatch, told)
    lz.configure(log_selections=True)
    lz.agree()

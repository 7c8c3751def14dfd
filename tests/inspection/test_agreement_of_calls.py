"""What ranks agree on: choices of all of them, rank 0's alone, and calls of one of them."""

from __future__ import annotations

import warnings

import msgspec
import pytest

import layerzero as lz
from agreeing_ranks import WEIGHT, X, of_rank, own, ranks
from layerzero.engine import dispatch
from layerzero.engine.frozen_choices import Agreed
from layerzero.engine.settings import DECIDE_NOTHING, SETTINGS
from layerzero.inspection import agreement, arrivals
from layerzero.inspection.arrivals import Arrival, arrived, merged
from layerzero.inspection.board import Board
from layerzero.inspection.freeze import Frost

pytestmark = pytest.mark.usefixtures("_two_kernels")


def test_each_setting_is_one_that_decides_or_one_that_does_not():
    """A new one is added here or there: ranks may not differ in this one, or may."""
    decide = {"version", "enabled", "fallback_enabled", "strict_mode", "allow_adaptation", "allow_jit_compile", "jit"}
    decide |= {"deterministic", "require_vetting", "debug", "layout", "memory_headroom_mb", "prefer_sources", "plugins"}
    decide |= {"avoid_sources", "allow", "deny", "locks", "unmeasured", "rules", "descriptors", "cpu_features"}
    decide |= {"batch_invariant", "require_tp_invariant", "hub.enabled", "hub.folder", "hub.lockfile", "hub.allow"}
    decide |= {"graph_strict_mode", "backend_isolation", "distributed_selection", "on_version_mismatch"}
    decide |= {
        "isolate",
        "isolation.memory_mb",
        "isolation.pythons",
        "backend_containers",
        "gpu_generations",
        "max_error",
        "quant.fallback",
        "quant.priority",
        "quant.profile",
    }
    assert not decide & DECIDE_NOTHING
    assert decide | DECIDE_NOTHING == set(SETTINGS)
    assert "telemetry_sampling_rate" in DECIDE_NOTHING


def test_rank_0s_choices_alone_count_where_the_setting_says_so(monkeypatch):
    _, told = of_rank("mine.two")
    name, _ = of_rank("mine.one", hidden=96)
    lz.configure(distributed_selection="rank0_broadcast")
    try:
        ranks(monkeypatch, told)
        assert name not in lz.agree().choices
    finally:
        lz.configure(distributed_selection="independent")


def test_a_rank_that_fails_is_told_on_every_rank(monkeypatch):
    lz.rms_norm(X, WEIGHT)
    ranks(monkeypatch, own())

    def failing(_, changed):
        raise RuntimeError("planted")

    monkeypatch.setattr(arrivals, "arrival", failing)
    with pytest.raises(lz.FrozenChoiceError, match="rank 1: RuntimeError: planted"):
        lz.agree()


def test_choices_that_lz_freeze_froze_are_told_on_every_rank(monkeypatch):
    lz.rms_norm(X, WEIGHT)
    ranks(monkeypatch, own())
    lz.freeze()
    with pytest.raises(lz.FrozenChoiceError, match=r"rank 1: PolicyError: choices are frozen already; wanted lz\.thaw"):
        lz.agree()


def test_ranks_that_called_nothing_are_warned(monkeypatch):
    dispatch.ENGINE.history.forget()
    with pytest.warns(lz.LayerZeroWarning, match="agree: wanted calls that were made or warmed up, got none"):
        lz.agree()


def test_what_another_version_says_is_told_by_rank(monkeypatch):
    told = msgspec.structs.replace(Arrival(), word=1)
    with pytest.raises(lz.FrozenChoiceError, match="rank 4: wanted what this version says of itself, got"):
        arrived(Board((2, 4)), [msgspec.json.encode(told), b'{"word": "?"}'])


def test_every_nth_call_alone_is_an_agreement():
    lz.rms_norm(X, WEIGHT)
    found = [lz.agree(every=3) for _ in range(7)]
    assert [each is not None for each in found] == [False, False, True, False, False, True, False]
    with pytest.raises(lz.PolicyError, match="got one that was destroyed"):
        for _ in range(2):
            lz.agree("a group", every=2)
    for wrong in (0, True, 1.5):
        with pytest.raises(lz.PolicyError, match="agree: every: wanted a number of calls of at least 1, got"):
            lz.agree(every=wrong)
    with pytest.raises(lz.PolicyError, match="agree: timeout_s: wanted seconds above 0, got 0"):
        lz.agree(timeout_s=0)


def test_classes_of_all_ranks_are_held_and_the_lowest_rank_counts():
    name, one = of_rank("mine.one")
    other = msgspec.structs.replace(one.choices[name], kernel="mine.two")
    more = msgspec.structs.replace(one, choices={name: other, "only there": other})
    packed = merged([b"", *(msgspec.msgpack.encode(each) for each in (one, more))])
    found = msgspec.msgpack.decode(packed, type=Frost)
    assert found.choices[name].kernel == "mine.one"
    assert found.choices["only there"].kernel == "mine.two"
    assert found.hash == found.sealed().hash
    assert merged([b"", packed]) == packed


def test_a_warmup_that_fails_tells_the_others(monkeypatch):
    boards = ranks(monkeypatch, own())
    monkeypatch.setattr(agreement, "ranks_choose", lambda policy: True)
    with pytest.raises(lz.UnknownOperationError):
        lz.warmup("no.such.operation")
    decided = boards[0].store.get("layerzero/1/arrive/decided").decode()
    assert "rank 1: warmup: UnknownOperationError" in decided


@pytest.mark.parametrize("run", [lz.warmup, lz.tune])
def test_ranks_agree_where_a_window_ends(monkeypatch, run):
    monkeypatch.setattr(agreement, "ranks_choose", lambda policy: True)
    given = {"budget_s": 0} if run is lz.tune else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run("elementwise.softmax", [(4, 64)], **given)  # has no kernel that compiles
    assert isinstance(lz.frozen(), Agreed)

"""Ranks hold the same choices: the lowest rank's, where all can run them; else nothing changes, and all are told."""

from __future__ import annotations

import datetime as dt
import warnings

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine import dispatch
from layerzero.engine.frozen_choices import Agreed
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import DECIDE_NOTHING, SETTINGS
from layerzero.inspection import agreement, arrivals
from layerzero.inspection.arrivals import Arrival, Known, arrival, arrived, marks_of, merged
from layerzero.inspection.board import Board
from layerzero.inspection.freeze import Frost
from layerzero.tuning.measurement.comparison import record_times

X, WEIGHT = torch.randn(4, 64), torch.ones(64)


@pytest.fixture(autouse=True)
def _two_kernels():
    for name in ("mine.one", "mine.two"):
        lz.register_kernel("norm.rms", name, supported_dtypes=["float32"])(_norm)
    yield
    if lz.frozen() is not None:
        lz.thaw()
    for name in ("mine.one", "mine.two"):
        lz.unregister_kernel(name)


def _norm(input, weight, *, eps):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def of_rank(kernel, hidden=64):
    """The class of a call, and what a rank would choose that takes this kernel for it; nothing of it is called here."""
    lz.rms_norm(torch.ones(4, hidden), torch.ones(hidden))
    found = own()
    name = next(name for name in found.choices if f"hidden={hidden} " in name)
    choice = msgspec.structs.replace(found.choices[name], kernel=kernel, version="")
    return name, msgspec.structs.replace(found, choices={name: choice}).sealed()


def own():
    return Known(anew=True).proposed()


def said_of(document):
    """What a rank says that knows these classes, and holds them if this process does."""
    held = lz.frozen()
    changed = not isinstance(held, Agreed) or held.document.hash != document.hash
    return msgspec.structs.replace(
        arrival(Known(anew=True), changed=changed), classes=marks_of(document.choices), named=document.device
    )


class Group:
    pass


def ranks(monkeypatch, *others, unable=(), **changes):
    """Let ``agree`` find other ranks that came before with these documents, and told that of themselves."""
    store, count = torch.distributed.HashStore(), len(others)
    store.set_timeout(dt.timedelta(seconds=30))
    boards = [Board(range(count + 1), rank, 30.0, store, 1, Group()) for rank in range(count + 1)]
    for rank, document in enumerate(others):
        told = msgspec.structs.replace(said_of(document), **changes)
        if told.versions != said_of(document).versions or changes.get("settings"):
            told = msgspec.structs.replace(told, word=1)
        chosen_ = agreement.Answer(msgspec.msgpack.encode(document))
        said = {"arrive": told, "choose": chosen_, "able": agreement.Answer(unable=dict(unable))}
        for stage, value in said.items():
            boards[rank]._told(
                torch.distributed.PrefixStore("layerzero", store), stage, msgspec.json.encode(value), None, 0.0
            )
    monkeypatch.setattr(Board, "of", staticmethod(lambda group, timeout_s: boards[-1]))
    return boards


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
        return _norm(input, weight, eps=eps)

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
    with pytest.raises(lz.FrozenChoiceError) as caught:
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
    lz.register_kernel("norm.rms", "mine.first", priority=100, supported_dtypes=["float32"])(_norm)
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


def test_each_setting_is_one_that_decides_or_one_that_does_not():
    """A new one is added here or there: ranks may not differ in this one, or may."""
    decide = {"version", "enabled", "fallback_enabled", "strict_mode", "allow_adaptation", "allow_jit_compile", "jit"}
    decide |= {"deterministic", "require_vetting", "debug", "layout", "memory_headroom_mb", "prefer_sources", "plugins"}
    decide |= {"avoid_sources", "allow", "deny", "locks", "unmeasured", "rules", "descriptors", "cpu_features"}
    decide |= {"batch_invariant", "require_tp_invariant", "hub.enabled", "hub.folder", "hub.lockfile", "hub.allow"}
    decide |= {"graph_strict_mode", "backend_isolation", "distributed_selection", "on_version_mismatch"}
    decide |= {
        "max_error",
        "isolate",
        "isolation.memory_mb",
        "isolation.pythons",
        "backend_containers",
        "gpu_generations",
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

    monkeypatch.setattr(agreement, "arrival", failing)
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

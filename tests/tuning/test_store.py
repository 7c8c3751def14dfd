"""Times that outlive a process: what is read back, and for whom."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from one_time import TIME, facts, fresh, times

import layerzero as lz
from drawing import examples
from layerzero.core.evidence import Provenance, call_work
from layerzero.core.ledger import Ledger
from layerzero.engine import order
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.testing import random_call
from layerzero.tuning.storage import environment, prior
from layerzero.tuning.storage.rows import work_of
from layerzero.tuning.storage.store import StoreLedger

PARTS = st.tuples(st.floats(1.0, 500.0), st.floats(1.0, 500.0), st.floats(1.0, 1.5))
"""What the device and the host of a call take, and how much longer it was waited for."""


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.tuples(PARTS, st.sampled_from([8, 16])), min_size=1), st.booleans())
def test_what_is_told_as_measured_is_a_row_that_was_recorded(kernels, drawn, capturing):
    """Whatever stands beside it: what decides depends on the others, and has a name of its own."""
    ENGINE.ledger = StoreLedger(Ledger())
    recorded = {}
    for name, ((device_us, host_us, longer), rows) in drawn.items():
        waited_us = max(device_us, host_us) * longer
        time = replace(TIME, median_us=waited_us, device_us=device_us, host_us=host_us)
        ENGINE.ledger.record_time(REGISTRY.kernel(f"user.{name}"), facts(rows), time)
        recorded[f"user.{name}"] = rows, waited_us, device_us
    for rows in (8, 16):
        report = lz.explain("rms_norm", torch.randn(rows, 64), torch.randn(64), capturing=capturing)
        for each in report.candidates:
            if each.provenance != "measured":
                continue
            assert recorded[each.kernel.id] == (rows, each.time_us, each.evidence.device_us)
            plain = each.to_dict()
            assert (plain["time_us"], plain["device_us"], plain["noise"]) == (
                each.time_us,
                each.evidence.device_us,
                0.02,
            )
            assert plain["cost_us"] == each.cost_us == each.evidence.cost_us
            assert f"{each.time_us:.1f} us measured" in str(report)
            assert ("cost" in each.evidence.told) != math.isclose(each.cost_us, each.time_us, rel_tol=1e-3)


def test_what_decides_is_told_beside_what_was_measured(kernels):
    waits = {"a": (60.0, 31.0), "b": (44.0, 28.0), "c": (52.0, 20.0)}
    ENGINE.ledger = StoreLedger(Ledger())
    for name, (waited_us, device_us) in waits.items():
        time = replace(TIME, median_us=waited_us, device_us=device_us, host_us=waited_us)
        ENGINE.ledger.record_time(REGISTRY.kernel(f"user.{name}"), facts(8), time)
    report = lz.explain("rms_norm", torch.randn(8, 64), torch.randn(64))
    told = {each.kernel.id: each for each in report.candidates if each.provenance == "measured"}
    assert {name: each.time_us for name, each in told.items()} == {"user.a": 60.0, "user.b": 44.0, "user.c": 52.0}
    assert told["user.c"].cost_us < told["user.b"].cost_us < told["user.a"].cost_us
    for each in told.values():
        assert "cost" in {term.name for term in each.terms}
        assert f"{each.time_us:.1f} us measured, device {each.evidence.device_us:.1f} us, cost " in str(report)


def test_a_later_process_reads_what_was_measured(folder, kernels):
    store = fresh()
    store.record(kernels[0], facts(), TIME)
    store.record(kernels[1], facts(), replace(TIME, median_us=7.0))
    found = fresh().evidence(kernels, facts())
    assert {name: each.time_us for name, each in found.items()} == {"user.a": 10.0, "user.b": 7.0}
    assert {each.provenance for each in found.values()} == {Provenance.MEASURED}
    assert found["user.a"].noise == 0.02
    assert found["user.a"].confidence > 0.99
    assert (folder / "perfdb.sqlite").exists()
    assert store.notes() == ()


def test_a_question_makes_no_file(folder, kernels):
    assert fresh().evidence(kernels, facts()) == {}
    assert list(folder.iterdir()) == []


def test_the_latest_time_of_the_same_thing_counts(folder, kernels):
    store = fresh()
    for median in (10.0, 30.0, 20.0):
        store.record(kernels[0], facts(), replace(TIME, median_us=median))
    assert times(fresh(), kernels, facts()) == {"user.a": 20.0}


def test_graph_times_and_eager_times_do_not_answer_for_each_other(folder, kernels):
    store = fresh()
    store.record(kernels[0], facts(), TIME)
    store.record(kernels[0], facts(), replace(TIME, median_us=3.0, graph=True))
    store.record(kernels[1], facts(), replace(TIME, median_us=4.0, graph=True))
    assert times(store, kernels, facts()) == {"user.a": 10.0}
    assert times(store, kernels, facts(capturing=True)) == {"user.a": 3.0, "user.b": 4.0}


def test_what_the_device_took_of_eager_calls_stands_for_replays_that_nobody_timed(folder, kernels):
    store = fresh()
    store.record(kernels[0], facts(), replace(TIME, median_us=30.0, device_us=2.0, host_us=30.0))
    store.record(kernels[1], facts(), replace(TIME, median_us=11.0, device_us=4.0, host_us=11.0))
    store.record(kernels[2], facts(), replace(TIME, median_us=5.0))  # its parts were not told
    eager = times(store, kernels, facts())
    assert min(eager, key=eager.get) == "user.c"
    assert eager["user.b"] < eager["user.a"], "a caller waits for the host"
    found = store.evidence(kernels, facts(capturing=True))
    assert {name: each.cost_us for name, each in found.items()} == {"user.a": 2.0, "user.b": 4.0}
    assert {name: each.time_us for name, each in found.items()} == {"user.a": 30.0, "user.b": 11.0}, "as measured"
    assert all(each.stands_in for each in found.values())
    store.record(kernels[1], facts(), replace(TIME, median_us=1.5, graph=True))
    assert times(store, kernels, facts(capturing=True)) == {"user.b": 1.5}
    assert not store.evidence(kernels, facts(capturing=True))["user.b"].stands_in


def test_replays_of_sizes_between_eager_ones_that_the_device_decided_are_predicted(folder, kernels):
    store = fresh()
    for rows in (64, 128, 256, 512, 1024):
        store.record(kernels[0], facts(rows), replace(TIME, median_us=rows / 4, device_us=rows / 4, host_us=3.0))
    found = store.evidence(kernels, facts(384, capturing=True))
    assert found["user.a"].provenance is Provenance.PREDICTED
    assert found["user.a"].time_us == pytest.approx(96, rel=0.1)


CHANGES = {
    "driver": lambda patch: patch.setattr(environment, "driver_version", lambda device: "999.1"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "9.9.9"),
    "capability": lambda patch: patch.setattr(environment, "capability_hash", lambda device: "other"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
    "library": lambda patch: patch.setattr(
        environment.probe.Machine, "state", lambda *_: environment.probe.LibraryState("9.9")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_times_of_another_environment_do_not_count(folder, kernels, monkeypatch, change):
    fresh().record(kernels[0], facts(), TIME)
    environment._surroundings.cache_clear()
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        assert times(fresh(), kernels, facts()) == {}
        environment._surroundings.cache_clear()
    assert times(fresh(), kernels, facts()) == {"user.a": 10.0}


def registered(source):
    """A kernel as a script has it, registered from this source."""
    names = {"torch": torch}
    exec(source, names)
    with contextlib.suppress(KeyError):
        lz.unregister_kernel("user.edited")
    lz.register_kernel("norm.rms", "user.edited")(names["run"])
    return REGISTRY.kernel("user.edited")


def test_a_registered_function_whose_code_was_edited_is_measured_again(folder):
    source = "def run(input, weight, eps=1e-6):\n    return torch.rms_norm(input, weight.shape, weight, eps) * 1\n"
    kernel = registered(source)
    fresh().record(kernel, facts(), TIME)
    assert times(fresh(), [registered(source)], facts()) == {"user.edited": 10.0}
    assert times(fresh(), [registered(source.replace("* 1", "* 2"))], facts()) == {}
    assert times(fresh(), [registered(source.replace("rms_norm(", "rms_norm_(", 1))], facts()) == {}


def test_times_under_the_condition_that_most_share_are_compared(folder, kernels):
    store = fresh()
    store.record(kernels[0], facts(), replace(TIME, median_us=5.0, condition="temperature=cold"))
    for each, median in zip(kernels, (9.0, 8.0, 7.0), strict=True):
        store.record(each, facts(), replace(TIME, median_us=median, condition="temperature=hot"))
    assert times(store, kernels, facts()) == {"user.a": 9.0, "user.b": 8.0, "user.c": 7.0}
    time.sleep(0.002)
    for each, median in zip(kernels, (3.0, 2.0, 1.0), strict=True):
        store.record(each, facts(), replace(TIME, median_us=median, condition="temperature=cold"))
    assert times(store, kernels, facts()) == {"user.a": 3.0, "user.b": 2.0, "user.c": 1.0}, "as many, and later"


def test_few_samples_and_wide_spread_count_less(folder, kernels):
    store = fresh()
    store.record(kernels[0], facts(), replace(TIME, samples=3))
    store.record(kernels[1], facts(), replace(TIME, noise=0.5))
    store.record(kernels[2], facts(), replace(TIME, variance_us2=400.0))
    found = store.evidence(kernels, facts())
    assert found["user.a"].confidence == pytest.approx(0.3, abs=0.01)
    assert found["user.b"].confidence < 0.2
    assert found["user.c"].confidence > 0.95, "outliers: half of the samples gave the same median as the other"


def test_a_hopeless_kernel_that_was_measured_roughly_blurs_nothing(folder, kernels):
    store = fresh()
    store.record(kernels[0], facts(), TIME)
    store.record(kernels[1], facts(), replace(TIME, median_us=300.0, samples=3, noise=0.3))
    store.record(kernels[2], facts(), replace(TIME, median_us=15.0, samples=3))
    found = order.costs(store.evidence(kernels, facts()), kernels)
    assert found["user.b"].confidence == found["user.a"].confidence
    assert found["user.c"].confidence < 0.4, "it may be the best yet"


@pytest.mark.parametrize(
    "field", ["median_us", "p95_us", "variance_us2", "noise", "first_call_us", "device_us", "host_us"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_what_is_no_time_is_refused(folder, kernels, field, value):
    with pytest.raises(ValueError, match=rf"user\.a: {field}: wanted a finite number"):
        fresh().record(kernels[0], facts(), replace(TIME, **{field: value}))


def test_disabled_and_without_a_folder_times_live_as_long_as_the_process(folder, kernels, monkeypatch):
    lz.configure(perfdb={"enabled": False})
    store = fresh()
    store.record(kernels[0], facts(), TIME)
    assert times(store, kernels, facts()) == {"user.a": 10.0}
    assert times(fresh(), kernels, facts()) == {}
    assert not (folder / "perfdb.sqlite").exists()
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", "")
    lz.configure(perfdb={"enabled": True})
    store = fresh()
    store.record(kernels[0], facts(), TIME)
    assert times(store, kernels, facts()) == {"user.a": 10.0}
    assert store.notes() == ()


def test_the_setting_names_the_file_and_moves_a_running_process(folder, kernels, tmp_path):
    store = fresh()
    store.record(kernels[0], facts(), TIME)
    lz.configure(perfdb={"path": str(tmp_path / "own" / "times.db")})
    assert times(store, kernels, facts()) == {}
    store.record(kernels[1], facts(), TIME)
    assert (tmp_path / "own" / "times.db").exists()
    lz.configure(perfdb={"path": None})
    assert times(store, kernels, facts()) == {"user.a": 10.0}


def test_the_engine_chooses_by_what_an_earlier_process_measured(folder, kernels):
    x, w = torch.randn(4, 64), torch.randn(64)
    earlier = StoreLedger(Ledger())
    for each, median in zip(kernels, (9.0, 5.0, 8.0), strict=True):
        earlier.record_time(each, lz.facts("rms_norm", x, w), replace(TIME, median_us=median))
    ENGINE.ledger = StoreLedger(Ledger())
    with lz.scope(allow=["user"]):
        assert lz.which("rms_norm", x, w)["kernel_id"] == "user.b"
        assert "measured" in str(lz.explain("rms_norm", x, w))


# work


@pytest.fixture
def no_priors(tmp_path, monkeypatch):
    """No times ship, of which some are for CPUs like this one."""
    monkeypatch.setattr(prior, "FOLDER", tmp_path)
    monkeypatch.setattr(prior, "_LOADED", {})


@pytest.mark.usefixtures("no_priors")
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, 10**6), second=st.integers(0, 10**6), same=st.booleans())
def test_a_time_is_read_under_the_same_work_and_never_under_another(tmp_path_factory, first, second, same):
    lz.configure(perfdb={"path": str(tmp_path_factory.mktemp("perfdb") / "times.sqlite")})
    calls = [random_call(0, first), random_call(0, first if same else second)]
    try:
        one, other = (lz.facts(call.function, **call.arguments) for call in calls)
    except (lz.InvalidCallError, lz.NoKernelFoundError):
        assume(False)
    kernels = REGISTRY.candidates(one["operation"])
    store = fresh()
    store.record(kernels[0], one, TIME)
    expected = {kernels[0].id: 10.0} if call_work(one) == call_work(other) else {}
    assert times(fresh(), REGISTRY.candidates(other["operation"]), other) == expected


def test_what_changes_the_work_changes_its_key():
    q, kv = torch.randn(1, 128, 8, 64), torch.randn(1, 128, 8, 64)
    wide = torch.randn(1, 128, 8, 128)
    calls = {
        "plain": lz.facts("attention", q, kv, kv, layout="BSHD"),
        "full": lz.facts("attention", q, kv, kv, layout="BSHD", causal=False),
        "heads": lz.facts("attention", q, kv[:, :, :4].contiguous(), kv[:, :, :4].contiguous(), layout="BSHD"),
        "batch": lz.facts("attention", *(t.repeat(2, 1, 1, 1) for t in (q, kv, kv)), layout="BSHD"),
        "sliced": lz.facts("attention", wide[..., :64], kv, kv, layout="BSHD"),
        "expanded": lz.facts("attention", q, kv[:, :, :1].expand(1, 128, 8, 64), kv, layout="BSHD"),
        "half": lz.facts("attention", q.half(), kv.half(), kv.half(), layout="BSHD"),
        "other layout": lz.facts("attention", *(t.transpose(1, 2) for t in (q, kv, kv)), layout="BHSD"),
        "window": lz.facts("attention", q, kv, kv, layout="BSHD", window=(5, 0)),
        "softcap": lz.facts("attention", q, kv, kv, layout="BSHD", softcap=30.0),
        "one mask": lz.facts("attention", q, kv, kv, False, layout="BSHD", attn_mask=torch.zeros(1, 1, 128, 128)),
        "all masks": lz.facts("attention", q, kv, kv, False, layout="BSHD", attn_mask=torch.zeros(1, 8, 128, 128)),
    }
    keys = {name: work_of(each).key for name, each in calls.items()}
    assert len(set(keys.values())) == len(keys)


def test_what_does_not_change_the_work_does_not_change_its_key():
    q, kv = torch.randn(1, 128, 8, 64), torch.randn(1, 128, 8, 64)
    plain = work_of(lz.facts("attention", q, kv, kv, layout="BSHD", softcap=30.0))
    assert work_of(lz.facts("attention", q, kv, kv, scale=0.3, layout="BSHD", softcap=50.0)) == plain
    x, w = torch.randn(4, 64), torch.randn(64)
    assert work_of(lz.facts("rms_norm", x, w)) == work_of(lz.facts("rms_norm", x.view(2, 2, 64), w, eps=1e-5))


def test_a_family_differs_in_scaling_sizes_only():
    assert work_of(facts(4)).family == work_of(facts(400)).family
    assert work_of(facts(4)).sizes == {"rows": 4, "hidden": 64}
    assert work_of(facts(4, 63)).family != work_of(facts(4, 64)).family, "rows of 63 are not aligned"


# files that cannot be trusted

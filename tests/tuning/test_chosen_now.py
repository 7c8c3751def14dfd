"""What a tuning run says is chosen now is what the next call of it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import rms_norm

import layerzero as lz
from layerzero.cli import tune as command
from layerzero.core.evidence import Measurement, Provenance
from layerzero.core.ledger import Ledger
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement import contest
from layerzero.tuning.measurement.comparison import record_times
from layerzero.tuning.storage.store import StoreLedger

WEIGHT = torch.randn(64)
RAN = []


def kernel_of(name, **more):
    def run(input, weight, *, eps=1e-6):
        RAN.append(f"user.{name}")
        return rms_norm(input, weight.shape, weight, eps)

    return lz.register_kernel("norm.rms", f"user.{name}", **more)(run)


@pytest.fixture(autouse=True)
def kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    ENGINE.ledger = StoreLedger(Ledger())
    kernel_of("a", priority=80)
    kernel_of("b", priority=60)
    lz.configure(allow=["user"])


@pytest.fixture
def times(monkeypatch):
    """Times that contests find, by the rows of a call and a kernel's name; 10 us where nothing is said."""
    said = {}
    real = contest.race

    def race(runs, clock, effort, *, seed):
        raced = real(runs, clock, replace(effort, samples=3, budget_s=0.0, fill=False, steady=0), seed=seed)
        for name, runner in raced.items():
            rows = runs[name].args[0].shape[0]
            told = said.get((rows, name), said.get(name, 10.0))
            apart = 1 + said.get("apart", 0.0)
            runner.taken = [runner.taken[0]._replace(time_us=told * each) for each in (1.0, apart) * 6]
        return raced

    monkeypatch.setattr(contest, "race", race)
    return said


def runs(rows):
    RAN.clear()
    lz.rms_norm(torch.randn(rows, 64), WEIGHT)
    return RAN[-1]


def tuned(*rows, **more):
    given = {"dtype": "float32", "isolate": False, "samples": 3, **more}
    return lz.tune("rms_norm", [(each, 64) for each in rows], **given)


def told(found):
    return {each.facts.tensors["input"].shape[0]: now.kernel_id
            for each, now in zip(found.contests, found.choices, strict=True)}  # fmt: skip


def test_an_axis_that_grows_and_its_neighbours(times):
    with lz.record() as recording:
        for rows in (*range(65, 100), 80, 80):
            lz.rms_norm(torch.randn(rows, 64), WEIGHT)
    times |= {"user.a": 20.0, "user.b": 10.0}
    file = ENGINE.ledger.times.database.path.parent / "workload.json"
    recording.stop().save(file)
    found = lz.tune(manifest=file, isolate=False, samples=3, device="cpu")
    assert list(told(found)) == [80, 65, 99]
    assert {runs(rows) for rows in told(found)} == {"user.b"} == set(told(found).values())
    assert {runs(rows) for rows in range(65, 100)} == {"user.b"}, "between and at the ends"
    assert {runs(rows) for rows in (64, 101, 120)} == {"user.b"}, "beside them"


def test_what_comes_later_changes_what_was_told_before(times):
    times |= {"user.a": 20.0, "user.b": 10.0}
    first = []

    def progress(step):
        if step.contest is not None:
            first.append(step.contest)
        if len(first) == 2:  # another process measures the first call anew
            (kernel,) = [each for each in first[0].times if each.id == "user.b"]
            record_times(first[0].facts, {kernel: replace(first[0].times[kernel], median_us=90.0)})

    found = tuned(8, 512, progress=progress)
    assert told(found) == {8: "user.a", 512: "user.b"}
    assert {rows: runs(rows) for rows in (8, 512)} == told(found)


def test_a_plan_that_was_kept_goes_where_another_kernel_is_told(times):
    times |= {"user.a": 20.0, "user.b": 10.0, "apart": 0.1}
    tuned(8)
    assert runs(8) == "user.b"
    times |= {"user.a": 10.0, "user.b": 10.3}  # as good as equal, so that priority decides
    found = tuned(8, again=True)
    assert runs(8) == told(found)[8] == "user.a"


@pytest.mark.parametrize("policy", ["lock", "deny"])
def test_locks_and_denials_hold(times, policy):
    times |= {"user.a": 20.0, "user.b": 10.0}
    if policy == "lock":
        lz.lock("norm.rms", "user.a")
    else:
        lz.configure(allow=["user"], deny=["user.b"])
    found = tuned(8)
    assert told(found) == {8: "user.a"}
    assert runs(8) == "user.a"
    assert found.choices[0].before == "user.a"


def test_before_is_what_ran_and_not_what_would_have_run_if_it_had_been_built(times):
    compiled = replace(REGISTRY.kernel("user.a"), id="user.compiled", jit=True, priority=99)
    lz.register_backend([compiled])
    times |= {"user.a": 20.0, "user.b": 15.0, "user.compiled": 10.0}
    assert runs(8) == "user.a"
    found = tuned(8)
    (choice,) = found.choices
    assert (choice.before, choice.kernel_id, choice.builds) == ("user.a", "user.compiled", True)
    assert found.to_dict()["measured"][0]["before"] == "user.a"
    (table, *_) = command.shown(found)
    assert [str(next(iter(column.cells))) for column in table.columns][2:] == [
        "user.compiled, once it is built",
        "user.a",
    ]


def test_times_of_other_threads_are_not_told_as_chosen_here(times):
    times |= {"user.a": 20.0, "user.b": 10.0}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        found = tuned(8)
        assert told(found)[8] == runs(8) == "user.b"
        torch.set_num_threads(2)
        assert runs(8) == "user.a", "nobody measured with two"
        (table, note, *_) = command.shown(found, 1, 2)
        assert [str(column.header) for column in table.columns][2] == "chosen with 1 thread"
        assert "torch uses 2 here" in str(note)
        assert [str(column.header) for column in next(command.shown(found, 1, 1)).columns][2] == "chosen now"
    finally:
        torch.set_num_threads(threads)


def masked(batch, queries, keys):
    query, key = torch.randn(batch, 2, queries, 16), torch.randn(batch, 2, keys, 16)
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    return lz.facts("attention", query, key, key, attn_mask=mask, causal=False, layout="BHSD")


@pytest.mark.parametrize("call", [(1, 31, 31), (2, 32, 32), (2, 33, 33), (1, 40, 40)])
def test_masks_of_other_lengths_and_batches_are_served_by_what_was_measured(monkeypatch, call):
    lz.configure(allow=["torch"])
    monkeypatch.setattr(ENGINE.ledger.times, "_shipped", lambda *_: {})
    quick, slow = "torch.sdpa.math", "torch.sdpa.cpu_flash"
    times = {quick: Measurement(10.0, 11.0, 0.0, 40, noise=0.01), slow: Measurement(40.0, 44.0, 0.0, 40, noise=0.01)}
    assert lz.explain(masked(*call)).kernel_id == slow, "torch's own, while nobody measured"
    record_times(masked(1, 32, 32), {REGISTRY.kernel(name): time for name, time in times.items()})
    found = lz.explain(masked(*call)).chosen
    assert (found.kernel.id, found.provenance) == (quick, Provenance.PREDICTED)
    assert found.confidence < lz.explain(masked(1, 32, 32)).chosen.confidence

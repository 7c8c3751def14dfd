"""Contests: who takes part, who is believed, and what is remembered of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import rms_norm

import layerzero as lz
from counting import Told
from drawing import at_once
from layerzero.core.evidence import call_work
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.ops.attention.sweep import Heads, decode_case, prefill_case
from layerzero.ops.norm.declare import norm_case
from layerzero.ops.paged.declare import paged_case
from layerzero.ops.ragged import reference as ragged
from layerzero.testing.compare import expected
from layerzero.testing.generate import case_call, random_call
from layerzero.tuning.measurement.contest import Status, contest, torch_default
from layerzero.tuning.measurement.jobs import Job, default_grid, jobs_of_cases, spread
from layerzero.tuning.measurement.timing import Effort
from layerzero.tuning.storage.rows import work_of
from layerzero.tuning.verification import child
from others import OTHERS

QUICK = Effort(samples=3, budget_s=0.05)


def rms(rows=8, hidden=64):
    return Job(*norm_case("norm.rms", rows, hidden), "float32")


def test_every_legal_kernel_is_proved_and_timed():
    found = contest(rms().make("cpu"), effort=QUICK, leave_out=OTHERS)
    assert [(each.kernel.id, each.status) for each in found.entries] == [("torch.rms_norm", Status.TIMED)]
    (entry,) = found.entries
    assert entry.error < 1e-4
    assert entry.measurement.first_call_us > 0
    assert entry.measurement.samples == len(entry.samples) == 3
    assert (entry.measurement.device_us, entry.measurement.host_us) == (None, None), "on a CPU there is one time"
    assert found.best is entry
    assert found.times == {entry.kernel: entry.measurement}


def test_a_wrong_kernel_is_banned_and_never_timed():
    calls = []

    @lz.register_kernel("norm.rms", "mine.wrong", supported_dtypes=["float32"])
    def wrong(input, weight, *, eps):
        calls.append(1)
        return rms_norm(input, weight.shape, weight, eps) * 1.01

    found = contest(rms().make("cpu"), effort=QUICK, leave_out=OTHERS)
    entry = next(each for each in found.entries if each.kernel.id == "mine.wrong")
    assert (entry.status, entry.measurement, entry.samples) == (Status.WRONG, None, ())
    assert "elements too far" in entry.detail
    assert len(calls) == 2  # its first run, and the one that was compared
    assert found.best.kernel.id == "torch.rms_norm"
    assert ENGINE.ledger.verdict(entry.kernel, found.facts) is Verdict.WRONG
    assert "UNHEALTHY" in str(lz.explain("rms_norm", torch.randn(8, 64), torch.ones(64)).reasons("mine.wrong"))


def test_a_kernel_that_raises_is_remembered_and_the_others_go_on():
    @lz.register_kernel("norm.rms", "mine.raises", supported_dtypes=["float32"])
    def raises(input, weight, *, eps):
        raise ArithmeticError("no")

    found = contest(rms().make("cpu"), effort=QUICK, leave_out=OTHERS)
    assert {each.kernel.id: each.status for each in found.entries} == {
        "torch.rms_norm": Status.TIMED,
        "mine.raises": Status.FAILED,
    }
    assert "ArithmeticError" in ENGINE.ledger.failures()["mine.raises", "norm.rms"][0]


def test_running_out_of_memory_is_held_against_nobody():
    @lz.register_kernel("norm.rms", "mine.hungry", supported_dtypes=["float32"])
    def hungry(input, weight, *, eps):
        raise torch.OutOfMemoryError("more")

    found = contest(rms().make("cpu"), effort=QUICK, leave_out=OTHERS)
    assert next(each.status for each in found.entries if each.kernel.id == "mine.hungry") is Status.MEMORY
    assert not ENGINE.ledger.failures()


def test_a_hopeless_kernel_keeps_the_time_that_it_has():
    told = []

    @lz.register_kernel("norm.rms", "mine.slow", supported_dtypes=["float32"])
    def slow(input, weight, *, eps):
        told.append(2000)
        return rms_norm(input, weight.shape, weight, eps)

    found = contest(rms().make("cpu"), effort=Effort(12, 1.0), leave_out=OTHERS, clock=Told(told))
    entry = next(each for each in found.entries if each.kernel.id == "mine.slow")
    assert entry.status is Status.STOPPED
    assert entry.measurement.samples == 3
    assert entry.measurement.median_us == 2000
    assert found.best.measurement.median_us == 10


def test_the_banned_do_not_run():
    @lz.register_kernel("norm.rms", "mine.crashes", supported_dtypes=["float32"])
    def crashes(input, weight, *, eps):
        raise AssertionError("it ran")

    found = contest(
        rms().make("cpu"), effort=QUICK, leave_out=OTHERS, banned={"mine.crashes": (Status.BANNED, "SIGSEGV")}
    )
    entry = next(each for each in found.entries if each.kernel.id == "mine.crashes")
    assert (entry.status, entry.detail) == (Status.BANNED, "SIGSEGV")


def test_the_reference_takes_part_only_alone():
    call = rms().make("cpu")
    assert not any(each.kernel.is_reference for each in contest(call, effort=QUICK, leave_out=OTHERS).entries)
    with lz.scope(deny=["torch", *OTHERS]):
        (entry,) = contest(call, effort=QUICK).entries
    assert entry.kernel.id == "reference.norm.rms"


def test_what_mutates_its_arguments_is_proved_on_copies():
    call = Job(*norm_case("norm.add_rms", 4, 64), "float32").make("cpu")
    found = contest(call, effort=QUICK, leave_out=OTHERS)
    assert [each.status for each in found.entries] == [Status.TIMED]


def test_others_can_be_timed_beside_the_kernels():
    call = rms().make("cpu")
    found = contest(call, effort=QUICK, leave_out=OTHERS, beside={"torch": torch_default("rms_norm", call.arguments)})
    assert len(found.others["torch"]) == 3


def test_measuring_warns_nobody_and_leaves_policy_as_it_was(recwarn):
    contest(Job(*norm_case("norm.layer", 4, 33), "float64").make("cpu"), effort=QUICK, leave_out=OTHERS)
    assert not recwarn.list
    assert not lz.which("rms_norm", torch.randn(2, 8), torch.ones(8))["kernel_id"].startswith("inductor")


# jobs and the truth about them


@at_once("name", sorted(OPERATIONS))
def test_facts_of_a_job_are_those_of_its_call(name):
    job = next(jobs_of_cases([name], ["float32"]))
    call = job.make("cpu")
    assert call_work(job.facts("cpu")) == call_work(lz.facts(call.function, **call.arguments))
    assert job.facts("cpu")["operation"] == name


def test_calls_over_pages_are_one_family_whatever_bound_they_promise():
    jobs = [Job(*paged_case(Heads(8, 2, 16), 2, context), "float32") for context in (477, 512, 2048)]
    works = [work_of(job.facts("cpu")) for job in jobs]
    assert len({work.family for work in works}) == 1
    assert len({work.key for work in works}) == 3
    assert [work.sizes["context_bound"] for work in works] == [480, 512, 2048]


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize(
    ("heads", "batch", "seq", "causal"),
    [(Heads(4, 2, 16), 3, 80, True), (Heads(4, 4, 16), 2, 33, False), (Heads(6, 2, 8), 2, 20, True)],
)
def test_parts_of_an_attention_agree_with_the_whole(heads, batch, seq, causal, layout, monkeypatch):
    job = Job(*prefill_case(heads, batch, seq, causal=causal), "float32", layout)
    call = job.make("cpu")
    whole = expected(call).results[0]
    monkeypatch.setattr(child, "MAX_ELEMENTS", {"cpu": 0})
    cut = child.truth_of(call, job.facts("cpu"))
    assert cut.whole is None
    assert len(cut.parts) == 2
    kernel = REGISTRY.kernel("torch.sdpa.math")
    assert not cut.problems(kernel, lambda **_: whole.float())
    assert cut.error(whole) < 1e-9
    spoilt = whole.clone()
    spoilt[(slice(None), slice(-1, None)) if layout == "BSHD" else (slice(None), slice(None), slice(-1, None))] += 1
    assert cut.problems(kernel, lambda **_: spoilt.float())


def test_parts_of_decoding_agree_with_the_whole(monkeypatch):
    monkeypatch.setattr(child, "MAX_ELEMENTS", {"cpu": 0})
    shared = "attention.cascade.decode.paged", OPERATIONS["attention.cascade.decode.paged"].cases[0]
    for case in (decode_case(Heads(8, 2, 16), 3, 40), paged_case(Heads(8, 2, 16), 3, 40), shared):
        job = Job(*case, "float32")
        call = job.make("cpu")
        found = child.truth_of(call, job.facts("cpu"))
        assert found.whole is None
        assert found.error(expected(call).results[0]) < 1e-9


@pytest.mark.parametrize("function", ["ragged_attention", "paged_attention"])
def test_parts_of_unlike_sequences_agree_with_the_whole(function, monkeypatch):
    monkeypatch.setattr(child, "MAX_ELEMENTS", {"cpu": -1})
    monkeypatch.setattr(ragged, "MOST_SCORES", 64)
    pieces, sums = 0, 0
    for number in range(150):
        call = random_call(0, number, function=function, dtype=torch.float64)
        facts = lz.facts(function, **call.arguments)
        if facts.operation.parts not in (ragged.parts_of_keys, ragged.parts_of_pages):
            continue
        found = child.truth_of(call, facts)
        assert (found.whole is None) is bool(found.parts) is bool(facts.size("tokens"))
        pieces += len(found.parts)
        wholes = expected(call).results
        for part in found.parts:
            sums += len(part.truth.results) == 2
            for whole, piece in zip(wholes, part.truth.results, strict=True):
                torch.testing.assert_close(part.place(whole), piece, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert pieces > 60
    assert sums > 10


@pytest.mark.parametrize("operation", ["gqa.decode.paged", "mla.decode.paged", "gqa.prefill.ragged", "gqa.mixed.paged"])
def test_pieces_are_compared_with_the_log_sum_exps_as_well(operation, monkeypatch):
    monkeypatch.setattr(child, "MAX_ELEMENTS", {"cpu": 0})
    operation = f"attention.{operation}"
    case = OPERATIONS[operation].cases[0]
    job = Job(operation, dataclasses.replace(case, params={**case.params, "return_lse": True}), "float32")
    call, kernel = job.make("cpu"), REGISTRY.kernel("torch.sdpa.math")
    output, sums = (each.float() for each in expected(call).results)
    found = child.truth_of(call, job.facts("cpu"))
    assert found.parts
    assert not found.problems(kernel, lambda **_: (output, sums))
    assert any("result 1" in each for each in found.problems(kernel, lambda **_: (output, sums / math.log(2))))
    assert any("wanted 2 results, got 1" in each for each in found.problems(kernel, lambda **_: output))


def test_a_call_with_a_mask_is_compared_whole(monkeypatch):
    monkeypatch.setattr(child, "MAX_ELEMENTS", {"cpu": 0})
    job = Job(*prefill_case(Heads(2, 2, 8), 1, 16, causal=False), "float32")
    call = job.make("cpu")
    masked = dataclasses.replace(call, arguments={**call.arguments, "attn_mask": torch.ones(16, 16, dtype=torch.bool)})
    assert child.truth_of(masked, job.facts("cpu")).whole is not None


@pytest.mark.parametrize(
    "name", ["norm.rms", "norm.layer", "norm.add_rms", "attention.gqa.prefill", "attention.gqa.decode"]
)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_torchs_default_computes_the_same(name, layout):
    operation = OPERATIONS[name]
    call = case_call(operation, operation.cases[0], torch.float32, layout=layout if operation.layouts else None)
    want = expected(call).results[0]
    got = torch_default(call.function, call.arguments)()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_torch_has_no_default_for_what_it_cannot_say():
    call = Job(*prefill_case(Heads(2, 2, 8), 1, 16, causal=True), "float32").make("cpu")
    assert torch_default("attention", {**call.arguments, "softcap": 3.0}) is None
    assert torch_default("paged_attention", {}) is None


# the grid


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_grid_has_every_call_once_and_every_operation(device):
    grid = default_grid(device)
    assert len({job.name for job in grid}) == len(grid)
    assert {job.operation for job in grid} >= set(OPERATIONS)  # plugins bring others


def test_every_beginning_of_the_grid_covers_the_whole():
    grid = default_grid("cuda")
    kinds = {job.operation for job in grid}
    assert {job.operation for job in grid[: len(grid) // 4]} == kinds, "each has its turn"
    lengths = [job.case.sizes["seq_q"] for job in grid if job.operation == "attention.gqa.prefill"][:8]
    assert {min(lengths), max(lengths)} == {128, 32768}


def test_spreading_loses_nothing():
    jobs = default_grid("cpu")
    assert sorted(job.name for job in spread(jobs)) == sorted(job.name for job in jobs)

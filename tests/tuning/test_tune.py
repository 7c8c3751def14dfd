"""Tuning windows: what is asked and measured, in which order, and what is skipped."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from norm_tuning import tuned
from torch.nn.functional import rms_norm

import layerzero as lz
from counting import Told
from layerzero.cli import tune as command
from layerzero.core.evidence import Provenance
from layerzero.core.ledger import Ledger
from layerzero.engine.dispatch import ENGINE
from layerzero.ops import OPERATIONS
from layerzero.tuning.measurement import contest, jobs, tune_run
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.tune import asked_jobs
from layerzero.tuning.prediction.fitting import fit
from layerzero.tuning.prediction.predict import Point, meaning_of
from layerzero.tuning.storage.store import StoreLedger


def test_times_decide_from_then_on(monkeypatch):
    told = []
    monkeypatch.setattr("layerzero.tuning.measurement.tune.clock_of", lambda device, *, graph: Told(told))

    @lz.register_kernel("norm.rms", "mine.slow", supported_dtypes=["float32"], priority=99)
    def slow(input, weight, *, eps):
        told.append(1000)
        return rms_norm(input, weight.shape, weight, eps)

    x, w = torch.randn(8, 64), torch.ones(64)
    lz.configure(allow=["torch", "mine.*"])
    assert lz.explain("rms_norm", x, w).kernel_id == "mine.slow"
    found = tuned("rms_norm", shapes=[(8, 64)])
    assert len(found.contests) == 1
    report = lz.explain("rms_norm", x, w)
    evidence = {each.kernel.id: each.provenance for each in report.candidates if each.legal}
    assert evidence["mine.slow"] == evidence["torch.rms_norm"] == Provenance.MEASURED
    assert report.kernel_id == "torch.rms_norm"
    assert report.chosen.time_us == found.contests[0].best.measurement.median_us == 10


def test_what_is_known_is_not_measured_again():
    steps = []
    assert len(tuned("rms_norm", shapes=[(8, 64), (8, 128)]).contests) == 2
    again = tuned("rms_norm", shapes=[(8, 64), (8, 128), (8, 256)], progress=steps.append)
    assert (again.known, len(again.contests), again.left) == (2, 1, 0)
    assert [step.skipped for step in steps] == ["", "known", "", "known", "", ""]
    assert [step.number for step in steps] == [1, 1, 2, 2, 3, 3]
    assert len(tuned("rms_norm", shapes=[(8, 64)], again=True).contests) == 1


def test_noisy_times_do_not_make_a_call_known(monkeypatch):
    ENGINE.ledger = StoreLedger(Ledger())
    lz.configure(allow=["torch"], perfdb={"enabled": False})
    real = contest.measurement
    noisy = lambda *args, **kwargs: replace(real(*args, **kwargs), noise=1.0, variance_us2=1e9)
    monkeypatch.setattr(contest, "measurement", noisy)
    first = tuned("rms_norm", shapes=[(8, 64)])
    (choice,) = first.choices
    assert choice.too_noisy
    assert choice.confidence < 0.1
    assert choice.kernel_id == lz.which("rms_norm", torch.randn(8, 64), torch.ones(64))["kernel_id"]
    assert "1 were too noisy" in str(first)
    assert first.to_dict()["measured"][0]["too_noisy"]
    shown = "\n".join(str(each) for each in command.shown(first))
    assert f"(confidence {choice.confidence:.2f}); run again with --again" in shown
    calm = lambda *args, **kwargs: replace(real(*args, **kwargs), noise=0.0, variance_us2=0.0)
    monkeypatch.setattr(contest, "measurement", calm)
    again = tuned("rms_norm", shapes=[(8, 64)])
    assert (again.known, len(again.contests)) == (0, 1)
    assert not again.choices[0].too_noisy
    assert tuned("rms_norm", shapes=[(8, 64)]).known == 1


def test_a_failed_kernel_does_not_make_its_call_unknown_for_ever():
    @lz.register_kernel("norm.rms", "mine.raises", supported_dtypes=["float32"])
    def raises(input, weight, *, eps):
        raise ArithmeticError("no")

    assert len(tuned("rms_norm", shapes=[(8, 64)]).contests) == 1
    assert tuned("rms_norm", shapes=[(8, 64)]).known == 1


def test_a_spent_budget_leaves_the_rest():
    found = tuned("rms_norm", shapes=[(8, 64), (8, 128)], budget_s=0.0)
    assert (len(found.contests), found.left) == (0, 2)
    assert "2 are left" in str(found)


def test_a_call_that_is_too_large_is_skipped(monkeypatch):
    def hungry(self, device):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(Job, "make", hungry)
    found = tuned("rms_norm", shapes=[(8, 64)])
    assert list(found.skipped.values()) == ["too little memory: raised OutOfMemoryError: no memory left"]
    assert "1 could not be measured" in str(found)


def test_what_memory_does_not_hold_is_asked_once_and_neither_rehearsed_nor_measured(monkeypatch):
    asked = []

    def too_large(facts):
        asked.append(facts.size("hidden"))
        return "no room" if facts.size("hidden") == 64 else ""

    monkeypatch.setattr(tune_run, "too_large", too_large)
    found = tuned("rms_norm", shapes=[(8, 64), (8, 128)])
    assert sorted(asked) == [64, 128]
    assert list(found.skipped.values()) == ["no room"]
    assert len(found.contests) == 1


def test_a_call_that_cannot_be_made_does_not_end_the_run(monkeypatch):
    make = Job.make

    def picky(self, device):
        if self.case.sizes["hidden"] == 64:
            raise LookupError("its values are not known")
        return make(self, device)

    monkeypatch.setattr(Job, "make", picky)
    found = tuned("rms_norm", shapes=[(8, 64), (8, 128)])
    assert list(found.skipped.values()) == ["raised LookupError: its values are not known"]
    assert len(found.contests) == 1


def test_the_answer_is_plain_data():
    data = tuned("rms_norm", shapes=[(8, 64)]).to_dict()
    (measured,) = data["measured"]
    assert measured["operation"] == "norm.rms"
    assert {each["status"] for each in measured["kernels"]} == {"timed"}


# what is asked

NORMS = sorted(name for name in OPERATIONS if name.startswith("norm."))


def names(*args, **kwargs):
    return [(job.operation, job.case.name) for job in asked_jobs(*args, **kwargs)]


def test_shapes_find_their_operations():
    assert names("attention", [(1, 8, 4, 16)], ["float32"], "cpu") == [("attention.standard.prefill", "1x8x4x16")]
    assert names("attention", [((1, 1, 4, 16), (1, 9, 2, 16))], ["float32"], "cpu") == [
        ("attention.gqa.decode", "1x1x4x16:1x9x2x16")
    ]
    found = names("norm.*", [(3, 4, 8)], ["float32"], "cpu")
    assert [each for each in found if each[0] in NORMS] == [(name, "3x4x8") for name in NORMS]  # plugins bring others
    (job,) = asked_jobs("attention.causal", [(1, 8, 4, 16)], ["float32"], "cpu")
    assert job.case.params == {"causal": True}
    (job,) = asked_jobs("attention", [(1, 4, 8, 16)], ["float32"], "cpu", layout="BHSD")
    assert job.make("cpu").arguments["query"].shape == (1, 4, 8, 16)
    assert job.case.sizes["heads"] == 4


def test_what_is_no_argument_is_refused_with_the_nearest():
    """Warmup left it out in silence, and tuning spoke of shapes."""
    wanted = r"causl: wanted an argument of attention.* got none; did you mean 'causal'\?"
    with pytest.raises(ValueError, match=wanted):
        names("attention", [(1, 8, 4, 16)], ["float32"], "cpu", params={"causl": True})
    with pytest.raises(ValueError, match=wanted):
        lz.warmup("attention", [(1, 8, 4, 16)], causl=True)
    for name, each in (("attention", {"layout": "BHSD"}), ("quantized_linear", {"activations": "int8"})):
        with pytest.raises(ValueError, match=f"parameters: wanted those of .*, got {', '.join(each)};"):
            names(name, "cases", ["float32"], "cpu", params=each)  # which measured nothing, in silence
    with pytest.raises(ValueError, match=r"shape: wanted an argument of norm\.rms, got none"):
        lz.warmup("rms_norm", shape=[(4, 64)])


@pytest.mark.parametrize("shapes", [(4, 64), [(4, "a")], [(4.0, 64)], [(-1, 64)], [((4, 64), 3)]], ids=str)
def test_what_is_no_list_of_shapes_is_refused(shapes):
    """A size that is no integer was left out in silence: of (4.0, 64) calls of (64,) were measured."""
    with pytest.raises(ValueError, match=r"shapes: wanted a list of shapes, such as \[\(4, 64\)\], got "):
        names("norm.rms", shapes, ["float32"], "cpu")
    with pytest.raises(ValueError, match="shapes: wanted a list"):
        lz.warmup("rms_norm", shapes)


PREFILL = meaning_of(OPERATIONS["attention.gqa.prefill"].schema.axes)


def of_grid():
    return [(job.operation, job.case) for job in jobs.default_grid("cuda")]


def test_every_kind_of_prefill_of_the_grid_tells_tiles():
    kinds = defaultdict(list)
    for operation, case in of_grid():
        if operation.endswith("prefill"):
            heads = tuple(case.sizes[name] for name in ("heads", "kv_heads", "head_dim"))
            kinds[heads, case.params["causal"]].append(case.sizes)
    assert len(kinds) == 7
    for sizes in kinds.values():
        uneven = [each["seq_q"] % 128 != 0 for each in sizes]
        assert sum(uneven) >= 3
        assert sum(not each for each in uneven) >= 3
        points = [Point(each, in_tiles(each["batch"], each["seq_q"]), meaning=PREFILL) for each in sizes]
        assert fit(points).tile == 128


def in_tiles(batch, seq):
    whole = -(-seq // 128) * 128
    return 5 + batch * whole / 200 + batch * whole * whole / 1e5


def test_decoding_of_the_grid_lies_off_the_powers_of_two_for_the_middle_batches():
    contexts = defaultdict(set)
    for operation, case in of_grid():
        if operation == "attention.gqa.decode":
            contexts[case.sizes["batch"]].add(case.sizes["seq_k"])
    powers = {2**each for each in range(20)}
    assert {batch: found <= powers for batch, found in contexts.items()} == {1: True, 4: False, 16: False, 64: True}


def test_cases_grid_and_parts_of_the_grid():
    cases = [case.name for each in lz.list_operations() if each.name == "norm.rms" for case in each.cases]
    assert names("rms_norm", "cases", ["float32"], "cpu") == [("norm.rms", case) for case in cases]
    assert {operation for operation, _ in names("norm.*", None, ["float32"], "cpu")} >= set(NORMS)
    jobs = asked_jobs("attention", None, ["float32"], "cpu", head_dim=96, seq_lens=[7, 9], batch_sizes=[2])
    assert {job.case.sizes["head_dim"] for job in jobs} == {96}
    assert {job.case.sizes["batch"] for job in jobs} == {2}
    assert {job.case.sizes["seq_k"] for job in jobs} == {7, 9}
    assert all(job.case.params["causal"] for job in asked_jobs("attention.causal", None, ["float32"], "cpu"))


def test_a_dtype_that_is_named_leaves_out_what_was_called_or_recorded_in_others(monkeypatch, tmp_path):
    """``tune attention --dtype bfloat16`` measured the float32 calls of a demonstration first."""
    with lz.record(tmp_path / "both.json") as recording:
        for dtype in (torch.float32, torch.bfloat16):
            lz.rms_norm(torch.randn(3, 24, dtype=dtype), torch.ones(24, dtype=dtype))
    recorded = [(1, each.call) for each in recording.manifest().calls]
    assert len(recorded) == 2
    monkeypatch.setattr(ENGINE.ledger, "calls", lambda: recorded, raising=False)
    for more in ({}, {"manifest": tmp_path / "both.json"}):
        every = asked_jobs("rms_norm", None, ["bfloat16"], "cpu", **more)
        assert {job.dtype for job in every if job.recipe is not None} == {"float32", "bfloat16"}
        named = asked_jobs("rms_norm", None, ["bfloat16"], "cpu", named=["bfloat16"], **more)
        assert {job.dtype for job in named} == {"bfloat16"}
        assert sum(job.recipe is not None for job in named) == 1


def test_an_alias_leaves_out_what_was_called_otherwise(monkeypatch):
    q = torch.randn(1, 8, 2, 16)
    with lz.record() as recording:
        for causal in (True, False):
            lz.attention(q, q, q, causal=causal, layout="BSHD")
    recorded = [(1, each.call) for each in recording.manifest().calls]
    monkeypatch.setattr(ENGINE.ledger, "calls", lambda: recorded, raising=False)
    found = [
        job.recipe.params["causal"] for job in asked_jobs("attention.causal", None, ["float32"], "cpu") if job.recipe
    ]
    assert found == [True]


def test_parameters_are_those_of_every_call(monkeypatch):
    """``--param eps=0.1`` was refused, where its help says that it is measured."""
    found = lz.tune("norm.rms", [(4, 64)], "float32", params={"eps": 0.1}, budget_s=0.0)
    assert found is not None
    (job,) = asked_jobs("norm.rms", [(4, 64)], ["float32"], "cpu", params={"eps": 0.1})
    assert job.case.params == {"eps": 0.1}


@pytest.mark.parametrize("said", [
    {"params": {"eps": 0.1}}, {"dtype": "bfloat16"}, {"layout": "BSHD"}, {"head_dim": 64, "seq_lens": [8]},
    {"manifest": "workload.json", "model": "m1"},
])  # fmt: skip
def test_what_a_model_takes_nothing_of_is_refused(said):
    """All but ``params`` were dropped without a word."""
    called = []
    with pytest.raises(ValueError, match=f"{', '.join(said)}: wanted with an operation's name alone, got a model"):
        lz.tune(called.append, torch.randn(2, 8), **said)
    for more in ({"manifest": "workload.json"}, {"eps": 0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(more))}: wanted with an operation's name alone, got a model"):
            lz.warmup(called.append, torch.randn(2, 8), **more)
    assert not called


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shapes": [(2, 2, 2)]}, "wanted the shapes of query"),
        ({"samples": 2}, "samples: wanted at least 3"),
        ({"shapes": "kases"}, "wanted sizes, or 'cases'"),
        ({"shapes": "cases", "head_dim": 8}, "head_dim: they narrow the default grid"),
        ({"shapes": "cases", "manifest": "x.json"}, "manifest: wanted it alone, got shapes"),
        ({"seq_lens": [3], "manifest": "x.json"}, "got seq_lens, too"),
        ({"manifest": "absent.json"}, "wanted a manifest that lz.record wrote"),
        ({"model": "tiny"}, "model: wanted it along with a manifest"),
    ],
)
def test_what_makes_no_sense_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        lz.tune("attention", **given)
    with pytest.raises(KeyError, match=r"norm\.rsm"):
        lz.tune("norm.rsm")


# first runs in a child

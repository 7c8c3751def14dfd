"""Plans: a model's kernels within buckets of sizes, solved once, written down, and held where all of it is the same."""

from __future__ import annotations

import math
import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

import layerzero as lz
from layerzero.engine.jit import BUILT
from layerzero.inspection.freeze import Frost
from layerzero.inspection.plan_document import differences
from layerzero.serving import solve as solving
from layerzero.serving.background_builds import BUILDS
from solved_models import Layer, inputs, model, own, refused, run, solve, timed


def test_calls_inside_the_buckets_miss_nothing_and_build_nothing(tmp_path, monkeypatch):
    asked = model(layers=1)
    solve(asked).write(tmp_path / "plan.json")
    lz.freeze(tmp_path / "plan.json", model=asked, strict=True)
    built = []
    monkeypatch.setattr(BUILT, "add", lambda *each: built.append(each))
    monkeypatch.setattr(BUILDS, "add", lambda *each: built.append(each))
    draw = random.Random(3)
    for _ in range(200):
        run(asked, draw.randint(1, 32), draw.randint(1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(asked, 4, 0)  # an empty batch, which the reference computes
    assert not lz.frozen().plan.misses
    assert not lz.frozen().departures
    assert not built


def test_a_call_has_the_kernel_of_the_smallest_bucket_that_holds_it():
    small, large = own("small"), own("large", 99)
    timed(8, 1, small=1.0, large=50.0)
    timed(32, 1, small=50.0, large=1.0)
    asked = model(layers=1)
    assert lz.compile is lz.solve
    plan = solve(asked, buckets={"seq_len": [8, 32], "batch": [1]})
    small.clear()
    large.clear()
    lz.freeze(plan)
    timed(32, 1, small=1.0, large=50.0)  # what comes later decides nothing
    for length in (1, 2, 5, 8):
        run(asked, length, 1)
    assert len(small) == 4
    assert not large
    for length in (16, 20, 31, 32):  # of rows, a product, 9 to 15 may share what was kept for 8
        run(asked, length, 1)
    assert len(large) == 4


@pytest.mark.parametrize(("seq_len", "batch", "wanted", "got"), [
    (33, 1, "seq_q and seq_k must be at most 32 and at most 32, is 33 and 33", "prefill"),
    (8, 5, "batch must be at most 4, is 5", "prefill"),
])  # fmt: skip
def test_a_call_outside_is_named_chosen_for_at_run_time_or_an_error(seq_len, batch, wanted, got):
    asked = model(layers=1)
    plan = solve(asked)
    lz.freeze(plan)
    with pytest.warns(lz.LayerZeroWarning, match="PLAN_BUCKET_MISS"):
        outside = run(asked, seq_len, batch)
    assert outside.shape == (batch, seq_len, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        run(asked, seq_len, batch)
    texts = [str(each) for each in lz.frozen().plan.misses.values()]
    assert any(wanted in each for each in texts)
    assert any(got in each for each in lz.frozen().plan.misses)
    lz.thaw()
    lz.freeze(plan, strict=True)
    with pytest.raises(lz.FrozenChoiceError, match="PLAN_BUCKET_MISS"):
        run(asked, seq_len, batch)
    run(asked, 8, 4)  # inside all goes on
    lz.rms_norm(torch.randn(1, 1, 64), torch.randn(64))
    lz.silu(torch.randn(4))  # no function of the plan


def test_outside_of_the_buckets_times_decide_and_inside_they_do_not():
    first, second = own("first"), own("second", 99)
    asked = model(layers=1)
    lz.freeze(solve(asked, buckets={"seq_len": [8], "batch": [1]}))
    first.clear()
    timed(64, 1, first=50.0, second=1.0)
    timed(8, 1, first=50.0, second=1.0)
    with pytest.warns(lz.LayerZeroWarning, match="PLAN_BUCKET_MISS"):
        run(asked, 64, 1)
    run(asked, 8, 1)
    assert (len(first), len(second)) == (1, 1)


def test_strictness_is_the_plans_unless_it_is_named():
    asked = model(layers=1)
    plan = solve(asked, strict=True)
    assert plan.solved.fallback == "error"
    assert "calls outside of all buckets: error" in str(plan)
    lz.freeze(plan)
    with pytest.raises(lz.FrozenChoiceError, match="PLAN_BUCKET_MISS"):
        run(asked, 64, 1)
    lz.thaw()
    lz.freeze(plan, strict=False)
    with pytest.warns(lz.LayerZeroWarning, match="PLAN_BUCKET_MISS"):
        run(asked, 64, 1)


def test_a_kind_of_call_that_was_not_solved_is_named_by_what_differs():
    asked = model(layers=1)
    lz.freeze(solve(asked))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    query = torch.randn(1, 8, 2, 32)
    report = lz.explain("attention", query, query, query, causal=False, attn_mask=mask, layout="BSHD")
    (note,) = [each for each in report.notes if "PLAN_BUCKET_MISS" in each]
    assert "must be causal=True mask_ndim=0, is attn_mask=" in note
    wanted = r"must be without gradients, is requires_grad=True\. Use torch\.no_grad\(\)"
    with pytest.warns(lz.LayerZeroWarning, match=wanted):
        asked(torch.randn(1, 8, 64))


def test_no_call_outside_slips_into_a_plan_that_was_kept_and_none_inside_is_kept_out():
    asked = model(layers=1)
    lz.freeze(solve(asked), strict=True)
    draw = random.Random(7)
    drawn = [(32, 1), (33, 1), (32, 4), (25, 5), (32, 4), (63, 1)]
    for seq_len, batch in [*drawn, *((draw.randint(1, 64), draw.randint(1, 8)) for _ in range(40))]:
        if seq_len <= 32 and batch <= 4:
            run(asked, seq_len, batch)
        else:
            with pytest.raises(lz.FrozenChoiceError, match="PLAN_BUCKET_MISS"):
                run(asked, seq_len, batch)


def test_a_plan_holds_in_captures():
    asked = model(layers=1)
    plan = solve(asked)
    lz.freeze(plan)
    weight, rows = torch.randn(64), torch.randn(1, 8, 64)
    report = lz.explain("rms_norm", rows, weight, capturing=True)
    assert any(note.startswith("frozen") and "rows<=8" in note for note in report.notes)


def test_a_kernel_that_may_not_run_gives_way_and_is_listed():
    ran = own("first")
    asked = model(layers=1)
    plan = solve(asked)
    ran.clear()
    lz.freeze(plan)
    lz.configure(deny=["user.first"])
    with pytest.warns(lz.LayerZeroWarning, match=r"user\.first is frozen .* cannot run"):
        run(asked, 8, 1)
    assert not ran
    assert {each.kernel for each in lz.frozen().departures.values()} == {"user.first"}
    assert not lz.frozen().plan.misses


def test_inputs_alone_are_one_bucket():
    asked = model(layers=1)
    plan = lz.solve(asked, torch.randn(2, 8, 64), budget_s=0)
    assert [each.sizes for each in plan.solved.plans] == [{}]
    lz.freeze(plan, strict=True)
    run(asked, 8, 2)
    run(asked, 5, 1)
    with pytest.raises(lz.FrozenChoiceError, match="rows must be at most 16, is 24"):
        run(asked, 8, 3)


def test_code_that_reads_values_or_runs_otherwise_without_memory_is_run_for_real():
    class Reads(Layer):
        def forward(self, rows):
            return super().forward(rows) if rows.sum().item() > 0 else rows

    class Differs(Layer):
        def forward(self, rows):
            return super().forward(rows) if type(rows) is torch.Tensor else lz.rms_norm(rows, self.weight)

    with pytest.raises(DataDependentOutputException):
        lz.dry_run(Reads(), inputs())
    for asked in (Reads(), Differs()):
        plan = solve(asked)
        operations = {each.call.operation for each in plan.choices.values()}
        assert operations == {"norm.rms", "attention.standard.prefill", "attention.standard.decode"}
        assert len(plan.choices) == len(solve(Layer()).choices)


def test_a_model_that_grows_tables_has_its_own_afterwards():
    class Grows(Layer):
        def __init__(self):
            super().__init__()
            self.had, self.kept = 0, {"rows": [], "seen": {0}}

        def forward(self, rows):
            if rows.shape[1] > self.had:
                self.had = rows.shape[1]
                self.register_buffer("table", torch.ones(self.had, 1), persistent=False)
                self.kept["rows"].append(self.table)
                self.kept["seen"].add(self.had)
            return super().forward(rows * self.table[: rows.shape[1]])

    asked = nn.Sequential(Grows())
    run(asked, 4, 1)
    table = asked[0].table
    lz.dry_run(asked, inputs(seq_len=64), "H100")
    assert (asked[0].had, asked[0].kept) == (4, {"rows": [table], "seen": {0, 4}})
    assert asked[0].table is table
    solve(asked)
    assert type(asked[0].table) is torch.Tensor
    assert {type(each) for each in asked[0].kept["rows"]} == {torch.Tensor}
    assert type(run(asked, 16, 1)) is torch.Tensor


def test_a_function_without_arguments_runs_the_model_by_itself():
    asked = model(layers=1)
    plan = solve(asked, lambda seq_len, batch: lambda: run(asked, seq_len, batch))
    assert plan.choices.keys() == solve(asked).choices.keys()


@pytest.mark.parametrize("compiles", [True, False])
def test_what_compiles_is_built_and_the_document_names_the_build(compiles, monkeypatch):
    ran = own("jit", jit=True)
    measured = solving.tune_calls
    monkeypatch.setattr(solving, "tune_calls", lambda calls, **more: measured([], **more))
    asked = Layer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = solve(asked, buckets={"seq_len": [8], "batch": [1]}, budget_s=None, compile_jit=compiles)
    norms = {each.kernel for each in plan.choices.values() if each.call.operation == "norm.rms"}
    assert ("user.jit" in norms) <= compiles
    if not compiles:
        assert not ran
        assert not plan.solved.jit_artifacts
        return
    assert ran
    for name, each in plan.solved.jit_artifacts.items():
        assert plan.choices[name].kernel == each.kernel == "user.jit"
        assert len(each.build) == 40


def test_what_time_did_not_suffice_for_is_told():
    with pytest.warns(lz.LayerZeroWarning, match=r"solve: .* were not measured: there was no time"):
        plan = solve(budget_s=1e-9)
    assert plan.choices


def test_measuring_decides_within_the_budget(monkeypatch):
    given = {}

    def tune_calls(calls, *, deadline, leave_out):
        given.update(calls=len(calls), left=deadline.left_s)
        return real([], deadline=deadline, leave_out=leave_out)

    real = solving.tune_calls
    monkeypatch.setattr(solving, "tune_calls", tune_calls)
    plan = solve(budget_s=100.0)
    assert given["calls"] == len(plan.choices)
    assert 0 < given["left"] < 100 * (1 - solving.LAST_S / 2)
    assert math.isfinite(given["left"])


AXIS = st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seq_len=AXIS, batch=AXIS, at=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_laws_of_plans(seq_len, batch, at):
    """Solved twice, a plan is the same; it differs from itself in nothing; a point inside of it lies in a bucket."""
    asked, buckets = Layer(), {"seq_len": seq_len, "batch": batch}
    plan, again = (solve(asked, buckets=buckets) for _ in range(2))
    assert plan.hash == again.hash
    assert plan == again
    assert differences(plan, again) == []
    other = solve(asked, buckets={"seq_len": [41], "batch": batch})
    there, back = differences(plan, other), differences(other, plan)
    assert there
    assert {(each.what, str(each.first)) for each in there} == {(each.what, str(each.second)) for each in back}
    sizes = [max(1, math.ceil(max(ends) * share)) for ends, share in zip((seq_len, batch), at, strict=True)]
    lz.freeze(plan, model=asked, strict=True)
    try:
        run(asked, *sizes)
        assert not lz.frozen().plan.misses
    finally:
        assert lz.thaw() == plan


def test_the_document_goes_around_and_reads_as_a_table(tmp_path):
    plan = solve()
    plan.write(tmp_path / "plan.json")
    assert Frost.load(tmp_path / "plan.json") == plan
    lines = str(plan).splitlines()
    assert lines[0].startswith("plan of Sequential on ")
    assert "  buckets: seq_len 8, 32; batch 1, 4" in lines
    assert "seq_len<=32 batch<=4" in lines
    assert any(line.split()[:1] == ["norm.rms"] and "rows<=128" in line for line in lines)
    assert plan.solved.hardware["signature"].startswith("cpu_")
    assert plan.solved.libraries["torch"] == str(torch.__version__)


@pytest.mark.slow
def test_a_language_model_is_solved_for_prompts_and_for_one_token_behind_them():
    transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
    lz.register_with_transformers()
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    asked = transformers.LlamaForCausalLM._from_config(config, attn_implementation="layerzero").eval()
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM._from_config(config, attn_implementation="layerzero").eval()
    plans = [lz.solve(each, shape_buckets={"seq_len": [4, 16], "batch": [2]}, budget_s=0) for each in (asked, shapes)]
    assert plans[0].choices.keys() == plans[1].choices.keys()
    assert plans[0].solved.configuration["num_hidden_layers"] == 1
    lz.freeze(plans[1], model=asked, strict=True)
    ids = torch.ones(2, 12, dtype=torch.long)
    asked.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    other = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig.from_dict(config.to_dict() | {"num_hidden_layers": 2})
    )
    lz.thaw()
    refused(plans[0], "model: num_hidden_layers: wanted 1, got 2", model=other)

"""A budget that is over before a plan's grid is recorded: what the plan has, and where it says what it lacks."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from torch import nn

import layerzero as lz
from command_lines import answer, run
from layerzero.inspection.freeze import Frost
from layerzero.inspection.plan_document import differences
from layerzero.integrations.optimize.swaps.swap import FROM_MANY
from layerzero.serving import solve as solving
from layerzero.tuning.measurement.timing import Deadline

BUCKETS = {"seq_len": [8, 32], "batch": [1, 4]}


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, rows):
        return lz.rms_norm(rows, self.weight)


class Reads(Norm):
    def forward(self, rows):
        return super().forward(rows) * rows.sum().item()


class Inputs:
    """What takes 100 s for each point, and for each at which one token stands for the smallest bucket."""

    def __init__(self):
        self.clock_s = 0.0

    def __call__(self, seq_len, batch):
        self.clock_s += 100.0
        return torch.empty(batch, seq_len, 64, device="meta")


@pytest.fixture
def asked():
    return Norm()


@pytest.fixture
def inputs(monkeypatch):
    given = Inputs()
    monkeypatch.setattr(solving, "Deadline", lambda seconds: Deadline(seconds, lambda: given.clock_s))
    return given


def for_real(asked, inputs):
    return lambda **point: lambda: asked(torch.ones(inputs(**point).shape))


def short(asked, inputs):
    with pytest.warns(lz.LayerZeroWarning, match="solve: 2 of 4 points of the grid were not recorded"):
        return lz.solve(asked, for_real(asked, inputs), BUCKETS, budget_s=250)


def test_the_whole_grid_is_recorded_without_memory_before_anything_is_measured(asked, inputs):
    whole = lz.solve(asked, inputs, BUCKETS, budget_s=0)
    with pytest.warns(lz.LayerZeroWarning, match="were not measured: there was no time") as told:
        plan = lz.solve(asked, inputs, BUCKETS, budget_s=150)
    assert "not recorded" not in str(told[0].message)
    assert plan.solved.plans == whole.solved.plans
    assert plan.solved.not_recorded is msgspec.UNSET
    assert b"not_recorded" not in msgspec.json.encode(plan), "documents of before have their hash"


def test_the_grid_of_a_model_that_reads_values_ends_with_the_budget(inputs):
    with pytest.warns(lz.LayerZeroWarning, match="solve: 2 of 4 points of the grid were not recorded"):
        lz.solve(Reads(), inputs, BUCKETS, budget_s=250)


def test_a_plan_names_the_points_of_its_grid_that_were_not_recorded(asked, inputs, tmp_path):
    plan = short(asked, inputs)
    missing = [{"seq_len": 32, "batch": 1}, {"seq_len": 32, "batch": 4}]
    assert plan.solved.not_recorded == missing
    said = "not recorded before the budget was over: seq_len<=32 batch<=1; seq_len<=32 batch<=4"
    assert f"  {said}" in str(plan).splitlines()
    file = tmp_path / "plan.json"
    plan.write(file)
    assert Frost.load(file) == plan
    assert said in " ".join(run(f"plan show {file}").output.split())
    assert answer(f"plan show {file}")["solved"]["not_recorded"] == missing
    whole = lz.solve(asked, for_real(asked, inputs), BUCKETS, budget_s=0)
    found = {each.what: each.first for each in differences(plan, whole)}
    assert found["bucket seq_len<=32 batch<=4"] == "not recorded"


def test_where_such_a_plan_is_held_a_miss_asks_for_a_larger_budget(asked, inputs, tmp_path):
    short(asked, inputs).write(tmp_path / "plan.json")
    with pytest.warns(lz.LayerZeroWarning, match=r"got none for seq_len<=32 batch<=1; .* with a larger budget_s"):
        lz.freeze(tmp_path / "plan.json", strict=True)
    lz.rms_norm(torch.ones(4, 8, 64), asked.weight.detach())
    with pytest.raises(lz.FrozenChoiceError, match="grid were not recorded: solve again with a larger budget_s"):
        lz.rms_norm(torch.ones(4, 32, 64), asked.weight.detach())
    lz.thaw()
    lz.freeze(lz.solve(asked, for_real(asked, inputs), BUCKETS, budget_s=0), strict=True)
    with pytest.raises(lz.FrozenChoiceError, match="Solve again with buckets that hold it"):
        lz.rms_norm(torch.ones(4, 33, 64), asked.weight.detach())


class Sizes(nn.Module):
    """What ``lz.optimize`` makes of a layer: other calls of one token, of few and of many."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, rows):
        count = rows.shape[0] * rows.shape[1]
        norm = lz.rms_norm(rows, self.weight)
        return norm if count == 1 else lz.silu(norm) if count < FROM_MANY else lz.gelu(norm)


@pytest.mark.parametrize("buckets", [{"seq_len": [32], "batch": [2, 4]}, {"seq_len": [5], "batch": [8]}])
def test_few_tokens_within_a_bucket_are_recorded(buckets):
    assert solving.FEW_TOKENS == FROM_MANY - 1
    model = Sizes()
    plan = lz.solve(model, lambda seq_len, batch: torch.empty(batch, seq_len, 64), buckets, budget_s=0, strict=True)
    lz.freeze(plan, model=model)
    with torch.no_grad():
        for rows in itertools.product(*(range(1, max(ends) + 1) for ends in buckets.values())):
            model(torch.ones(*rows, 64))


@pytest.mark.parametrize("buckets", [{"seq_len": [4, 8], "batch": [1]}, {"seq_len": [15], "batch": [4]}])
def test_no_point_is_run_twice(buckets):
    asked = []

    def inputs(seq_len, batch):
        asked.append((seq_len, batch))
        return torch.empty(batch, seq_len, 64, device="meta")

    lz.solve(Norm().to("meta"), inputs, buckets, budget_s=0)
    assert len(asked) == len(set(asked))
    assert any(seq_len * batch == min(15, max(buckets["seq_len"]) * max(buckets["batch"])) for seq_len, batch in asked)

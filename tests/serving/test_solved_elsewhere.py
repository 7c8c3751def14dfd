"""Plans of another model, machine, setting or build, and documents that were edited: refused by what differs."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.engine import probe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import BUILT
from layerzero.inspection import plan_document
from solved_models import Layer, model, own, refused, run, solve


def test_another_model_is_refused_by_what_differs():
    plan = solve(model())
    refused(plan, r"model: parameters: wanted 128, got 192", model=model(layers=3))
    refused(plan, r"model: class: wanted Sequential, got Layer", model=Layer())

    class Renamed(nn.Sequential):
        pass

    Renamed.__name__ = "Sequential"
    same = Renamed(nn.ModuleDict({"other": model()}))
    refused(plan, "model: configuration_hash: wanted", model=same)


def test_a_config_with_numbers_that_json_lacks_is_read_back(tmp_path):
    class Config:
        limit = math.inf

        def to_dict(self):
            return {"limit": self.limit, "least": -math.inf, "none": math.nan}

    asked = model()
    asked.config = Config()
    solve(asked).write(tmp_path / "plan.json")
    lz.freeze(tmp_path / "plan.json", model=asked)
    lz.thaw()
    asked.config.limit = 3.0
    refused(tmp_path / "plan.json", r"model: limit: wanted inf, got 3\.0", model=asked)


def test_where_weights_lie_is_no_part_of_the_model():
    plan = solve(model())
    lz.freeze(plan, model=model().to("meta"))


def test_another_machine_is_refused_by_what_differs(monkeypatch):
    plan = solve()
    with monkeypatch.context() as patch:
        patch.setattr(plan_document, "driver_version", lambda device: "999.1")
        refused(plan, r"hardware: driver: wanted , got 999\.1")
    with monkeypatch.context() as patch:
        patch.setattr(plan_document, "capability_hash", lambda device: "other")
        refused(plan, r"hardware: capability: wanted \w+, got other")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        refused(plan, r"hardware: threads: wanted \d+, got 77")
    with monkeypatch.context() as patch:
        machine = probe.Machine(libraries={"torch": "2.10.0", "zentorch": "0.1"})
        patch.setattr(probe, "this_machine", lambda: machine)
        refused(plan, r"library: torch: wanted \S+, got 2\.10\.0")


def test_a_plan_of_a_gpu_is_refused_where_there_is_none():
    plan = solve(model(layers=1))
    hardware = plan.solved.hardware | {"platform": "cuda", "name": "NVIDIA H100 80GB HBM3"}
    elsewhere = msgspec.structs.replace(plan.solved, hardware=hardware)
    with pytest.raises(lz.FrozenChoiceError) as caught:
        lz.freeze(msgspec.structs.replace(plan, solved=elsewhere).sealed())
    if not torch.cuda.is_available():
        assert len(caught.value.problems) == 2
    assert any("hardware: name: wanted NVIDIA H100 80GB HBM3, got" in each for each in caught.value.problems)


def test_other_settings_are_refused():
    plan = solve()
    lz.configure(avoid_sources=["reference.*"])
    refused(plan, "settings: avoid_sources")


@pytest.mark.parametrize(("damage", "problem"), [
    (lambda text: text[: len(text) // 2], "wanted frozen choices as JSON"),
    (lambda text: text.replace('"threads": ', '"threads": 1'), "hash: wanted"),
    (lambda text: text.replace('"runtime_select"', '"error"'), "hash: wanted"),
    (lambda text: "", "wanted frozen choices as JSON"),
    (lambda text: json.dumps(json.loads(text) | {"format": 1}), "format: wanted 2, got 1"),
])  # fmt: skip
def test_a_document_that_is_cut_or_was_edited_is_refused(damage, problem, tmp_path):
    path = tmp_path / "plan.json"
    solve().write(path)
    path.write_text(damage(path.read_text()))
    refused(path, problem)


def test_what_makes_no_sense_is_refused_by_name():
    asked = model()
    for more, error, problem in (
        ({"buckets": {}}, ValueError, "wanted at least one axis"),
        ({"buckets": {"seq_len": []}}, ValueError, r"seq_len: wanted sizes from 1 on, .* got \[\]"),
        ({"buckets": {"seq_len": [0]}}, ValueError, "wanted sizes from 1 on"),
        ({"buckets": {"seq_len": [True]}}, ValueError, "wanted sizes from 1 on"),
        ({"buckets": {"seq_len": 8}}, ValueError, "wanted sizes from 1 on"),
        ({"given": torch.ones(3)}, TypeError, "wanted a function of the buckets' axes"),
        ({"given": None, "buckets": {"pages": [1]}}, ValueError, "got pages without inputs="),
        ({"given": None}, TypeError, "wanted inputs= for a model without config"),
        ({"asked": nn.Linear(64, 64)}, ValueError, "wanted a model that calls LayerZero's functions"),
        ({"budget_s": -1}, ValueError, "budget_s: wanted seconds"),
    ):
        with pytest.raises(error, match=problem):
            solve(**{"asked": asked, **more})
    with pytest.raises(TypeError, match=r"wanted a torch\.nn\.Module"):
        lz.solve(3, torch.ones(3))
    lz.freeze(solve(asked))
    with pytest.raises(lz.PolicyError, match=r"wanted lz\.thaw"):
        solve(asked)
    lz.thaw()
    with pytest.raises(lz.PolicyError, match="wanted a plan with them"):
        lz.freeze(model=asked)
    with pytest.raises(lz.PolicyError, match="wanted 'error' or 'select'"):
        lz.freeze(solve(asked), otherwise="no")
    run(asked, 8, 1)
    with pytest.raises(lz.FrozenChoiceError, match=r"wanted a plan that lz\.solve wrote"):
        lz.freeze(msgspec.structs.replace(solve(asked), solved=None).sealed(), strict=True)


def test_a_build_that_is_not_here_is_refused_by_name():
    own("jit", jit=True)
    asked = Layer()
    lz.configure(deny=["inductor"])  # which a compiler builds for seconds
    lz.warmup("rms_norm", [(1, 8, 64), (1, 1, 64)], device="cpu")
    plan = solve(asked, buckets={"seq_len": [8], "batch": [1]})
    assert {each.kernel for each in plan.solved.jit_artifacts.values()} == {"user.jit"}
    lz.freeze(plan)
    lz.thaw()
    BUILT.clear()
    ENGINE.bump()
    refused(plan, r"wanted user\.jit, .*JIT_DISABLED")

"""What a model would run elsewhere: on named devices, without weights and without a kernel that runs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.engine.dispatch import ENGINE, Dispatcher
from layerzero.engine.transforms import ELSEWHERE, _alike


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.query = nn.Linear(64, 64)

    def forward(self, rows):
        normed = self.query(lz.rms_norm(rows, self.weight))
        heads = normed.view(*rows.shape[:2], 2, 32)
        return rows + lz.attention(heads, heads, heads, causal=True, layout="BSHD").flatten(2)


def model(layers=3, device="meta", dtype=torch.bfloat16):
    with torch.device(device):
        made = nn.Sequential(*(Layer() for _ in range(layers)))
    return made if dtype is torch.float32 else made.to(dtype)


ROWS = torch.empty(2, 128, 64, dtype=torch.bfloat16, device="meta")


def kernels(report):
    return {(row.layer, row.operation): row.kernel for row in report.rows}


def takes(report, kernel):
    """Whether a kernel may run the norm."""
    norm = next(each for each in report.reports if each.operation == "norm.rms")
    return not norm.reasons(kernel)


@pytest.mark.parametrize("device", ["H100", "A100", "MI300X", "cpu"])
def test_it_names_what_explain_names_for_that_device(device):
    report = lz.dry_run(model(2), ROWS, device)
    libraries = None if report.assumes[1].endswith("installed here") else report.libraries
    weight = torch.empty(64, dtype=torch.bfloat16, device="meta")
    wanted = lz.explain("rms_norm", ROWS, weight, device=device, libraries=libraries).kernel_id
    assert [kernels(report)[f"{layer}", "norm.rms"] for layer in range(2)] == [wanted] * 2
    assert all(row.why for row in report.rows)
    assert report.trace.others == {"Linear": 2}


def test_a_device_with_shipped_times_has_the_libraries_that_they_were_measured_with():
    report = lz.dry_run(model(1), ROWS, "H100")
    assert report.libraries["vllm"] == "0.20.0"
    assert report.libraries["torch"].startswith("2.11")
    assert takes(report, "vllm.rms_norm")
    assert "vllm 0.20.0" in report.assumes[1]
    assert "with which its shipped times were measured" in report.assumes[1]
    alone = lz.dry_run(model(1), ROWS, "H100", libraries={"torch": "2.13.0"})
    assert not takes(alone, "vllm.rms_norm")
    assert "as they were named" in str(alone)
    other = lz.dry_run(model(1), ROWS, "A100")
    assert "no times ship for NVIDIA A100" in str(other)


@pytest.mark.parametrize("kind", ["meta", "fake", "real"])
def test_nothing_runs_wherever_the_weights_lie(kind):
    ran = []

    def kernel(input, weight, *, eps=1e-6):
        ran.append(1)
        return input

    lz.register_kernel("norm.rms", "user.norm", priority=100)(kernel)
    if kind == "fake":
        with FakeTensorMode():
            asked = model(1, "cpu", torch.float32)
    else:
        asked = model(1, "cpu" if kind == "real" else "meta", torch.float32)
    with lz.prefer("user"):
        report = lz.dry_run(asked, torch.randn(2, 8, 64), "cpu")
    assert kernels(report)["0", "norm.rms"] == "user.norm"
    assert not ran
    assert ("lz.optimize exchanged" in str(report)) is (kind != "meta")


@pytest.mark.parametrize("kind", ["buffer", "weight", "attribute"])
def test_what_lies_in_memory_beside_weights_on_meta_is_put_back(kind):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, device="meta"))
            if kind == "buffer":
                self.register_buffer("scale", torch.ones(64))
            else:
                self.scale = nn.Parameter(torch.ones(64)) if kind == "weight" else torch.ones(64)

        def forward(self, rows):
            return lz.rms_norm(rows * self.scale, self.weight)

    asked = Scaled()
    scale = asked.scale
    report = lz.dry_run(asked, torch.ones(2, 64), "H100")
    assert [row.operation for row in report.rows] == ["norm.rms"]
    assert asked.scale is scale
    assert lz.solve(asked, torch.ones(2, 64), budget_s=0).choices
    assert asked.scale is scale


@pytest.mark.parametrize(("one", "other"), [([64], (64,)), (1, True), (1, 1.0), ({"a": 1}, {"a": True})])
def test_arguments_that_only_look_alike_are_judged_apart(one, other):
    first, second = (_alike("norm", {"given": each}, ROWS) for each in (one, other))
    assert first == _alike("norm", {"given": one}, ROWS)
    assert first != second


def test_arguments_that_make_no_key_are_judged_each_time():
    assert _alike("norm", {"given": {1}}, ROWS) != _alike("norm", {"given": {1}}, ROWS)


def test_layers_that_are_alike_are_judged_once(monkeypatch):
    asked = []
    explain = Dispatcher.explain

    def counted(self, *args, **kwargs):
        asked.append(self.function.name)
        return explain(self, *args, **kwargs)

    monkeypatch.setattr(Dispatcher, "explain", counted)
    report = lz.dry_run(model(5), ROWS, "H100")
    assert sorted(asked) == ["attention", "rms_norm"]
    assert len(report.rows) == 10
    assert len(report.reports) == 2
    assert all(each.candidates for each in report.reports)


def test_a_call_without_a_legal_kernel_is_listed_with_its_reasons():
    with lz.scope(allow=["user"], fallback_enabled=False):
        report = lz.dry_run(model(1), ROWS, "H100")
    assert {each.operation for each in report.refused} == {"norm.rms", "attention.standard.prefill"}
    assert not report.rows
    assert "no kernel may run norm.rms on NVIDIA H100 80GB HBM3" in str(report)
    assert json.loads(json.dumps(report.to_dict(), default=str))["refused"]


def test_an_error_of_the_model_leaves_nothing_behind():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1, device="meta"))

        def forward(self, rows):
            return rows.sum().item()

    with pytest.raises(RuntimeError, match="meta"):
        lz.dry_run(Reads(), torch.ones(3), "H100")
    assert ELSEWHERE.get() is None
    assert not ENGINE.watchers


def test_what_cannot_be_asked_is_refused_by_name():
    with pytest.raises(TypeError, match=r"wanted a torch\.nn\.Module, got int"):
        lz.dry_run(3)
    with pytest.raises(TypeError, match="wanted inputs="):
        lz.dry_run(model(1), device="H100")
    with pytest.raises(KeyError, match="unknown device 'H1000'"):
        lz.dry_run(model(1), ROWS, "H1000")


def test_a_language_model_of_transformers_needs_neither_weights_nor_inputs():
    transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
    lz.register_with_transformers()
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2
    )
    with torch.device("meta"):
        asked = transformers.LlamaForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="layerzero"
        )
    report = lz.dry_run(asked, device="H100")
    assert [row.layer for row in report.rows] == [f"model.layers.{number}.self_attn" for number in range(4)]
    assert {row.operation for row in report.rows} == {"attention.gqa.prefill"}
    assert report.rows[0].shapes["query"] == (1, 8, 512, 128)
    assert report.trace.others["LlamaRMSNorm"] == 9

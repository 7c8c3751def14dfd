"""What would make a machine faster is said in at most five lines, with gains where times tell them."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from compiled_norms import compiled_norm
from layerzero.cli.app import main
from layerzero.core.device import Device
from layerzero.core.evidence import Measurement
from layerzero.core.recipe import CallRecipe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.ops.quantize.schemes import LOSSES
from layerzero.serving import advice as advising
from layerzero.serving.advice import advice, formats

CALL = torch.empty(8, 64), torch.empty(64)


@pytest.fixture
def called(monkeypatch):
    """One call was made here; torch's own kernel takes 30 us, and one that nobody built 10."""
    compiled_norm(lambda _: None)
    facts = lz.facts("rms_norm", *CALL)
    monkeypatch.setattr(type(ENGINE.ledger), "calls", lambda _: [(1, CallRecipe.of(facts))])
    for name, us in (("torch.rms_norm", 30.0), ("mine.compiled", 10.0)):
        ENGINE.ledger.record_time(REGISTRY.kernel(name), facts, Measurement(us, us, 0.01, 20))


@pytest.mark.usefixtures("called")
def test_what_is_not_built_is_told_with_its_gain():
    first = advice("cpu")[0]
    assert (first.gain, first.calls) == (pytest.approx(3.0), 1)
    assert "build mine: set jit: background" in first.text
    with lz.scope(jit="background"):
        assert "behind the first calls" in advice("cpu")[0].text


@pytest.mark.usefixtures("called")
def test_a_single_thread_is_told(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(advising, "thread_advice", lambda threads: f"{threads} thread of 4")
    assert any("1 thread of 4" in each.text for each in advice("cpu"))


def test_without_any_call_it_says_what_to_do_first():
    assert "run your program" in " ".join(each.text for each in advice("cpu"))
    assert len(advice("cpu")) <= advising.MOST


def test_doctor_ends_with_it():
    shown = CliRunner().invoke(main, ["doctor"]).stdout
    assert "to be faster here:" in shown.splitlines()[-2 * advising.MOST - 1 :]
    told = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert told["jit"]["setting"] == "never"
    assert len(told["faster"]) <= advising.MOST


def test_formats_say_what_they_lose_and_what_multiplies_with_them():
    hopper, blackwell = (formats(Device.named(name), torch_version="2.11.0") for name in ("H100", "B200"))
    assert [each.loss for each in hopper] == sorted(each.loss for each in hopper)
    by_name = {each.name: each for each in hopper}
    assert by_name["int4"].kernels[:3] == ("vllm.machete", "vllm.marlin", "humming.linear")
    assert by_name["int4"].bits == 4.125
    assert by_name["fp8"].rounded == "fp8_e4m3"
    assert {each.name for each in hopper if each.native} == {"int8", "fp8"}
    assert {each.name for each in blackwell if each.native} == {"int8", "fp8", "mxfp4", "nvfp4"}
    assert "vllm.machete" not in {name for each in blackwell for name in each.kernels}


def test_where_every_kernel_writes_the_numbers_out_another_format_is_named(monkeypatch):
    hopper, instinct = (formats(Device.named(name), torch_version="2.11.0") for name in ("H100", "MI300X"))
    assert not any(each.instead for each in (*hopper, *instinct))  # all are taken, or none
    monkeypatch.setattr(advising, "AS_NUMBERS", ("torch.dequantized_", "humming.linear_", "vllm.marlin_"))
    found = {each.name: each.instead for each in formats(Device.named("H100"), torch_version="2.11.0")}
    assert (found.pop("nvfp4"), found.pop("mxfp4")) == (("int4",), ("int4",))
    assert not any(found.values())
    monkeypatch.setattr(advising, "AS_NUMBERS", ("torch.", "humming.linear", "vllm.", "humming.linear_nvfp4"))
    with lz.scope(quant={"priority": "high", "profile": {"mxfp4": 0.01}}):
        assert not any(each.instead for each in formats(Device.named("H100"), torch_version="2.11.0"))


@pytest.mark.parametrize("name", LOSSES)
def test_a_listed_format_is_made_by_its_name_and_loses_as_much(name):
    weight = torch.randn(128, 1024)
    lost = float((lz.quantize_weight(weight, name).dequantized(torch.float32) - weight).norm() / weight.norm())
    assert lost == pytest.approx(LOSSES[name], rel=0.1)


def test_the_command_of_formats_marks_what_runs_here_and_what_is_native():
    text = CliRunner().invoke(main, ["formats", "--device", "B200"], prog_name="layerzero").stdout
    assert "nvfp4*" in text
    assert "(torch.dequantized_mx)" in text
    wrong = CliRunner().invoke(main, ["formats", "--torch", "newest"], prog_name="layerzero")
    assert wrong.exit_code == 2

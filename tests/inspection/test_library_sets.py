"""What to install together: tested versions that fit, with kernels for the operations, without harm to each other."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.core.device import Device
from layerzero.core.reasons import ReasonCode
from layerzero.engine import probe
from layerzero.engine.probe import Machine
from layerzero.engine.registry import REGISTRY
from layerzero.inspection import diagnosis
from layerzero.inspection.model_sets import together

H100 = Device.named("H100")


@pytest.mark.parametrize("device", ["H100", "CPU", "MI300X"])
def test_every_library_of_a_set_has_a_tested_version_and_runs_something(device):
    found = together(["decoder"], Device.named(device), "2.13.0")
    backends = {name: each for each in REGISTRY.backends() for name in each.distributions}
    for each in found.libraries:
        name, _, version = each.package.partition("==")
        assert version in backends[name].tested
        assert each.operations
        assert backends[name].holds_for(version)
    assert {each.package.partition("==")[0] for each in found.libraries}.isdisjoint(name for name, _ in found.left)
    assert all(why for _, why in found.left)


def test_a_set_for_a_gpu_is_one_command_and_says_what_else_it_needs():
    found = together(["decoder", "serving"], H100, "2.13.0")
    packages = [each.package for each in found.libraries]
    assert packages[0].startswith("flashinfer-python=="), "most operations first"
    quack = next(each for each in found.libraries if each.library == "quack")
    assert quack.needs == ("nvidia-cutlass-dsl>=4.7",)
    (command,) = found.commands
    assert command.startswith("pip install torch==2.13.0 flashinfer-python=="), "pip may not exchange torch"
    assert "'nvidia-cutlass-dsl>=4.7'" in command
    left = dict(found.left)
    assert left["vllm"] == "0.20.0 needs torch>=2.11,<2.12, got 2.13.0"
    assert left["xformers"].startswith("none of its versions was tested")
    assert "sampling.greedy" in found.alone
    assert "vllm==0.20.0" in [each.package for each in together(["serving"], H100, "2.11.0").libraries]
    assert found.lines()[0] == f"with torch 2.13.0 on {H100.name}, CUDA or ROCm 13.0:"


def test_an_older_cuda_or_driver_leaves_what_needs_a_newer_one():
    old = dataclasses.replace(H100, runtime="12.4", driver="550.54.15")
    left = dict(together(["decoder"], old, "2.13.0").left)
    assert left["flash-attn-4"] == "4.0.0b36 needs cuda>=12.8, got 12.4"
    assert left["quack-kernels"] == "0.6.5 needs driver>=575.51.03, got 550.54.15"


@pytest.mark.parametrize(
    ("driver", "fits"), [("550.54.15", False), ("575.51.03", True), ("580.159.04", True), ("", True), ("12040", True)]
)
def test_a_driver_that_is_too_old_is_a_reason_and_an_unknown_one_is_none(driver, fits):
    backend = next(each for each in REGISTRY.backends() if each.name == "quack")
    device = dataclasses.replace(H100, driver=driver)
    reason = Machine(device, {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}).state(backend, device).reason
    assert (reason is None) == fits
    if reason is not None:
        assert (reason.code, reason.wanted, reason.got) == (ReasonCode.VERSION_UNSUPPORTED, ">=575.51.03", driver)


@pytest.mark.parametrize("owner", ["flash-attn-4", "flashinfer-python"])
def test_a_library_that_does_harm_beside_a_better_one_is_left(owner):
    other = {"flash-attn-4": "flashinfer-python", "flashinfer-python": "flash-attn-4"}[owner]
    backend = next(each for each in REGISTRY.backends() if owner in each.distributions)
    object.__setattr__(backend, "conflicts", ((other, "both are named so"),))
    try:
        found = together(["serving"], H100, "2.13.0")
    finally:
        object.__setattr__(backend, "conflicts", ())
    assert dict(found.left)["flash-attn-4"] == "along with flashinfer-python: both are named so"
    assert "flash-attn-4" not in " ".join(found.commands)


def test_the_command_prints_it_and_refuses_what_names_no_set():
    run = CliRunner().invoke(main, ["libraries", "--for", "serving", "--device", "H100", "--torch", "2.13.0", "--json"])
    assert (run.exit_code, json.loads(run.stdout)["torch"]) == (0, "2.13.0")
    run = CliRunner().invoke(main, ["libraries", "--for", "serveing"])
    assert (run.exit_code, "did you mean 'serving'" in run.stderr) == (2, True), run.stderr
    assert CliRunner().invoke(main, ["libraries", "--for", "serving", "--device", "MI300X"]).exit_code == 1


def test_a_runtime_of_another_cuda_is_an_issue(monkeypatch):
    here = {"nvidia-cuda-runtime-cu12": "12.9.79", "nvidia-cuda-runtime": "13.0.48"}
    monkeypatch.setattr(probe, "installed_version", here.get)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (told,) = diagnosis.other_cudas()
    assert told.startswith("nvidia-cuda-runtime-cu12 12.9.79 with torch for CUDA 13.0: a process may load both")
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    (told,) = diagnosis.other_cudas()
    assert told.startswith("nvidia-cuda-runtime 13.0.48 with")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert list(diagnosis.other_cudas()) == [], "a build for CPUs loads none"
    assert any(each.driver is not None for each in lz.doctor().devices)

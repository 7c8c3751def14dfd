"""Kernels that serve no call without an optional tensor prove themselves on calls that have it."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.core.device import Device
from layerzero.core.ledger import Verdict
from layerzero.core.reasons import ReasonCode
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import awaits_vetting, example_calls
from layerzero.testing.sizes import CheckSetting, base_case
from layerzero.tuning.verification.vetting import class_pairs
from paged_calls import paged

NAME = "attention.gqa.prefill.paged"
SOURCE = """
from dataclasses import replace

import layerzero as lz
from layerzero.backends.torch.paged import load_each
from layerzero.core import limits as limit
from layerzero.core.kernel import Backend, Kernel, Trust

ACCEPTS = "causal", "scale", "window", "return_lse"
LIMITS = (
    limit.platform("cpu"), limit.equal("value_dim", "head_dim"), limit.positive("scale"),
    limit.last_stride_one("query", "key_cache", "value_cache"),
)


def without(argument):
    def load(facts):
        attend = load_each(facts)
        return lambda *tensors, **named: attend(*tensors, **{**named, argument: None})
    return load


def kernel(name, argument, load):
    return Kernel(
        id=name, operations=("attention.gqa.prefill.paged",), backend=Backend(name="mine", summary="mine"), load=load,
        layout="NHD", accepts=(*ACCEPTS, argument), limits=(*LIMITS, limit.one_of(argument, "float")),
        trust=Trust.UNTRIED,
    )


KERNELS = [
    kernel("mine.sinks", "sinks", load_each),
    kernel("mine.slopes", "alibi_slopes", load_each),
    kernel("mine.no_sinks", "sinks", without("sinks")),
    kernel("mine.no_slopes", "alibi_slopes", without("alibi_slopes")),
]
lz.register_backend(KERNELS)
"""


@pytest.fixture(autouse=True)
def kernels(monkeypatch, tmp_path):
    """Two kernels that are right, and two that leave what they demand unread."""
    (tmp_path / "demanding.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "demanding", raising=False)
    monkeypatch.setitem(sys.modules, "demanding", importlib.import_module("demanding"))


@pytest.mark.slow  # recorded calls pass below
@pytest.mark.parametrize(("kernel", "verdict"), [
    ("mine.sinks", Verdict.PASSED),
    ("mine.slopes", Verdict.PASSED),
    ("mine.no_sinks", Verdict.WRONG),
    ("mine.no_slopes", Verdict.WRONG),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*is not chosen any more")
def test_they_are_vetted_on_calls_that_have_what_they_demand(kernel, verdict):
    shapes = [(20, 8, 64), (6, 16, 2, 64), (6, 16, 2, 64), (3, 2)]
    found = lz.vet(NAME, kernels=[kernel], shapes=[shapes], dtype="float32", modules=["demanding"])
    assert [each.verdict for each in found] == [verdict] * 2  # a layout each


@pytest.mark.parametrize(("kernel", "argument"), [("mine.sinks", "sinks"), ("mine.slopes", "alibi_slopes")])
def test_the_operations_cases_are_asked_about_with_what_they_demand(kernel, argument):
    found = [facts for _, facts in class_pairs([REGISTRY.kernel(kernel)], NAME, Device.detect("cpu"))]
    assert {facts["tokens"] for facts in found} == {case.sizes["tokens"] for case in REGISTRY.operation(NAME).cases}
    assert {facts[argument] for facts in found} == {"float"}


def test_the_hint_of_their_refusal_vets_them_on_recorded_calls(tmp_path):
    names = "query", "key_cache", "value_cache", "block_tables", "context_lens", "cu_seqlens_q"
    call = dict(zip(names, paged((1, 3, 2, 8), dtype=torch.float32), strict=True)) | {"sinks": torch.rand(4)}
    facts, kernel = lz.facts("paged_attention", **call), REGISTRY.kernel("mine.sinks")
    (reason,) = lz.explain("paged_attention", **call).reasons(kernel.id)
    assert reason.code is ReasonCode.NOT_VETTED
    assert "--manifest FILE" in reason.hint
    with lz.record(tmp_path / "calls.json"):
        lz.paged_attention(**call)
    asked = "vet", "--kernel", kernel.id, "--module", "demanding", "--manifest", str(tmp_path / "calls.json")
    answer = CliRunner().invoke(main, asked)
    assert answer.exit_code == 0, answer.output
    assert ENGINE.ledger.verdict(kernel, facts) is Verdict.PASSED


@pytest.mark.slow
def test_a_call_too_large_for_the_reference_is_cut_with_what_they_demand():
    shapes = [(9000, 8, 64), (1024, 16, 2, 64), (1024, 16, 2, 64), (8, 128)]
    found = lz.vet(NAME, kernels=["mine.sinks"], shapes=[shapes], dtype="float32", modules=["demanding"])
    assert {each.verdict for each in found} == {Verdict.PASSED}
    assert all("cut to" in each.detail for each in found)


def test_what_awaits_a_verdict_is_told():
    kernel, here = REGISTRY.kernel("mine.sinks"), Device.detect("cpu")
    assert {facts["sinks"] for facts in example_calls(kernel, here)} == {"float"}
    assert awaits_vetting([kernel], here)
    for facts in example_calls(kernel, here):
        ENGINE.ledger.record_verdict(kernel, facts, Verdict.PASSED, "")
    assert not awaits_vetting([kernel], here)


@pytest.mark.parametrize(("kernel", "argument"), [("mine.sinks", "sinks"), ("mine.slopes", "alibi_slopes")])
def test_conformance_makes_its_cases_with_what_they_demand(kernel, argument):
    setting = CheckSetting(REGISTRY.operation(NAME), torch.float32, "cpu", "NHD")
    _, trial = base_case(REGISTRY.kernel(kernel), setting)
    assert trial is not None
    assert not trial.reasons
    assert trial.call.arguments[argument] is not None
    assert trial.outcome().status == "passed"


@pytest.mark.slow
def test_shapes_alone_vet_a_kernel_for_sinks():
    asked = "vet", "--kernel", "torch.sdpa.cpu_flash_sinks", "--shapes", "1x16x4x32", "--dtype", "float32"
    answer = CliRunner().invoke(main, [*asked, "--operation", "attention.standard.prefill", "--device", "cpu"])
    assert answer.exit_code == 0, answer.output
    assert "passed" in answer.output

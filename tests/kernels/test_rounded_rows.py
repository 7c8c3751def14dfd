"""Kernels that round rows to int8 have no code for NaN, and their results must say it all the same."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.engine.registry import REGISTRY
from layerzero.ops.linear.quantized import QUANTIZED
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.moe.quantized import ROUNDED
from layerzero.ops.quantize.schemes import scheme_of

BY_ROW = QUANTIZED["int8"].name
FORMATS = {FORMATTED["group.int8"].name: ("awq:bits=4,group=32,zeros=stored",)}
FORMATS[FORMATTED["gguf.int8"].name] = "gguf:Q4_K", "gguf:Q8_0"
ROUNDING = {BY_ROW, *FORMATS}
KERNELS = [
    (operation, each.id, text)
    for each in REGISTRY.kernels()
    for operation in each.operations
    if ROUNDING.issuperset(each.operations)
    for text in FORMATS.get(operation, (None,))
]


def weight(text, outputs=64, inputs=256):
    of = lz.WeightFormat.of(text)
    fields = scheme_of(of).random(of, outputs, inputs, torch.Generator().manual_seed(3))
    return lz.QuantizedWeight(of, (outputs, inputs), *fields)


def call_of(text):
    if text is not None:
        return {"weight": weight(text)}
    numbers, scale = lz.quantize(torch.randn(64, 256), "int8", per="row")
    return {"weight": numbers, "weight_scale": scale, "packed": lz.PackedWeight(numbers)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("operation", "kernel", "text"), KERNELS)
def test_rows_that_are_not_finite_have_no_finite_result(operation, kernel, text, dtype):
    rows = torch.randn(5, 256, dtype=dtype)
    rows[1, 7], rows[2], rows[3, 9] = torch.nan, torch.nan, torch.inf
    given = call_of(text)
    refused = lz.explain("quantized_linear", rows, **given, activations="int8").reasons(kernel)
    if refused:
        pytest.skip("; ".join(each.message for each in refused))
    with lz.scope(locks={operation: kernel}):
        got = lz.quantized_linear(rows, **given, activations="int8")
    assert not got[1:4].isfinite().any()
    assert got[[0, 4]].isfinite().all()


def test_experts_of_int8_say_it_too():
    stacks = [
        lz.QuantizedWeight.stack([weight("compressed-tensors:bits=8", *shape)] * 4) for shape in ((64, 64), (64, 32))
    ]
    rows = torch.randn(3, 64, dtype=torch.bfloat16)
    rows[1, 5] = torch.nan
    call = rows, *stacks, torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)
    kernels = [each.id for each in REGISTRY.kernels() if ROUNDED.name in each.operations]
    for kernel in kernels:
        if lz.explain("moe_experts", *call, activations="int8").reasons(kernel):
            continue
        with lz.scope(locks={ROUNDED.name: kernel}):
            got = lz.moe_experts(*call, activations="int8")
        assert got.isfinite().all(1).tolist() == [True, False, True], kernel
        assert got[1].isnan().all(), kernel

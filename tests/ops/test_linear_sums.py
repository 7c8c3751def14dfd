"""Products of large values are judged by what is added up: right ones pass at any scale, coarse ones at none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.testing.compare import check
from layerzero.testing.generate import RandomCall

WIDTH = 1024
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def call_of(function: str, scale: float, seed: int, dtype: torch.dtype) -> RandomCall:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    calls = {
        "linear": lambda: {"input": made(24, WIDTH), "weight": made(96, WIDTH), "bias": made(96)},
        "batched_linear": lambda: {"input": made(3, 8, WIDTH), "weight": made(3, 32, WIDTH)},
        "grouped_linear": lambda: {
            "input": made(24, WIDTH),
            "weight": made(3, 32, WIDTH),
            "group_ends": torch.tensor([4, 4, 24], dtype=torch.int32),
        },
        "qkv_linear": lambda: {
            "input": made(24, WIDTH),
            **{f"{each}_weight": made(32, WIDTH) for each in "qkv"},
            **{f"{each}_bias": made(32) for each in "qkv"},
        },
    }
    return RandomCall(function, calls[function](), function)


FUNCTIONS = ("linear", "batched_linear", "grouped_linear", "qkv_linear")


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=examples(6), deadline=None)
@given(scale=st.sampled_from([1e-3, 1.0, 8.0]), seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_right_products_of_any_size_pass(function, scale, seed, dtype):
    assert check(call_of(function, scale, seed, dtype)) == []


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_products_of_rounded_values_do_not(function, scale):
    call = call_of(function, scale, 1, torch.float32)
    run = getattr(lz, function)

    def coarse(**given):  # 11 bits of each value, as TF32 keeps
        cut = lambda value: (
            (value.view(torch.int32) & ~0x1FFF).view(torch.float32) if value.dtype == torch.float32 else value
        )
        return run(**{name: cut(value) for name, value in given.items()})

    assert "elements too far" in check(call, coarse)[0]


@pytest.mark.parametrize("activation", [None, "relu2", "silu", "gelu_tanh"])
def test_activations_of_large_products_pass(activation):
    call = call_of("linear", 4.0, 3, torch.float32)
    assert check(RandomCall("linear", {**call.arguments, "activation": activation})) == []

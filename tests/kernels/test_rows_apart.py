"""On a CPU with AMX a row's end is not read with the next row's beginning, whatever its length."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import layerzero as lz
from layerzero.backends.torch.cpu_half import _filled_up, linear_for
from layerzero.core.facts import Facts

XEON = dataclasses.replace(lz.Device.detect("cpu"), instruction_sets=frozenset({"avx512", "avx512_bf16", "amx_bf16"}))


def facts_of(features: int, dtype: torch.dtype, device: lz.Device = XEON) -> Facts:
    rows, weight = torch.empty(3, features, dtype=dtype), torch.empty(5, features, dtype=dtype)
    return lz.facts("linear", rows, weight, device=device)


@pytest.mark.parametrize("features", [1, 31, 33, 100])
def test_uneven_rows_in_bfloat16_are_filled_up(features):
    assert linear_for(facts_of(features, torch.bfloat16)) is _filled_up


@pytest.mark.parametrize(("features", "dtype"), [(32, torch.bfloat16), (64, torch.bfloat16), (33, torch.float32)])
def test_others_are_torchs_own(features, dtype):
    assert linear_for(facts_of(features, dtype)) is torch.nn.functional.linear


def test_other_processors_are_left_alone():
    other = dataclasses.replace(XEON, instruction_sets=frozenset({"avx512", "avx512_bf16"}))
    assert linear_for(facts_of(33, torch.bfloat16, other)) is torch.nn.functional.linear


@pytest.mark.parametrize("function", ["linear", "mlp", "qkv_linear"])
def test_no_call_is_refused_for_it(function):
    count = {"linear": 1, "mlp": 2, "qkv_linear": 3}[function]
    weights = [torch.empty(33, 33, dtype=torch.bfloat16)] * count
    report = lz.explain(function, torch.empty(3, 33, dtype=torch.bfloat16), *weights, device=XEON)
    assert report.kernel_id in {"torch.linear", "torch.mlp", "torch.qkv_linear"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("features", [1, 33, 96, 100])
def test_the_product_is_the_same_and_rows_stay_apart(features, bias):
    rows, weight = torch.randn(33, features).bfloat16(), torch.randn(64, features).bfloat16()
    offset = torch.randn(64).bfloat16() if bias else None
    wanted = torch.nn.functional.linear(rows.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(_filled_up(rows, weight, offset).double(), wanted, rtol=1e-2, atol=5e-2)
    rows[6] = torch.nan
    spoilt = _filled_up(rows, weight, offset).isnan().any(-1)
    assert spoilt.nonzero().flatten().tolist() == [6]


def test_gradients_go_through():
    rows, weight = (torch.randn(4, 33, requires_grad=True) for _ in range(2))
    _filled_up(rows, weight).sum().backward()
    assert rows.grad.shape == rows.shape
    torch.testing.assert_close(weight.grad, rows.detach().sum(0).expand(4, 33))

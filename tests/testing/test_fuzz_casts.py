"""Random calls whose plans cast: they are drawn, and a kernel that is wrong about them is found."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.testing import fuzz
from layerzero.testing.compare import expected, route


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(fuzz, "CAST_SHARE", 1.0)


@pytest.mark.parametrize("function", ["rms_norm", "layer_norm", "attention", "append_kv_", "append_paged_kv_"])
def test_calls_that_are_cast_are_drawn_and_stay_the_same_with_other_data(function):
    source = fuzz._Source(())
    source.functions = (function,)
    calls = [[source.call(3, number, data, "cpu") for data in (0, 1)] for number in range(120)]
    casts = [[route(each).casts for each in pair] for pair in calls]
    assert all(first == second for first, second in casts)
    assert sum(bool(first) for first, _ in casts) > 0
    for (call, _), (made, _) in zip(calls, casts, strict=True):
        if "" in made:
            assert expected(call).dtype is made[""][1], "judged by the dtype that the caller gets"


def test_a_kernel_that_is_wrong_in_what_was_cast_is_found():
    def wrong(input, weight, eps):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps) * 1.05

    lz.register_kernel("norm.rms", "user.wrong", priority=100, supported_dtypes=[torch.float32, torch.float64])(wrong)
    report = fuzz.run(40, 1, operations=["norm.rms"], kernels=["user.wrong"])
    cast = [each for each in report.failures if "bfloat16" in each.call or "float16" in each.call]
    assert cast, "computed in float32 for callers with 16 bits"


def test_a_function_that_takes_no_gradients_is_called_without_any(monkeypatch):
    monkeypatch.setattr(fuzz, "GRAD_SHARE", 1.0)
    report = fuzz.run(3, 3, operations=["all_reduce_add_rms_norm"])
    assert report.ok, report
    assert report.comparisons >= report.calls == 3

"""Kernels that compute half precision in float32: results, their dtype, and the edges of blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from layerzero.backends.torch import widened

HALVES = [torch.bfloat16, torch.float16]


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("outputs", [1, 16, 63, 64, 65, 129])
def test_blocks_end_where_weights_do(monkeypatch, outputs, dtype):
    monkeypatch.setattr(widened, "BLOCK_BYTES", 64 * 40 * 4)  # 64 rows, or fewer of equal blocks
    rows, weight, bias = torch.randn(3, 5, 40).to(dtype), torch.randn(outputs, 40).to(dtype), torch.randn(outputs)
    expected = functional.linear(rows.float(), weight.float(), bias.to(dtype).float())
    got = widened.product(rows.float(), weight, bias.to(dtype))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(widened.product(rows[0, 0].float(), weight), expected[0, 0] - bias.to(dtype).float())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("more", [{}, {"activation": "gelu"}, {"activation": "relu2"}, {"out_dtype": torch.float32}])
def test_a_product_has_the_dtype_that_was_asked_for_and_is_as_near_as_torchs(dtype, more):
    rows, weight, bias = (torch.randn(size).to(dtype) / 8 for size in ((4, 16, 64), (96, 64), (96,)))
    exact = lz.linear(rows.double(), weight.double(), bias.double(), activation=more.get("activation"))
    found = {}
    for kernel in ("torch.linear_then" if more else "torch.linear", "torch.linear_widened"):
        lz.lock("mlp.linear", kernel)
        found[kernel] = got = lz.linear(rows, weight, bias, **more)
        assert got.dtype == more.get("out_dtype", dtype)
        lz.unlock("mlp.linear")
    theirs, ours = (error(each, exact) for each in found.values())
    assert ours <= 1.01 * theirs + 1e-7

"""Biases, residuals, softmax and casts: their values, what they write into, and bad input."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import examples
from layerzero.ops import FUNCTIONS, OPERATIONS
from layerzero.testing import fuzz

NAMES = ("add_bias", "add_residual_", "softmax", "cast")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_bias_and_a_softmax():
    x, bias = numbers(2, 3, 8), numbers(8, seed=1)
    torch.testing.assert_close(lz.add_bias(x, bias), x + bias)
    torch.testing.assert_close(lz.softmax(x), x.softmax(-1))
    torch.testing.assert_close(lz.softmax(x, temperature=0.5), (x * 2).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_to_a_residual_is_rounded_once(dtype):
    """A product that was rounded before it is added shows in half precision."""
    residual, x, rows = numbers(64, 128).to(dtype), numbers(64, 128, seed=1).to(dtype), numbers(64, seed=2)
    for given, factor in (({}, 1.0), ({"scale": 0.3}, 0.3), ({"scale": rows}, rows.unsqueeze(1))):
        got = residual.clone()
        assert lz.add_residual_(got, x, **given) is None
        want = residual.double() + x.double() * factor
        near = 2e-7 if dtype is torch.float32 else 2**-8
        assert bool(((got.double() - want).abs() <= near * want.abs() + 1e-6).all())


def test_a_negated_input_keeps_its_sign_in_another_dtype():
    x = numbers(4, 8).half()
    cast = OPERATIONS["elementwise.cast"].reference(torch._neg_view(x), out_dtype=torch.float32)
    torch.testing.assert_close(cast, -x.float())


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("given", [{}, {"scale": 0.5}, {"scale": torch.full((4,), 0.5)}], ids=["", "one", "rows"])
def test_a_negated_residual_keeps_its_sign(given, kernel):
    """torch's copy into a negated view of another dtype drops the sign."""
    residual, x = torch._neg_view(-numbers(4, 8).half()), numbers(4, 8, seed=1).half()
    want = residual.double() + x.double() * (0.5 if given else 1.0)
    operation = "elementwise.scaled_add" if given else "elementwise.add"
    lock = f"torch.{operation.partition('.')[2]}" if kernel == "torch" else f"reference.{operation}"
    with lz.scope(locks={operation: lock}):
        lz.add_residual_(residual, x, **given)
    torch.testing.assert_close(residual.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_cast_has_memory_of_its_own(dtype):
    x = numbers(4, 6).T
    got = lz.cast(x, dtype)
    assert got.dtype is dtype
    assert got.is_contiguous()
    assert got.data_ptr() != x.data_ptr()
    assert torch.equal(got, x.to(dtype))


SHARED = numbers(4, 8)
WRONG = {
    "bias: wanted features 8 as in input, got 7": ("add_bias", (numbers(2, 8), numbers(7))),
    "input: wanted shape (2, 8) like residual, got (3, 8)": ("add_residual_", (numbers(2, 8), numbers(3, 8))),
    "scale: wanted -1e+06 to 1e+06, got inf": ("add_residual_", (numbers(2, 8), numbers(2, 8), float("inf"))),
    "residual: wanted memory of its own, got memory that it shares with input": ("add_residual_", (SHARED, SHARED)),
    "residual: wanted memory of its own, got an expanded view": (
        "add_residual_",
        (numbers(1, 8).expand(2, 8), numbers(2, 8)),
    ),
    "out_dtype: wanted a floating dtype of at least 16 bits, got int32": ("cast", (numbers(2, 8), torch.int32)),
    "temperature: wanted 1e-06 to 1e+06, got 0": ("softmax", (numbers(2, 8),), {"temperature": 0}),
}


@pytest.mark.parametrize("problem", WRONG)
def test_bad_calls(problem):
    name, arguments, *named = WRONG[problem]
    with pytest.raises(lz.InvalidCallError) as raised:
        getattr(lz, name)(*arguments, **dict(*named))
    assert problem in str(raised.value)


def test_gradients():
    x = numbers(3, 8).double().requires_grad_()
    lz.softmax(x, temperature=0.5)[:, 0].sum().backward()
    want = torch.autograd.grad((x * 2).softmax(-1)[:, 0].sum(), x)[0]
    torch.testing.assert_close(x.grad, want)


def test_random_calls(monkeypatch):
    monkeypatch.setattr("layerzero.testing.generate.FUNCTIONS_BY_NAME", {name: FUNCTIONS[name] for name in NAMES})
    report = fuzz.run(examples(300), 9)
    assert report.ok, str(report)

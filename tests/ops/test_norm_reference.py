"""The normalisations' references against torch and against formulas over single rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from drawing import at_once
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Routed
from layerzero.engine.reference import fake_call, reference_call
from layerzero.ops.norm import declare as norm

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(7,), (1, 1), (3, 8), (2, 3, 33), (2, 1, 3, 16), (0, 8)]


def normal(*shape, dtype=torch.float64):
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype)


@at_once("shape", SHAPES)
@at_once("eps", [1e-6, 0.3])
def test_rms_norm_is_torchs(shape, eps):
    x, w = normal(*shape), normal(shape[-1])
    torch.testing.assert_close(norm.rms_norm(x, w, eps=eps), functional.rms_norm(x, w.shape, w, eps))


def test_rms_norm_by_hand():
    x, w = normal(3, 5), normal(5)
    got = norm.rms_norm(x, w, eps=0.1)
    for row in range(3):
        root = math.sqrt(sum(float(value) ** 2 for value in x[row]) / 5 + 0.1)
        torch.testing.assert_close(got[row], x[row] / root * w)


@at_once("shape", SHAPES)
@at_once("axes", [1, 2])
@at_once("given", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_layer_norm_is_torchs(shape, axes, given):
    normalized = shape[-axes:]
    if 0 in normalized:
        pytest.skip("nothing to normalise")
    x = normal(*shape)
    arguments = {name: normal(*normalized) for name in given}
    got = norm.layer_norm(x, normalized_shape=normalized, eps=1e-4, **arguments)
    torch.testing.assert_close(got, functional.layer_norm(x, normalized, **arguments, eps=1e-4))


def test_layer_norm_by_hand():
    x = normal(2, 6)
    got = norm.layer_norm(x, normalized_shape=(6,), eps=0.2)
    for row in range(2):
        mean = sum(float(value) for value in x[row]) / 6
        variance = sum((float(value) - mean) ** 2 for value in x[row]) / 6  # the biased one
        torch.testing.assert_close(got[row], (x[row] - mean) / math.sqrt(variance + 0.2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual_and_normalises_what_it_holds(dtype):
    x, residual, w = normal(4, 8, dtype=dtype), normal(2, 4, 8, dtype=dtype)[0], normal(8, dtype=dtype)
    total = (x.double() + residual.double()).to(dtype)
    updated = residual.clone()
    got = norm.add_residual_rms_norm_(x, updated, w)
    torch.testing.assert_close(updated, total, rtol=0, atol=0)
    torch.testing.assert_close(got, norm.rms_norm(total, w), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_wide(dtype):
    x, w = normal(4, 512, dtype=dtype) * 300, normal(512, dtype=dtype)  # squares that no float16 holds
    tolerance = norm.RMS.tolerance[dtype]
    exact = norm.rms_norm(x.double(), w.double())
    got = norm.rms_norm(x, w)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), exact, rtol=tolerance.rtol, atol=tolerance.atol)
    exact = norm.layer_norm(x.double(), (512,), w.double())
    got = norm.layer_norm(x, (512,), w)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), exact, rtol=tolerance.rtol, atol=tolerance.atol)


def test_nan_and_infinity_stay_in_their_row():
    x = normal(3, 4)
    x[0, 1], x[1, 2] = math.nan, math.inf
    for got in (norm.rms_norm(x, torch.ones(4).double()), norm.layer_norm(x, normalized_shape=(4,))):
        assert got[0].isnan().all()
        assert got[1, 2].isnan()
        assert got[2].isfinite().all()


@at_once("dtype", DTYPES)
@at_once("operation", norm.OPERATIONS)
def test_shapes_alone_are_the_real_shapes(operation, dtype):
    for shape in SHAPES:
        x = normal(*shape, dtype=dtype).expand(shape)
        tensors = {tensor.name: x.clone() if tensor.mutated else x for tensor in operation.schema.inputs}
        tensors |= {name: x.new_ones(shape[-1:]) for name in ("weight", "bias") if name in tensors}
        arguments = {**operation.schema.neutral, **tensors}
        if "normalized_shape" in operation.schema.chosen:
            arguments["normalized_shape"] = shape[-1:]
        strided = {
            n: t.transpose(0, -1).contiguous().transpose(0, -1) if isinstance(t, torch.Tensor) and t.ndim > 1 else t
            for n, t in arguments.items()
        }
        for each in (arguments, strided):
            fake = fake_call(Routed(operation, each))
            real = reference_call(Routed(operation, each))
            if not operation.schema.outputs:  # both write over the input
                assert (fake, real) == (None, None)
                continue
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype) == (x.shape, dtype)


def test_the_norm_in_place_is_that_of_two_results_written_over_input_and_residual():
    x, residual, w = torch.randn(3, 4, 16), torch.randn(3, 4, 16), torch.randn(16)
    total = residual.clone()
    wanted = lz.add_residual_rms_norm_(x, total, w, 1e-5)
    assert lz.add_rms_norm_(x, residual, w, 1e-5) is None
    torch.testing.assert_close(x, wanted)
    torch.testing.assert_close(residual, total)


def test_a_residual_that_is_the_weights_memory_is_refused():
    """It was written before the weight was read, and kernels gave unlike results."""
    x, residual = torch.randn(4, 16), torch.randn(4, 16)
    lz.add_residual_rms_norm_(x, residual.clone(), torch.randn(16))  # a plan is there
    with pytest.raises(InvalidCallError, match="shares with weight"):
        lz.add_residual_rms_norm_(x, residual, residual[0])


def test_the_norm_in_place_refuses_what_it_cannot_write():
    x, w = torch.randn(4, 16), torch.randn(16)
    with pytest.raises(InvalidCallError, match="shares with input"):
        lz.add_rms_norm_(x, x, w)
    with pytest.raises(InvalidCallError, match="shares with weight"):
        lz.add_rms_norm_(x, torch.randn(4, 16), x[0])
    with pytest.raises(InvalidCallError, match="input: wanted memory of its own"):
        lz.add_rms_norm_(w.expand(4, 16), x, w.clone())
    with pytest.raises(InvalidCallError, match="leaf that requires gradients"):
        lz.add_rms_norm_(torch.randn(4, 16, requires_grad=True), x, w)

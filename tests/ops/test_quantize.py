"""Narrow numbers with scales: what formats hold, how far a number moves, what is refused, and what stays of NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from layerzero.ops.quantize.formats import (
    FORMATS,
    as_floats,
    e2m1_codes,
    e2m1_numbers,
    four_in_three,
    of_six_bits,
    six_bits,
)
from layerzero.testing import compare
from layerzero.testing.generate import random_call

SCALED = ("int8", "fp8_e4m3", "fp8_e5m2")
FOUR_BITS = ("mxfp4", "nvfp4")
HALF_STEP = {"int8": 0.5 / 127, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}
"""How far a number moves at most, of the largest in int8, of itself in float8."""


@at_once("name", FORMATS)
def test_what_is_quantized_comes_back_as_near_as_the_format_allows(path, name):
    x = torch.randn(6, 64)
    quantized, scale = lz.quantize(x, name)
    back = lz.dequantize(quantized, scale, dtype=name)
    assert quantized.dtype is FORMATS[name].dtype
    assert scale.dtype is FORMATS[name].scale_dtype
    assert back.dtype is torch.float32
    assert back.shape == x.shape
    assert (back - x).abs().max() <= 0.25 * x.abs().max()  # a block of MX may begin at 8, and end at 6, of its scale


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(
    ("given_arguments", "shape"),
    [({}, ()), ({"per": "row"}, (3, 5, 1)), ({"per": "block", "block_size": 8}, (3, 5, 4))],
    ids=["tensor", "row", "block"],
)
def test_a_scale_is_the_largest_number_over_that_of_the_format(name, given_arguments, shape):
    x = torch.randn(3, 5, 32, dtype=torch.bfloat16)
    _, scale = lz.quantize(x, name, **given_arguments)
    assert scale.shape == shape
    size = x.float().abs().view(3, 5, *((4, 8) if shape and shape[-1] == 4 else (1, 32)))
    most = size.amax(-1) if shape else size.amax()
    torch.testing.assert_close(scale, most / FORMATS[name].largest, rtol=1e-6, atol=0.0)


@at_once("shape", [(), (1,), (4, 1), (16,), (4, 2), (4, 16)])
@at_once("name", SCALED)
def test_a_given_scale_says_by_its_shape_what_it_is_for(name, shape):
    x, scale = torch.randn(4, 16), torch.rand(shape) * 0.05 + 0.02
    quantized, returned = lz.quantize(x, name, scale)
    assert torch.equal(returned, scale)
    assert returned.data_ptr() != scale.data_ptr()
    each = scale.repeat_interleave(8, -1) if shape == (4, 2) else scale.expand(4, 16)
    wanted = x / each
    got = quantized.float()
    limit = torch.where(wanted.abs() > FORMATS[name].largest, torch.inf, wanted.abs() * 2.0**-3 + 0.51)
    assert ((got - wanted).abs() <= limit).all()
    torch.testing.assert_close(lz.dequantize(quantized, scale, dtype=name), got * each)


def test_ties_go_to_the_even_number_and_what_is_too_large_saturates():
    one = torch.ones(1)
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.4, 200.0, -200.0, torch.inf, -torch.inf])
    assert lz.quantize(x, "int8", one)[0].tolist() == [0, 2, 2, 0, -2, 127, 127, -128, 127, -128]
    x = torch.tensor([17.0, 19.0, 1e6, -1e6, torch.inf])  # between 16 and 18, 18 and 20
    assert lz.quantize(x, "fp8_e4m3", one)[0].tolist() == [16.0, 20.0, 448.0, -448.0, 448.0]
    assert lz.quantize(x[2:], "fp8_e5m2", one)[0].tolist() == [57344.0, -57344.0, 57344.0]


@given(st.floats(-1e4, 1e4, width=32))
@settings(max_examples=examples(200))
def test_four_bits_hold_the_nearest_of_fifteen_numbers(number):
    every = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    every = torch.cat((every, -every))
    found = e2m1_numbers(e2m1_codes(torch.tensor([number])), torch.float32)
    assert (found - number).abs() == (every - number).abs().min()


@pytest.mark.parametrize(("name", "steps"), [("mxfp6_e2m3", 8), ("mxfp6_e3m2", 4)])
@given(number=st.floats(-1e3, 1e3, width=32))
@settings(max_examples=examples(100))
def test_six_bits_hold_the_nearest_number_and_lie_side_by_side(name, steps, number):
    of, lowest = FORMATS[name], 1.0 if steps == 8 else 0.25
    every = [lowest * each / steps for each in range(steps)]
    every += [lowest * 2.0**power * (1 + each / steps) for power in range(8) for each in range(steps)]
    every = torch.tensor(every[:32])
    assert every[-1] == of.largest
    found = of_six_bits(six_bits(torch.tensor([number]), of), of, torch.float32)
    both = torch.cat((every, -every))
    assert (found - number).abs() == (both - number).abs().min()
    codes = torch.arange(64, dtype=torch.uint8)
    assert torch.equal(of_six_bits(codes, of, torch.float64), both.double())
    stream = sum(int(code) << 6 * place for place, code in enumerate(codes))
    assert bytes(four_in_three(codes).tolist()) == stream.to_bytes(48, "little")


@given(st.integers(0, 2**32), st.sampled_from(SCALED), st.floats(1e-3, 1e3))
@settings(max_examples=examples(50))
def test_a_number_moves_by_half_a_step_at_most(seed, name, spread):
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * spread
    quantized, scale = lz.quantize(x, name, per="row")
    moved = (lz.dequantize(quantized, scale, dtype=name) - x).abs()
    most = x.abs().amax(-1, keepdim=True)
    least = 2.0**-9 * scale if name == "fp8_e4m3" else 2.0**-16 * scale  # half a step of the smallest numbers
    size = most if name == "int8" else x.abs()
    assert (moved <= HALF_STEP[name] * size * (1 + 1e-5) + least).all()


@given(st.integers(0, 2**32), st.sampled_from(sorted(FORMATS)))
@settings(max_examples=examples(40))
def test_what_came_back_once_stays(seed, name):
    """Numbers that a format holds exactly are quantized to themselves, with the scales that they had."""
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
    quantized, scale = lz.quantize(x, name)
    back = lz.dequantize(quantized, scale, dtype=name, out_dtype=torch.float64)
    if name in SCALED:
        again = lz.quantize(back, name, scale)[0]
        assert torch.equal(again.view(torch.uint8), quantized.view(torch.uint8))
    else:
        again, scales = lz.quantize(back, name)
        torch.testing.assert_close(lz.dequantize(again, scales, dtype=name, out_dtype=torch.float64), back)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_two_numbers_lie_in_a_byte_the_first_in_its_low_bits(name):
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 31] = 6.0, -1.0, 3.0
    quantized, scale = lz.quantize(x, name)
    unit = scale[0, 0].float()
    assert quantized.shape == (1, 16)
    codes = (quantized[0, 0] & 15, quantized[0, 0] >> 4)
    assert e2m1_numbers(torch.stack(codes), torch.float32).mul(unit).tolist() == [6.0, -1.0]


def test_zeros_have_a_scale_that_can_be_divided_by(path):
    x = torch.zeros(2, 32)
    assert lz.quantize(x, "int8", per="row")[1].tolist() == [[1.0], [1.0]]
    assert lz.quantize(x, "int8")[1].item() == 1.0
    assert lz.quantize(x, "fp8_e4m3")[1].item() == pytest.approx(1 / (448 * 512))
    for name in FORMATS:
        quantized, scale = lz.quantize(x, name)
        assert not lz.dequantize(quantized, scale, dtype=name).any()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_nan_stays_nan_in_float8_and_makes_no_scale(name, per):
    x = torch.randn(3, 32)
    want = lz.quantize(x.clone().index_fill_(1, torch.tensor([5]), 0.0), name, per=per)[1]
    x[:, 5] = torch.nan
    quantized, scale = lz.quantize(x, name, per=per)
    assert torch.equal(scale, want)
    assert quantized.float().isnan().nonzero().tolist() == [[0, 5], [1, 5], [2, 5]]


@at_once("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@at_once("per, lost", [("tensor", 3), ("row", 1)])
@at_once("number", [torch.inf, -torch.inf])
def test_infinity_shows_in_what_shares_its_scale(name, per, lost, number):
    """It became the largest finite number of its block: an overflow before the call was hidden."""
    x = torch.randn(3, 32)
    x[1, 5] = number
    for kernel in [each.kernel.id for each in lz.explain("quantize", x, name, per=per).candidates if each.legal]:
        with lz.scope(locks={f"quantize.{name}": kernel}):
            quantized, scale = lz.quantize(x, name, per=per)
        read = lz.dequantize(quantized, scale, dtype=name)  # NaN; of infinity itself vllm.cpu makes -inf with AVX2
        assert (~read.isfinite()).all(-1).sum() == lost, kernel
        assert scale.isinf().sum() == 1


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_a_block_that_is_not_finite_has_no_scale(name):
    x = torch.randn(1, 64)
    x[0, 40] = torch.inf
    scale = lz.quantize(x, name)[1].float()
    assert scale.isnan().sum() == 1
    assert scale[0, 40 // FORMATS[name].block].isnan()


def test_no_gradient_flows_through_rounding():
    x = torch.randn(2, 32, requires_grad=True)
    for name in FORMATS:
        assert not any(each.requires_grad for each in lz.quantize(x, name))


def test_the_gradient_of_a_scale_is_what_was_multiplied_by_it():
    quantized, scale = lz.quantize(torch.randn(3, 32), "int8", per="row")
    scale.requires_grad_()
    lz.dequantize(quantized, scale, dtype="int8").sum().backward()
    torch.testing.assert_close(scale.grad, quantized.float().sum(-1, keepdim=True))


def test_a_scale_of_a_tensor_makes_small_numbers_of_nvfp4_fit():
    """A block of 1e-4 is below the least scale of e4m3, 2^-9 / 6, alone."""
    x = torch.randn(2, 32) * 1e-4
    alone = lz.dequantize(*lz.quantize(x, "nvfp4"), dtype="nvfp4")
    whole = x.abs().amax() / (448 * 6)
    quantized, scale = lz.quantize(x, "nvfp4", tensor_scale=whole)
    beside = lz.dequantize(quantized, scale, dtype="nvfp4", tensor_scale=whole)
    assert not alone.any()
    assert (beside - x).abs().max() < 0.2 * x.abs().max()


X = torch.randn(4, 64)
WRONG = {
    "dtype: wanted one of int8, fp8_e4m3": (X, "fp9", {}),
    "dtype: wanted one of int8": (X, None, {}),
    "input: wanted dtype": (X.int(), "int8", {}),
    "scale: wanted None with mxfp4": (X, "mxfp4", {"scale": torch.ones(1)}),
    "per: wanted 'tensor' with nvfp4": (X, "nvfp4", {"per": "row"}),
    "tensor_scale: wanted None with int8": (X, "int8", {"tensor_scale": torch.ones(1)}),
    "tensor_scale: wanted shape () or (1,), got (2,)": (X, "nvfp4", {"tensor_scale": torch.ones(2)}),
    "scale: wanted shape (), (1,), (4, 1) for rows, (64,) for columns": (X, "int8", {"scale": torch.ones(3)}),
    "scale: wanted dtype float32, got float16": (X, "int8", {"scale": torch.ones(1).half()}),
    "scale: wanted device cpu like input, got meta": (X, "int8", {"scale": torch.ones(1, device="meta")}),
    "per: wanted tensor, row, block, got 'column'": (X, "int8", {"per": "column"}),
    "per: wanted nothing with scale": (X, "int8", {"per": "row", "scale": torch.ones(1)}),
    "block_size: wanted a divisor of the 64 numbers of a row, got 48": (X, "int8", {"per": "block", "block_size": 48}),
    "block_size: wanted a divisor of the 64 numbers of a row, got None": (X, "int8", {"per": "block"}),
    "block_size: wanted None with per='row', got 8": (X, "int8", {"per": "row", "block_size": 8}),
    "input: wanted rows of a multiple of 32 numbers, the block of mxfp4, got (4, 40)": (X[:, :40], "mxfp4", {}),
    "input: wanted numbers in its rows, got (4, 0)": (X[:, :0], "int8", {}),
}


@at_once("problem", WRONG)
def test_a_call_that_means_nothing_says_what_was_wanted(problem):
    x, name, arguments = WRONG[problem]
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.quantize(x, name, **arguments)
    assert problem in str(raised.value)


def test_what_does_not_belong_together_is_not_dequantized():
    quantized, scale = lz.quantize(X, "mxfp4")
    with pytest.raises(lz.InvalidCallError, match="scale: wanted dtype float8_e4m3"):
        lz.dequantize(quantized, scale, dtype="nvfp4")
    with pytest.raises(lz.InvalidCallError, match=r"scale: wanted shape \(4, 2\)"):
        lz.dequantize(quantized, scale[:, :1], dtype="mxfp4")
    with pytest.raises(lz.InvalidCallError, match="out_dtype: wanted"):
        lz.dequantize(quantized, scale, dtype="mxfp4", out_dtype=torch.int32)


def test_debug_mode_refuses_scales_of_nothing_and_numbers_that_a_format_has_no_place_for():
    with lz.scope(debug=True):
        with pytest.raises(lz.InvalidCallError, match="scale: wanted finite numbers above 0"):
            lz.quantize(X, "int8", torch.zeros(1))
        with pytest.raises(lz.InvalidCallError, match="input: wanted finite numbers, since int8 holds no other"):
            lz.quantize(X * torch.nan, "int8")
        with pytest.raises(lz.InvalidCallError, match="scale: wanted finite numbers above 0"):
            lz.dequantize(X.to(torch.int8), -torch.ones(1), dtype="int8")
        assert lz.quantize(X * torch.nan, "fp8_e4m3")[0].float().isnan().all()


@pytest.mark.parametrize("function", ["quantize", "dequantize"])
def test_random_calls_are_what_numpy_says(function):
    pytest.importorskip("numpy")
    from oracles import truth

    for number in range(60):
        call = random_call(7, number, function=function)
        assert compare.check(call, truth=truth(call)) == [], call.text


def test_formats_are_known_by_their_other_names():
    one, other = (lz.quantize(X, name)[0].view(torch.uint8) for name in ("float8_e4m3", "fp8_e4m3"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_e4m3_is_widened_by_its_bits(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for each in (codes, codes.view(16, 16).t()):
        got, wanted = as_floats(each, dtype), each.to(dtype)
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0, equal_nan=True)
        assert torch.equal(got.signbit()[wanted == 0], wanted.signbit()[wanted == 0])
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(as_floats(codes[:127], dtype), codes[:127].to(torch.float32).to(dtype))
    finally:
        torch.set_flush_denormal(False)

"""Products with weights of int8 and float8: results, packed weights, gradients, bad calls."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from launches import Counted
from layerzero.backends.torch.quantized_linear import quantized_rows
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.ops.calls import arguments_of
from layerzero.ops.quantize.formats import FORMATS
from layerzero.ops.quantize.weight_format import rotated
from layerzero.testing import compare
from layerzero.testing.generate import random_call

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TWO_ROUNDINGS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 3e-2}
WEIGHTS = ("int8", "fp8_e4m3", "fp8_e5m2")


def weight(name, outputs=64, inputs=96, per="row"):
    return lz.quantize(torch.randn(outputs, inputs) / inputs**0.5, name, per=per)


@at_once("dtype", FLOATS)
@at_once("name", WEIGHTS)
def test_a_weight_is_multiplied_with_its_scales(path, name, dtype):
    x, bias = torch.randn(2, 3, 96).to(dtype), torch.randn(64).to(dtype)
    narrow, scale = weight(name)
    wanted = x.double() @ lz.dequantize(narrow, scale, dtype=name, out_dtype=torch.float64).t() + bias.double()
    got = lz.quantized_linear(x, narrow, scale, bias)
    assert got.dtype is dtype
    assert got.shape == (2, 3, 64)
    torch.testing.assert_close(got.double(), wanted, rtol=TWO_ROUNDINGS[dtype], atol=TWO_ROUNDINGS[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_rows_are_quantized_as_lz_quantize_does(path, name, dtype):
    torch.manual_seed(0)  # two kernels may round a number in the middle between two differently
    x, bias = torch.randn(5, 96).to(dtype), torch.randn(64).to(dtype)
    narrow, scale = weight(name)
    codes, scales = lz.quantize(x, name, per="row")
    rows = lz.dequantize(codes, scales, dtype=name, out_dtype=torch.float64)
    wanted = rows @ lz.dequantize(narrow, scale, dtype=name, out_dtype=torch.float64).t() + bias.double()
    got = lz.quantized_linear(x, narrow, scale, bias, activations=name)
    torch.testing.assert_close(got.double(), wanted, rtol=TWO_ROUNDINGS[dtype], atol=TWO_ROUNDINGS[dtype])


@pytest.mark.parametrize("shape", [(), (1,), (64,), (64, 1)], ids=str)
@pytest.mark.parametrize("activations", [None, "int8"])
def test_scales_may_be_one_or_one_an_output(activations, shape):
    narrow, scale = weight("int8", per="row" if 64 in shape else "tensor")
    x = torch.randn(3, 96)
    whole = scale.reshape(-1, 1).expand(64, 1) * narrow
    wanted = torch.nn.functional.linear(x, whole)
    got = lz.quantized_linear(x, narrow, scale.reshape(shape), activations=activations)
    assert (got - wanted).abs().max() < (0.05 if activations else 1e-5)


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(0.25, 4.0))
@settings(max_examples=examples(40))
def test_a_scale_of_outputs_scales_results(seed, rows, factor):
    """Twice the scale is twice the result, whatever kernel runs: both are powers of two apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32, generator=generator)
    narrow, scale = lz.quantize(torch.randn(16, 32, generator=generator), "int8", per="row")
    one, other = (lz.quantized_linear(x, narrow, each, activations="int8") for each in (scale, scale * factor))
    torch.testing.assert_close(one * factor, other, rtol=1e-5, atol=1e-5)


def test_wider_results_are_not_rounded_to_the_input():
    x = torch.randn(4, 96).bfloat16()
    narrow, scale = weight("int8")
    got = lz.quantized_linear(x, narrow, scale, out_dtype=torch.float32)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, torch.nn.functional.linear(x.float(), narrow * scale), rtol=1e-5, atol=1e-5)


def test_a_packed_weight_of_int8_changes_no_result():
    x = torch.randn(4, 96).bfloat16()
    narrow, scale = weight("int8")
    packed = lz.PackedWeight(narrow)
    plain = lz.quantized_linear(x, narrow, scale, activations="int8")
    torch.testing.assert_close(
        lz.quantized_linear(x, narrow, scale, activations="int8", packed=packed), plain, rtol=1e-2, atol=2e-2
    )
    narrow.neg_()
    with pytest.raises(lz.InvalidCallError, match=r"packed: wanted one of weight as it is.*call refresh\(\)"):
        lz.quantized_linear(x, narrow, scale, activations="int8", packed=packed)
    packed.refresh()
    turned = lz.quantized_linear(x, narrow, scale, activations="int8", packed=packed)
    torch.testing.assert_close(turned, -plain, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_reach_the_input_the_scales_and_the_bias(name):
    narrow, scale = weight(name, 8, 16)
    x, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 16), (8,)))
    scale.requires_grad_()
    lz.quantized_linear(x, narrow, scale, bias).sum().backward()
    whole = lz.dequantize(narrow, scale.detach(), dtype=name, out_dtype=torch.float64)
    torch.testing.assert_close(x.grad, whole.sum(0).expand(3, 16), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(bias.grad, torch.full((8,), 3.0, dtype=torch.float64))
    wanted = (x.detach().sum(0) * narrow.double()).sum(-1, keepdim=True)
    torch.testing.assert_close(scale.grad.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_gradients_of_quantized_rows_reach_the_scales_and_the_bias_alone(name):
    narrow, scale = weight(name, 8, 16)
    x, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 16), (8,)))
    codes, scales = lz.quantize(x, name, per="row")
    rows = lz.dequantize(codes, scales, dtype=name, out_dtype=torch.float64)
    lz.quantized_linear(x, narrow, scale.requires_grad_(), bias, activations=name).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(bias.grad, torch.full((8,), 3.0, dtype=torch.float64))
    wanted = (rows.sum(0) * narrow.double()).sum(-1, keepdim=True)
    torch.testing.assert_close(scale.grad.double(), wanted, rtol=1e-4, atol=1e-4)


def test_nan_stays_nan_in_rows_of_float8():
    x = torch.randn(3, 96)
    x[1, 5] = torch.nan
    narrow, scale = weight("fp8_e4m3")
    got = lz.quantized_linear(x, narrow, scale, activations="fp8_e4m3")
    assert got.isnan().any(-1).tolist() == [False, True, False]
    assert got[1].isnan().all()


def test_a_weight_with_one_input_is_another_one_for_torchs_product():
    """``torch._int_mm`` gives other numbers there, in silence."""
    narrow, scale = torch.tensor([[5], [-7], [3]], dtype=torch.int8), torch.ones(1)
    x = torch.tensor([[2.0], [-1.0]])
    got = lz.quantized_linear(x, narrow, scale, activations="int8")
    torch.testing.assert_close(got, torch.tensor([[10.0, -14.0, 6.0], [-5.0, 7.0, -3.0]]), rtol=1e-5, atol=1e-5)


X, N, (W, S) = torch.randn(3, 96), torch.randn(64, 96), weight("int8")
WRONG = {
    "activations: wanted None or 'int8' or 'fp8_e4m3', got 'int4'": (W, S, {"activations": "int4"}),
    "activations: wanted None or 'int8' or 'fp8_e4m3', got 8": (W, S, {"activations": 8}),
    "weight: wanted dtype float8_e4m3, got int8": (W, S, {"activations": "fp8_e4m3"}),
    "weight: wanted dtype float8_e4m3 or float8_e5m2 or int8, got float32": (W.float(), S, {}),
    "weight: wanted in_features 96 as in input, got 32": (W[:, :32], S, {}),
    "weight_scale: wanted shape (), (64,) or (64, 1), got (1, 64)": (W, S.t(), {}),
    "weight_scale: wanted dtype float32, got float16": (W, S.half(), {}),
    "bias: wanted dtype float32 like input, got float16": (W, S, {"bias": torch.ones(64).half()}),
    "out_dtype: wanted float32 for an input of float32, got float16": (W, S, {"out_dtype": torch.float16}),
    "packed: wanted the PackedWeight of this very weight": (W, S, {"packed": lz.PackedWeight(W.clone())}),
}


def test_a_weight_without_columns_has_no_blocks():
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.quantized_linear(X[:, :0], W[:, :0], torch.ones(len(W), 2))
    assert "group_size" not in str(raised.value)


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
def test_scales_of_blocks_name_the_weight_that_has_them(format):
    narrow, scale = lz.quantize(N, format, per="block", block_size=32)
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.quantized_linear(X, narrow, scale)
    step = str(raised.value).partition("got (64, 3); ")[2]
    made = re.search(r"lz\.\w+[^ ]*\(.*\)", step)[0]
    made = eval(made, {"lz": lz, "numbers": N, "weight": narrow, "weight_scale": scale})  # what the error advises
    assert (lz.quantized_linear(X, made) - X @ N.T).norm() < 0.05 * (X @ N.T).norm()


@pytest.mark.parametrize("problem", WRONG)
def test_a_call_that_means_nothing_says_what_was_wanted(problem):
    narrow, scale, arguments = WRONG[problem]
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.quantized_linear(X, narrow, scale, **arguments)
    assert problem in str(raised.value)


def test_random_calls_are_what_numpy_says():
    pytest.importorskip("numpy")
    from oracles import truth

    for number in range(60):
        call = random_call(8, number, function="quantized_linear")
        assert compare.check(call, truth=truth(call)) == [], call.text


def test_rows_whose_scale_is_rounded_down_stay_within_whole_numbers():
    """Below about 1e-42 a scale has few bits, and quotients lay beyond 127, which wrapped."""
    rows = torch.tensor([[5.7e-43, -5.7e-43, 2.8e-43]])
    whole, _ = quantized_rows(rows, FORMATS["int8"])
    assert whole.min() >= -128
    assert whole.max() <= 127
    assert whole[0, 0] > 0 > whole[0, 1]


@pytest.mark.parametrize("name", ["mlp.linear.quant", "mlp.linear.quant.int8", "mlp.linear.quant.fp8_e4m3"])
def test_shapes_of_a_case_are_told_without_arithmetic(name):
    """A product of meta tensors imports torch's compiler: `layerzero doctor` took twice as long for it."""
    operation = OPERATIONS[name]
    for case in operation.cases:
        with Counted() as counted:
            shapes = arguments_of(operation, case, torch.float32, "meta")
        assert set(counted.calls) <= {"aten.empty.memory_format", "aten.new_empty.default"}
        if case.sizes["in_features"] <= 128:
            made = arguments_of(operation, case, torch.float32, "cpu")
            told = {each: (value.shape, value.dtype) for each, value in made.items() if torch.is_tensor(value)}
            assert told == {
                each: (value.shape, value.dtype) for each, value in shapes.items() if torch.is_tensor(value)
            }


KEPT = {
    "fp8": "torch.kept_quant",
    "fp8:rows=0": "torch.kept_quant",
    "fp8:group=32,rows=16": "torch.kept_block",
    "compressed-tensors:bits=4,group=32": "torch.kept_group",
    "mxfp4": "torch.kept_mx",
    "nf4:group=64": "torch.kept_codebook",
}


@at_once("dtype", FLOATS)
@at_once("text", KEPT)
def test_numbers_are_kept_where_a_form_may_be_as_large_as_a_floating_weight(text, dtype):
    known = lz.quantize_weight(torch.randn(64, 96) / 96**0.5, text)
    x, bias = torch.randn(2, 3, 96).to(dtype), torch.randn(64).to(dtype)
    wanted = x.double() @ known.dequantized(torch.float64).t() + bias.double()
    small, packed = lz.PackedWeight(known), lz.PackedWeight(known, dense=True)
    assert "dense=True" in str(lz.explain("quantized_linear", x, known, packed=small).reasons(KEPT[text]))
    with lz.scope(allow=[KEPT[text]]):
        for _ in range(2):
            got = lz.quantized_linear(x, known, bias=bias, packed=packed)
            torch.testing.assert_close(got.double(), wanted, rtol=TWO_ROUNDINGS[dtype], atol=TWO_ROUNDINGS[dtype])
    assert packed.forms == 1
    assert packed.bytes in {64 * 96 * dtype.itemsize, 64 * 96 * 4}  # of half precision in float32 where it is emulated
    other, twin = copy.deepcopy((known, packed))
    assert twin.kind_for(*other.fields) == "dense"


def test_a_weight_of_float8_has_a_form_of_its_own_size_where_vllm_takes_it():
    known = lz.quantize_weight(torch.randn(64, 96) / 96**0.5, "fp8")
    known.fields.data[5] = 0.0  # which the library reads as 2^-7
    x, bias = torch.randn(3, 96).bfloat16(), torch.randn(64).bfloat16()
    report = lz.explain("quantized_linear", x, known)
    if why := report.reasons("vllm.cpu.fp8"):
        pytest.skip(str(why[0]))
    assert report.chosen.kernel.id == "vllm.cpu.fp8"
    for scale in (known.fields.scale, known.fields.scale.reshape(-1), torch.tensor(0.01)):
        packed = lz.PackedWeight(known.fields.data)
        wanted = x.double() @ (known.fields.data.double() * scale.double().reshape(-1, 1)).t() + bias.double()
        with lz.scope(allow=["vllm.cpu.fp8"]):
            got = lz.quantized_linear(x, known.fields.data, scale, bias, packed=packed)
        torch.testing.assert_close(got.double(), wanted, rtol=3e-2, atol=3e-2)
        assert packed.bytes < 2 * known.fields.data.nbytes


@pytest.mark.parametrize("start", [0, 8, 16])
@pytest.mark.parametrize("text", ["int8", "compressed-tensors:bits=8"])
def test_rows_of_torchs_int8_product_may_begin_at_any_address(text, start):
    """It loads 32 bytes from an address that it takes for a multiple of that, and ends the process elsewhere."""
    numbers = torch.randn(9, 96) / 96**0.5
    buffer = torch.randn(3 * 96 + 64).bfloat16()
    x = buffer[-buffer.data_ptr() % 64 // 2 + start :][: 3 * 96].view(3, 96)
    if text == "int8":
        narrow, scale = lz.quantize(numbers, "int8", per="row")
        kernel, whole, given = "torch.int8pack_mm", narrow * scale, (narrow, scale)
    else:
        known = lz.quantize_weight(numbers.bfloat16(), text)
        kernel, whole, given = "torch.int8pack_mm_rows", known.dequantized(torch.float32), (known,)
    if why := lz.explain("quantized_linear", x, *given).reasons(kernel):
        pytest.skip(str(why[0]))
    with lz.scope(allow=[kernel]):
        got = lz.quantized_linear(x, *given)
    torch.testing.assert_close(got.float(), x.float() @ whole.t(), rtol=3e-2, atol=3e-2)


ROTATED = ("mxfp4:rotation=32", "mxfp4:rotation=64", "nvfp4:rotation=16", "nvfp4:over,rotation=32", "mxfp8:rotation=2")


@at_once("text", ROTATED)
def test_a_rotated_weight_stands_for_the_numbers_before(text):
    """Numbers that are 8 times as large as the others of their block cost mxfp4 0.16 of the norm, rotated 0.11."""
    torch.manual_seed(0)
    numbers = torch.randn(64, 192)
    numbers[:, ::37] *= 8.0
    known, plain = (lz.quantize_weight(numbers, each) for each in (text, re.sub(r":?,?rotation=\d+", "", text)))
    lost, before = (((each.dequantized() - numbers).norm() / numbers.norm()).item() for each in (known, plain))
    assert 0.0 < lost < (0.12 if text.startswith("mxfp4") else 1.15 * before)
    assert lost < before - 0.03 or not text.startswith("mxfp4")
    turned = lz.QuantizedWeight.unchecked(plain.format, known.shape, known.fields).dequantized(torch.float64)
    size = known.format.rotation
    matrix = torch.tensor([[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)])
    wanted = (turned.view(64, -1, size) @ matrix.double() / size**0.5).view(64, 192)
    torch.testing.assert_close(known.dequantized(torch.float64), wanted, rtol=1e-12, atol=1e-12)


@at_once("dtype", FLOATS)
@at_once("text", ROTATED)
@at_once("kernel", ["torch.dequantized_mx", "torch.kept_mx"])
def test_rows_are_rotated_where_their_weight_is(kernel, text, dtype):
    torch.manual_seed(0)
    known = lz.quantize_weight(torch.randn(64, 192) / 192**0.5, text)
    x, bias = torch.randn(2, 3, 192).to(dtype), torch.randn(64).to(dtype)
    packed = lz.PackedWeight(known, dense=True)
    if why := lz.explain("quantized_linear", x, known, packed=packed).reasons(kernel):
        assert dtype is torch.float16  # rotated rows may be larger than any of its numbers
        assert "bfloat16 or float32 with a rotated weight" in str(why[0])
        return
    with lz.scope(allow=[kernel]):
        got = lz.quantized_linear(x, known, bias=bias, packed=packed)
    wanted = x.double() @ known.dequantized(torch.float64).t() + bias.double()
    torch.testing.assert_close(got.double(), wanted, rtol=TWO_ROUNDINGS[dtype], atol=TWO_ROUNDINGS[dtype])


def test_half_precision_rows_that_no_half_holds_once_rotated_are_multiplied():
    known = lz.quantize_weight(torch.randn(64, 64) / 64, "mxfp4:rotation=64")
    x = torch.full((2, 64), 3e4).half()
    wanted = x.double() @ known.dequantized(torch.float64).t()
    torch.testing.assert_close(lz.quantized_linear(x, known).double(), wanted, rtol=2e-3, atol=2e3)


def test_gradients_of_rotated_rows_are_those_of_the_numbers_before():
    known = lz.quantize_weight(torch.randn(64, 64), "mxfp4:rotation=32")
    x = torch.randn(3, 64, requires_grad=True)
    lz.quantized_linear(x, known).sum().backward()
    torch.testing.assert_close(x.grad, known.dequantized().sum(0).expand(3, 64), rtol=1e-4, atol=1e-4)


def test_a_kernel_whose_bits_are_the_same_in_every_batch_rotates_without_a_product():
    """Sums of products may have another order for other numbers of rows."""
    x = torch.randn(67, 128, dtype=torch.bfloat16)
    assert all(torch.equal(rotated(x[start : start + 1], 32), rotated(x, 32)[start : start + 1]) for start in (0, 66))
    exact, quick = rotated(x.float(), 32), rotated(x.float(), 32, rotated(torch.eye(32), 32))
    torch.testing.assert_close(quick, exact, rtol=1e-5, atol=1e-5)
    load = REGISTRY.kernel("humming.linear_mx_invariant").load
    assert load.keywords["batch_invariant"]
    assert not REGISTRY.kernel("humming.linear_mx").load.keywords["batch_invariant"]


def sequency(size):
    """Hadamard's matrix with columns in the order of their changes of sign, as FP-Quant's ``gsr``."""
    made = rotated(torch.eye(size), size)
    return made[:, (made.diff(dim=0) != 0).sum(0).argsort()].contiguous()


def test_the_matrix_of_a_file_says_the_rotation_and_another_one_is_refused():
    known = lz.quantize_weight(torch.randn(64, 96), "mxfp4:rotation=32")
    data, scale = known.fields[:2]
    for rotation in (32, rotated(torch.eye(32), 32), rotated(torch.eye(32), 32).bfloat16()):
        made = lz.QuantizedWeight.from_mx(data, scale, rotation=rotation)
        assert made.format == known.format
        assert torch.equal(made.dequantized(), known.dequantized())
    assert lz.QuantizedWeight.from_mx(data, scale, rotation=torch.eye(32)).format == lz.WeightFormat("mxfp4")
    for other in (sequency(32), -rotated(torch.eye(32), 32), torch.ones(32, 32), torch.ones(3, 2), torch.tensor(1.0)):
        with pytest.raises(lz.InvalidCallError, match="rotation: wanted Hadamard's matrix") as raised:
            lz.QuantizedWeight.from_mx(data, scale, rotation=other)
        assert raised.value.code == "QUANT_FORMAT_UNSUPPORTED"
    nv = lz.quantize_weight(torch.randn(64, 96), "nvfp4:over,rotation=16")
    data, scale, _, _, second = nv.fields
    made = lz.QuantizedWeight.from_nvfp4(data, scale, second, divides=True, rotation=16)
    assert torch.equal(made.dequantized(), nv.dequantized())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mxfp4:rotation=24", "rotation: wanted 0 or a power of two, got 24"),
        ("mxfp4:rotation=64", "data: wanted a multiple of 64 columns"),
        ("gptq:bits=4,group=32,zeros=stored,rotation=32", "rotation: wanted nothing with gptq"),
    ],
)
def test_a_rotation_that_no_weight_has_is_refused(text, said):
    with pytest.raises(lz.InvalidCallError, match=said):
        lz.quantize_weight(torch.randn(64, 96), text)

"""Weights that are quantised, laid out anew, and read from files and other libraries' tensors."""

import re
import sys

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops.quantize.schemes import scheme_of

X = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
GPTQ, AWQ = "gptq:bits=4,group=32,zeros=minus_one", "awq:bits=4,group=32,zeros=stored"
PERMUTED = "gptq:bits=4,group=32,zeros=stored,permuted=True"
PACKED = "compressed-tensors:bits=4,group=32"


def weight(text, outputs=64, inputs=128, seed=1):
    of = lz.WeightFormat.of(text)
    fields = scheme_of(of).random(of, outputs, inputs, torch.Generator().manual_seed(seed))
    return lz.QuantizedWeight(of, (outputs, inputs), *fields)


N = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
LOSSES = {
    "int8": 0.01,
    "int4": 0.12,
    "int3": 0.3,
    "awq:bits=4,group=32,zeros=stored": 0.12,
    "gptq:bits=4,group=32,zeros=minus_one": 0.12,
    "compressed-tensors:bits=5,group=32,zeros=signed": 0.06,
    "fp8:group=128,rows=128": 0.04,
    "fp8:group=48,rows=40": 0.04,
    "fp8": 0.04,
    "fp8:rows=0": 0.04,
    "mxfp4": 0.2,
    "mxfp6_e2m3": 0.05,
    "mxfp6_e3m2": 0.08,
    "mxfp8": 0.05,
    "nvfp4": 0.15,
    "nvfp4:over": 0.15,
    "nf4:group=64": 0.12,
    "fp4:group=64": 0.25,
}


@at_once("text", LOSSES)
@at_once("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_near_what_it_was_made_of(text, dtype):
    known = lz.quantize_weight(N.to(dtype), text)
    lost = (known.dequantized(torch.float32) - N.to(dtype).float()).norm() / N.norm()
    assert 0.0 < lost < LOSSES[text]
    torch.testing.assert_close(lz.quantized_linear(X, known), X @ known.dequantized(torch.float32).t())


@pytest.mark.parametrize("name", ["gptq", "awq", "marlin", "compressed-tensors", "nf4", "fp4"])
def test_a_name_alone_stands_for_the_usual_form(name):
    numbers = torch.randn(64, 256)
    made = lz.quantize_weight(numbers, name)
    assert (made.format.scheme, made.format.group) == (name, 64 if name in ("nf4", "fp4") else 128)
    assert (made.dequantized() - numbers).norm() < 0.15 * numbers.norm()


def test_a_weight_of_zeros_is_kept():
    for text in LOSSES:
        known = lz.quantize_weight(torch.zeros(64, 128), text)
        assert not known.dequantized().any(), text


@pytest.mark.parametrize(("text", "bound"), [("int4", 0.105), ("int3", 0.21), ("int2", 0.47), ("int8", 0.0067)])
def test_groups_have_the_scale_of_five_that_loses_least(text, bound):
    """With the largest number as the largest code alone they lose 0.111, 0.237, 0.550 and 0.0065."""
    numbers = torch.randn(64, 1024, generator=torch.Generator().manual_seed(5))
    lost = (lz.quantize_weight(numbers, text).dequantized() - numbers).norm() / numbers.norm()
    assert 0.0 < lost < bound
    turned = lz.quantize_weight(numbers.to(torch.bfloat16).t().contiguous().t(), text)
    assert torch.equal(turned.dequantized(), lz.quantize_weight(numbers.to(torch.bfloat16), text).dequantized())


def test_a_group_of_zeros_stays():
    numbers = N.clone()
    numbers[3, 32:64] = 0.0
    for text in (PACKED, AWQ):
        assert not lz.quantize_weight(numbers, text).dequantized()[3, 32:64].any()


def test_zero_points_that_are_all_in_the_middle_are_left_out_where_a_format_has_none():
    known = lz.quantize_weight(N, "int4", group_size=32)
    back = lz.repack(lz.repack(known, "gptq"), PACKED)
    assert back.fields.zero is None
    assert torch.equal(back.dequantized(), known.dequantized())
    torch.testing.assert_close(lz.quantized_linear(X, back), lz.quantized_linear(X, known))


@pytest.mark.parametrize("columns", [96, 100])
def test_the_call_that_an_error_advises_is_taken(columns):
    with pytest.raises(lz.InvalidCallError) as refused:
        lz.QuantizedWeight("exl2:bits=5", (4, columns), N)
    advised = re.search(r"lz.quantize_weight\(numbers, '([^']+)'\)", str(refused.value))
    assert lz.quantize_weight(N[:4, :columns], advised[1]).shape == (4, columns)


@pytest.mark.parametrize("size", [0, -1])
def test_a_whole_row_is_a_group_by_either_number(size):
    assert lz.quantize_weight(N, "int4", group_size=size).format.group == 0


def test_one_column_of_blocks_of_float8_is_no_scale_for_each_row():
    known = lz.quantize_weight(N.repeat(4, 1), "fp8:group=128,rows=128")
    again = lz.QuantizedWeight.from_fp8(known.fields.data, known.fields.scale)
    assert known.fields.scale.shape == (2, 1)
    assert again.format == known.format


@at_once("text", [GPTQ, AWQ, PACKED, "compressed-tensors:bits=4,group=32,zeros=signed"])
@at_once("other", ["gptq", "awq", "compressed-tensors", GPTQ])
def test_numbers_stay_as_they_are_in_another_order(text, other):
    known = weight(text)
    made = lz.repack(known, other)
    assert torch.equal(made.dequantized(), known.dequantized())
    assert made.format.scheme == other.split(":")[0]


@at_once("text", ["marlin:bits=4,group=32", "marlin:bits=4"])
def test_a_weight_in_marlins_order_becomes_a_plain_one_and_comes_back(text):
    known = weight(text)
    plain = lz.repack(known, "compressed-tensors")
    assert plain.format == lz.WeightFormat.of(text.replace("marlin", "compressed-tensors"))
    assert torch.equal(plain.dequantized(), known.dequantized())
    for through in (plain, lz.repack(known, "gptq")):  # which has zero points, all of them in the middle
        again = lz.repack(through, "marlin")
        assert again.format == known.format
        assert all(torch.equal(*each) for each in zip(again.fields[:2], known.fields[:2], strict=True))


@at_once(
    "problem, code, again",
    [
        ("zeros: wanted a format with zero points", "REQUANTIZATION_REQUIRED", lambda: lz.repack(weight(AWQ), PACKED)),
        (
            "zeros: wanted a format with zero points",
            "REQUANTIZATION_REQUIRED",
            lambda: lz.repack(weight(AWQ), "marlin"),
        ),
        (
            "permuted: wanted True, which the weight has",
            "REQUANTIZATION_REQUIRED",
            lambda: lz.repack(weight(PERMUTED), AWQ),
        ),
        (
            "bits: wanted 4, which the weight has, got 8",
            "REQUANTIZATION_REQUIRED",
            lambda: lz.repack(weight(PACKED), "compressed-tensors:bits=8,group=32"),
        ),
        (
            "lz.quantize_weight(weight.dequantized(), 'mxfp4')",
            "REQUANTIZATION_REQUIRED",
            lambda: lz.repack(weight(AWQ), "mxfp4"),
        ),
        (
            "codes: wanted a format of whole numbers",
            "REQUANTIZATION_REQUIRED",
            lambda: lz.repack(weight("mxfp4"), "awq"),
        ),
        ("permuted: wanted False", None, lambda: lz.quantize_weight(N, PERMUTED)),
        ("weight: wanted finite numbers, got one", None, lambda: lz.quantize_weight(N / 0.0, "int4")),
        ("weight: wanted finite numbers, got none", None, lambda: lz.quantize_weight(N.to("meta"), "int4")),
        ("group: wanted 0 or more, got -7", None, lambda: lz.quantize_weight(N, "int4", group_size=-7)),
        ("group: wanted 0 or more, got '128'", None, lambda: lz.quantize_weight(N, "int4", group_size="128")),
        ("weight: wanted a floating tensor (N, K)", None, lambda: lz.quantize_weight(N[0], "int4")),
        ("of 16 bits or more, got", None, lambda: lz.quantize_weight(N.to(torch.float8_e4m3fn), "int4")),
        (
            "format: wanted one that is made here, got gguf:Q4_K",
            None,
            lambda: lz.quantize_weight(N.repeat(1, 2), "gguf:Q4_K"),
        ),
        (
            "group: wanted a divisor of the 128 columns, got 100",
            None,
            lambda: lz.quantize_weight(N, "int4", group_size=100),
        ),
        ("kind: wanted one of Q4_0", "QUANT_FORMAT_UNSUPPORTED", lambda: lz.QuantizedWeight("gguf:IQ1_S", (1, 256), N)),
        (
            "data: wanted uint8 (64, 144)",
            None,
            lambda: lz.QuantizedWeight("gguf:Q4_K", (64, 256), weight("gguf:Q4_K", inputs=256).fields.data[:, :100]),
        ),
        (
            "data: wanted finite scales in blocks of gguf:Q8_0, got one that is not in block 3",
            None,
            lambda: cut_scale(),
        ),
        ("mxfp4, fp4, int3", "QUANT_FORMAT_UNSUPPORTED", lambda: lz.quantize_weight(N, "hqq")),
        ("got 'int4:32'", "QUANT_FORMAT_UNSUPPORTED", lambda: lz.quantize_weight(N, "int4:32")),
        ("group: wanted an even number", None, lambda: lz.quantize_weight(N, "nf4:group=31")),
        ("group: wanted an even number, got 0", None, lambda: lz.quantize_weight(N, "nf4:group=0")),
        ("rows: wanted at least 1 with a group", None, lambda: lz.quantize_weight(N, "fp8:rows=0,group=128")),
        ("kind: wanted nothing with mxfp4", None, lambda: lz.quantize_weight(N, "mxfp4:over")),
        (
            "group: wanted 0 or more",
            None,
            lambda: lz.quantize_weight(N, lz.WeightFormat("awq", bits=4, group=-1, zeros="stored")),
        ),
        ("group_size: wanted None", None, lambda: lz.quantize_weight(N, "nf4:group=64", group_size=32)),
        ("zero_points: wanted None", None, lambda: lz.quantize_weight(N, "mxfp4", zero_points=True)),
    ],
)
def test_what_cannot_be_made_says_why(problem, code, again):
    with pytest.raises(lz.InvalidCallError) as raised:
        again()
    assert problem in str(raised.value)
    if code is not None:
        assert raised.value.code == code


@at_once(
    "again, said",
    [
        (
            lambda: lz.QuantizedWeight("gguf:IQ3_S", (4, 256), N),
            "bits=3,group=128') quantises anew: 400 bytes for 4 x 256",
        ),
        (lambda: lz.QuantizedWeight("exl2", (4, 256), N), "bits=2,group=128') quantises anew"),
        (lambda: lz.QuantizedWeight("bitsandbytes-nf4", (4, 256), N), "'nf4:group=64') quantises anew: 576 bytes"),
        (lambda: lz.QuantizedWeight("float8_e4m3fnuz", (4, 256), N), "'fp8') quantises anew: 1024 bytes"),
        (lambda: lz.QuantizedWeight("gptq:bits=5,zeros=stored,group=64", (4, 256), N), "bits=5,group=64'"),
        (lambda: lz.quantized_linear(X, N, weight_format="mxfp6"), "compressed-tensors:bits=6,group=128', quantises"),
        (
            lambda: lz.repack(weight(AWQ), "gguf:Q4_K"),
            "compressed-tensors:bits=4,group=128') quantises anew: 4224 bytes",
        ),
        (lambda: weight("mxfp4").codes, "bits=8,group=128') quantises anew: 8320 bytes for 64 x 128 numbers, normal"),
        (
            lambda: lz.quantize_weight(N, "int4", accuracy=0.03),
            "wanted a loss of at most 0.03 of the numbers' norm, got",
        ),
        (
            lambda: lz.quantize_weight(N, "int4", accuracy=0.03),
            "with compressed-tensors:bits=4,group=128; mxfp8 loses 0.029",
        ),
        (lambda: lz.quantize_weight(N, "int8", accuracy=1e-6), "no format here loses so little"),
        (lambda: lz.quantize_weight(N, "int8", accuracy=True), "accuracy: wanted a number from 0 or None, got True"),
    ],
)
def test_a_refusal_names_the_nearest_format_and_what_it_costs(again, said):
    with pytest.raises(lz.InvalidCallError) as raised:
        again()
    assert said.replace("', q", "') q") in str(raised.value)


def test_where_no_kernel_takes_a_format_the_nearest_that_one_takes_is_named():
    known = lz.quantize_weight(torch.randn(64, 256).bfloat16(), "compressed-tensors:bits=6,group=64")
    with lz.scope(allow=["torch.int4pack_mm"], deny=["reference.*"]), pytest.raises(lz.NoKernelFoundError) as raised:
        lz.quantized_linear(torch.randn(2, 256).bfloat16(), known)
    text = "torch.int4pack_mm takes compressed-tensors:bits=4,group=64; lz.quantize_weight(weight.dequantized(), "
    if "weight_bits" in str(raised.value.failures["torch.int4pack_mm"][0]):
        assert text in str(raised.value)
        assert "quantises anew: 8704 bytes for 64 x 256 numbers, normal numbers lose 0.1 of their norm" in str(
            raised.value
        )


def cut_scale():
    data = weight("gguf:Q8_0").fields.data.clone()
    data.view(-1, 34)[3, :2] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    return lz.QuantizedWeight("gguf:Q8_0", (64, 128), data)


def test_a_row_of_float8_takes_the_kernels_of_its_own_operation():
    for scale in (torch.rand(64, 1) + 0.5, torch.rand(64) + 0.5, torch.tensor(2.0)):
        known = lz.QuantizedWeight.from_fp8(N.to(torch.float8_e4m3fn), scale)
        assert lz.explain("quantized_linear", X, known).operation == "mlp.linear.quant"
        result = lz.quantized_linear(X, known)
        torch.testing.assert_close(result, X @ known.dequantized(torch.float32).t())


def test_mx_weights_are_taken_as_gpt_oss_has_them():
    known = weight("mxfp4")
    blocks = known.fields.data.view(64, 4, 16)
    made = lz.QuantizedWeight.from_mx(blocks, known.fields.scale.view(torch.uint8))
    assert torch.equal(made.dequantized(), known.dequantized())


def test_nvfp4_of_both_conventions():
    known = weight("nvfp4")
    data, scale, _, _, second = known.fields
    made = lz.QuantizedWeight.from_nvfp4(data, scale, 1.0 / second, divides=True)
    torch.testing.assert_close(made.dequantized(), known.dequantized(), rtol=1e-6, atol=0.0)
    assert torch.equal(lz.QuantizedWeight.from_nvfp4(data, scale, second).dequantized(), known.dequantized())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_weights_are_what_it_dequantizes(kind, nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    data, state = functional.quantize_4bit(N, blocksize=64, quant_type=kind, compress_statistics=nested)
    made = lz.QuantizedWeight.from_bitsandbytes(data, state)
    torch.testing.assert_close(made.dequantized(), functional.dequantize_4bit(data, state), rtol=3e-3, atol=0.0)


def test_a_gguf_file_is_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    q4 = weight("gguf:Q4_K", inputs=512)
    experts = weight("gguf:Q8_0", outputs=32)
    writer.add_tensor("q4", q4.fields.data.numpy(), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.add_tensor("experts", experts.fields.data.view(2, 16, -1).numpy(), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("norm", N[0].numpy())
    writer.add_tensor("half", N.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = lz.read_gguf(path)
    assert sorted(found) == ["experts", "half", "norm", "q4"]
    assert found["q4"].shape == (64, 512)
    assert torch.equal(found["q4"].dequantized(), q4.dequantized())
    assert torch.equal(torch.cat([each.dequantized() for each in found["experts"]]), experts.dequantized())
    assert torch.equal(found["norm"], N[0])
    assert torch.equal(found["half"], N.half())
    with pytest.raises(lz.InvalidCallError, match="names: wanted some of the 4 tensors"):
        lz.read_gguf(path, ["q5"])
    whole = path.read_bytes()
    for length in (3, 100, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(lz.InvalidCallError, match="path: wanted a whole GGUF file"):
            lz.read_gguf(path)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0)])
def test_a_weight_without_numbers_is_quantised(shape):
    made = lz.quantize_weight(torch.empty(shape), "nvfp4")
    assert made.dequantized().shape == shape


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lz.QuantizedWeight.from_mx(torch.zeros(4), None), "weight: wanted a tensor of 2 axes or more"),
        (
            lambda: lz.QuantizedWeight.from_fp8(None, torch.ones(())),
            "weight: wanted a tensor of 2 axes or more, got None",
        ),
        (lambda: lz.QuantizedWeight.from_fp8(torch.zeros(4, 8), None), "scale: wanted a tensor of 0 axes or more"),
        (
            lambda: lz.QuantizedWeight.from_nvfp4(torch.zeros(4, 8), torch.ones(4, 1), 2.0),
            "second_scale: wanted a tensor",
        ),
    ],
)
def test_what_is_no_tensor_of_a_file_is_refused_by_its_name(make, said):
    with pytest.raises(lz.InvalidCallError, match=said):
        make()


def test_a_file_of_gguf_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="read_gguf: wanted the package gguf, got none here; pip install gguf"):
        lz.read_gguf("model.gguf")

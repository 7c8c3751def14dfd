"""Weights as files hold them: what their tensors stand for, what is refused, and products with them."""

import contextlib
import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core.judge import Given
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.quantize.gguf import AFFINE, affine
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.schemes import SCHEMES, scheme_of
from layerzero.ops.quantize.weight_format import ARGUMENTS, Fields, packed, unpacked
from layerzero.testing import compare
from layerzero.testing.generate import random_call

X = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))


def weight(text, outputs=64, inputs=128, seed=1):
    of = lz.WeightFormat.of(text)
    fields = scheme_of(of).random(of, outputs, inputs, torch.Generator().manual_seed(seed))
    return lz.QuantizedWeight(of, (outputs, inputs), *fields)


GPTQ, AWQ = "gptq:bits=4,group=32,zeros=minus_one", "awq:bits=4,group=32,zeros=stored"
PERMUTED = "gptq:bits=4,group=32,zeros=stored,permuted=True"
PACKED = "compressed-tensors:bits=4,group=32"


@at_once("bits", range(2, 9))
@at_once("count", [1, 7, 32, 33, 96])
def test_a_stream_of_bits_is_read_back(bits, count):
    codes = torch.randint(0, 1 << bits, (3, count), dtype=torch.uint8)
    words = packed(codes, bits)
    assert words.shape == (3, -(-count * bits // 32))
    assert torch.equal(unpacked(words, bits, count), codes)


@pytest.mark.parametrize("text", [scheme.example for scheme in SCHEMES.values()])
def test_the_text_of_a_format_reads_back(text):
    of = lz.WeightFormat.of(text)
    assert lz.WeightFormat.of(str(of)) == of
    assert str(of) == text


@pytest.mark.parametrize("text", [*(each.example for each in SCHEMES.values()), AWQ, PERMUTED, "fp8:group=64,rows=1"])
def test_rows_of_several_weights_are_joined_where_they_share_the_rest(text):
    of, inputs = lz.WeightFormat.of(text), 512
    scheme, counts = scheme_of(of), (128, 256, 128)
    parts = [weight(text, rows, inputs, seed).fields for seed, rows in enumerate(counts)]
    if parts[0].group_index is not None or parts[0].second_scale is not None:
        assert scheme.joined(of, parts, inputs) is None, "an order and a second scale are one for all rows"
        shared = {name: getattr(parts[0], name) for name in ("group_index", "second_scale")}
        parts = [each._replace(**shared) for each in parts]
    joined = scheme.joined(of, parts, inputs)
    apart = [scheme.dequantized(of, each, inputs, torch.float32) for each in parts]
    assert torch.equal(scheme.dequantized(of, joined, inputs, torch.float32), torch.cat(apart))
    cut = scheme.cut(of, joined, inputs, 128, 384)
    assert torch.equal(scheme.dequantized(of, cut, inputs, torch.float32), apart[1])
    assert cut.data.data_ptr() != parts[1].data.data_ptr()
    assert cut.data.untyped_storage().data_ptr() == joined.data.untyped_storage().data_ptr()


@pytest.mark.parametrize("text", [AWQ, PERMUTED, PACKED, "marlin:bits=4,group=32"])
def test_a_product_is_compiled_after_one_that_was_not(text):
    """Tables of places were kept as tensors of the first call, which no compiler takes."""
    known = weight(text)
    arguments = {"input": X, **known.arguments_of("quantized_linear", "weight", {}), "packed": None}
    wanted = lz.quantized_linear(**arguments)
    torch._dynamo.reset()
    compiled = torch.compile(lz.quantized_linear, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**arguments), wanted)
    torch._dynamo.reset()


def test_rows_that_end_within_a_word_are_not_joined():
    parts = [weight(GPTQ, 8, 128, seed).fields for seed in range(2)]
    assert scheme_of(lz.WeightFormat.of(GPTQ)).joined(lz.WeightFormat.of(GPTQ), parts, 128) is None


@at_once("dtype", ["float16", "float32"])
@at_once("text", [*(each.example for each in SCHEMES.values()), "fp8:group=64,rows=1"])
def test_a_size_in_bits_is_that_of_the_tensors(text, dtype):
    known = weight(text, 64, 512)
    scale = known.fields.scale
    if scale is None or scale.itemsize == 1 or known.format.scheme in ("nf4", "fp4"):  # whose scales have one dtype
        dtype = "float32"
    else:
        scale = scale.to(getattr(torch, dtype))
    size = sum(each.nbytes for each in known.fields._replace(scale=scale, group_index=None) if each is not None)
    bits = scheme_of(known.format).bits(known.format, dtype)
    assert bits == pytest.approx(8 * size / (64 * 512), rel=0.01)


@pytest.mark.parametrize("text", [GPTQ, AWQ, PERMUTED, PACKED, "compressed-tensors:bits=3,zeros=signed,permuted=True"])
def test_codes_become_the_very_tensors_again(text):
    known = weight(text)
    made = GROUPED[known.format.scheme].encoded(known.format, known.codes)
    for name, mine, theirs in zip(made._fields, made, known.fields, strict=True):
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine, theirs), name


def test_numbers_are_what_numpy_reads_from_the_bits():
    pytest.importorskip("numpy")
    from oracles import truth

    for number in range(60):
        call = random_call(11, number, function="quantized_linear")
        if "weight_format" in call.arguments:
            assert compare.check(call, truth=truth(call)) == [], call.text


def test_a_call_takes_the_weight_or_its_tensors():
    known = weight(GPTQ)
    whole = lz.quantized_linear(X, known)
    fields = known.fields
    apart = lz.quantized_linear(X, fields.data, fields.scale, weight_zero=fields.zero, weight_format=str(known.format))
    torch.testing.assert_close(whole, apart)  # a packed weight may get another kernel
    torch.testing.assert_close(whole, X @ known.dequantized(torch.float32).t())


def test_an_index_in_order_is_no_act_order():
    fields = weight(GPTQ).fields
    order = torch.arange(128) // 32
    known = lz.QuantizedWeight.from_gptq(fields.data, fields.zero, fields.scale, order, group_size=32)
    assert not known.format.permuted
    assert str(known.format) == GPTQ


def test_a_packed_form_is_made_once_of_the_weight_as_it_is():
    known, made = weight(PACKED), []

    def pack(given):
        made.append(given)
        return given.codes.numbers, 1

    first = known.packed.form("a kernel", pack)
    assert known.packed.form("a kernel", pack) is first
    assert torch.equal(first, known.codes.numbers)
    assert len(made) == 1
    arguments = [known.fields.data, known.fields.scale, None, None, None]
    assert known.packed.kind_for(*arguments) == "packed"
    assert known.packed.kind_for(arguments[0], arguments[1].clone(), None, None, None) == "foreign"
    known.fields.scale.mul_(2.0)
    assert known.packed.kind_for(*arguments) == "stale"
    with pytest.raises(lz.InvalidCallError, match="written into"):
        lz.quantized_linear(X, known)
    known.packed.refresh()
    torch.testing.assert_close(lz.quantized_linear(X, known), X @ known.dequantized(torch.float32).t())


def test_writes_into_a_scale_that_torch_does_not_count_are_seen_in_memory():
    """A form that was made before went on giving what the scales gave then."""
    known = weight(GPTQ)
    known.packed.form("a kernel", lambda given: (given.codes.numbers, 1))
    known.fields.scale.data.mul_(2.0)
    with pytest.raises(lz.InvalidCallError, match="written into"):
        lz.quantized_linear(X, known)


def test_a_packed_weight_of_other_tensors_is_refused():
    known, other = weight(GPTQ), weight(GPTQ, seed=2)
    mixed = lz.QuantizedWeight(known.format, known.shape, known.fields.data, other.fields.scale, known.fields.zero)
    with pytest.raises(lz.InvalidCallError, match="packed: wanted the PackedWeight of this very weight"):
        lz.quantized_linear(X, mixed, packed=known.packed)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_weight_is_copied_with_its_tensors(again):
    known = weight(PERMUTED)
    made = again(known)
    assert made.format == known.format
    assert torch.equal(made.dequantized(), known.dequantized())
    assert torch.equal(lz.quantized_linear(X, made), lz.quantized_linear(X, known))


def changed(text, **fields):
    known = weight(text)
    found = {name: change(each) for name, each in known.fields._asdict().items() if (change := fields.get(name))}
    return lambda: lz.QuantizedWeight(known.format, known.shape, **{**known.fields._asdict(), **found})


def nan_at(place):
    def change(tensor):
        made = tensor.clone()
        made[place] = float("nan")
        return made

    return change


WRONG = {
    "data: wanted int32 (16, 64) for 64 x 128 numbers of gptq": changed(GPTQ, data=lambda each: each[:15]),
    "scale: wanted bfloat16 or float16 or float32 (4, 64)": changed(GPTQ, scale=torch.t),
    "data: wanted int32 (16, 64) for": changed(GPTQ, data=torch.Tensor.float),
    "zero: wanted a tensor (4, 8) with gptq": changed(GPTQ, zero=lambda _: None),
    "scale: wanted finite numbers other than 0 with gptq:bits=4,group=32,zeros=minus_one, got nan at (1, 2)": changed(
        GPTQ, scale=nan_at((1, 2))
    ),
    "got 0 at (0, 0)": changed(PACKED, scale=torch.zeros_like),
    "group_index: wanted groups from 0 to 3, got 1 to 4": changed(PERMUTED, group_index=lambda each: each + 1),
    "group_index: wanted 32 columns in each group, got 128 in group 0": changed(PERMUTED, group_index=torch.zeros_like),
    "zero: wanted numbers from -8 to 7": changed(
        "compressed-tensors:bits=4,group=32,zeros=signed", zero=lambda each: each + 20
    ),
    "group: wanted a divisor of the 128 columns, got 96": lambda: lz.QuantizedWeight(
        "awq:bits=4,group=96,zeros=stored", (64, 128), *weight(AWQ).fields
    ),
    "bits: wanted 4 with awq, got 3": lambda: weight("awq:bits=3,group=32,zeros=stored"),
    "zeros: wanted stored with awq, got 'none'": lambda: lz.QuantizedWeight(
        "awq:bits=4,group=32", (64, 128), *weight(AWQ).fields
    ),
    "format: wanted one of gptq, awq": lambda: lz.QuantizedWeight("marlin_24", (64, 128), torch.zeros(2, 2)),
    "B: wanted 8 rows for 1 groups of 128, got 4, as 2:4 sparse weights have (marlin_24)": lambda: (
        lz.QuantizedWeight.from_marlin(torch.zeros(4, 128, dtype=torch.int32), torch.ones(1, 64))
    ),
    "B: wanted a tensor of 2 axes, got None": lambda: lz.QuantizedWeight.from_marlin(None, torch.ones(1, 64)),
    "data: wanted multiples of 64 rows and 16 columns in marlin:bits=4, got 32 x 64": lambda: lz.QuantizedWeight(
        "marlin:bits=4", (32, 64), torch.zeros(4, 64, dtype=torch.int32), torch.ones(1, 32)
    ),
    "format: wanted kind=str, bits=int": lambda: lz.WeightFormat.of("gptq:bits=four"),
    "shape: wanted 64 rows, which data (16, 64) holds, got 32": lambda: lz.QuantizedWeight(
        lz.WeightFormat.of(GPTQ), (32, 128), *weight(GPTQ).fields
    ),
    "qzeros: wanted a tensor of 2 axes, got None": lambda: lz.QuantizedWeight.from_gptq(
        weight(GPTQ).fields.data, None, weight(GPTQ).fields.scale
    ),
}


@at_once("problem", WRONG)
def test_a_weight_that_is_none_says_what_was_wanted(problem):
    with pytest.raises(lz.InvalidCallError) as raised:
        WRONG[problem]()
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("problem", "arguments"),
    [
        ("weight: wanted int32 (8, 64) for 64 x 64 numbers of gptq", {"input": X[:, :64]}),
        ("bias: wanted shape (64,), got (63,)", {"bias": torch.ones(63)}),
        ("activations: wanted None or 'int8' with weight_format=", {"activations": "int4"}),
        ("weight_zero: wanted a tensor (4, 8)", {"weight_zero": None}),
        ("second_scale: wanted None with gptq", {"second_scale": torch.ones(())}),
        ("weight_zero: wanted None without weight_format", {"weight_format": None}),
        ("format: wanted one of gptq, awq", {"weight_format": "exl2"}),
    ],
)
def test_a_call_whose_tensors_do_not_fit_says_so(problem, arguments):
    fields = weight(GPTQ).fields
    given = {"input": X, "weight": fields.data, "weight_scale": fields.scale, "weight_zero": fields.zero}
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.quantized_linear(**{**given, "weight_format": GPTQ, **arguments})
    assert problem in str(raised.value)


def test_a_weight_stands_for_nothing_else():
    with pytest.raises(lz.InvalidCallError, match="weight_scale: wanted None with a QuantizedWeight"):
        lz.quantized_linear(X, weight(GPTQ), torch.ones(4, 64))
    with pytest.raises(lz.InvalidCallError, match="weight: wanted a tensor, got a QuantizedWeight"):
        lz.linear(X, weight(GPTQ))


FAULTS = {
    "swapped nibbles": lambda codes: replace(
        codes, numbers=codes.numbers.view(len(codes.numbers), -1, 2).flip(-1).flatten(1)
    ),
    "the next group": lambda codes: replace(codes, scale=codes.scale.roll(1, 1)),
    "the next row's scale": lambda codes: replace(codes, scale=codes.scale.roll(1, 0)),
    "a zero point off by one": lambda codes: replace(codes, numbers=codes.numbers + 1),
    "no act-order": lambda codes: replace(codes, group_index=None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_mistake_in_its_codes_is_found(fault):
    found = 0
    for number in range(400):
        call = random_call(5, number, function="quantized_linear", dtype=torch.bfloat16)
        of = call.arguments.get("weight_format") and lz.WeightFormat.of(call.arguments["weight_format"])
        if not of or of.scheme not in GROUPED or call.arguments["input"].shape[-1] % 2 or not of.group:
            continue
        if fault == "no act-order" and not of.permuted:
            continue

        def run(of=of, **arguments):
            names = ("weight", "weight_scale", "weight_zero", "group_index")
            fields = Fields(*[arguments.get(name) for name in names])
            codes = GROUPED[of.scheme].codes(of, fields, arguments["input"].shape[-1])
            result = torch.nn.functional.linear(
                arguments["input"].float(), FAULTS[fault](codes).dequantized(torch.float32)
            )
            result = result if arguments.get("bias") is None else result + arguments["bias"]
            return result.to(arguments.get("out_dtype") or arguments["input"].dtype)

        found += bool(compare.check(call, run=run))
        if found == 3:
            return
    raise AssertionError(f"{fault}: {found} calls found it")


def rounded_in_groups(x, group):
    """Rows as a library may round them: by a scale for each group."""
    parts = x.view(*x.shape[:-1], -1, group)
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / scale).round() * scale).flatten(-2)


@pytest.mark.parametrize(("fault", "found"), [("none", False), ("neighbour", True), ("zero", True), ("rows", True)])
def test_rows_may_be_rounded_in_any_way_and_nothing_else_may_differ(fault, found):
    operation = FORMATTED["group.int8"]
    of = weight(AWQ)
    fields = of.fields
    arguments = {"input": X, "weight_format": str(of.format), **dict(zip(ARGUMENTS.values(), fields, strict=True))}
    want = operation.reference(**{**arguments, "input": X.double()})
    numbers, rows = of.dequantized(torch.float32), rounded_in_groups(X, 32)
    if fault == "neighbour":
        numbers = numbers.roll(1, 0)
    if fault == "zero":
        scale = of.codes.scale.float().repeat_interleave(32, 1)
        numbers = numbers + scale
    if fault == "rows":
        rows = (X / X.abs().amax() * 7).round() * X.abs().amax() / 7
    given = Given(torch.float32, operation.judge.basis(arguments))
    assert bool(operation.judge.problem(rows @ numbers.t(), want, given)) is found


def test_compiled_and_bound_calls_take_a_weight():
    known = weight(PACKED)
    expected = X @ known.dequantized(torch.float32).t()

    def layer(rows):
        return lz.quantized_linear(rows, known)

    with warnings.catch_warnings():
        warnings.simplefilter("error", lz.LayerZeroPerformanceWarning)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(X), expected)
    torch.testing.assert_close(lz.bind("quantized_linear", X, known)(X, known), expected)


def test_gradients_reach_the_rows_alone():
    known = weight(GPTQ)
    rows = X.clone().requires_grad_()
    scale = known.fields.scale.clone().requires_grad_()
    lz.quantized_linear(
        rows, known.fields.data, scale, weight_zero=known.fields.zero, weight_format=str(known.format)
    ).sum().backward()
    torch.testing.assert_close(rows.grad, known.dequantized(torch.float32).sum(0).expand(3, -1))
    assert scale.grad is None


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        ("", {}),
        (
            "weight_scale: wanted finite numbers",
            {"weight_scale": torch.full((4, 64), float("nan"), dtype=torch.float16)},
        ),
        ("group_index: wanted groups that have a scale", {"group_index": torch.full((128,), 4, dtype=torch.int32)}),
    ],
)
def test_debug_mode_looks_at_the_values_of_bare_tensors(problem, changes):
    fields = weight(PERMUTED).fields
    given = dict(zip(ARGUMENTS.values(), fields, strict=True)) | {"weight_format": PERMUTED}
    refused = pytest.raises(lz.InvalidCallError, match=problem) if problem else contextlib.nullcontext()
    with lz.scope(debug=True), refused:
        lz.quantized_linear(X, **{**given, **changes})


@pytest.mark.parametrize("kind", AFFINE)
def test_ggufs_codes_of_four_bits_are_codes_scales_and_offsets(kind):
    known = weight(f"gguf:{kind}", outputs=64, inputs=512)
    codes, scale, offset = affine(known.fields.data, kind)
    whole = codes.float() * scale.repeat_interleave(32, 1) + offset.repeat_interleave(32, 1)
    numbers = known.dequantized(torch.float32)
    torch.testing.assert_close(whole, numbers)
    if "avx2" not in lz.Device.detect("cpu").instruction_sets:
        pytest.skip("torch's kernel for packed codes wants AVX2")
    rows = torch.rand(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert lz.which("quantized_linear", rows, known)["kernel_id"] == "torch.int4pack_mm_gguf"
    wanted = rows.float() @ numbers.t()
    terms = (rows.float().square() @ numbers.t().square()).sqrt()
    assert ((lz.quantized_linear(rows, known).float() - wanted).abs() <= 0.01 * (terms + wanted.abs())).all()


@pytest.mark.parametrize("text", ["fp8", "fp8:rows=1", "fp8:group=32,rows=4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_a_weight_without_numbers_is_quantised_and_gives_zeros(text, shape):
    weight = lz.quantize_weight(torch.zeros(shape, dtype=torch.bfloat16), text)
    output = lz.quantized_linear(torch.ones(2, shape[1], dtype=torch.bfloat16), weight)
    assert output.shape == (2, shape[0])
    assert not output.any()

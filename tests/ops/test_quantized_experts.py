"""Experts with quantised weights: stacks of every format, what a call makes of them, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops.moe.experts import Stack, moe_experts, summed
from layerzero.ops.moe.quantized import QUANTIZED, ROUNDED
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.schemes import SCHEMES, scheme_of
from layerzero.testing import compare
from layerzero.testing.generate import random_call

HIDDEN, INNER, EXPERTS = 256, 64, 4
FORMATS = (
    *("compressed-tensors:bits=4,group=32", "compressed-tensors:bits=8", "awq:bits=4,group=32,zeros=stored"),
    *(
        "gptq:bits=4,group=32,zeros=minus_one",
        "fp8",
        "fp8:rows=0",
        "fp8:group=128,rows=128",
        "mxfp4",
        "mxfp6_e3m2",
        "mxfp8",
        "nvfp4",
    ),
    "nf4:group=64",
)


SHAPES = (2 * INNER, HIDDEN), (HIDDEN, INNER)


def stack(text, shape):
    """Experts of a format and a shape."""
    of, generator = lz.WeightFormat.of(text), torch.Generator().manual_seed(1)
    each = [scheme_of(of).random(of, *shape, generator) for _ in range(EXPERTS)]
    return lz.QuantizedWeight.stack([lz.QuantizedWeight(of, shape, *one) for one in each])


def stacks(text):
    """Both weights of experts in a format."""
    return [stack(text, shape) for shape in SHAPES]


def around(tokens=5, dtype=torch.float32):
    """Rows, ids and shares."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :2].int()
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype), ids, torch.rand(tokens, 2, generator=generator)


@at_once("text", [*FORMATS, "gptq:bits=4,group=32,zeros=stored,permuted=True"])
@at_once("tokens", [1, 5])
def test_a_call_multiplies_with_the_numbers_that_the_format_stands_for(text, tokens):
    (gate_up, down), (rows, ids, shares) = stacks(text), around(tokens)
    wide = [each.dequantized(torch.float32) for each in (gate_up, down)]
    got = lz.moe_experts(rows, gate_up, down, ids, shares)
    torch.testing.assert_close(got, lz.moe_experts(rows, *wide, ids, shares), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", FORMATS)
def test_a_stack_is_what_its_experts_are(text):
    gate_up, _ = stacks(text)
    parts = [gate_up[number] for number in range(EXPERTS)]
    assert gate_up.shape == (EXPERTS, 2 * INNER, HIDDEN)
    assert torch.equal(gate_up.dequantized(), torch.stack([each.dequantized() for each in parts]))
    again = lz.QuantizedWeight(gate_up.format, gate_up.shape, *gate_up.fields)
    joined = lz.QuantizedWeight.stack(list(gate_up))
    for one in (again, joined, copy.deepcopy(gate_up)):
        assert torch.equal(one.dequantized(), gate_up.dequantized())
        assert one.bytes == gate_up.bytes


def test_files_of_experts_are_stacks():
    """gpt-oss keeps blocks of 16 bytes, DeepSeek scales of blocks."""
    numbers = torch.randn(EXPERTS, 2 * INNER, HIDDEN)
    mx = lz.quantize_weight(numbers, "mxfp4")
    file = lz.QuantizedWeight.from_mx(mx.fields.data.view(EXPERTS, 2 * INNER, HIDDEN // 32, 16), mx.fields.scale)
    assert torch.equal(file.dequantized(), mx.dequantized())
    for text in ("fp8:group=128,rows=128", "fp8", "fp8:rows=0"):
        fp8 = lz.quantize_weight(numbers, text)
        file = lz.QuantizedWeight.from_fp8(fp8.fields.data, fp8.fields.scale)
        assert str(file.format) == text
        assert torch.equal(file.dequantized(), fp8.dequantized())
    nv = lz.quantize_weight(numbers, "nvfp4")
    file = lz.QuantizedWeight.from_nvfp4(*(each for each in nv.fields if each is not None))
    assert torch.equal(file.dequantized(), nv.dequantized())
    assert str(lz.repack(lz.quantize_weight(numbers, "int4", group_size=32), "awq").format).startswith("awq")


def test_formats_may_differ_and_experts_may_be_elsewhere():
    gate_up, down = stack("gguf:Q4_K", SHAPES[0]), stack("fp8", SHAPES[1])
    rows, ids, shares = around(6, torch.bfloat16)
    wide = [each.dequantized(torch.bfloat16) for each in (gate_up, down)]
    parts = [lz.moe_experts(rows, gate_up, down, ids.masked_fill(ids % 2 != rank, -1), shares) for rank in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], lz.moe_experts(rows, *wide, ids, shares), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("tokens", [1, 4])
def test_rows_get_gradients_of_zeros_where_every_expert_is_elsewhere(tokens):
    rows, ids, shares = around(tokens)
    rows.requires_grad_()
    lz.moe_experts(rows, *stacks("nf4:group=64"), ids.fill_(-1), shares).sum().backward()
    assert not rows.grad.any()


KERNELS = {
    "torch.experts_int4": "compressed-tensors:bits=4,group=32",
    "torch.experts_int8": "compressed-tensors:bits=8",
    "vllm.cpu.fused_experts_mxfp4": "mxfp4",
    "vllm.cpu.fused_experts_fp8": "fp8:group=128,rows=128",
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_packed_kernel_makes_its_form_once(kernel, tokens):
    gate_up, down = stacks(KERNELS[kernel])
    rows, ids, shares = around(tokens, torch.bfloat16)
    report = lz.explain("moe_experts", rows, gate_up, down, ids, shares)
    if report.reasons(kernel):
        pytest.skip(f"not here: {report.reasons(kernel)}")
    with lz.scope(locks={"moe.experts.quant": kernel}):
        found = [lz.moe_experts(rows, gate_up, down, ids, shares) for _ in range(2)]
    wide = [each.dequantized(torch.float32) for each in (gate_up, down)]
    torch.testing.assert_close(found[0].float(), lz.moe_experts(rows.float(), *wide, ids, shares), rtol=0.02, atol=0.03)
    assert torch.equal(*found)
    assert gate_up.packed.forms == down.packed.forms == 1
    assert gate_up.packed.bytes > 0


@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_may_be_rounded_to_eight_bits(tokens):
    (gate_up, down), (rows, ids, shares) = stacks("compressed-tensors:bits=8"), around(tokens, torch.bfloat16)
    given = rows, gate_up, down, ids, shares
    report = lz.explain("moe_experts", *given, activations="int8")
    assert report.operation == ROUNDED.name
    wanted = lz.moe_experts(*given).float()
    got = lz.moe_experts(*given, activations="int8").float()
    assert (got - wanted).norm() < 0.03 * wanted.norm()
    for biases in ({"gate_up_bias": torch.zeros(EXPERTS, 2 * INNER, dtype=torch.bfloat16)}, {"activation": "gelu"}):
        assert lz.explain("moe_experts", *given, activations="int8", **biases).reasons("vllm.cpu.fused_experts_int8")


@pytest.mark.parametrize(
    ("text", "activations", "wanted"),
    [
        ("mxfp4", "int8", "activations: wanted None, or 'int8' with weights of whole numbers by group"),
        ("compressed-tensors:bits=8", "int4", "activations: wanted None or 'int8', got 'int4'"),
    ],
)
def test_other_formats_and_activations_are_refused(text, activations, wanted):
    (gate_up, down), (rows, ids, shares) = stacks(text), around()
    with pytest.raises(lz.InvalidCallError, match=wanted):
        lz.moe_experts(rows, gate_up, down, ids, shares, activations=activations)
    with pytest.raises(lz.InvalidCallError, match="activations: wanted None"):
        lz.moe_experts(rows, gate_up.dequantized(), down.dequantized(), ids, shares, activations=activations)


def test_gradients_reach_rows_shares_and_biases():
    (gate_up, down), (rows, ids, shares) = stacks("mxfp4"), around()
    bias = torch.randn(EXPERTS, HIDDEN)
    given = [each.requires_grad_() for each in (rows, shares, bias)]
    lz.moe_experts(rows, gate_up, down, ids, shares, down_bias=bias).square().sum().backward()
    assert all(bool(each.grad.abs().sum() > 0) for each in given)


def test_compiled_code_takes_the_tensors():
    (gate_up, down), (rows, ids, shares) = stacks("mxfp4"), around()

    def call(rows, ids, shares):
        return lz.moe_experts(rows, gate_up, down, ids, shares)

    torch.testing.assert_close(torch.compile(call, backend="eager")(rows, ids, shares), call(rows, ids, shares))


GATE_UP, DOWN = stacks("mxfp4")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gate_up_weight": GATE_UP[0]}, r"gate_up_weight: wanted one of experts \(E, N, K\), got a QuantizedWeight"),
        ({"down_weight": torch.randn(EXPERTS, HIDDEN, INNER)}, "down_format"),
        (
            {"down_weight": stack("mxfp4", (128, INNER))},
            "down_weight: wanted 256 rows an expert, those of input, got 128",
        ),
        (
            {"down_weight": lz.quantize_weight(torch.randn(3, HIDDEN, INNER), "mxfp4")},
            "experts 4 as in gate_up_weight, got 3",
        ),
        ({"gate_up_scale": torch.ones(2)}, "gate_up_scale: wanted None with a QuantizedWeight"),
        ({"gate_up_weight": GATE_UP.fields.data, "gate_up_format": "mxfp4"}, "gate_up_scale: wanted a tensor"),
        (
            {"gate_up_weight": GATE_UP.fields.data, "gate_up_format": "exl2", "gate_up_scale": GATE_UP.fields.scale},
            "gate_up_format: format: wanted one of gptq",
        ),
        (
            {
                "gate_up_weight": GATE_UP.fields.data,
                "gate_up_format": "mxfp4",
                "gate_up_scale": GATE_UP.fields.scale[:, :, 1:],
            },
            r"gate_up_scale: wanted .* \(128, 8\) for 128 x 256 numbers of mxfp4, got .* for each expert",
        ),
        (
            {
                "gate_up_weight": GATE_UP.fields.data,
                "gate_up_format": "mxfp4",
                "gate_up_scale": GATE_UP.fields.scale[1:],
            },
            "gate_up_scale: wanted the 4 experts in front, got",
        ),
        ({"gate_up_bias": torch.zeros(EXPERTS, 3)}, r"gate_up_bias: wanted shape \(4, 128\), got \(4, 3\)"),
        ({"packed_down": lz.PackedWeight(GATE_UP)}, "packed_down: wanted the PackedWeight of this very down_weight"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_the_field(given, told):
    rows, ids, shares = around()
    arguments = {"input": rows, "gate_up_weight": GATE_UP, "down_weight": DOWN, "expert_ids": ids}
    with pytest.raises(lz.InvalidCallError, match=told):
        lz.moe_experts(**{**arguments, "expert_weights": shares, **given})


@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("group", [8, -1])
@pytest.mark.parametrize("name", ["gate_up_group_index", "down_group_index"])
def test_a_column_of_no_group_is_refused_by_the_name_of_the_field(name, group, debug):
    rows, ids, shares = around()
    given = {"input": rows, "expert_ids": ids, "expert_weights": shares}
    both = stacks("gptq:bits=4,group=32,zeros=stored,permuted=True")
    for part, weight in zip(("gate_up", "down"), both, strict=True):
        fields = {"scale": weight.fields.scale, "zero": weight.fields.zero, "group_index": weight.fields.group_index}
        given |= {f"{part}_weight": weight.fields.data, f"{part}_format": str(weight.format)}
        given |= {f"{part}_{field}": each for field, each in fields.items()}
    lz.moe_experts(**given)
    given[name] = given[name].clone()
    given[name][1, 3] = group
    with lz.scope(debug=debug), pytest.raises(lz.InvalidCallError, match=f"{name}: wanted groups that have a scale"):
        lz.moe_experts(**given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda fields: fields._replace(scale=None), "scale: wanted a tensor"),
        (
            lambda fields: fields._replace(data=fields.data[:, :, 1:]),
            r"data: wanted uint8 \(128, 128\) .* got uint8 \(128, 127\) for each expert",
        ),
        (lambda fields: fields._replace(scale=fields.scale.view(torch.uint8) | 255), "scale: wanted finite numbers"),
        (lambda fields: fields._replace(data=fields.data[0]), "data: wanted the 4 experts in front"),
    ],
)
def test_a_stack_is_checked_where_it_is_made(change, told):
    with pytest.raises(lz.InvalidCallError, match=told):
        lz.QuantizedWeight("mxfp4", GATE_UP.shape, *change(GATE_UP.fields))


def test_a_stack_in_any_other_place_is_refused_by_its_name():
    rows = torch.zeros(2, GATE_UP.shape[2])
    with pytest.raises(lz.InvalidCallError, match=r"weight: wanted one weight \(N, K\), got a QuantizedWeight"):
        lz.quantized_linear(rows, GATE_UP)
    given = {"expert_ids": torch.zeros(2, 1, dtype=torch.int32), "expert_weights": GATE_UP}
    with pytest.raises(lz.InvalidCallError, match="expert_weights: wanted a tensor, got a QuantizedWeight"):
        lz.moe_experts(rows, GATE_UP, DOWN, **given)


def test_a_stack_of_unlike_weights_is_refused():
    with pytest.raises(lz.InvalidCallError, match=r"weights\[1\]: wanted QuantizedWeight\(mxfp4"):
        lz.QuantizedWeight.stack([GATE_UP[0], DOWN[0]])
    with pytest.raises(lz.InvalidCallError, match="wanted at least one"):
        lz.QuantizedWeight.stack([])
    with pytest.raises(lz.InvalidCallError, match=r"codes: wanted one weight, got .*weight\[e\]\.codes"):
        _ = stacks("compressed-tensors:bits=4,group=32")[0].codes


FAULTS = {
    "swapped nibbles": lambda codes: replace(codes, numbers=codes.numbers.unflatten(1, (-1, 2)).flip(-1).flatten(1)),
    "the next row's scale": lambda codes: replace(codes, scale=codes.scale.roll(1, 0)),
    "a zero point off by one": lambda codes: replace(codes, numbers=codes.numbers + 1),
    "the next expert": None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_mistake_in_its_weights_is_found(fault, monkeypatch):
    """The float64 judge sees it in two of some hundred random calls."""
    mistake, found = FAULTS[fault], 0

    def wrong(self, number):
        if mistake is None:
            number = (number + 1) % self.shape[0]
        weight = lz.QuantizedWeight.unchecked(self.of, self.shape[1:], self.given.of_expert(number))
        if mistake is None or self.of.scheme not in GROUPED:
            return weight.dequantized(self.dtype)
        return mistake(weight.codes).dequantized(torch.float32).to(self.dtype)

    for number in range(300):
        call = random_call(7, number, function="moe_experts", dtype=torch.float32)
        text = call.arguments.get("gate_up_format")
        grouped = text is not None and lz.WeightFormat.of(text).scheme in GROUPED
        if not grouped or call.arguments["input"].shape[1] % 2 or len(call.arguments["gate_up_weight"]) < 2:
            continue

        def run(**arguments):
            with monkeypatch.context() as patched:
                patched.setattr(Stack, "__getitem__", wrong)
                return QUANTIZED.reference(**arguments)

        found += bool(compare.check(call, run=run))
        if found == 2:
            return
    raise AssertionError(f"{fault}: {found} calls found it")


def test_every_scheme_is_drawn():
    drawn = {
        lz.WeightFormat.of(text).scheme
        for number in range(200)
        if (text := random_call(3, number, function="moe_experts", dtype=torch.float32).arguments.get("gate_up_format"))
    }
    assert drawn == set(SCHEMES)


def canonical(rows, ids, shares, weights, **given):
    """A call as its judge sees it."""
    call = {"input": rows, "expert_ids": ids, "expert_weights": shares, **given}
    for name, weight in zip(("gate_up", "down"), weights, strict=True):
        call |= {f"{name}_weight": weight.fields.data, f"{name}_scale": weight.fields.scale}
        call[f"{name}_format"] = str(weight.format)
    return call


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_what_is_added_up_covers_weights_that_are_rounded(activation):
    """Rows whose products with the gates' weights cancel: each gate is a small sum of large terms."""
    weights = stacks("fp8:group=128,rows=128")
    rows, ids, shares = around(64, torch.float64)
    ids, shares, exact = ids[:, :1] * 0, shares[:, :1].double(), weights[0][0].dequantized(torch.float64)
    gates = exact[::2] if activation == "swiglu_oai" else exact[:INNER]
    rows -= rows @ gates.T @ torch.linalg.pinv(gates).T
    call = canonical(rows, ids, shares, weights, activation=activation)
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        dense = [torch.stack([each.dequantized(torch.float64).to(dtype).double() for each in w]) for w in weights]
        results.append(moe_experts(rows, *dense, ids, shares, activation=activation))
    moved, eps = (results[0] - results[1]).abs(), torch.finfo(torch.bfloat16).eps
    assert (moved > 3.0 * eps * summed(call)).any(), "what experts of other weights are allowed"
    assert (moved <= 3.0 * eps * QUANTIZED.judge.basis(call)).all()


def test_an_expert_that_a_token_has_twice_is_off_the_same_way_both_times():
    weights = stacks("fp8")
    rows, ids, shares = around(3, torch.float64)
    once = QUANTIZED.judge.basis(canonical(rows, ids[:, :1], shares[:, :1].double(), weights))
    four = QUANTIZED.judge.basis(canonical(rows, ids[:, :1].expand(3, 4), shares[:, :1].double().expand(3, 4), weights))
    torch.testing.assert_close(four, 4.0 * once)

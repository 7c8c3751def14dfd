"""CUDA kernels of float8, MX, NVFP4 and GGUF: what each is offered, and how its library is called."""

from __future__ import annotations

import types

import pytest
import torch
from weight_operators import BF16, F16, LIBRARIES, product, refused, stand_in, weight

import layerzero as lz
from drawing import at_once
from layerzero.backends import humming
from layerzero.backends.vllm import grouped_linear, marlin
from layerzero.core.device import Device
from layerzero.core.errors import NotPreparedError
from layerzero.core.facts import FactsBuilder
from layerzero.core.reasons import ReasonCode
from layerzero.engine.legality import limit_findings
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.ops.linear.quantized import QUANTIZED
from layerzero.ops.quantize.weight_format import Fields

WRONG, DTYPE, PLATFORM = ReasonCode.CONSTRAINT_FAILED, ReasonCode.DTYPE_UNSUPPORTED, ReasonCode.PLATFORM_MISMATCH
FP8 = "fp8:group=128,rows=128"

CASES = [
    ("vllm.marlin_fp8", {"text": FP8}, set()),
    ("vllm.marlin_fp8", {"text": "fp8:rows=0", "dtype": F16}, set()),
    ("vllm.marlin_fp8", {"text": "fp8:group=32,rows=4"}, {WRONG}),
    ("vllm.marlin_fp8", {"text": FP8, "device": "MI300X"}, {PLATFORM}),
    ("vllm.marlin_mx", {"text": "mxfp4"}, set()),
    ("vllm.marlin_mx", {"text": "mxfp8"}, set()),
    ("vllm.marlin_mx", {"text": "mxfp4", "dtype": F16}, {DTYPE}),
    ("vllm.marlin_mx", {"text": "nvfp4"}, {WRONG}),
    ("vllm.marlin_nvfp4", {"text": "nvfp4", "dtype": F16}, set()),
    ("vllm.marlin_nvfp4", {"text": "nvfp4", "outputs": 96}, {WRONG}),
    ("humming.linear_fp8", {"text": FP8}, set()),
    ("humming.linear_fp8", {"text": "fp8:group=32"}, {WRONG}),
    ("humming.linear_mx", {"text": "mxfp4"}, set()),
    ("humming.linear_mx", {"text": "mxfp4", "dtype": F16}, {DTYPE}),
    ("humming.linear_nvfp4", {"text": "nvfp4:over"}, set()),
    ("humming.linear_nvfp4", {"text": "mxfp4"}, {WRONG}),
    ("vllm.marlin_mx", {"text": "mxfp4:rotation=32"}, set()),
    ("vllm.marlin_mx", {"text": "nvfp4:rotation=16"}, {WRONG}),
    ("vllm.marlin_nvfp4", {"text": "nvfp4:over,rotation=128"}, set()),
    ("vllm.marlin_nvfp4", {"text": "nvfp4:rotation=16", "dtype": F16}, {DTYPE}),
    ("humming.linear_mx", {"text": "mxfp4:rotation=32"}, set()),
    ("humming.linear_nvfp4", {"text": "nvfp4:rotation=16"}, set()),
    ("vllm.gguf", {"text": "gguf:Q4_K"}, set()),
    ("vllm.gguf", {"text": "gguf:MXFP4"}, {WRONG}),
    ("vllm.gguf", {"text": "gguf:Q4_K", "dtype": torch.float32}, {DTYPE}),
    ("vllm.gguf", {"text": "gguf:Q4_K", "device": "T4"}, {ReasonCode.SM_TOO_OLD}),
]
FORMATS = {
    "block": (FP8, "fp8", "fp8:rows=0", "fp8:group=128"),
    "mx": (
        *("mxfp4", "mxfp8", "nvfp4", "nvfp4:over"),
        *("mxfp4:rotation=32", "nvfp4:rotation=16", "nvfp4:over,rotation=128"),
    ),
    "gguf": tuple(f"gguf:{kind}" for kind in marlin._KINDS),
}


@at_once("kernel, given, wanted", CASES)
def test_each_kernel_says_what_it_is_not_for(kernel, given, wanted):
    assert refused(kernel, **given) - {ReasonCode.JIT_DISABLED} == wanted  # nothing is built for a GPU here


@pytest.mark.parametrize("kernel", sorted({kernel for kernel, _, _ in CASES}))
def test_each_library_is_called_as_it_reads_numbers(monkeypatch, kernel):
    stand_in(monkeypatch)
    operation = REGISTRY.kernel(kernel).operations[0].rpartition(".")[2]
    generator, taken = torch.Generator().manual_seed(3), []
    for text in FORMATS[operation]:
        known = weight(text)
        for dtype in (F16, BF16):
            input, bias = torch.randn(2, 3, 256, generator=generator).to(dtype), torch.randn(128).to(dtype)
            got = product(operation, kernel, known, input, bias)
            if got is None:
                continue
            taken.append(text)
            exact = input.double() @ known.dequantized(torch.float64).t() + bias.double()
            assert (got.dtype, got.shape) == (dtype, exact.shape)
            torch.testing.assert_close(got.double(), exact, rtol=0.0, atol=0.06 if dtype is BF16 else 0.01)
    wanted = {given["text"] for named, given, codes in CASES if named == kernel and not codes}
    assert wanted <= set(taken)


BY_SCHEME = {"torch.dequantized_mx", "torch.kept_mx", "reference.mlp.linear.quant.mx"}
"""What reads each format as its scheme says."""


@pytest.mark.parametrize("rotation", ["", "rotation=32"])
@pytest.mark.parametrize("device", ["H100", "B200", "MI300X", "MI355X", "cpu"])
def test_no_kernel_that_reads_mxfp4_is_offered_nvfp4(device, rotation):
    taken = {}
    for text in ("mxfp4", "nvfp4", "nvfp4:over"):
        whole = f"{text}{',' if ':' in text else ':' * bool(rotation)}{rotation}".rstrip(",")
        given = torch.empty(2, 256, dtype=BF16), weight(whole)
        report = lz.explain("quantized_linear", *given, device=device, libraries=LIBRARIES)
        built = {ReasonCode.JIT_DISABLED, ReasonCode.NOT_VETTED, ReasonCode.PACKED_WEIGHTS_REQUIRED}
        taken[text] = {
            each.kernel.id for each in report.candidates if {reason.code for reason in each.reasons} <= built
        }
    assert taken["nvfp4"] == taken["nvfp4:over"]
    assert (taken["mxfp4"] & taken["nvfp4"]) - BY_SCHEME == set()
    assert "torch.dequantized_mx" in taken["nvfp4"]
    assert len(taken["nvfp4"] - BY_SCHEME) >= (2 if device in ("H100", "B200") else 0)


def test_tensors_of_nvfp4_are_none_of_mxfp4():
    data, scale, _, _, second = weight("nvfp4").fields
    x = torch.randn(2, 256).to(BF16)
    for more in ({}, {"second_scale": second}):
        with pytest.raises(lz.InvalidCallError, match="weight_scale: wanted"):
            lz.quantized_linear(x, data, scale, weight_format="mxfp4", **more)
    with pytest.raises(lz.InvalidCallError, match="scale: wanted"):
        lz.QuantizedWeight.from_mx(data, scale, of="mxfp4")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_scales_without_a_sign_are_what_they_were(dtype):
    scale = torch.tensor([0.0, 0.5, 3.0, 448.0]).to(torch.float8_e4m3fn).repeat(64, 2)
    eighths, factor = marlin.unsigned_scale(scale, dtype)
    numbers = (eighths.view(torch.uint8).to(torch.int16) << 7).view(F16).float()
    assert torch.equal(numbers, scale.t().float() * 128.0)  # all outputs alike
    assert (eighths.shape, factor) == ((8, 64), 1.0)


@pytest.mark.parametrize(
    ("scale", "dtype", "wanted"),
    [([-1.0, 1.0], F16, "from 0 on"), ([448.0, 0.001953125], BF16, "from 2 to 65504 times one power of two")],
)
def test_scales_that_marlin_cannot_hold_are_refused_with_the_reason(scale, dtype, wanted):
    with pytest.raises(NotPreparedError, match=wanted):
        marlin.unsigned_scale(torch.tensor(scale).to(torch.float8_e4m3fn).repeat(64, 4), dtype)


def test_a_scale_that_marlins_bias_makes_infinite_is_refused(monkeypatch):
    stand_in(monkeypatch)
    known = weight(FP8)
    large = lz.QuantizedWeight.unchecked(
        known.format, known.shape, Fields(known.fields.data, known.fields.scale + 300.0)
    )
    with pytest.raises(NotPreparedError, match=r"stay finite in torch\.bfloat16 times 2\^120"):
        product("block", "vllm.marlin_fp8", large, torch.randn(1, 256).to(BF16))


@pytest.mark.parametrize(("text", "field", "code"), [
    *((text, "data", code) for text in (FP8, "fp8", "mxfp8") for code in (127, 255)),
    ("mxfp4", "scale", 255), ("mxfp8", "scale", 255), ("nvfp4", "scale", 127),
])  # fmt: skip
def test_nan_of_which_marlin_makes_a_number_is_refused(text, field, code):
    """Its kernel shifts the bits of e4m3 and e8m0 into place, and so does Humming's: NaN is 480 then, or infinity."""
    known = weight(text)
    made = {"mx": marlin.micro_tensors, "nv": marlin.micro_tensors}.get(text[:2], marlin.block_tensors)
    made(known, BF16)
    humming._of_weight(known, BF16)
    wrong = getattr(known.fields, field).clone()
    wrong.view(torch.uint8)[3, 1 if field == "scale" else 70] = code
    fields = known.fields._replace(**{field: wrong})
    spoiled = lz.QuantizedWeight.unchecked(known.format, known.shape, fields)
    for each in (made, humming._of_weight):
        with pytest.raises(NotPreparedError, match="wanted no NaN for"):
            each(spoiled, BF16)


@pytest.mark.parametrize("rows", [(), (1,), (128,), (128, 1)], ids=str)
@pytest.mark.parametrize("held", ["codes", "QuantizedWeight"])
def test_marlin_takes_float8_by_row_without_its_scales(monkeypatch, rows, held):
    stand_in(monkeypatch)
    known, scale = weight("fp8"), torch.rand(rows) + 0.5
    codes, operation = known.fields.data, QUANTIZED[None]
    packed = lz.PackedWeight(codes) if held == "codes" else known.packed
    given = {"bias": torch.randn(128).to(BF16), "packed": packed}
    for shape in ((3, 256), (2, 3, 256)):
        call = {"input": torch.randn(shape).to(BF16), "weight": codes, "weight_scale": scale, **given}
        device = Device.named("H100")
        facts = FactsBuilder(operation).of_valid({**operation.schema.neutral, **call}, device=device)
        declared = REGISTRY.kernel("vllm.marlin_fp8_rows")
        assert not any(limit_findings(declared, facts))
        got = declared.load(facts)(call["input"], codes, scale, **given)
        exact = call["input"].double() @ (codes.double() * scale.double().reshape(-1, 1)).t() + given["bias"].double()
        assert (got.dtype, got.shape) == (BF16, exact.shape)
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=0.1 * float(exact.abs().mean()))
    spoiled = codes.clone()
    spoiled.view(torch.uint8)[3, 70] = 127
    given["packed"] = lz.PackedWeight(spoiled)
    with pytest.raises(NotPreparedError, match="wanted no NaN for"):
        declared.load(facts)(call["input"], spoiled, scale, **given)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_float8_rows_go_to_cutlass_with_their_scales(monkeypatch, dtype):
    def scaled_mm(output, a, b, a_scale, b_scale, bias):
        assert (a.dtype, b.dtype) == (torch.float8_e4m3fn,) * 2
        assert (a.stride(1), b.stride(0)) == (1, 1)
        assert (a_scale.shape, b_scale.shape) == ((len(a), 1), (b.shape[1],))
        output.copy_((a.float() @ b.float()) * a_scale * b_scale + bias.float())

    names = {"cutlass_scaled_mm": scaled_mm, "dynamic_scaled_int8_quant": None}
    library = types.SimpleNamespace(**{name: types.SimpleNamespace(default=each) for name, each in names.items()})
    monkeypatch.setattr(grouped_linear, "operators", lambda *_: library)
    operation, declared = OPERATIONS["mlp.linear.quant.fp8_e4m3"], REGISTRY.kernel("vllm.fp8_linear")
    numbers, scale = lz.quantize(torch.randn(48, 64) / 8, "fp8_e4m3", per="row")
    input, bias = torch.randn(2, 3, 64).to(dtype), torch.randn(48).to(dtype)
    given = {**operation.schema.neutral, "input": input, "weight": numbers, "weight_scale": scale, "bias": bias}
    facts = FactsBuilder(operation).of_valid(given, device=Device.named("H100"))
    got = declared.load(facts)(input, numbers, scale, bias=bias)
    wanted = operation.reference(input, numbers, scale, bias)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("device", "wanted"), [("H100", set()), ("A100", {ReasonCode.SM_TOO_OLD})])
def test_float8_products_begin_with_ada(device, wanted):
    numbers, scale = lz.quantize(torch.randn(48, 64) / 8, "fp8_e4m3", per="row")
    report = lz.explain(
        "quantized_linear",
        torch.randn(4, 64).to(BF16),
        numbers,
        scale,
        activations="fp8_e4m3",
        device=device,
        libraries=LIBRARIES,
    )
    assert {reason.code for reason in report.reasons("vllm.fp8_linear")} == wanted

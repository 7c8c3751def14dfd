"""Products with codes by group: those of other libraries' modules, and four bits on request."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coded_modules import GROUP, INPUTS, OUTPUTS, OfCodes, Product, module, numbers, off, weight
from torch import Tensor, nn
from torch.nn import functional

import layerzero as lz
from layerzero.integrations.optimize import selection
from layerzero.integrations.optimize.modules import quantised
from layerzero.integrations.optimize.swaps.codes import call
from layerzero.integrations.optimize.times import timing
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight_format import packed

TEXTS = (
    f"gptq:bits=4,group={GROUP},zeros=minus_one",
    f"gptq:bits=4,group={GROUP},zeros=stored",
    f"gptq:bits=4,group={GROUP},zeros=minus_one,permuted=True",
    f"awq:bits=4,group={GROUP},zeros=stored",
    f"compressed-tensors:bits=4,group={GROUP}",
    f"marlin:bits=4,group={GROUP}",
)


def taken(report: Any) -> dict[str, str]:
    return {each.path: each.calls for each in report.replaced if each.kind == "int4"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_codes_by_group_of_other_libraries_are_served(text: str, dtype: torch.dtype, unmeasured: None) -> None:
    model, rows = nn.Sequential(module(text, dtype)).eval(), torch.randn(5, INPUTS).to(dtype)
    exact = 1e-5 if dtype is torch.float32 else 6e-3
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model)
        assert taken(report) == {"0": "lz.quantized_linear with int4 weights and rows as they are"}
        assert model[0].__dict__["_layerzero"].weight.format == lz.WeightFormat.of(text)
        assert off(model(rows), own) < exact
        assert off(copy.deepcopy(model)(rows), own) < exact
        scales = model[0].of.fields.scale
        scales.mul_(2.0)
        assert off(model(rows), 2 * own - model[0].bias) < exact
        report.undo()
        scales.div_(2.0)
        assert torch.equal(model(rows), own)


@pytest.mark.parametrize(
    "names",
    [
        {"qweight": torch.zeros(16, 64, dtype=torch.int32), "qzeros": torch.zeros(4, 8), "scales": torch.ones(64)},
        {"qweight": torch.zeros(16, 64, dtype=torch.int32), "qzeros": torch.zeros(0, 8), "scales": torch.ones(0, 64)},
        {"weight_packed": torch.zeros(64, 16), "weight_scale": torch.ones(64, 4), "weight_shape": torch.tensor([64])},
        {"weight_packed": torch.zeros(64, 16), "weight_scale": torch.ones(64, 4), "weight_shape": torch.zeros(2)},
    ],
)
def test_tensors_of_the_same_names_that_hold_something_else_stay(names: dict[str, Tensor]) -> None:
    stranger = Product(weight("compressed-tensors:bits=4,group=32"), torch.float32, **names)
    del stranger.in_features
    report = lz.optimize(nn.Sequential(stranger).eval())
    assert not report.replaced


def test_a_module_that_gives_something_else_stays(unmeasured: None) -> None:
    model = nn.Sequential(module(TEXTS[0], torch.float32)).eval()
    model[0].times = 1.01
    report = lz.optimize(model)
    assert not taken(report)
    assert "was off by" in next(each.why for each in report.left if each.path == "0")


class Unpacked(OfCodes):
    """As torchao's IntxUnpackedToInt8Tensor: codes of four bits in int8 within a tensor's own class."""

    PARTS = ("qdata", "scale", "zero_point")
    activation_quantization, target_dtype = None, torch.int4

    def numbers(self) -> Tensor:
        return (self.qdata - self.zero_point.repeat_interleave(GROUP, 1)) * self.scale.repeat_interleave(GROUP, 1)


def test_codes_of_four_bits_within_a_tensors_own_class_are_served(unmeasured: None) -> None:
    model, rows = nn.Sequential(nn.Linear(INPUTS, OUTPUTS)).eval(), torch.randn(5, INPUTS)
    groups = OUTPUTS, INPUTS // GROUP
    qdata, zero = torch.randint(-8, 8, (OUTPUTS, INPUTS), dtype=torch.int8), torch.randint(-3, 4, groups).to(torch.int8)
    model[0].weight = nn.Parameter(Unpacked(qdata, torch.rand(groups) + 0.1, zero), requires_grad=False)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model)
        assert taken(report) == {"0": "lz.quantized_linear with int4 weights and rows as they are"}
        assert off(model(rows), own) < 1e-5


def test_torchaos_codes_of_four_bits_are_served(unmeasured: None) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    model, rows = nn.Sequential(nn.Linear(INPUTS, OUTPUTS)).eval(), torch.randn(5, INPUTS)
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity.PerGroup(GROUP))
    with torch.no_grad():
        quantization.quantize_(model, config)
        own = model(rows)
        report = lz.optimize(model)
        assert taken(report) == {"0": "lz.quantized_linear with int4 weights and rows as they are"}
        assert off(model(rows), own) < 1e-5


class Blocks(nn.Module):
    """A product as other libraries keep float8, codebooks, int8 and GGUF's blocks."""

    def __init__(self, of: lz.QuantizedWeight, weight: Any, *, rounds: bool = False, **attributes: Any) -> None:
        super().__init__()
        self.of, self.rounds, self.times, self.weight = of, rounds, 1.0, weight
        for name, each in attributes.items():
            setattr(self, name, nn.Parameter(each, requires_grad=False) if isinstance(each, Tensor) else each)

    def forward(self, input: Tensor) -> Tensor:
        rows = (
            lz.dequantize(*lz.quantize(input, "int8", per="row"), dtype="int8").to(input.dtype)
            if self.rounds
            else input
        )
        return functional.linear(rows, self.of.dequantized(torch.float32).to(input.dtype)) * self.times


class Params4bit(nn.Parameter):
    """As bitsandbytes': codes with a state, which a copy has, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        made = Params4bit(self.data.clone(), requires_grad=False)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def frozen(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def as_float8(text: str = "fp8:group=128,rows=16", **more: Any) -> Blocks:
    of = lz.quantize_weight(numbers(), text)
    return Blocks(of, frozen(of.fields.data), weight_scale_inv=of.fields.scale, block_size=(16, 128), **more)


def as_codebook(*, converted: bool = False, kind: str = "nf4") -> Blocks:
    of = lz.quantize_weight(numbers(), f"{kind}:group=64")
    data, absmax, *_ = of.fields
    if converted:  # as the first call of bitsandbytes on a CPU lays them out
        absmax = absmax.to(torch.bfloat16)
        of = lz.QuantizedWeight(of.format, of.shape, data, absmax.float())
        codes = torch.cat((data >> 4, data & 15), 1).view(OUTPUTS // 32, 32, 128, 2).transpose(1, 2).reshape(-1, 64)
        data, absmax = (codes[:, 32:] << 4 | codes[:, :32]).view(OUTPUTS, 128), absmax.view(OUTPUTS, 4).t().contiguous()
    weight = Params4bit(data, requires_grad=False)
    weight.quant_state = SimpleNamespace(
        absmax=absmax, nested=False, blocksize=64, quant_type=kind, shape=of.shape, packing_format_for_cpu=converted
    )
    return Blocks(of, weight)


def as_int8(*, called: bool) -> Blocks:
    codes, scale = lz.quantize(numbers(), "int8", per="row")
    of = lz.QuantizedWeight("compressed-tensors:bits=8", codes.shape, packed((codes.short() + 128).byte(), 8), scale)
    weight = Params4bit(codes, requires_grad=False)
    state = SimpleNamespace(SCB=scale.flatten() * 127)
    if not called:
        weight.SCB, state.SCB = state.SCB, None
    return Blocks(of, weight, rounds=True, state=state)


def as_gguf(number: int, kind: str) -> Blocks:
    of = lz.WeightFormat("gguf", kind)
    known = lz.QuantizedWeight(of, (OUTPUTS, 256), *scheme_of(of).random(of, OUTPUTS, 256, None))
    return Blocks(known, frozen(known.fields.data), ggml_type=number)


OTHERS: dict[str, Any] = {
    "float8 in blocks": (as_float8, "fp8"),
    "float8 in blocks, rows rounded": (lambda: as_float8(rounds=True), "fp8"),
    "float8 by row": (lambda: as_float8("fp8"), "fp8"),
    "float8 by one": (lambda: as_float8("fp8:rows=0"), "fp8"),
    "nf4": (as_codebook, "nf4"),
    "fp4 laid out anew": (lambda: as_codebook(converted=True, kind="fp4"), "fp4"),
    "int8 before its first call": (lambda: as_int8(called=False), "int8"),
    "int8": (lambda: as_int8(called=True), "int8"),
    "gguf Q4_0": (lambda: as_gguf(2, "Q4_0"), "gguf"),
    "gguf Q6_K": (lambda: as_gguf(14, "Q6_K"), "gguf"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("made", OTHERS)
def test_other_formats_of_other_libraries_are_served(made: str, dtype: torch.dtype, unmeasured: None) -> None:
    make, kind = OTHERS[made]
    model, rows = nn.Sequential(make()).eval(), torch.randn(5, 256).to(dtype)
    exact = functional.linear(rows.double(), model[0].of.dequantized(torch.float64))
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model)
        assert [(each.path, each.kind) for each in report.replaced] == [("0", kind)]
        assert off(model(rows), exact) < (1e-5 if dtype is torch.float32 else 6e-3)
        assert off(copy.deepcopy(model)(rows), exact) < (1e-5 if dtype is torch.float32 else 6e-3)
        data = model[0].weight
        data.view(torch.uint8).copy_(data.roll(1, 0).view(torch.uint8))  # of rows, blocks of rows or bytes
        assert off(model(rows), exact) > 0.1
        data.view(torch.uint8).copy_(data.roll(-1, 0).view(torch.uint8))
        report.undo()
        assert torch.equal(model(rows), own)
        model[0].times = 1.01
        assert not lz.optimize(model).replaced


@pytest.mark.parametrize(("limit", "kept"), [(None, 1), (10**9, 1), (OUTPUTS * 256 * 2, 0), (0, 0)])
def test_numbers_of_a_quantised_weight_are_kept_within_the_bound(
    limit: int | None, kept: int, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_keep_what_gains", lambda *_: True)
    model, rows = nn.Sequential(as_codebook()).eval(), torch.randn(5, 256)
    with torch.no_grad():
        exact = functional.linear(rows, model[0].of.dequantized(torch.float32))
        report = lz.optimize(model, rows, memory_limit=limit)
        for _ in range(3):
            assert off(model(rows), exact) < 1e-5
        assert report.extra_bytes == kept * OUTPUTS * 256 * 4
        kernel = lz.trace(model, rows).rows[0].kernel
    assert kernel == ("torch.kept_codebook" if kept else "torch.dequantized_codebook")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitsandbytes_codes_of_four_bits_are_served(kind: str, dtype: torch.dtype, unmeasured: None) -> None:
    modules = pytest.importorskip("bitsandbytes.nn", reason="bitsandbytes is not installed")
    made = modules.Linear4bit(256, OUTPUTS, bias=False, compute_dtype=dtype, quant_type=kind)
    made.weight = modules.Params4bit(numbers().to(dtype), requires_grad=False, quant_type=kind)
    model, rows = nn.Sequential(made.to("cpu")).eval(), torch.randn(5, 256).to(dtype)
    with torch.no_grad():
        report = lz.optimize(model)
        assert [each.kind for each in report.replaced] == [kind]
        got = model(rows)
        report.undo()
        assert off(got, model(rows)) < 6e-3


def test_bitsandbytes_int8_is_served(unmeasured: None) -> None:
    modules = pytest.importorskip("bitsandbytes.nn", reason="bitsandbytes is not installed")
    made = modules.Linear8bitLt(256, OUTPUTS, bias=False, has_fp16_weights=False, threshold=6.0)
    made.load_state_dict({"weight": numbers()})
    model, rows = nn.Sequential(made.to("cpu")).eval(), torch.randn(5, 256).to(torch.bfloat16)
    with torch.no_grad():
        report = lz.optimize(model)
        assert [each.kind for each in report.replaced] == ["int8"]
        got = model(rows)
        report.undo()
        assert off(got, model(rows)) < 0.02


@pytest.mark.parametrize("activations", [None, "int8"], ids=str)
@pytest.mark.parametrize(("asked", "group"), [("int4", 128), ("int4:32", 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_quantised_to_four_bits_when_asked_for(
    asked: str, group: int, activations: str | None, dtype: torch.dtype, unmeasured: None
) -> None:
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(256, 96), nn.Linear(96, 40)).eval().to(dtype), torch.randn(7, 256).to(dtype)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model, weights=asked, activations=activations)
        assert set(taken(report)) == {"0", "1"}
        assert [each.weight.format.group for each in report.made] == [group, 32]
        assert all(0.05 < each.loss < 0.12 for each in report.made)
        assert 0.05 < off(model(rows), own) < 0.2
        assert "2 weights in int4: " in str(report)
        model[0].weight.data.zero_()
        assert torch.allclose(model[0](rows), model[0].bias.expand(7, 96))
        report.undo()
        assert torch.allclose(model[0](rows), model[0].bias.expand(7, 96))


def test_layers_that_lose_too_much_and_rows_that_no_group_divides_stay(unmeasured: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 96), nn.Linear(96, 40), nn.Linear(40, 24)).eval()
    both = lz.optimize(model, weights="int4", accuracy=1.0)
    losses = {each.path: each.error for each in both.replaced if each.kind == "int4"}
    both.undo()
    more, less = sorted(losses, key=lambda path: -losses[path])
    bound = (losses[more] + losses[less]) / 2
    report = lz.optimize(model, weights="int4", accuracy=bound)
    said = {each.path: each.why for each in report.left if "int4" in each.why}
    assert set(taken(report)) == {less}
    assert f"of its output, accuracy={bound:g} allows less" in said[more]
    assert "no group of 32 divides its 40 columns" in said["2"]


def test_a_weight_stays_as_it_is_on_a_gpu_where_no_kernel_takes_its_codes(
    monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    """Stands in for a GPU by a CPU whose products are not timed."""
    model, rows = nn.Sequential(nn.Linear(256, 96)).eval(), torch.randn(7, 256)
    monkeypatch.setattr(timing, "TIMED", frozenset())
    with lz.scope(locks={"mlp.linear.quant": "torch.quantized_linear"}):
        report = lz.optimize(model, (rows,), weights="fp8", isolate=False, rounds=1)
    assert not taken(report)
    (why,) = [each.why for each in report.left if "fp8" in each.why]
    assert "torch.quantized_linear writes a weight of fp8 out before each product" in why


@pytest.mark.parametrize("text", TEXTS[3:])
def test_rows_are_rounded_where_that_is_asked_for_and_loses_little(text: str, unmeasured: None) -> None:
    model, rows = nn.Sequential(module(text, torch.float32)).eval(), torch.randn(5, INPUTS)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model, activations="int8")
        assert taken(report) == {"0": "lz.quantized_linear with int4 weights and rows int8"}
        assert off(model(rows), own) < 0.03
        report.undo()
        report = lz.optimize(model, activations="int8", accuracy=0.0)
        assert taken(report) in (
            {"0": "lz.quantized_linear with int4 weights and rows as they are"},
            {"0": "lz.quantized_linear with int4 weights and rows int8"},  # of a kernel that rounds none
        )
        report.undo()


@pytest.mark.parametrize(("number", "kind"), [(8, "Q8_0"), (12, "Q4_K"), (14, "Q6_K")])
def test_rows_of_ggufs_blocks_are_rounded_where_that_is_asked_for(number: int, kind: str, unmeasured: None) -> None:
    model, rows = nn.Sequential(as_gguf(number, kind)).eval(), torch.randn(5, 256)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model, activations="int8")
        assert [each.calls for each in report.replaced] == ["lz.quantized_linear with gguf weights and rows int8"]
        assert off(model(rows), own) < 0.03
        report.undo()
        assert torch.equal(model(rows), own)


def test_rounded_rows_are_judged_on_the_inputs_and_a_report_says_why_they_stay(
    monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    def lossy(state: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        return call(state, rows, bias) * (2.0 if state.activations and rows.abs().max() > 500 else 1.0)

    monkeypatch.setattr(quantised, "call", lossy)
    model = nn.Sequential(module(TEXTS[4], torch.float32)).eval()
    report = lz.optimize(model, (1000 * torch.randn(5, INPUTS),), activations="int8", accuracy=0.5, rounds=1)
    assert not [each.calls for each in report.replaced if "rows int8" in each.calls]
    (why,) = [each.why for each in report.left if each.why.startswith("activations='int8'")]
    assert "rounded rows lose 1 of its output, accuracy=0.5 allows less; its rows stay as they are" in why


def test_a_report_says_that_a_model_has_no_weights_whose_rows_could_be_rounded(unmeasured: None) -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    report = lz.optimize(model, activations="int8")
    (why,) = [each.why for each in report.left if each.why.startswith("activations='int8'")]
    assert "no module that was looked at has a weight quantised by group or in GGUF's blocks" in why
    assert "pass weights='int8'" in why


def test_scales_of_one_float8_number_are_read_as_they_are() -> None:
    model, rows = nn.Linear(16, 24).eval(), torch.randn(3, 16)
    model.scale = nn.Parameter(torch.ones(24).to(torch.float8_e8m0fnu), requires_grad=False)
    wanted = model(rows)
    report = lz.optimize(model)
    assert {each.path for each in (*report.left, *report.replaced)} == {""}
    torch.testing.assert_close(model(rows), wanted)

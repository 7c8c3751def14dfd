"""Float8 on request, and formats of weights that are timed, on the sizes of calls and on others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from coded_modules import Product, off
from torch import Tensor, nn
from torch.nn import functional

import layerzero as lz
from layerzero.backends.torch.quantized_linear import AS_NUMBERS
from layerzero.core.device import Device
from layerzero.integrations.optimize import selection
from layerzero.integrations.optimize.modules import weights
from layerzero.integrations.optimize.swaps.swap import Way
from layerzero.integrations.optimize.times import timing
from layerzero.ops.linear.weight_formats import without_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_quantised_to_float8_when_asked_for(dtype: torch.dtype, unmeasured: None) -> None:
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(256, 96), nn.Linear(96, 40)).eval().to(dtype), torch.randn(7, 256).to(dtype)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model, weights="fp8")
        assert {each.path for each in report.replaced if each.kind == "fp8"} == {"0", "1"}
        assert all(0.015 < each.loss < 0.04 for each in report.made)
        assert 0.005 < off(model(rows), own) < 0.06
        assert "2 weights in fp8: " in str(report)
        model[0].weight.data.zero_()
        assert torch.allclose(model[0](rows), model[0].bias.expand(7, 96))
        report.undo()
    with pytest.raises(lz.InvalidCallError, match="activations: wanted None with weights='fp8'"):
        lz.optimize(model, weights="fp8", activations="int8")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("of", ["int8", "int4", "fp8", "auto"])
def test_a_weight_that_is_not_finite_keeps_its_own_code(of: str, value: float, unmeasured: None) -> None:
    """Else its codes gave a finite number where the product has none, those of before did, or the call raised."""
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(256, 96), nn.Linear(96, 32)).eval(), torch.randn(7, 256)
    with torch.no_grad():
        report = lz.optimize(model, weights=of, accuracy=0.2)
        assert {each.path for each in report.replaced if each.kind in of or of == "auto"} >= {"0", "1"}
        model(rows)
        model[0].weight[3, 5] = value
        own = functional.linear(rows, model[0].weight, model[0].bias)
        assert all(torch.allclose(model[0](rows), own, equal_nan=True) for _ in range(2))
        model[0].weight[3, 5] = 2.0
        assert 0.001 < off(model[0](rows), functional.linear(rows, model[0].weight, model[0].bias)) < 0.2
        report.undo()
        model[0].weight[3, 5] = value
        report = lz.optimize(model, weights=of, accuracy=0.2)
        assert "its weight is not finite" in next(each.why for each in report.left if each.path == "0")
        assert "1" in {each.path for each in report.replaced}


@pytest.mark.parametrize("of", ["int8", "int4", "fp8"])
def test_a_weight_that_becomes_a_negated_view_or_float8_keeps_its_own_code(of: str, unmeasured: None) -> None:
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(256, 96)).eval().requires_grad_(False), torch.randn(7, 256)
    with torch.no_grad():
        lz.optimize(model, weights=of, accuracy=0.2)
        model(rows)
        model[0].weight.data = torch._neg_view(model[0].weight.data)
        torch.testing.assert_close(model(rows), functional.linear(rows, model[0].weight, model[0].bias))
        model[0].weight.data = model[0].weight.data.resolve_neg().to(torch.float8_e4m3fn)
        with pytest.raises(RuntimeError, match="same dtype"):
            model(rows)


ORDER = ["int4", "fp8", "int8", "int4:32"]


@pytest.mark.parametrize(("accuracy", "kind"), [(0.15, "int4"), (0.05, "fp8"), (None, "fp8"), (0.015, "int8")])
def test_the_fastest_format_within_the_bound_is_taken(
    accuracy: float | None, kind: str, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 96)).eval()
    monkeypatch.setattr(weights.Request, "_fastest", lambda *_, **__: list(ORDER))
    report = lz.optimize(model, weights="auto", accuracy=accuracy)
    assert [each.kind for each in report.replaced] == [kind]
    report.undo()
    report = lz.optimize(model, weights="auto", accuracy=0.001)
    said = next(each.why for each in report.left if each.path == "0")
    assert said.count("[QUANT_ACCURACY_THRESHOLD_EXCEEDED] it loses") == 4
    assert "of its output in fp8, accuracy=0.001 allows less" in said


def test_formats_that_are_one_for_a_layer_are_tried_once(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 128 and of 32 divide 96 columns into the same groups of 32."""
    made: list[str] = []
    usual = weights.Request._made

    def noted(self: weights.Request, module: nn.Module, of: str, **more: Any) -> Any:
        made.append(of)
        return usual(self, module, of, **more)

    monkeypatch.setattr(weights.Request, "_made", noted)
    report = lz.optimize(nn.Sequential(nn.Linear(96, 64)).eval(), weights="auto", accuracy=0.0001)
    assert sorted(made) == sorted(2 * ["fp8", "int4:32", "int8"])  # timed, then computed
    said = next(each.why for each in report.left if each.path == "0")
    assert said.count("it loses") == 3


def test_formats_are_timed_on_the_sizes_of_the_inputs_calls(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bits are said to be fastest for one row, and int8 for many."""
    now, few = [0.0], {"int8": 3.0, "int4": 1.0, "fp8": 2.0}
    monkeypatch.setattr(timing, "CLOCK", lambda: now[0])
    own = weights.call

    def call(state: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        now[0] += few[state.kind] if len(rows) == 1 else 4.0 - few[state.kind]
        return own(state, rows, bias)

    monkeypatch.setattr(weights, "call", call)
    monkeypatch.setattr(selection, "_keep_what_gains", lambda *_: True)
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(512, 96)).eval(), torch.randn(40, 512)
    kinds = []
    for inputs in (rows, rows[:1]):
        report = lz.optimize(model, inputs, weights="auto", accuracy=1.0)
        kinds += [each.kind for each in report.replaced]
        report.undo()
    assert kinds == ["int8", "int4"]


@pytest.mark.parametrize(
    ("rows", "slower", "own", "ours"),
    [
        (1, (256,), (100, 300), (1, 5, 64)),  # of which one token was called: others were timed
        (1, (64, 256), (40, 300), (1, 5)),
        (1, (4,), (5,), (1, 40, 300)),
        (40, (256,), (100, 300), (1, 5, 40)),
        (200, (1,), (1,), (5, 40, 300)),  # long rows were called, so that nothing speaks against longer ones
        (None, (256,), (100, 300), (1, 5, 64)),
    ],
)
def test_sizes_that_no_input_calls_are_left_to_own_code_where_it_is_faster(
    rows: int | None,
    slower: tuple[int, ...],
    own: tuple[int, ...],
    ours: tuple[int, ...],
    unmeasured: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(selection, "_keep_what_gains", lambda *_: True)
    monkeypatch.setattr(weights, "_ratio", lambda _, size: asked.append(size) or (1.7 if size in slower else 0.5))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 96)).eval()
    stock = copy.deepcopy(model)
    with torch.no_grad():
        inputs = None if rows is None else torch.randn(rows, 256)
        report = lz.optimize(model, inputs, weights="int8")
        if not report.made:  # random rows were slower
            pytest.skip(str(report))
        for count in own:
            given = torch.randn(count, 256)
            assert torch.equal(model(given), stock(given)), count
            assert torch.equal(copy.deepcopy(model)(given), stock(given)), count
        for count in ours:
            given = torch.randn(count, 256)
            assert not torch.equal(model(given), stock(given)), count
    assert "of the module's own time" in str(report)
    assert len(asked) == len(set(asked))
    assert not set(asked) & ({1} if rows == 1 else {64} if rows == 40 else {64, 256} if rows == 200 else {1, 4, 64})


def test_a_layer_that_no_input_calls_keeps_its_own_code_for_long_prompts(
    unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_keep_what_gains", lambda *_: True)
    monkeypatch.setattr(weights, "_ratio", lambda _, size: 1.7 if size == weights.LONG else 0.5)
    model = OneOfTwo().eval()
    report = lz.optimize(model, torch.randn(1, 256), weights="int8")
    most = {each.path: each.swap.state.most for each in report.replaced if each.swap is not None}
    assert most == {"called": 64, "other": 64}


def test_sizes_count_as_calls_of_the_product_do(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a prompt begins at 64 rows, a call of 40 is one of few: what it took must not be decided by 4 rows."""

    def timed_alone(_: Any, report: Any, *__: Any) -> bool:
        for each in report.replaced:
            each.swap.state.take((Way.PACKED,) * 3, 64)
        return True

    monkeypatch.setattr(selection, "_keep_what_gains", timed_alone)
    monkeypatch.setattr(weights, "_ratio", lambda _, size: 1.7 if size == 4 else 0.5)
    model = nn.Sequential(nn.Linear(256, 96)).eval()
    given = torch.randn(40, 256)
    with torch.no_grad():
        stock = model(given)
        report = lz.optimize(model, given, weights="int8")
        assert report.made
        assert not torch.equal(model(given), stock)
    assert not report.kept_sizes


class OneOfTwo(nn.Module):
    """Two products, one of which every call takes."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.other = nn.Linear(256, 96), nn.Linear(256, 96)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.called(input)
        return output


def test_a_product_is_timed_beside_the_modules_own_code_on_so_many_rows(
    unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, before, seen = [0.0], weights.call, []
    monkeypatch.setattr(weights, "keep_sizes", lambda _, report: seen.extend(map(replace, report.replaced)))
    monkeypatch.setattr(selection, "_keep_what_gains", lambda *_: True)
    model = nn.Sequential(Timed(256, 96, now)).eval()
    report = lz.optimize(model, torch.randn(1, 256), weights="int8")

    def call(state: Any, given: Tensor, bias: Tensor | None) -> Tensor:
        now[0] += 6.0 * len(given)
        return before(state, given, bias)

    monkeypatch.setattr(weights, "call", call)
    monkeypatch.setattr(timing, "CLOCK", lambda: now[0])
    forms = report.packs[0].forms
    assert weights._ratio(seen[0], 64) == pytest.approx(3.0)
    assert report.packs[0].forms == forms


class Timed(nn.Linear):
    """One that takes two seconds a row, by a clock of its own."""

    def __init__(self, inputs: int, outputs: int, now: list[float]) -> None:
        super().__init__(inputs, outputs)
        self.now = now

    def forward(self, input: Tensor) -> Tensor:
        self.now[0] += 2.0 * len(input)
        return functional.linear(input, self.weight, self.bias)


def fast_int4(dtype: torch.dtype) -> str:
    """What multiplies with four bits as they are; skips where nothing does."""
    weight = without_memory(lz.WeightFormat("compressed-tensors", bits=4, group=128), (96, 256), torch.bfloat16)
    found = lz.explain("quantized_linear", torch.empty(6, 256, dtype=dtype, device="meta"), weight, device="cpu")
    if found.kernel_id is None or found.kernel_id.startswith(AS_NUMBERS):
        pytest.skip(f"no kernel here takes four bits as they are: {found}")
    return found.kernel_id


@pytest.mark.parametrize("of", ["nvfp4", "mxfp4"])
def test_a_format_that_is_asked_for_gives_way_where_no_fast_kernel_takes_it(of: str, unmeasured: None) -> None:
    fast_int4(torch.float32)
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(256, 96)).eval(), torch.randn(7, 256)
    with torch.no_grad():
        own = model(rows)
        said = f"1 weights are in int4 in place of {of}, which no fast kernel takes here"
        with pytest.warns(lz.LayerZeroFallbackWarning, match=said):
            report = lz.optimize(model, weights=of)
        assert [each.kind for each in report.replaced] == ["int4"]
        assert 0.05 < report.made[0].loss < 0.15
        assert said in str(report)
        assert any("; it is in int4 where that gains" in each.why for each in report.left if each.path == "0")
        assert 0.05 < off(model(rows), own) < 0.15
        report.undo()
        with lz.scope(**{"quant.fallback": "never"}):
            report = lz.optimize(model, weights=of)
    why = next(each.why for each in report.left if each.path == "0")
    assert f"[QUANT_FORMAT_UNSUPPORTED] torch.dequantized_mx writes a weight of {of} out" in why
    assert "set quant.fallback to requested for int4" in why
    assert not report.made


@pytest.mark.parametrize(
    ("columns", "accuracy", "said", "tried"),
    [
        (256, 0.02, "[QUANT_ACCURACY_THRESHOLD_EXCEEDED] it loses", ["nvfp4", "int4:128"]),
        (40, None, "no group of 16 divides its 40 columns", []),
        (48, None, "torch.dequantized_mx writes", ["nvfp4"]),  # no group of int4 divides them
    ],
)
def test_another_format_is_for_kernels_and_not_for_what_is_lost(
    columns: int, accuracy: float | None, said: str, tried: list[str], unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_int4(torch.float32)
    made: list[str] = []
    usual = weights.Request._made

    def noted(self: weights.Request, module: nn.Module, of: str, **more: Any) -> Any:
        made.append(of)
        return usual(self, module, of, **more)

    monkeypatch.setattr(weights.Request, "_made", noted)
    report = lz.optimize(nn.Sequential(nn.Linear(columns, 96)).eval(), weights="nvfp4", accuracy=accuracy)
    assert made == tried
    assert not report.made
    assert any(said in each.why for each in report.left)


def asked(of: str, **settings: Any) -> weights.Request:
    with lz.scope(**{f"quant.{name}": value for name, value in settings.items()}):
        found, problems = weights.request(of, None, None)
    assert found is not None, problems
    return found


def test_priority_and_profile_order_what_comes_into_question(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, plain = torch.device("cpu"), ["int8", "int4", "int4:32", "fp8"]
    assert asked("auto").formats(cpu) == plain
    assert asked("auto", priority="high").formats(cpu) == ["int8", "fp8", "int4", "int4:32"]
    assert asked("auto", priority="high", profile={"fp8": 0.001}).formats(cpu)[0] == "fp8"
    assert asked("auto", profile={"fp8": 0.04}).formats(cpu) == ["int8", "int4", "int4:32"]  # accuracy is 0.03
    assert asked("nvfp4").formats(cpu) == ["nvfp4", "int4", "mxfp4"]
    assert asked("nvfp4", priority="high", profile={"mxfp4": 0.05}).formats(cpu) == ["nvfp4", "mxfp4", "int4"]
    assert asked("int4:32").formats(cpu) == ["int4:32", "mxfp4"]
    assert asked("mxfp4").formats(cpu) == ["mxfp4", "int4"]
    assert asked("int8").formats(cpu) == ["int8"]
    assert asked("nvfp4", fallback="never").formats(cpu) == ["nvfp4"]
    blackwell = Device.named("B200")
    monkeypatch.setattr(weights.Device, "detect", lambda *_: blackwell)
    quick = asked("auto", priority="performance")
    assert quick.formats(cpu) == ["nvfp4", "mxfp4", *plain]  # it computes in int8, too
    assert quick.accuracy == 0.15
    assert asked("nvfp4", priority="performance").formats(cpu) == ["nvfp4", "mxfp4", "int4"]
    assert asked("auto").formats(cpu) == plain


def test_what_loses_least_comes_first_where_that_is_the_priority(unmeasured: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 96)).eval()
    with lz.scope(**{"quant.priority": "high"}):
        report = lz.optimize(model, weights="auto")
    assert {each.kind for each in report.replaced} <= {"int8"}
    report.undo()
    with lz.scope(**{"quant.profile": dict.fromkeys(("int8", "int4", "fp8"), 0.5)}):
        report = lz.optimize(model, weights="auto")
    assert "quant.profile says that each format loses more than 0.03" in str([each.why for each in report.left])


@pytest.mark.parametrize("text", ["nvfp4:over", "mxfp4"])
def test_what_a_model_holds_is_converted_where_that_is_allowed_and_else_its_cost_is_said(
    text: str, unmeasured: None
) -> None:
    kernel, of = fast_int4(torch.float32), text.partition(":")[0]
    torch.manual_seed(0)
    known = lz.quantize_weight(torch.randn(64, 256) / 16, text)
    data, scale, _, _, second = known.fields
    more = {} if second is None else {"weight_global_scale": second.reshape(1)}
    held = Product(known, torch.float32, weight_packed=data, weight_scale=scale, **more)
    model, rows = nn.Sequential(held).eval(), torch.randn(5, 256)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model)
        assert off(model(rows), own) < 1e-5
        assert [each.kind for each in report.replaced] == [of]
        why = next(each.why for each in report.left if each.path == "0")
        assert f"[REQUANTIZATION_REQUIRED] no fast kernel takes {of} here, {kernel} takes int4" in why
        assert "'compressed-tensors:bits=4,group=128') quantises anew: 8448 bytes for 64 x 256 numbers" in why
        report.undo()
        with lz.scope(**{"quant.fallback": "held"}):
            with pytest.warns(lz.LayerZeroFallbackWarning, match=f"1 weights are in int4 in place of {of}"):
                report = lz.optimize(model)
            assert [each.kind for each in report.replaced] == ["int4"]
            assert 0.03 < report.made[0].loss < 0.15
            assert "0: 1 lose " in str(report)
            assert "quantises anew: 8448 bytes" in report.left[0].why
            assert report.left[0].why.endswith("it is in int4 where that gains")
            first, twin = model(rows), copy.deepcopy(model)
            assert 0.03 < off(first, own) < 0.15
            assert torch.equal(twin(rows), first)
            scale.view(torch.uint8)[:32] = 0  # what is written is quantised anew
            assert off(model(rows), functional.linear(rows, known.dequantized(), held.bias)) < 0.15
            assert torch.allclose(model(rows)[:, :32], held.bias[:32].expand(5, 32), atol=1e-4)
            report.undo()
            report = lz.optimize(model, accuracy=0.001)
        assert [each.kind for each in report.replaced] == [of]
        why = next(each.why for each in report.left if each.path == "0")
        assert "[QUANT_ACCURACY_THRESHOLD_EXCEEDED]" in why
        assert "accuracy=0.001 allows less" in why
        report.undo()

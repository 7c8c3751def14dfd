"""Which modules ``lz.optimize`` takes, and what it leaves with which reason."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import layerzero as lz
from drawing import examples
from layerzero.integrations.optimize import selection
from layerzero.integrations.optimize.modules.norms import norm
from layerzero.integrations.optimize.modules.products import Block, activation_named, block
from layerzero.integrations.optimize.selection import time_kinds
from layerzero.integrations.optimize.times.report import Optimized, Replaced, Timed

PACKED = "packed" in str(lz.which("linear", torch.ones(1, 8), w := torch.ones(8, 8), packed=lz.PackedWeight(w)))


class Scaled(nn.Module):
    """A norm of some kind, whose class says nothing."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.kind, self.tiny = kind, 1e-5
        self.weight = nn.Parameter(torch.ones(size) if kind != "one plus" else torch.zeros(size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is not None:
            x = x * gate
        if self.kind == "mean":
            return functional.layer_norm(x, self.weight.shape, self.weight, None, self.tiny)
        unit = x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt()
        if self.kind == "squared":
            return unit * self.weight.square()
        return unit * (1 + self.weight) if self.kind == "one plus" else unit * self.weight


class Gated(nn.Module):
    """A gated block with names of nobody's."""

    def __init__(self, act: Any, *, doubled: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 24)
        self.act, self.doubled = act, doubled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.act(self.three(x)) * self.one(x))
        return 2 * y if self.doubled else y


@pytest.mark.parametrize(
    ("kind", "calls"), [("plain", "lz.rms_norm"), ("one plus", "lz.rms_norm by 1 + weight"), ("mean", "lz.layer_norm")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_told_by_their_values(kind: str, calls: str, dtype: torch.dtype) -> None:
    module = nn.Sequential(Scaled(16, kind)).eval().to(dtype)
    report = lz.optimize(module, None)
    found = norm(Scaled(16, kind))
    assert not isinstance(found, str)
    assert found is not None
    assert found.calls == calls
    assert [each.calls for each in report.replaced] == [calls]
    x, other = torch.randn(2, 3, 16).to(dtype), torch.randn(2, 3, 16).to(dtype)
    stock = copy.deepcopy(module)
    lz.optimize(stock).undo()
    with torch.no_grad():
        report.undo()
        expected, gated = module(x), module[0](x, gate=other)
        lz.optimize(module)
        torch.testing.assert_close(module(x), expected)
        assert torch.equal(module[0](x, gate=other), gated)  # more than one tensor is the module's own business


def test_a_norm_that_only_looks_like_one_is_left() -> None:
    """With weights of 1 their squares are the same; other weights tell."""
    report = lz.optimize(nn.Sequential(Scaled(16, "squared")).eval())
    (left,) = report.left
    assert not report.replaced
    assert "none of the norms' formulas" in left.why


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (functional.relu, "relu"),
        (lambda x: functional.relu(x).square(), "relu2"),
        (torch.sigmoid, ""),
        (nn.PReLU(), ""),
        (lambda x: x * torch.sigmoid(1.702 * x), ""),
        (nn.Identity(), ""),
    ],
)
def test_activations_are_told_by_their_values(function: Any, name: str) -> None:
    assert activation_named(function) == name


@pytest.mark.parametrize(
    "function", [nn.SiLU(), functional.gelu, nn.GELU(approximate="tanh"), lambda x: functional.relu(x).square()]
)
def test_blocks_are_told_by_their_values(function: Any) -> None:
    model = nn.Sequential(Gated(function)).eval()
    x = torch.randn(5, 16)
    with torch.no_grad():
        expected = model(x)
        report = lz.optimize(model)
        assert [each.kind for each in report.replaced] == ["block"]
        torch.testing.assert_close(model(x), expected)


def test_a_block_that_does_more_is_left_and_its_products_are_not() -> None:
    report = lz.optimize(nn.Sequential(Gated(nn.SiLU(), doubled=True)).eval())
    assert "none of the blocks' formulas" in next(each.why for each in report.left if each.module == "Gated")
    assert {each.module for each in report.replaced} == ({"Linear"} if PACKED else set())


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        ("hook", "it has hooks"),
        ("inner hook", "it has hooks of three"),
        ("forward", "was exchanged on the instance"),
        ("meta", "is on the meta device"),
        ("subclass", "no plain tensor"),
        ("parametrized", "computed anew"),
        ("twice", "LayerZero's already"),
        ("training", "training mode"),
        ("own class", "a forward of its own"),
        ("adapter", "under an adapter"),
        ("offloaded", "was exchanged on the instance"),
    ],
)
def test_what_cannot_be_proved_is_left_with_a_reason(plant: str, why: str) -> None:
    model = nn.Sequential(Gated(nn.SiLU())).eval()
    inner = model[0]
    if plant == "hook":
        inner.register_forward_hook(lambda *_: None)
    elif plant == "inner hook":
        inner.three.register_forward_pre_hook(lambda *_: None)
    elif plant == "forward":
        inner.forward = lambda x: x
    elif plant == "meta":
        model.to("meta")
    elif plant == "subclass":
        inner.one.weight = nn.Parameter(inner.one.weight.detach().as_subclass(type("Split", (torch.Tensor,), {})))
    elif plant == "parametrized":
        nn.utils.parametrizations.weight_norm(inner.one)
    elif plant == "twice":
        lz.optimize(model)
    elif plant == "training":
        model.train()
    elif plant == "adapter":
        lora = type(
            "Lora", (nn.Module,), {"__module__": "peft.tuners.lora.layer", "forward": lambda self, x: self.one(x)}
        )
        inner.one, lora_layer = nn.Identity(), lora()
        lora_layer.one, inner.one = nn.Linear(16, 24), lora_layer
    elif plant == "offloaded":  # what accelerate.hooks.add_hook_to_module leaves
        inner.one._old_forward, inner.one._hf_hook = inner.one.forward, object()
        inner.one.forward = lambda x, old=inner.one._old_forward: old(x.clone())
    else:
        inner.one = type("Low", (nn.Linear,), {"forward": lambda self, x: functional.linear(x, self.weight)})(16, 24)
    before = [dict(vars(each)) for each in model.modules()]
    report = lz.optimize(model)
    assert why in "\n".join(each.why for each in report.left), report
    assert not any(each.module == "Gated" for each in report.replaced)
    if plant in {"twice", "training"}:
        assert not report.replaced
        assert [dict(vars(each)) for each in model.modules()] == before


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torchscript_is_left_with_a_reason() -> None:
    x = torch.randn(3, 16)
    scripted = torch.jit.trace(nn.Linear(16, 16), x)
    model = nn.Sequential(scripted, nn.LayerNorm(16)).eval()
    expected = model(x)
    report = lz.optimize(model)
    assert any("TorchScript" in each.why for each in report.left if each.path == "0"), report
    torch.testing.assert_close(model(x), expected)


def test_who_hooks_or_exchanges_an_inner_module_later_is_heard() -> None:
    model = nn.Sequential(Gated(nn.SiLU())).eval()
    lz.optimize(model)
    x, heard = torch.randn(3, 16), []
    handle = model[0].three.register_forward_hook(lambda *_: heard.append(1))
    with torch.no_grad():
        model(x)
        assert heard == [1]
        handle.remove()
        stock = Gated(nn.SiLU()).eval()
        stock.load_state_dict(model[0].state_dict())
        stock.two = model[0].two = nn.Linear(24, 16)
        torch.testing.assert_close(model(x), stock(x))
        assert heard == [1]


def test_tied_and_shared_modules_stay_tied() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 8)).eval()
    model[3].weight = shared.weight
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x)
        report = lz.optimize(model)
        torch.testing.assert_close(model(x), expected)
        model[3].weight.mul_(2)
        assert model[0].weight is model[3].weight
        stock = copy.deepcopy(model)
        report.undo()
        torch.testing.assert_close(stock(x), model(x))


def test_gate_and_up_lie_in_one_tensor_without_a_copy() -> None:
    module = Gated(nn.SiLU())
    for each in (module.one, module.two, module.three):
        each.bias = None
    module.eval()
    found = block(module)
    assert not isinstance(found, str)
    assert found is not None
    values = copy.deepcopy(module.state_dict())
    x = torch.randn(5, 16)
    with torch.no_grad():
        expected = module(x)
        report = Optimized()
        state = found.swap.state
        assert isinstance(state, Block)
        assert not state.join(Counter(), report._joined)
        report.put_on(Replaced("", "Gated", "block", "", None, None, found.swap))
        torch.testing.assert_close(module(x), expected)
        joined = module.one.weight.untyped_storage()
        assert joined.data_ptr() == module.three.weight.untyped_storage().data_ptr()
        assert joined.nbytes() == 2 * module.one.weight.nbytes
        assert all(torch.equal(values[key], value) for key, value in module.state_dict().items())
        module.load_state_dict({key: 2 * value for key, value in values.items()})
        stock = Gated(nn.SiLU())
        stock.one.bias = stock.two.bias = stock.three.bias = None
        stock.load_state_dict(module.state_dict())
        torch.testing.assert_close(module(x), stock.eval()(x))
        torch.testing.assert_close(copy.deepcopy(module)(x), stock(x))
        torch.testing.assert_close(copy.deepcopy(module).double()(x.double()), stock.double()(x.double()))
        report.undo()
        assert module.one.weight.untyped_storage().nbytes() == module.one.weight.nbytes
        assert torch.equal(module(x), stock.float()(x))
    again = block(module)
    assert not isinstance(again, str)
    assert again is not None
    module.three.weight.data = torch.cat((module.three.weight.data, module.one.weight.data))[:24]
    assert "larger memory" in again.swap.state.join(Counter(), [])  # type: ignore[attr-defined]


@pytest.mark.parametrize("planted", ["zeros", "one", "scale"])
def test_a_wrong_kernel_is_refused_by_name(planted: str) -> None:
    def wrong(input: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        right = functional.rms_norm(input, weight.shape, weight, eps)
        return {"zeros": torch.zeros_like(right), "one": input, "scale": right * 1.01}[planted]

    model = nn.Sequential(Scaled(16, "plain")).eval()
    lz.register_kernel("norm.rms", "planted.rms_norm")(wrong)
    try:
        with lz.prefer("planted.rms_norm"):
            report = lz.optimize(model)
    finally:
        lz.unregister_kernel("planted.rms_norm")
    assert not report.replaced
    assert "planted.rms_norm was off by" in report.left[0].why


def test_transforms_and_other_weights_are_served() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-6)).eval()
    stock = copy.deepcopy(model)
    lz.optimize(model)
    x = torch.randn(4, 3, 8)
    other = {name: torch.randn(each.shape) for name, each in model.named_parameters()}
    many = {name: torch.randn(4, *each.shape) for name, each in model.named_parameters()}
    with torch.no_grad():
        model(x)
        for weights in (other, dict(model.named_parameters())):
            expected = torch.func.functional_call(stock, {name: each.clone() for name, each in weights.items()}, (x,))
            torch.testing.assert_close(torch.func.functional_call(model, weights, (x,)), expected)
        batched = [
            torch.func.vmap(lambda w, row, each=each: torch.func.functional_call(each, w, (row,)))(many, x)
            for each in (model, stock)
        ]
        torch.testing.assert_close(batched[0], batched[1])
        torch.testing.assert_close(model(x), stock(x))
    gradient = [torch.func.grad(lambda row, each=each: each(row).sum())(x) for each in (model, stock)]
    torch.testing.assert_close(gradient[0], gradient[1])


def timed(cost: dict[str, float]) -> Any:
    """A gate over kinds that take so much off a run of 100 seconds, by a clock that only they move."""
    on: dict[str, bool] = {}
    order: list[tuple[str, ...]] = []

    def sample() -> float:
        order.append(tuple(kind for kind in cost if on[kind]))
        return 100.0 - sum(gain for kind, gain in cost.items() if on[kind])

    switches = {kind: (lambda state, kind=kind: on.__setitem__(kind, state)) for kind in cost}
    return time_kinds(switches, sample, 3), on, order


def test_what_gains_less_than_one_percent_is_left_as_it_was() -> None:
    found, on, order = timed({"much": 30.0, "little": 0.3, "harm": -20.0})
    assert on == {"much": True, "little": False, "harm": False}
    assert sorted(found.dropped) == ["harm", "little"]
    assert (found.stock_s, found.after_s) == (100.0, 70.0)
    assert order[0] == ()  # stock first
    assert "1.43 times as fast" in str(found)


def test_steps_keep_the_attention_that_they_need() -> None:
    found, on, order = timed({"attention": -5.0, "layer": -7.0, "step": 40.0})
    assert on == {"attention": True, "layer": False, "step": True}
    assert found.dropped == ["layer"]
    assert ("layer", "step") not in order, "steps without their attention are none"


def test_a_run_that_captures_counts_for_nothing() -> None:
    on, state = {}, {"before": None}

    def sample() -> float:
        changed, state["before"] = dict(on) != state["before"], dict(on)
        return (0.5 if on["step"] else 1.0) + (9.0 if changed and on["step"] else 0.0)

    found = time_kinds({"step": lambda state: on.__setitem__("step", state)}, sample, 3, captured={"step"})
    assert on == {"step": True}
    assert found.speedup == pytest.approx(2.0)


def test_where_nothing_gains_everything_is_taken_out() -> None:
    found, on, _ = timed({"a": 0.0})
    assert on == {"a": False}
    assert found.dropped == ["a"]
    assert found.speedup == 1.0


def test_layers_that_differ_in_their_number_stand_in_one_line_within_a_pipeline_too() -> None:
    layers = nn.ModuleList(Scaled(16, "plain") for _ in range(3))
    pipeline = nn.Sequential(nn.ModuleDict({"layer": layers, "last": Scaled(16, "plain")})).eval()
    text = str(lz.optimize(pipeline))
    assert "0.layer.0-2 " in text
    assert "0.last " in text
    assert "\n1 " not in text


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning")
@pytest.mark.skipif(not PACKED, reason="needs a kernel with packed weights")
def test_forms_of_kernels_that_were_only_tried_are_let_go() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval(), torch.randn(3, 64)
    report = lz.optimize(model)
    assert report.replaced
    assert report.extra_bytes == 0
    with torch.no_grad():
        model(x)
        one_form = report.extra_bytes
        for kernel in ("torch.onednn_linear_packed", "zentorch.linear_packed"):
            with lz.prefer(kernel):
                model(x)
    assert report.extra_bytes >= one_form > 0
    report.undo()
    report = lz.optimize(model, (x,), rounds=1, isolate=False)
    assert report.extra_bytes <= one_form


def test_a_slow_moment_of_the_machine_is_no_gain() -> None:
    from layerzero.integrations.optimize.times.timing import gain

    assert gain([(1.0, 0.5), (1.0, 0.5), (1.0, 0.5)]) == 1.0
    assert gain([(0.028, 0.18), (0.1, 0.025)]) < 0  # the mean of the pairs says 1.08


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(1.0, 50.0), min_size=22, max_size=22), st.integers(0, 41))
def test_neighbours_decide_nothing(loads: list[float], stuck: int) -> None:
    """Whole rounds are slower by any factor, and one sample of them all takes a thousand times as long."""
    on: dict[str, bool] = {}
    numbers = iter(range(-2, 100))

    def sample() -> float:
        number = next(numbers)
        return (0.8 if on["a"] else 1.0) * loads[max(number, 0) // 2] * (1000 if number == stuck else 1)

    found = time_kinds({"a": lambda state: on.__setitem__("a", state)}, sample, 5)
    assert on == {"a": True}
    assert found.speedup == pytest.approx(1.25)


def test_rounds_go_on_while_ratios_lie_on_both_sides() -> None:
    def counted(after: list[float]) -> int:
        on, times = {}, iter([1.0, *after])
        found = time_kinds({"a": lambda state: on.__setitem__("a", state)}, lambda: next(times) if on["a"] else 1.0, 5)
        return found.rounds

    assert counted([0.5] * 5) == 5
    assert counted([0.5, 2.0] * 10) == 20
    assert counted([0.5, 2.0, *[0.5] * 6]) == 8


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning")
def test_where_nothing_is_replaced_no_time_is_told_as_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerzero.integrations.optimize.selection.LEAST", 1e9)
    model = Scaled(16, "plain").eval()
    report = lz.optimize(model, torch.randn(3, 16), rounds=1, isolate=False)
    assert report.replaced == []
    assert report.spent is not None
    assert report.spent.after == {}
    times = [line for line in str(report).splitlines() if " ms" in line or line.startswith("time of a run")]
    assert times
    assert not any("after" in line for line in times)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning")
def test_a_kind_that_gained_in_its_turn_alone_is_not_told_it_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def decided(switches, sample, rounds, *_):
        for switch in switches.values():
            switch(False)
        return Timed(1.0, 1.0, dict.fromkeys(switches, 0.7), list(switches), rounds)

    monkeypatch.setattr(selection, "time_kinds", decided)
    model = Scaled(16, "plain").eval()
    report = lz.optimize(model, torch.randn(3, 16), rounds=1, isolate=False)
    assert report.replaced == []
    assert any(
        "it gained +70.0% in its turn, but all that gained less than 1 % together" in each.why for each in report.left
    )


@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning")
def test_progress_is_told_of_modules_calls_and_turns() -> None:
    seen: list[tuple[str, int, int]] = []
    model = nn.Sequential(Scaled(16, "plain"), nn.Linear(16, 16)).eval()
    lz.optimize(
        model, torch.randn(3, 16), budget_s=5.0, rounds=1, isolate=False, progress=lambda *each: seen.append(each)
    )
    kinds = list(dict.fromkeys(text.split()[0] for text, _, _ in seen))
    assert kinds == ["checking", "measuring", "timing"]
    assert all(0 <= done <= of for _, done, of in seen)
    assert any(" s left" in text for text, _, _ in seen)


def test_nothing_is_told_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    lz.optimize(nn.Sequential(Scaled(16, "plain")).eval())
    assert capsys.readouterr() == ("", "")

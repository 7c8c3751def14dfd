"""Which modules ``lz.optimize`` takes, and what it leaves with which reason."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from scaled_modules import PACKED, Gated, Scaled
from torch import nn
from torch.nn import functional

import layerzero as lz
from layerzero.integrations.optimize.modules.norms import norm
from layerzero.integrations.optimize.modules.products import Block, activation_named, block
from layerzero.integrations.optimize.swaps.candidate import Candidate, compared
from layerzero.integrations.optimize.times.report import Optimized, Replaced


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("plain", "lz.rms_norm"),
        ("written", "lz.rms_norm"),
        ("one plus", "lz.rms_norm by 1 + weight"),
        ("mean", "lz.layer_norm"),
    ],
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


def test_torchs_norm_without_eps_agrees_on_small_rows() -> None:
    """Torch takes float32's for half precision, whose own is 65,000 times as large."""
    module = nn.RMSNorm(16).bfloat16().eval()
    found = norm(module)
    assert isinstance(found, Candidate)
    assert compared(found) == ""
    rows = (torch.randn(3, 16) * 1e-4).bfloat16()
    with torch.no_grad():
        expected = module(rows)
        found.swap.on()
        torch.testing.assert_close(module(rows), expected)


def test_what_is_no_tensor_gets_the_error_of_the_modules_own_code() -> None:
    """Its dtype was asked for first, which only a tensor has."""
    model = nn.Sequential(Scaled(16, "written")).eval()
    with pytest.raises(Exception, match="str") as own:
        model("text")
    assert lz.optimize(model).is_on
    with pytest.raises(type(own.value), match=str(own.value)):
        model("text")


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


class Gives(nn.Module):
    """A product and an activation, whose output is something else."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.dense, self.act, self.give = nn.Linear(16, 16), nn.GELU(), give

    def forward(self, x: torch.Tensor) -> Any:
        return self.give(self.act(self.dense(x)))


@pytest.mark.parametrize(
    ("give", "told"),
    [
        (lambda y: (y, None), "tuple"),
        (lambda y: {"y": y}, "dict"),
        (lambda y: y.sum(-1), "(2, 3)"),
        (lambda _: None, "NoneType"),
    ],
    ids=["tuple", "dict", "sum", "none"],
)
def test_a_module_that_gives_something_else_is_left_with_a_reason(give: Any, told: str) -> None:
    report = lz.optimize(nn.ModuleList([Gives(give)]).eval())
    assert any(f"its output is another one ({told})" in each.why for each in report.left)


def test_a_model_whose_parameters_have_no_values_yet_is_left_with_a_reason() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d()).eval()
    (left,) = lz.optimize(model).left
    assert "run the model once" in left.why
    model(torch.randn(3, 8))
    assert all("run the model once" not in each.why for each in lz.optimize(model).left)


class Scale(nn.Module):
    """A norm of nobody's: what is computed rests on more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.rand(16) + 0.5), [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (16,), self.weight) * self.times[0]


@pytest.mark.parametrize("first", [nn.LayerNorm(16), Scale()], ids=["torch", "own"])
def test_a_block_may_begin_with_a_module_that_is_called_as_it_is(first: nn.Module) -> None:
    torch.manual_seed(0)
    drop = nn.Dropout(0.1)
    module = nn.Sequential(copy.deepcopy(first), nn.Linear(16, 24), nn.GELU(), drop, nn.Linear(24, 16), drop).eval()
    found, x = block(module), torch.randn(2, 5, 16)
    assert isinstance(found, Candidate)
    assert compared(found) == ""
    found.swap.on()
    before: Any = module[0]

    def check(*, ours: bool = True) -> None:
        calls: list[int] = []
        with before.register_forward_hook(lambda *_: calls.append(1)):
            torch.testing.assert_close(module(x), type(module).forward(module, x))
        assert found.swap.state.stamp is not None
        assert found.swap.state.stamp.holds() is ours
        assert len(calls) == 2

    with torch.no_grad():
        check()
        before.weight.mul_(2)
        before.times = [3.0]
        check()
        check_copy = copy.deepcopy(module)
        check_copy[0].weight.mul_(2)  # type: ignore[operator, union-attr]
        torch.testing.assert_close(check_copy(x), type(module).forward(check_copy, x))
        module[0] = nn.Identity()
        torch.testing.assert_close(module(x), type(module).forward(module, x))
        module[0] = before
    module.requires_grad_(False)
    before.requires_grad_()
    module(x).sum().backward()  # type: ignore[no-untyped-call]
    assert before.weight.grad is not None


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
        ("one axis", "it does not compute on one tensor of rows"),
        ("bias", "its own code does not compute on an example"),
        ("kernel of two axes", "a weight of its own"),
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
    elif plant == "one axis":
        inner.one.weight = nn.Parameter(torch.randn(24))
    elif plant == "bias":
        inner.one = nn.Conv1d(4, 4, 3)
        inner.one.bias = nn.Parameter(torch.randn(3))
    elif plant == "kernel of two axes":
        inner.one = nn.Conv2d(4, 4, 3)
        inner.one.weight = nn.Parameter(torch.randn(4, 4))
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
    with pytest.raises(TypeError, match="TopLevelTracedModule; optimize the module that the script was made of"):
        lz.optimize(scripted)


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


@pytest.mark.parametrize("fused", [True, False])
def test_what_torchs_layers_do_not_call_is_left(*, fused: bool) -> None:
    model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=fused).eval()
    left = {each.path for each in lz.optimize(model).left if "does not call it" in each.why}
    held = {"norm1", "norm2", "linear1", "linear2", "self_attn"} if fused else set()
    assert left == {"self_attn.out_proj"} | held


def test_encoder_layers_of_other_parts_than_torchs_are_served() -> None:
    class Attention(nn.Module):
        def forward(self, query: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
            return query, None

    without_norms, attending = (nn.TransformerEncoderLayer(16, 2, 24).eval() for _ in range(2))
    without_norms.norm1 = without_norms.norm2 = nn.Identity()  # type: ignore[assignment]
    attending.self_attn = Attention()  # type: ignore[assignment]
    for model in (without_norms, attending):
        assert "linear1" not in {each.path for each in lz.optimize(model).left if "does not call it" in each.why}

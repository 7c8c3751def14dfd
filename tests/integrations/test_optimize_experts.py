"""``lz.optimize`` on mixtures of experts: found by what they compute, and packed weights follow their parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import layerzero as lz
from drawing import examples, mostly
from layerzero.integrations.optimize.modules.experts import experts
from layerzero.integrations.optimize.swaps.candidate import Candidate
from layerzero.ops.moe.experts import GATES, gated

transformers = pytest.importorskip("transformers", "5.0", reason="needs transformers >= 5")
pytest.importorskip("transformers.integrations.moe", reason="needs its interface for experts")

import mixtures  # noqa: E402  # it imports transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]

QUICK = ("Mixtral", "GptOss", "DeepseekV3", "Qwen3Next")
NAMES = mostly(mixtures.NAMES, QUICK)
PACKED, EACH = "vllm.cpu.experts_packed", "torch.experts_each"


@pytest.fixture(scope="module", autouse=True)
def _quietly() -> Iterator[None]:
    before, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    yield
    transformers.logging.set_verbosity(before)
    torch.set_num_threads(threads)


def need(kernel: str, dtype: torch.dtype = torch.float32) -> None:
    """Skip where this machine refuses the kernel for such experts; a CPU may take one dtype and refuse another."""
    rows, weights = (
        torch.ones(1, 64, dtype=dtype),
        (torch.ones(2, 64, 64, dtype=dtype), torch.ones(2, 64, 32, dtype=dtype)),
    )
    packed = {"packed_gate_up": lz.PackedWeight(weights[0]), "packed_down": lz.PackedWeight(weights[1])}
    call = rows, *weights, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    why = lz.explain("moe_experts", *call, **packed).reasons(kernel)
    if why:
        pytest.skip("; ".join(map(str, why)))


@pytest.fixture(params=[PACKED, EACH])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With a kernel that reads packed weights, and torch's own, which reads them as they lie and is no gain alone."""
    need(request.param)
    monkeypatch.setattr(Candidate, "is_torchs", False)
    with lz.scope(locks={"moe.experts": request.param}):
        yield request.param


def replaced(report: Any) -> list[Any]:
    return [each for each in report.replaced if each.kind == "experts"]


def optimized(module: nn.Module) -> Any:
    report = lz.optimize(nn.Sequential(module).eval())
    assert len(replaced(report)) == 1
    return report


class Mixed(nn.Module):
    """Experts with names of nobody's.

    Args:
        wide: experts, hidden and inner features.
    """

    def __init__(
        self,
        wide: tuple[int, int, int] = (3, 64, 32),
        activation: str = "silu",
        *,
        transposed: bool = False,
        biased: bool = False,
        numbers: tuple[float, float] = (1.702, 7.0),
    ) -> None:
        super().__init__()
        count, hidden, inner = wide
        self.activation, self.transposed = activation, transposed
        self.alpha, self.limit = numbers
        shapes = [(count, 2 * inner, hidden), (count, hidden, inner)]
        weights = [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]
        one, two = (nn.Parameter(each.mT.contiguous() if transposed else each) for each in weights)
        self.second, self.first = two, one  # their order says nothing
        self.four, self.three = (
            (nn.Parameter(torch.randn(count, hidden)), nn.Parameter(torch.randn(count, 2 * inner)))
            if biased
            else (None, None)
        )

    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        numbers = (self.alpha, self.limit) if self.activation == "swiglu_oai" else ()
        return gated(joined, self.activation, *numbers)

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(rows)
        for number in range(len(self.first)):
            one, two = (each[number].mT if self.transposed else each[number] for each in (self.first, self.second))
            biases = (None, None) if self.three is None else (self.three[number], self.four[number])
            made = nn.functional.linear(self.gate(nn.functional.linear(rows, one, biases[0])), two, biases[1])
            share = torch.where(ids == number, shares, 0).sum(-1, keepdim=True)
            total = total + (made * share).to(total.dtype)
        return total


def call_of(module: Mixed, rows: int = 7, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    count, hidden = len(module.first), module.first.shape[1 if module.transposed else 2]
    ids = torch.rand(rows, count).argsort(-1)[:, : min(2, count)].contiguous()
    return torch.randn(rows, hidden).to(dtype), ids, torch.rand(rows, ids.shape[1]).to(dtype)


@settings(max_examples=examples(30), deadline=None)
@given(
    wide=some.tuples(some.integers(1, 4), some.integers(1, 40), some.integers(1, 40)),
    activation=some.sampled_from(GATES),
    transposed=some.booleans(),
    biased=some.booleans(),
    numbers=some.sampled_from([(1.702, 7.0), (1.0, 0.5)]),
)
def test_experts_are_told_by_their_values(
    wide: tuple[int, int, int], activation: str, transposed: bool, biased: bool, numbers: tuple[float, float]
) -> None:
    torch.manual_seed(0)
    module = Mixed(wide, activation, transposed=transposed, biased=biased, numbers=numbers).eval()
    found = experts(module)
    assert isinstance(found, Candidate)
    form = found.swap.state.form
    assert (form.gate_up, form.down, form.activation) == ("first", "second", activation)
    assert (form.gate_up_bias, form.down_bias) == (("three", "four") if biased else (None, None))
    call = call_of(module)
    with torch.no_grad():
        expected = module(*call)
        found.swap.on()
        got = module(*call)
    torch.testing.assert_close(got, expected, atol=1e-5 * max(1.0, expected.abs().max().item()), rtol=1e-4)


class Doubled(Mixed):
    def forward(self, *call: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(*call)


class Cut(Mixed):
    """Like silu where values are small."""

    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, -1)
        return nn.functional.silu(gate.clamp(max=50.0)) * up.clamp(-50.0, 50.0)


class Quick(Mixed):
    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, -1)
        return gate * torch.sigmoid(1.702 * gate) * up


class Rows(Mixed):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return rows @ self.first[0].mT @ self.second[0].new_ones(64, 64)


class Gateless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 32, 64)), nn.Parameter(torch.randn(2, 64, 32))


def zeros() -> Mixed:
    module = Mixed()
    nn.init.zeros_(module.first)
    return module


def parallel() -> Mixed:
    module = Mixed()
    module._is_expert_parallel = True
    return module


def hooked() -> Mixed:
    module = Mixed()
    module.register_forward_hook(lambda *_: None)
    return module


LEFT = {
    Doubled: "its output is none of lz.moe_experts' formulas",
    Cut: "its output is none of lz.moe_experts' formulas",
    Quick: "its output is none of lz.moe_experts' formulas",
    Rows: "it does not compute on rows, ids and shares: TypeError",
    Gateless: "its experts have no gate",
    zeros: "its weights are zero or infinite",
    parallel: "its experts are divided among ranks",
    hooked: "it has hooks, which wait for its calls",
}


@pytest.mark.parametrize("plant", LEFT, ids=lambda each: each.__name__)
def test_what_cannot_be_proved_is_left_with_a_reason(plant: Any) -> None:
    model = nn.Sequential(plant()).eval()
    report = lz.optimize(model)
    assert not report.replaced
    assert [each.path for each in report.left if LEFT[plant] in each.why] == ["0"]


def test_where_torchs_own_kernel_would_run_they_are_left() -> None:
    with lz.scope(locks={"moe.experts": EACH}):
        report = lz.optimize(nn.Sequential(Mixed()).eval())
    assert not report.replaced
    assert "no time says that another is faster" in report.left[0].why


@pytest.mark.parametrize("name", NAMES)
def test_they_are_found_and_write_the_same_tokens_until_undone(name: str, kernel: str) -> None:
    stock, model = mixtures.made(name), mixtures.made(name)
    report = lz.optimize(model)
    assert len(replaced(report)) == len(mixtures.experts_of(model))
    assert {each.kernel for each in replaced(report)} == {kernel}
    assert all(each.error <= 2e-5 for each in replaced(report))
    assert mixtures.written(model) == mixtures.written(stock)
    scale = mixtures.logits(stock).abs().max()
    for run in (mixtures.logits, mixtures.in_two_parts):
        torch.testing.assert_close(run(model) / scale, run(stock) / scale, atol=2e-5, rtol=1e-4)
    report.undo()
    assert not any("_layerzero" in vars(each) or "forward" in vars(each) for each in model.modules())
    assert torch.equal(mixtures.logits(model), mixtures.logits(stock))


@pytest.mark.parametrize("name", mostly(mixtures.NAMES, {"Mixtral", "GptOss"}))
def test_bfloat16_is_as_near_to_the_truth_as_stock(name: str, kernel: str) -> None:
    need(kernel, torch.bfloat16)
    stock, model = mixtures.made(name, torch.bfloat16), mixtures.made(name, torch.bfloat16)
    truth = mixtures.logits(mixtures.true(stock))
    report = lz.optimize(model)
    assert replaced(report)
    for each in report.replaced:
        if each.kind != "experts" and each.exchange is not None:  # a rounding before a router sends rows elsewhere
            each.exchange.off()
    mixtures.assert_as_near(mixtures.logits(model), mixtures.logits(stock), truth)


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_gradients_are_stocks(name: str, kernel: str) -> None:
    stock, model = mixtures.made(name), mixtures.made(name)
    lz.optimize(model)
    mixtures.logits(model)
    for each in (stock, model):
        each(mixtures.tokens()).logits.square().mean().backward()
    for (key, wanted), got in zip(stock.named_parameters(), model.parameters(), strict=True):
        assert (wanted.grad is None) == (got.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(got.grad, wanted.grad, atol=1e-5, rtol=1e-3, msg=key)


def test_gradients_of_shares_alone_are_stocks(kernel: str) -> None:
    module = Mixed().eval().requires_grad_(False)
    rows, ids, shares = call_of(module)
    shares.requires_grad_()
    expected = torch.autograd.grad(module(rows, ids, shares).sum(), shares)[0]
    optimized(module)
    assert torch.equal(torch.autograd.grad(module(rows, ids, shares).sum(), shares)[0], expected)


@pytest.mark.parametrize("kernel", [PACKED, pytest.param(EACH, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("name", ["Mixtral", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_it_compiles_as_one_graph(name: str, kernel: str) -> None:
    model = mixtures.made(name)
    lz.optimize(model)
    wanted = mixtures.logits(model)
    try:
        got = mixtures.logits(torch.compile(model, fullgraph=True, backend="eager"))
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def other_values(module: nn.Module) -> None:
    module.load_state_dict({key: each * 0.5 for key, each in module.state_dict().items()})


def other_memory(module: nn.Module) -> None:
    for each in module.parameters():
        each.data = each.data * 0.5


def other_dtype(module: nn.Module) -> None:
    module.to(torch.bfloat16)


def other_parameters(module: nn.Module) -> None:
    for name, each in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(each.detach() * 0.5))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("change", [other_values, other_memory, other_dtype, other_parameters])
def test_weights_are_followed_wherever_they_go(change: Any, transposed: bool, kernel: str) -> None:
    if change is other_dtype:
        need(kernel, torch.bfloat16)
    torch.manual_seed(0)
    module = Mixed(transposed=transposed, biased=True).eval()
    report = optimized(module)
    call = call_of(module)
    with torch.no_grad():
        module(*call)
        change(module)
        call = (call[0].to(module.first.dtype), call[1], call[2].to(module.first.dtype))
        got = module(*call)
        again = module(*call)
        assert [each.forms for each in module._layerzero.packed] == [1 if kernel == PACKED else 0] * 2
        report.undo()
        expected = module(*call)
    assert torch.equal(again, got)
    tolerance = 2e-2 if got.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, atol=tolerance * expected.abs().max().item(), rtol=tolerance)


@pytest.mark.parametrize("transposed", [False, True])
def test_copies_compute_with_their_own_weights(transposed: bool, kernel: str) -> None:
    module = Mixed(transposed=transposed).eval()
    model = nn.Sequential(module).eval()
    assert lz.optimize(model).replaced
    call = call_of(module)
    with torch.no_grad():
        before = module(*call)
        twin = copy.deepcopy(model)
        assert twin[0]._layerzero is not module._layerzero
        twin[0].second.mul_(0.5)
        torch.testing.assert_close(twin[0](*call), before / 2)
        module.second.mul_(3.0)
        torch.testing.assert_close(module(*call), before * 3)
        torch.testing.assert_close(twin[0](*call), before / 2)
    weights = twin[0]._layerzero.weights(twin[0])
    assert [each.data_ptr() for each in weights] == [each.data_ptr() for each in (twin[0].first, twin[0].second)]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_copy_made_between_new_weights_and_the_next_call_computes_with_them(transposed: bool, kernel: str) -> None:
    module = Mixed(transposed=transposed).eval()
    model = nn.Sequential(module, nn.Linear(64, 64)).eval()
    assert lz.optimize(model).replaced
    call = call_of(module)
    with torch.no_grad():
        module(*call)
        model.load_state_dict({name: each * 0.5 for name, each in model.state_dict().items()}, assign=True)
        twin = copy.deepcopy(model)
        torch.testing.assert_close(twin[0](*call), Mixed.forward(module, *call))
        torch.testing.assert_close(twin[1](call[0]), nn.Linear.forward(model[1], call[0]))


def test_experts_are_found_whatever_device_new_tensors_are_on() -> None:
    model = nn.Sequential(Mixed(), nn.RMSNorm(64), nn.Linear(64, 64)).eval()
    expected = [(each.path, each.why) for each in lz.optimize(copy.deepcopy(model)).left]
    with torch.device("meta"):  # as set_default_device("cuda"), where random numbers are drawn on a CPU
        got = [(each.path, each.why) for each in lz.optimize(model).left]
    assert got == expected


def test_what_is_saved_is_the_stock_module(kernel: str) -> None:
    model = nn.Sequential(Mixed(transposed=True)).eval()
    assert lz.optimize(model).replaced
    call = call_of(model[0])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded[0](*call), model[0](*call))
    assert loaded[0].__dict__.get("_layerzero") is None


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_packed_once_in_inference_mode_too(transposed: bool, kernel: str) -> None:
    module = Mixed(transposed=transposed).eval()
    with torch.inference_mode():
        optimized(module)
        module(*call_of(module))
        before = module._layerzero.packed
        forms = [dict(each._slots) for each in before]
        for rows in (1, 5, 40):
            module(*call_of(module, rows))
    assert [dict(each._slots) for each in module._layerzero.packed] == forms
    assert module._layerzero.packed is before


ROOM = {0: 0, 1: 0, 2: 1, 4: 2}
"""Modules that are packed where so many times gate_up's memory may be used; down takes half of that."""


@pytest.mark.parametrize("room", ROOM)
def test_packed_forms_stay_within_their_limit(room: int) -> None:
    """Both weights of a module are packed, or none: the kernel that wants one wants both."""
    need(PACKED)
    model = nn.Sequential(Mixed(), Mixed(), Mixed()).eval()
    half = model[0].first.nbytes
    limit = room * half
    calls = [call_of(each) for each in model]
    with torch.no_grad():
        expected = [each(*call) for each, call in zip(model, calls, strict=True)]
        report = lz.optimize(model, memory_limit=limit)
        assert len(report.replaced) == 3
        for _ in range(2):
            got = [each(*call) for each, call in zip(model, calls, strict=True)]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert report.extra_bytes <= limit
    kept = [each._layerzero.forms for each in model]
    assert sorted(kept) == sorted([[1, 1]] * ROOM[room] + [[0, 0]] * (3 - ROOM[room]))
    assert "more had no room" in str(report)


def test_an_expert_that_there_is_not_is_transformers_business(kernel: str) -> None:
    """Its loop passes over the number behind the last."""
    model = mixtures.made("Mixtral", experts_implementation="eager")
    module = mixtures.experts_of(model)[0]
    ids, shares = torch.tensor([[0, 4], [4, 3]]), torch.rand(2, 2)
    with torch.no_grad():
        try:
            expected = module(rows := torch.randn(2, 64), ids, shares)
        except RuntimeError:
            pytest.skip("Transformers 5.17 refuses such calls")
        assert replaced(lz.optimize(model))
        assert torch.equal(module(rows, ids, shares), expected)


def test_other_calls_are_served_as_before(kernel: str) -> None:
    module = Mixed().eval()
    rows, ids, shares = call_of(module)
    with torch.no_grad():
        expected = module(rows, ids, shares)
        optimized(module)
        assert torch.equal(module(rows, shares=shares, ids=ids), expected)
        torch.testing.assert_close(module(rows.view(7, 1, 64), ids.view(7, 1, 2), shares.view(7, 1, 2))[:, 0], expected)


def test_training_autocast_and_transforms_run_as_stock(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Mixed().eval()
    call = call_of(module)
    with torch.no_grad():
        expected = module(*call)
        optimized(module)
        monkeypatch.setattr(lz, "moe_experts", None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(*call)
        module.train()
        assert torch.equal(module(*call), expected)


@pytest.mark.usefixtures("unmeasured")
def test_they_are_timed_as_a_kind_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And left where that gains nothing."""
    model = mixtures.made("Mixtral")
    from layerzero.integrations.optimize import selection

    seen: list[list[str]] = []
    real = selection.time_kinds

    def time_kinds(switches: Any, *others: Any) -> Any:
        seen.append(list(switches))
        return real(switches, *others)

    monkeypatch.setattr(selection, "time_kinds", time_kinds)
    with lz.scope(locks={"moe.experts": EACH}):
        report = lz.optimize(model, {"input_ids": mixtures.tokens()}, rounds=1, isolate=False)
    assert "experts" in seen[0]
    assert report.timed is not None
    assert "experts" in report.timed.gains
    assert ("experts" in report.timed.dropped) != bool(replaced(report))

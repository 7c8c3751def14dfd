"""Optimised experts in calls: gradients, copies, weights that are written into, and packed forms."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mixed_experts import EACH, PACKED, Mixed, call_of
from torch import nn

import layerzero as lz
from drawing import mostly, pairs
from layerzero.integrations.optimize.swaps.candidate import Candidate

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
pytest.importorskip("transformers.integrations.moe", reason="needs its interface for experts")

import mixtures  # noqa: E402  # it imports transformers

pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
]


QUICK = ("Mixtral", "GptOss", "DeepseekV3", "Qwen3Next")
NAMES = mostly(mixtures.NAMES, QUICK)


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


@pytest.mark.parametrize(("name", "kernel"), pairs(mixtures.NAMES, [PACKED, EACH], QUICK), indirect=["kernel"])
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

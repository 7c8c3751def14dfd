"""``lz.optimize(model, weights=...)`` on mixtures of experts: what is quantised, what it loses, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz

pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

from test_optimize_experts import Mixed, call_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"
)
ROUNDS = "vllm.cpu.fused_experts_int8"


def model(dtype: torch.dtype = torch.bfloat16, **given: Any) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(Mixed(**given).to(dtype)).eval()


def results(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(8)
    with torch.no_grad():
        found: torch.Tensor = module(*call_of(module, dtype=dtype))  # type: ignore[arg-type]
    return found.float()


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put on stays, whatever it takes."""
    monkeypatch.setattr("layerzero.integrations.optimize.entrance.time_random_rows", lambda *_, **__: None)


def why(report: Any) -> str:
    return "; ".join(each.why for each in report.left if each.path == "0")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("of", ["int8", "int4:32", "fp8"])
def test_experts_are_quantised_when_asked_for_and_follow_their_weights(of: str, transposed: bool) -> None:
    whole = model(transposed=transposed, biased=True)
    before = results(whole[0])
    report = lz.optimize(whole, weights=of, accuracy=0.3)
    (found,) = report.replaced
    assert found.calls == f"lz.moe_experts with {of.partition(':')[0]} weights and rows as they are"
    lost = {"int8": 0.02, "int4:32": 0.25, "fp8": 0.06}[of]
    assert 0 < off(results(whole[0]), before) < lost
    assert f"1 weights in {of.partition(':')[0]}: " in str(report)
    assert "experts" not in why(report)
    twin = copy.deepcopy(whole)
    assert torch.equal(results(twin[0]), results(whole[0]))
    with torch.no_grad():
        whole[0].first.mul_(0.5)  # type: ignore[operator,union-attr]
    changed = results(whole[0])
    whole[0].first.data = torch._neg_view(whole[0].first.data)  # type: ignore[operator,union-attr]
    negated, of_plain = results(whole[0]), copy.deepcopy(twin)
    of_plain[0].first.data.copy_(whole[0].first.data)  # type: ignore[operator,union-attr]
    assert off(negated, results(of_plain[0])) < lost
    whole[0].first.data = torch._neg_view(whole[0].first.data)  # type: ignore[operator,union-attr]
    with torch.no_grad():
        whole[0].first[:, 3, 5] = torch.inf  # type: ignore[operator,union-attr]
    endless = [results(whole[0]) for _ in range(2)]
    report.undo()
    assert all(torch.equal(each.isfinite(), results(whole[0]).isfinite()) for each in endless)
    with torch.no_grad():
        whole[0].first[:, 3, 5] = twin[0].first[:, 3, 5] * 0.5  # type: ignore[operator,union-attr]
    assert off(changed, results(whole[0])) < lost
    assert off(results(twin[0]), before) < lost


def test_rows_are_rounded_where_a_kernel_does_or_it_is_said_why_not() -> None:
    whole = model()
    before = results(whole[0])
    report = lz.optimize(whole, weights="int8", activations="int8", accuracy=0.1)
    if ROUNDS in [each.kernel for each in report.replaced if each.path == "0"]:
        assert 1e-3 < off(results(whole[0]), before) < 0.04
        report.undo()
    else:
        assert f"no kernel rounds the rows of such experts here ({ROUNDS}: [" in why(report)
    biased = model(biased=True)
    report = lz.optimize(biased, weights="int8", activations="int8")
    assert f"({ROUNDS}: [" in why(report)
    assert "gate_up_bias" in why(report) or "INSTRUCTION" in why(report) or "BACKEND" in why(report)


def test_what_loses_too_much_or_has_no_group_stays() -> None:
    report = lz.optimize(model(), weights="int4", accuracy=0.01)
    assert "QUANT_ACCURACY_THRESHOLD_EXCEEDED" in why(report)
    report = lz.optimize(model(wide=(3, 48, 24)), weights="int4")
    assert "no group of 32 divides their 48 and 24 columns" in why(report)

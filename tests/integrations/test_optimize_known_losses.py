"""What layers lose in a format is kept beside times, and a later request leaves out what is known to lose too much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.core.ledger import Ledger
from layerzero.engine.dispatch import ENGINE
from layerzero.integrations.optimize.modules import coded_experts, weights
from layerzero.tuning.storage import archive
from layerzero.tuning.storage.store import StoreLedger, TimeStore


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None) -> Iterator[None]:
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    ENGINE.ledger = StoreLedger(Ledger())
    yield
    ENGINE.ledger = Ledger()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 64, bias=False)).eval().requires_grad_(requires_grad=False)


def why(report: Any) -> str:
    return next(each.why for each in report.left if each.path == "0")


def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that weights are quantised to from now on."""
    seen: list[str] = []
    own = weights.Made

    def noted(weight: Any, of: str, *others: Any, **named: Any) -> Any:
        seen.append(of)
        return own(weight, of, *others, **named)

    monkeypatch.setattr(weights, "Made", noted)
    return seen


def test_a_loss_is_kept_with_the_time_of_the_product_and_its_kernel() -> None:
    report = lz.optimize(model(), weights="int4")
    (loss,) = [each.error for each in report.replaced]
    (row,) = archive.rows(TimeStore().database)
    assert (row.error, row.origin, row.samples) == (loss, "optimize", 1)
    assert row.facts["operation"] == "optimize.weights.int4:128"
    assert row.kernel == report.replaced[0].kernel
    assert row.median_us > 0


def test_what_is_known_to_lose_too_much_is_not_quantised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = why(lz.optimize(model(), weights="int4", accuracy=0.02))
    assert "[QUANT_ACCURACY_THRESHOLD_EXCEEDED] it loses 0.0" in first
    seen = made(monkeypatch)
    again = why(lz.optimize(model(), weights="int4", accuracy=0.02))
    assert "of its output as measured before, accuracy=0.02 allows less" in again
    assert seen == []


def test_other_numbers_and_a_bound_that_allows_it_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    lz.optimize(model(), weights="int4", accuracy=0.02)
    seen, other = made(monkeypatch), model()
    assert lz.optimize(model(), weights="int4", accuracy=0.2).replaced
    other[0].weight.data[:, ::2] *= 3.0
    assert "before" not in why(lz.optimize(other, weights="int4", accuracy=0.02))
    assert seen == ["int4:128", "int4:128"]


def test_of_all_formats_those_are_left_out_that_are_known_to_lose_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    lz.optimize(model(), weights="int4", accuracy=0.02)
    monkeypatch.setattr(weights.Request, "_fastest", lambda *_, **__: ["int4:128", "int8"])
    seen = made(monkeypatch)
    report = lz.optimize(model(), weights="auto", accuracy=0.03)
    assert [each.kind for each in report.replaced] == ["int8"]
    assert seen == ["int8"]


def test_what_was_lost_on_inputs_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = made(monkeypatch)
    for seed in range(2):
        rows = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
        assert "before" not in why(lz.optimize(model(), (rows,), weights="int4", accuracy=0.02, rounds=1))
    assert len(seen) == 2


def test_a_weight_is_told_from_others_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", missing)
    assert coded_experts.work_of(model()[0].weight, "int4", None, on_inputs=False).facts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_is_told_from_others_by_every_column_and_every_number(dtype: torch.dtype) -> None:
    def mark(of: torch.Tensor) -> str:
        return dict(coded_experts.work_of(of, "int8", None, on_inputs=False).facts)["weight"]

    weight = torch.randn(1024, 1024).to(dtype)
    seen = {mark(weight), mark(weight.clone())}
    assert len(seen) == 1
    turned = weight.clone()
    turned[:, 1] = turned[:, 1].flip(0)  # the sums stay
    other = weight.clone()
    other[0, 1] += 1.0  # one number, which no sample has to meet
    assert len({*seen, mark(turned), mark(other)}) == 3


def test_without_a_store_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ENGINE.ledger = Ledger()
    seen = made(monkeypatch)
    for _ in range(2):
        assert "before" not in why(lz.optimize(model(), weights="int4", accuracy=0.02))
    assert len(seen) == 2

"""Products with codes that a module calls with the same rows: one product computes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_optimize_quantised import INPUTS, TEXTS, module, off
from torch import Tensor, nn

import layerzero as lz


class Heads(nn.Module):
    """Three products of the same rows, and one of what they give."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (module(text, torch.float32) for _ in range(4))
        self.k.times = self.v.times = 1.0
        self.elsewhere = False

    def forward(self, rows: Tensor) -> Tensor:
        keys = rows.clone() if self.elsewhere else rows
        made = torch.cat([self.q(rows), self.k(keys) * self.v(keys)], -1)
        return self.o(made)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Outputs of each product that ran."""
    found: list[int] = []
    original = lz.quantized_linear

    def note(input: Tensor, weight: Tensor, *others: Any, **named: Any) -> Tensor:
        made: Tensor = original(input, weight, *others, **named)
        found.append(made.shape[-1])
        return made

    monkeypatch.setattr(lz, "quantized_linear", note)
    return found


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put on stays, whatever it takes."""
    monkeypatch.setattr("layerzero.integrations.optimize.entrance.time_random_rows", lambda *_, **__: None)


def optimized(model: Heads, counted: list[int], **named: Any) -> Any:
    report = lz.optimize(model.eval(), **named)
    counted.clear()
    return report


@pytest.mark.parametrize("text", [*TEXTS[:2], *TEXTS[3:]])
def test_products_of_the_same_rows_are_one(text: str, counted: list[int]) -> None:
    model = Heads(text)
    report = optimized(model, counted)
    rows = [torch.randn(2, INPUTS) for _ in range(3)]
    with torch.no_grad():
        ours = [model(rows[0])]
        assert counted == [64] * 4  # as its calls show which they are
        counted.clear()
        ours += [model(each) for each in rows[1:]]
        assert counted == [192, 64] * 2
        twin = copy.deepcopy(model)
        assert off(twin(rows[0]), ours[0]) < 1e-6
        before = report.extra_bytes
        assert before >= sum(each.nbytes for each in (model.q.of.fields.data,) * 3)
        prompt = torch.randn(80, INPUTS)
        counted.clear()
        theirs = model(prompt)
        assert counted == [64] * 4
        model.k.of.fields.scale.mul_(2.0)  # followed, as by each alone
        changed = [model(each) for each in rows]
        report.undo()
        assert all(off(one, model(each)) < 1e-5 for one, each in zip(changed, rows, strict=True))
        model.k.of.fields.scale.div_(2.0)
        assert all(off(one, model(each)) < 1e-5 for one, each in zip(ours, rows, strict=True))
        assert off(theirs, model(prompt)) < 1e-5


def test_rows_that_are_others_after_all_are_multiplied_apart(counted: list[int]) -> None:
    model, rows = Heads(TEXTS[0]), torch.randn(2, INPUTS)
    report = optimized(model, counted)
    with torch.no_grad():
        wanted = [model(rows) for _ in range(3)][-1]
        rows.mul_(2.0)  # written into: other rows in the same tensor
        twice = model(rows)
        model.elsewhere = True
        found = [model(rows) for _ in range(3)]
        counted.clear()
        found.append(model(rows))
        assert counted == [64, 128, 64]  # keys and values have the same rows still
        model.elsewhere = False
        found += [model(rows) for _ in range(3)]
        counted.clear()
        found.append(model(rows))
        assert counted in ([64] * 4, [192, 64])
        report.undo()
        assert all(off(each, model(rows)) < 1e-5 for each in (twice, *found))
        rows.div_(2.0)
        assert off(wanted, model(rows)) < 1e-5


def test_nothing_is_joined_without_room_nor_where_columns_lie_otherwise(counted: list[int]) -> None:
    model, mixed, rows = Heads(TEXTS[0]), Heads(TEXTS[0]), torch.randn(2, INPUTS)
    mixed.k = module(TEXTS[2], torch.float32)
    for each, room in ((model, 0), (mixed, None)):
        report = optimized(each, counted, memory_limit=room)
        with torch.no_grad():
            found = [each(rows.clone()) for _ in range(3)]
            assert counted == [64] * 12
            report.undo()
            assert all(off(one, each(rows)) < 1e-5 for one in found)

"""Tables of cosines and sines in a capture: a graph makes its own, and leaves nobody else's behind."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerzero.core import graph_capture
from layerzero.integrations.diffusers_rotary import _table
from layerzero.integrations.optimize.layers.layer import table_for
from layerzero.integrations.optimize.modules.norms import Normed, OnePlus


class OnDevice(torch.Tensor):
    is_cuda = True


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.rand(1, 6, 4)
    whole = torch.cat((half, half), -1)
    return whole.cos().as_subclass(OnDevice), whole.sin().as_subclass(OnDevice)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


MADE = [
    lambda cos, sin: table_for(cos, sin, 1, 6),
    lambda cos, sin: _table(cos, sin, False, twice=True),
    lambda cos, sin: _table(cos, sin, False, twice=False),
]


@pytest.mark.parametrize("make", MADE, ids=["optimize", "diffusers, twice", "diffusers"])
def test_a_capture_and_other_calls_have_tables_of_their_own(
    capture: list[bool], monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> None:
    cos, sin = angles()
    eager = make(cos, sin)
    assert make(cos, sin) is eager
    capture[0] = True
    monkeypatch.setattr(graph_capture._HERE, "mark", object(), raising=False)
    inside = make(cos, sin)
    assert inside is not eager
    assert make(cos, sin) is inside, "for all layers of the graph"
    assert torch.equal(inside.cos, eager.cos)
    monkeypatch.setattr(graph_capture._HERE, "mark", object())
    assert make(cos, sin) is not inside, "another graph, which no eager call came before"
    monkeypatch.setattr(graph_capture._HERE, "mark", None)
    assert make(cos, sin) is not make(cos, sin), "graphs of which nothing is known: each call may be another's"
    capture[0] = False
    after = make(cos, sin)
    assert after is not inside
    assert torch.equal(after.sin, eager.sin)


def test_nothing_is_asked_of_a_device_that_captures(capture: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    cos, sin = angles()
    capture[0] = True
    assert _table(cos, sin, False, twice=True) is None, "nobody saw whether its angles stand twice"
    capture[0] = False
    assert _table(cos, sin, False, twice=True) is not None
    capture[0] = True
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("it waits for the device"))
    assert _table(cos, sin, False, twice=True) is not None


def _of_layers(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    module: Any = types.SimpleNamespace(_parameters={"weight": weight})
    return Normed(module, OnePlus("one_plus", 1e-6))._scale


def _of_norms(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    return functools.partial(OnePlus("one_plus", 1e-6).factor.of, weight)


@pytest.mark.parametrize("of", [_of_layers, _of_norms])
def test_a_factor_that_is_made_in_a_capture_is_not_kept(capture: list[bool], of: Callable[..., Any]) -> None:
    weight = torch.rand(4).as_subclass(OnDevice)
    factor = of(weight)
    capture[0] = True
    inside = factor()
    assert factor() is not inside
    capture[0] = False
    kept = factor()
    assert torch.equal(kept, 1 + weight)
    capture[0] = True
    assert factor() is kept


def test_a_table_serves_rows_of_its_length_alone() -> None:
    """A hook may hand shorter hidden states on, with the same cosines: stock raises there."""
    cos, sin = (torch.rand(1, 6, 8) for _ in range(2))
    assert table_for(cos, sin, 2, 6).positions is None
    with pytest.raises(RuntimeError, match="must match the existing size"):
        table_for(cos, sin, 2, 1)
    one = [each[:, :1] for each in (cos, sin)]
    assert [table_for(*one, 2, length).positions.shape for length in (5, 7)] == [(2, 5), (2, 7)]  # type: ignore[union-attr]

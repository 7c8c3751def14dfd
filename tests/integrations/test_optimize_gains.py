"""What stays of what was put on: rounds, ratios around one percent, forms that were only tried, and progress."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scaled_modules import PACKED, Scaled
from torch import nn

import layerzero as lz
from drawing import examples
from layerzero.integrations.optimize import selection
from layerzero.integrations.optimize.selection import time_kinds
from layerzero.integrations.optimize.times.report import Timed


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

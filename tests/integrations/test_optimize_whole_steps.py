"""Layers that gained alone stay where steps of the whole model lose nothing; the clock is the test's."""

from __future__ import annotations

import pytest
from timed_llamas import llama

import layerzero as lz
from clock import Clock
from layerzero.integrations.optimize.layers import layer, layer_timing, whole_steps
from layerzero.integrations.optimize.swaps.swap import Way
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.timing import Sizes

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

ALONE = {Way.STOCK: 1.0, Way.OWN: 1.0, Way.PLAIN: 0.9}
"""What layers took alone: their new forward stays."""


@pytest.fixture
def clock(monkeypatch):
    """Layers gain 10 % alone; what whole steps take the test says."""
    timing.forget()
    made = Clock()
    monkeypatch.setattr(timing, "CLOCK", made)
    monkeypatch.setattr(
        layer_timing, "measured", lambda *_, **__: Sizes((ALONE,) * 3, (dict.fromkeys(ALONE, 0.0),) * 3, (9,) * 3, 1.0)
    )
    costing(made, monkeypatch, transformers.models.llama.modeling_llama.LlamaMLP, "forward", lambda *_: 1e-3)
    yield made
    timing.forget()


def costing(clock, monkeypatch, owner, name, seconds):
    monkeypatch.setattr(owner, name, clock.costs(getattr(owner, name), seconds))


def layers(report):
    return [each for each in report.replaced if each.kind == "layer"]


def test_layers_stay_where_steps_gain(clock, monkeypatch):
    costing(clock, monkeypatch, layer.Layer, "compute", lambda *_: 0.5e-3)
    report = lz.optimize(llama())
    assert len(layers(report)) == 2, str(report)
    assert [each.ways for each in report.paced if each.module == "LlamaDecoderLayer"] == [(Way.PLAIN,) * 3]


@pytest.mark.slow
def test_a_size_whose_steps_lose_computes_another_way(clock, monkeypatch):
    costing(clock, monkeypatch, layer.Layer, "compute", lambda _, hidden, __: 2e-3 if hidden.shape[1] == 1 else 0.5e-3)
    report = lz.optimize(llama())
    assert [each.exchange.state.own_at for each in layers(report)] == [(True, False, False)] * 2, str(report)
    assert [each.ways[0] for each in report.paced if each.module == "LlamaDecoderLayer"] == [Way.OWN]


def test_what_makes_steps_slower_in_every_way_is_taken_off_and_the_report_says_so(clock, monkeypatch):
    costing(clock, monkeypatch, layer.Layer, "compute", lambda *_: 2e-3)
    costing(clock, monkeypatch, layer, "size_of", lambda *_: 1e-3)  # of what runs the model's own code
    model = llama()
    report = lz.optimize(model)
    assert not layers(report)
    assert model.config._attn_implementation == "sdpa"
    assert all(vars(each).get("_layerzero") is None for each in model.model.layers)
    why = {each.why for each in report.left if "layers" in each.path}
    assert why == {"layer: steps of the model took 2.00 times its own time at 1 a step"}, str(report)
    again = lz.optimize(llama())
    assert not layers(again)  # and what is known is not timed again


def test_a_model_that_takes_no_step_is_left_as_it_was_decided(clock, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such step")

    monkeypatch.setattr(whole_steps, "filled", fail)
    report = lz.optimize(llama())
    assert len(layers(report)) == 2
    assert any("no such step" in each for each in report.tune)


def test_a_way_that_could_not_be_timed_is_not_left_on(clock, monkeypatch):
    lost = iter([1.5])

    def of_steps(steps, count):
        found = next(lost, None)
        if found is None:
            raise RuntimeError("no such step")
        return found

    monkeypatch.setattr(whole_steps._Steps, "lost", of_steps)
    report = lz.optimize(llama())
    assert [each.ways for each in report.paced if each.module == "LlamaDecoderLayer"] == [(Way.PLAIN,) * 3]
    assert not any(any(each.exchange.state.own_at) for each in layers(report))
    assert "steps of the whole model were not timed (RuntimeError: no such step)" in str(report)

"""Layers that are timed: with windows, with attention that loses, with what raises, and before others."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from timed_llamas import llama, of_layers
from torch import nn

import layerzero as lz
from clock import Clock, Ticking
from layerzero.integrations.optimize import selection
from layerzero.integrations.optimize.layers import layer_timing
from layerzero.integrations.optimize.layers.layer_timing import attention_costs
from layerzero.integrations.optimize.swaps.reads import Listening
from layerzero.integrations.optimize.swaps.swap import Way
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.timing import Paced, Sizes, Untimed

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


quiet = pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning")


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture
def ticking(monkeypatch):
    """Every way takes as long as every other."""
    timing.forget()
    monkeypatch.setattr(timing, "CLOCK", Ticking())
    yield
    timing.forget()


def gemma(*types, window=16):
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=len(types), num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=window, layer_types=list(types),
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


def taking(*, own, plain, noise=0.0):
    ratios = ({Way.STOCK: 1.0, Way.OWN: own, Way.PLAIN: plain},) * 3
    return Sizes(ratios, ({Way.STOCK: 0.0, Way.OWN: noise, Way.PLAIN: noise},) * 3, (9,) * 3, 1.0)


def measuring(monkeypatch, answer):
    """Let ``answer`` say what a row of layers takes, with LayerZero's attention exchanged or not."""
    asked = []

    def measured(group, whole, exchange, passed, *, ours):
        row, exchanged = layer_timing._row(group), ours and not exchange.chosen
        asked.append(([each.path for each in row], exchanged))
        return answer(row, exchanged)

    timing.forget()
    monkeypatch.setattr(timing, "CLOCK", Clock())
    monkeypatch.setattr(layer_timing, "measured", measured)
    return asked


@quiet
@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("window", [*(pytest.param(each, marks=pytest.mark.slow) for each in (16, 128)), 66])
def test_layers_with_a_sliding_window_are_timed(window):
    report = lz.optimize(gemma(SLIDING, SLIDING, FULL, FULL, window=window))
    assert len([each for each in report.paced if of_layers(each)]) == 2, str(report)
    assert "not timed" not in str(report)
    assert "could not be timed" not in str(report)


class Scaled(nn.Module):
    """A norm's own code, which takes some numbers of rows only."""

    def __init__(self, size, most) -> None:
        super().__init__()
        self.weight, self.tiny, self.most = nn.Parameter(torch.ones(size)), 1e-5, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[:-1].numel() >= self.most:
            raise ValueError("too many rows")
        return x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt() * self.weight


@quiet
@pytest.mark.usefixtures("ticking")
def test_a_module_that_raises_while_it_is_timed_is_taken_out_and_the_others_count(monkeypatch):
    monkeypatch.setattr(Listening, "why", lambda *_, **__: "")  # as for code that hides from the proof that it compares
    report = lz.optimize(nn.Sequential(Scaled(16, 64), Scaled(32, 65)).eval())
    why = {each.path: each.why for each in report.left}
    assert "it could not be timed against the model's own code (ValueError: too many rows)" in why["0"]
    assert [each.paths for each in report.paced] == [["1"]]


@quiet
def test_layers_that_raise_go_with_their_attention_and_what_was_timed_before_counts(monkeypatch):
    def answer(row, exchanged):
        if row[0].path.endswith("layers.2"):
            raise RuntimeError("another mask")
        return taking(own=1.0, plain=0.5)

    asked = measuring(monkeypatch, answer)
    report = lz.optimize(gemma(SLIDING, SLIDING, FULL, FULL))
    paths = [f"model.layers.{number}" for number in range(4)]
    assert [each.path for each in report.replaced if each.kind == "layer"] == paths[:2]
    assert [each.paths for each in report.paced if of_layers(each)] == [paths[:2]]
    why = {each.path: each.why for each in report.left if each.path in {"", *paths}}
    assert set(why) == {"", *paths[2:]}
    assert all("RuntimeError: another mask" in each for each in why.values())
    assert asked == [(paths[:2], True), (paths[2:], True), (paths[:2], False)]  # kept by what it takes without it


@quiet
@pytest.mark.usefixtures("ticking")
def test_modules_are_timed_alone_where_no_layer_can_be_run_before_them(monkeypatch):
    def raises(whole, exchange):
        raise IndexError("no hidden states")

    monkeypatch.setattr(selection, "around", raises)
    report = lz.optimize(llama())
    assert "modules were timed alone, not behind a layer of the model (IndexError: no hidden states)" in str(report)
    assert any(each.module == "LlamaRMSNorm" for each in report.paced)


@quiet
@pytest.mark.usefixtures("ticking")
def test_hidden_states_may_be_passed_by_name(monkeypatch):
    kind, around = transformers.models.llama.modeling_llama.LlamaDecoderLayer, selection.around

    def by_name(self, hidden, *others, **named):
        return self.forward(*others, hidden_states=hidden, **named)

    def naming(whole, exchange):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "__call__", by_name)
            return around(whole, exchange)

    monkeypatch.setattr(selection, "around", naming)
    report = lz.optimize(llama())
    assert "modules were timed alone" not in str(report)


def paced(sizes):
    return Paced("Layer", (Way.OWN,) * 3, sizes, kept=False)


@quiet
def test_attention_costs_what_layers_that_are_not_kept_take_beyond_the_noise():
    assert attention_costs([]) == ""
    assert attention_costs([paced(taking(own=1.005, plain=1.2))]) == ""
    assert attention_costs([paced(taking(own=1.04, plain=1.2, noise=0.05))]) == ""
    assert "1.04 times as long in Layer on 1 tokens" in attention_costs([paced(taking(own=1.04, plain=1.2))])
    assert attention_costs([Paced("Layer", (Way.PLAIN,) * 3, taking(own=1.4, plain=0.5), kept=True)]) == ""
    assert attention_costs([Untimed("Layer", "it raised")]) == "in Layer: it raised"
    assert attention_costs([Untimed("Layer", "the clock stood still", stays=True)]) == ""


@quiet
def test_attention_that_loses_in_some_layers_goes_and_the_others_are_timed_without_it(monkeypatch):
    def answer(row, exchanged):
        if row[0].path.endswith("layers.2"):
            return taking(own=1.2, plain=1.3)
        return taking(own=1.0, plain=0.5 if exchanged else 1.5)

    asked = measuring(monkeypatch, answer)
    model = gemma(SLIDING, SLIDING, FULL, FULL)
    report = lz.optimize(model)
    assert [exchanged for _, exchanged in asked] == [True, True, False]
    assert all(each.kind not in {"layer", "attention"} for each in report.replaced)
    assert model.config._attn_implementation == "sdpa"
    assert "attention: it took 1.20 times as long" in str(report)


@quiet
def test_what_is_known_of_layers_counts_where_attention_is_exchanged_alike(monkeypatch):
    asked = measuring(monkeypatch, lambda row, exchanged: taking(own=1.0, plain=0.5))
    lz.optimize(llama())
    lz.register_with_transformers()
    chosen = llama()
    chosen.set_attn_implementation("layerzero")
    lz.optimize(chosen)
    lz.optimize(llama())
    assert [exchanged for _, exchanged in asked] == [True, False]


@quiet
@pytest.mark.parametrize(
    ("types", "reads"),
    [
        pytest.param((SLIDING, FULL) * 2, [False] * 2, marks=pytest.mark.slow),
        ((SLIDING,) * 2 + (FULL,) * 2, [True, False]),
    ],
)
@pytest.mark.usefixtures("ticking")
def test_a_layer_computes_the_next_ones_norm_only_if_that_runs_next(monkeypatch, types, reads):
    rows, seen, row_of, timed = [], [], layer_timing._row, layer_timing.timed

    def row(group):
        rows.append(row_of(group))
        return rows[-1]

    def timing(*given, **named):
        seen.append([layer_timing._state(each).following is not None for each in rows[-1]])
        return timed(*given, **named)

    monkeypatch.setattr(layer_timing, "_row", row)
    monkeypatch.setattr(layer_timing, "timed", timing)
    lz.optimize(gemma(*types))
    assert seen == [reads, reads]


@quiet
def test_a_report_says_that_a_clock_stood_still():
    timing.forget()
    report = lz.optimize(llama())
    assert report.paced == []
    assert "LlamaDecoderLayer, LlamaRMSNorm" in str(report)
    assert "not timed against the model's own code (the clock stood still" in str(report)


@quiet
@pytest.mark.parametrize(("resolution", "clock"), [(1e-9, time.thread_time), (1 / 64, time.perf_counter)])
def test_a_coarse_clock_of_threads_is_not_taken(monkeypatch, resolution, clock):
    monkeypatch.setattr(time, "get_clock_info", lambda name: SimpleNamespace(resolution=resolution))
    assert timing._alone() is clock

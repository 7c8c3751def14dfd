"""Without inputs, nothing stays that is slower than a model's own code, or cannot be timed; the clock is the test's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from timed_llamas import llama
from torch import nn

import layerzero as lz
from clock import Clock
from layerzero.integrations.optimize import selection
from layerzero.integrations.optimize.layers import layer, layer_timing
from layerzero.integrations.optimize.modules import find as modules
from layerzero.integrations.optimize.modules import norms
from layerzero.integrations.optimize.swaps import candidate, weights
from layerzero.integrations.optimize.swaps.swap import FROM_MANY, SIZES, Way, size_of
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import Optimized
from layerzero.integrations.optimize.times.timing import Sizes, timed

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


def costing(layer_clock, monkeypatch, *, own, ours):
    """Let a layer take ``own`` seconds by its own code and ``ours`` by the new forward, which may depend on tokens."""
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer

    def by(seconds):
        return lambda *given, **_: seconds(next(each for each in given if isinstance(each, torch.Tensor)).shape[1])

    whole = layer_clock.costs(kind.forward, by(own))

    def forward(self, hidden_states, *others, **named):
        return whole(self, hidden_states, *others, **named)

    monkeypatch.setattr(kind, "forward", forward)
    monkeypatch.setattr(
        layer.Layer,
        "compute",
        layer_clock.costs(layer.Layer.compute, lambda state, hidden, named: ours(hidden.shape[1])),
    )


def layers(report):
    return [each for each in report.replaced if each.kind == "layer"]


def test_layers_that_are_slower_are_taken_out_and_the_report_says_so(layer_clock, monkeypatch):
    costing(layer_clock, monkeypatch, own=lambda tokens: 1.0, ours=lambda tokens: 2.0)
    model = llama()
    report = lz.optimize(model)
    assert layers(report) == []
    assert all(vars(each).get("_layerzero") is None for each in model.model.layers)
    why = [each.why for each in report.left if "layers" in each.path]
    assert len(why) == 2
    assert "layer: no gain on random rows" in why[0]
    assert "1.00 ± 0.00 on 1 (own code)" in str(report).replace("\n", " ")


@pytest.mark.slow
def test_layers_that_are_faster_stay(layer_clock, monkeypatch):
    costing(layer_clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 1.0)
    report = lz.optimize(llama())
    assert len(layers(report)) == 2, str(report)
    assert "0.50 ± 0.00 on 64" in str(report)


def test_a_size_that_loses_runs_the_layers_own_code(layer_clock, monkeypatch):
    costing(layer_clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 3.0 if tokens == 4 else 1.0)
    model = llama()
    report = lz.optimize(model)
    assert len(layers(report)) == 2
    ran = []
    computing = layer.Layer.compute
    monkeypatch.setattr(
        layer.Layer,
        "compute",
        lambda state, hidden, named: ran.append(hidden.shape[1]) or computing(state, hidden, named),
    )
    with torch.no_grad():
        for tokens in SIZES:
            model(input_ids=torch.ones(1, tokens, dtype=torch.int64))
    assert ran == [1, 1, 64, 64]


def test_layers_of_one_shape_are_timed_once_a_process(layer_clock, monkeypatch):
    costing(layer_clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 1.0)
    lz.optimize(llama())
    before = layer_clock.now
    report = lz.optimize(llama())
    (known,) = [each for each in report.paced if each.module == "LlamaDecoderLayer"]
    assert known.known
    assert known.sizes.seconds == 0
    assert "as measured before" in str(report)
    assert layer_clock.now - before < before / 4  # the proofs alone ran


def test_a_norm_that_is_slower_is_taken_out(layer_clock, monkeypatch):
    monkeypatch.setattr(lz, "rms_norm", layer_clock.costs(lz.rms_norm, 3.0))
    kind = transformers.models.llama.modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(kind, "forward", layer_clock.costs(kind.forward, 1.0))
    assert norms.lz is lz
    report = lz.optimize(torch.nn.Sequential(kind(64)).eval())
    assert report.replaced == []
    assert "norm: no gain on random rows" in report.left[0].why


@pytest.mark.slow
def test_what_layers_save_is_a_share_of_the_whole_step(layer_clock, monkeypatch):
    costing(layer_clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 1.0)
    kind = transformers.models.llama.modeling_llama.LlamaForCausalLM
    monkeypatch.setattr(kind, "forward", layer_clock.costs(kind.forward, 1000.0))
    report = lz.optimize(llama())
    assert layers(report) == []
    (told,) = [each for each in report.paced if each.module == "LlamaDecoderLayer"]
    assert told.sizes.ratios[0][Way.PLAIN] == pytest.approx(1002 / 1004)


def test_a_norm_is_timed_behind_a_layer_as_the_model_calls_it(layer_clock, monkeypatch):
    """Called over and over, its code stays in the host's caches: here that takes half of its own code's time."""
    costing(layer_clock, monkeypatch, own=lambda tokens: 1.0, ours=lambda tokens: 2.0)
    of_layers, fast, behind = transformers.models.llama.modeling_llama, lz.rms_norm, Clock()
    whole, own = of_layers.LlamaDecoderLayer.forward, of_layers.LlamaRMSNorm.forward

    def forward(self, hidden_states, *others, **named):
        result = whole(self, hidden_states, *others, **named)
        behind.now = 1.0
        return result

    def normed(*given, **named):
        layer_clock.now += 3e-5 if behind.now else 0.5e-5
        behind.now = 0.0
        return fast(*given, **named)

    monkeypatch.setattr(of_layers.LlamaDecoderLayer, "forward", forward)
    monkeypatch.setattr(of_layers.LlamaRMSNorm, "forward", layer_clock.costs(own, 1e-5))
    monkeypatch.setattr(lz, "rms_norm", normed)
    report = lz.optimize(llama())
    (told,) = [each for each in report.paced if each.module == "LlamaRMSNorm"]
    assert told.sizes.ratios[0][Way.PLAIN] == pytest.approx(3.0, rel=0.01)
    assert not told.kept
    assert all(each.kind != "norm" for each in report.replaced)


def test_a_clock_that_stands_still_decides_nothing(layer_clock):
    report = lz.optimize(llama())
    assert len(layers(report)) == 2
    assert report.paced == []


@pytest.mark.parametrize(("tokens", "size"), [(1, 0), (2, 1), (15, 1), (16, 2), (900, 2)])
def test_every_number_of_tokens_has_a_size(tokens, size):
    assert size_of(torch.empty(1, tokens, 8)) == size_of(torch.empty(tokens, 8)) == size


@pytest.mark.parametrize(
    ("one", "many", "native", "emulated"),
    [(1.05, 0.45, True, True), (1.16, 0.3, False, True), (1.15, 0.67, False, True), (1.25, 0.1, False, False)],
)
def test_much_gained_at_one_size_outweighs_python_at_another(one, many, native, emulated):
    ratios = tuple({Way.STOCK: 1.0, Way.PLAIN: each} for each in (one, 1.0, many))
    found, ways = Sizes(ratios, ({Way.PLAIN: 0.01},) * 3, (9,) * 3, 1.0), (Way.PLAIN,) * 3
    assert found.gains(ways) is native
    assert found.gains(ways, emulated=True) is emulated


@pytest.mark.parametrize("emulated", [False, True])
def test_what_a_cpu_emulates_stays_though_one_token_loses(layer_clock, monkeypatch, emulated):
    monkeypatch.setattr(selection, "emulation", SimpleNamespace(emulates=lambda *_: emulated))
    monkeypatch.setattr(candidate.Candidate, "is_torchs", False)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    sizes = tuple({Way.STOCK: 1.0, Way.OWN: each + 0.1, Way.PLAIN: each} for each in (1.15, 1.0, 0.6))
    found = Sizes(sizes, (dict.fromkeys(Way, 0.0),) * 3, (9,) * 3, 1.0)
    monkeypatch.setattr(modules, "measured", lambda *_: found)
    report = lz.optimize(model)
    assert bool(report.replaced) is emulated


def test_a_gain_within_the_noise_is_none():
    ratios = ({Way.STOCK: 1.0, Way.PLAIN: 0.97},) * 3
    ways = (Way.PLAIN,) * 3
    assert Sizes(ratios, ({Way.PLAIN: 0.0},) * 3, (9,) * 3, 1.0).gains(ways)
    assert not Sizes(ratios, ({Way.PLAIN: 0.05},) * 3, (9,) * 3, 1.0).gains(ways)


@pytest.mark.parametrize(("noise", "way"), [(0.02, Way.PLAIN), (0.04, Way.OWN)])
def test_own_code_stays_where_nothing_is_faster_for_sure(noise, way):
    ratios = ({Way.STOCK: 1.0, Way.OWN: 1.0, Way.PLAIN: 0.97, Way.PACKED: 1.2},) * 3
    found = Sizes(ratios, ({**dict.fromkeys(Way, 0.0), Way.PLAIN: noise},) * 3, (9,) * 3, 1.0)
    assert found.best(among=(Way.OWN, Way.PLAIN, Way.PACKED)) == (way,) * 3


def test_a_way_that_loses_nothing_is_kept_where_own_code_loses():
    ratios = {Way.STOCK: 1.0, Way.OWN: 1.025, Way.PLAIN: 1.0}
    found = Sizes((ratios,) * 3, ({Way.STOCK: 0.0, Way.OWN: 0.01, Way.PLAIN: 0.03},) * 3, (9,) * 3, 1.0)
    assert found.best(among=(Way.OWN, Way.PLAIN)) == (Way.PLAIN,) * 3


def test_a_module_of_another_model_is_timed_behind_its_weights(layer_clock, monkeypatch):
    kind, fast = transformers.models.llama.modeling_llama.LlamaRMSNorm, lz.rms_norm
    model, read, behind = nn.Sequential(kind(64), nn.Linear(64, 64)).eval(), layer_timing.among_weights, Clock()
    model[1].weight.data = model[1].weight.data.to(torch.float8_e4m3fn)  # which nothing sums up

    def normed(*given, **named):
        layer_clock.now += 3e-5 if behind.now else 0.5e-5
        behind.now = 0.0
        return fast(*given, **named)

    def among_weights(root):
        found = read(root)
        assert found.about == 4 * (64 + 64)
        return replace(found, run=lambda: (found.run(), setattr(behind, "now", 1.0)))

    large = nn.Linear(64, layer_timing.SWEPT_BYTES // 128)
    assert read(nn.Sequential(large, nn.Linear(64, 64))).about == layer_timing.SWEPT_BYTES
    monkeypatch.setattr(selection, "among_weights", among_weights)
    monkeypatch.setattr(kind, "forward", layer_clock.costs(kind.forward, 1e-5))
    monkeypatch.setattr(lz, "rms_norm", normed)
    report = lz.optimize(model)
    assert [each.sizes.ratios[0][Way.PLAIN] for each in report.paced] == [pytest.approx(3.0, rel=0.01)]
    assert not report.replaced


@pytest.mark.parametrize(("noise", "said"), [(0.02, False), (0.42, True)])
def test_a_report_says_that_its_times_are_noise(noise, said):
    found = Sizes(({Way.STOCK: 1.0, Way.PLAIN: 0.08},) * 3, ({Way.PLAIN: noise},) * 3, (9,) * 3, 1.0)
    report = Optimized(paced=[timing.Paced("Linear", (Way.PLAIN,) * 3, found, kept=True, paths=["head"])])
    assert ("± 0.42 says little: optimize again in a new process" in str(report)) == said


def test_a_prompt_begins_where_its_way_gains(monkeypatch):
    ratios = ({}, {Way.STOCK: 1.0, Way.PLAIN: 0.9, Way.PACKED: 1.7}, {Way.STOCK: 1.0, Way.PLAIN: 1.0, Way.PACKED: 0.7})
    found, ways = Sizes(ratios, ratios, (9,) * 3, 1.0, (25.0, 35.0, 150.0)), (Way.PLAIN, Way.PLAIN, Way.PACKED)
    many = found.many(ways)
    assert many == 46  # 34 us are missing on 4 rows, 15 left over on 64
    for few in range(1, 100):  # too little is gained anywhere but on 64 rows, which were timed
        little = replace(found, stock_s=(25.0, few, 150.0))
        assert little.many((Way.PLAIN, Way.PLAIN, Way.STOCK)) == SIZES[-1]
    assert replace(found, stock_s=()).many(ways) == FROM_MANY
    with monkeypatch.context() as patch:
        patch.setattr(timing, "ranks_choose", lambda _: True)
        assert found.many(ways) == FROM_MANY  # each rank has times of its own
    state = weights.Packs([torch.empty(8, 8)], pack=True)
    state.take(ways, many)
    assert [state.forms_for(torch.empty(rows, 8)) == [None] for rows in (1, 4, many - 1, many, 64)] == [True] * 3 + [
        False
    ] * 2


def test_no_round_begins_after_the_time(layer_clock):
    ways = {way: lambda: lambda: layer_clock.costs(int, 1.0)() for way in (Way.STOCK, Way.PLAIN)}
    found = timed([ways] * 3)
    assert found.rounds == (timing.FEWEST,) * 3

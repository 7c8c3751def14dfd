"""Without inputs, nothing stays in a model that is slower than its own code; the clock is the test's."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.integrations.optimize import layer, norms, pace
from layerzero.integrations.optimize.pace import SIZES, Sizes, Way, size_of, timed

transformers = pytest.importorskip("transformers")


class Clock:
    """Goes on by what is said, and by nothing else."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def costs(self, function, seconds):
        """A function that takes so long; ``seconds`` may depend on its arguments."""

        def run(*args, **named):
            self.now += seconds(*args, **named) if callable(seconds) else seconds
            return function(*args, **named)

        return run


@pytest.fixture
def clock(monkeypatch):
    pace.forget()
    made = Clock()
    monkeypatch.setattr(pace, "CLOCK", made)
    yield made
    pace.forget()


def decoder():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def costing(clock, monkeypatch, *, own, ours):
    """Let a layer take ``own`` seconds by its own code and ``ours`` by the new forward, which may depend on tokens."""
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer

    def by(seconds):
        return lambda *given, **_: seconds(next(each for each in given if isinstance(each, torch.Tensor)).shape[1])

    whole = clock.costs(kind.forward, by(own))

    def forward(self, hidden_states, *others, **named):
        return whole(self, hidden_states, *others, **named)

    monkeypatch.setattr(kind, "forward", forward)
    monkeypatch.setattr(
        layer, "_compute", clock.costs(layer._compute, lambda state, hidden, named: ours(hidden.shape[1]))
    )


def layers(report):
    return [each for each in report.replaced if each.kind == "layer"]


def test_layers_that_are_slower_are_taken_out_and_the_report_says_so(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 1.0, ours=lambda tokens: 2.0)
    model = decoder()
    report = lz.optimize(model)
    assert layers(report) == []
    assert all(vars(each).get("_layerzero") is None for each in model.model.layers)
    why = [each.why for each in report.left if "layers" in each.path]
    assert len(why) == 2
    assert "layer: no gain on random rows" in why[0]
    assert "1.00 ± 0.00 on 1 (own code)" in str(report).replace("\n", " ")


def test_layers_that_are_faster_stay(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 1.0)
    report = lz.optimize(decoder())
    assert len(layers(report)) == 2, str(report)
    assert "0.50 ± 0.00 on 64" in str(report)


def test_a_size_that_loses_runs_the_layers_own_code(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 3.0 if tokens == 4 else 1.0)
    model = decoder()
    report = lz.optimize(model)
    assert len(layers(report)) == 2
    ran = []
    computing = layer._compute
    monkeypatch.setattr(
        layer, "_compute", lambda state, hidden, named: ran.append(hidden.shape[1]) or computing(state, hidden, named)
    )
    with torch.no_grad():
        for tokens in SIZES:
            model(input_ids=torch.ones(1, tokens, dtype=torch.int64))
    assert ran == [1, 1, 64, 64]


def test_layers_of_one_shape_are_timed_once_a_process(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 1.0)
    lz.optimize(decoder())
    before = clock.now
    report = lz.optimize(decoder())
    (known,) = [each for each in report.paced if each.module == "LlamaDecoderLayer"]
    assert known.known
    assert known.sizes.seconds == 0
    assert "as measured before" in str(report)
    assert clock.now - before < before / 4  # the proofs alone ran


def test_a_norm_that_is_slower_is_taken_out(clock, monkeypatch):
    monkeypatch.setattr(lz, "rms_norm", clock.costs(lz.rms_norm, 3.0))
    kind = transformers.models.llama.modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(kind, "forward", clock.costs(kind.forward, 1.0))
    assert norms.lz is lz
    report = lz.optimize(torch.nn.Sequential(kind(64)).eval())
    assert report.replaced == []
    assert "norm: no gain on random rows" in report.left[0].why


def test_what_layers_save_is_a_share_of_the_whole_step(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 1.0)
    kind = transformers.models.llama.modeling_llama.LlamaForCausalLM
    monkeypatch.setattr(kind, "forward", clock.costs(kind.forward, 1000.0))
    report = lz.optimize(decoder())
    assert layers(report) == []
    (told,) = [each for each in report.paced if each.module == "LlamaDecoderLayer"]
    assert told.sizes.ratios[0][Way.PLAIN] == pytest.approx(1002 / 1004)


def test_a_norm_is_timed_behind_a_layer_as_the_model_calls_it(clock, monkeypatch):
    """Called over and over, its code stays in the host's caches: here that takes half of its own code's time."""
    costing(clock, monkeypatch, own=lambda tokens: 1.0, ours=lambda tokens: 2.0)
    of_layers, fast, behind = transformers.models.llama.modeling_llama, lz.rms_norm, []
    whole, own = of_layers.LlamaDecoderLayer.forward, of_layers.LlamaRMSNorm.forward

    def forward(self, hidden_states, *others, **named):
        result = whole(self, hidden_states, *others, **named)
        behind[:] = [self]
        return result

    def normed(*given, **named):
        clock.now += 3e-5 if behind else 0.5e-5
        behind.clear()
        return fast(*given, **named)

    monkeypatch.setattr(of_layers.LlamaDecoderLayer, "forward", forward)
    monkeypatch.setattr(of_layers.LlamaRMSNorm, "forward", clock.costs(own, 1e-5))
    monkeypatch.setattr(lz, "rms_norm", normed)
    report = lz.optimize(decoder())
    (told,) = [each for each in report.paced if each.module == "LlamaRMSNorm"]
    assert told.sizes.ratios[0][Way.PLAIN] == pytest.approx(3.0, rel=0.01)
    assert not told.kept
    assert all(each.kind != "norm" for each in report.replaced)


def test_a_clock_that_stands_still_decides_nothing(monkeypatch):
    pace.forget()
    report = lz.optimize(decoder())
    assert len(layers(report)) == 2
    assert report.paced == []


@pytest.mark.parametrize(("tokens", "size"), [(1, 0), (2, 1), (15, 1), (16, 2), (900, 2)])
def test_every_number_of_tokens_has_a_size(tokens, size):
    assert size_of(torch.empty(1, tokens, 8)) == size_of(torch.empty(tokens, 8)) == size


def test_a_gain_within_the_noise_is_none():
    ratios = ({Way.STOCK: 1.0, Way.PLAIN: 0.97},) * 3
    ways = (Way.PLAIN,) * 3
    assert Sizes(ratios, ({Way.PLAIN: 0.0},) * 3, (9,) * 3, 1.0).gains(ways)
    assert not Sizes(ratios, ({Way.PLAIN: 0.05},) * 3, (9,) * 3, 1.0).gains(ways)


def test_no_round_begins_after_the_time(clock):
    ways = {way: lambda: lambda: clock.costs(int, 1.0)() for way in (Way.STOCK, Way.PLAIN)}
    found = timed([ways] * 3)
    assert found.rounds == (pace.FEWEST,) * 3

"""Without inputs, nothing stays that is slower than a model's own code, or cannot be timed; the clock is the test's."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import layerzero as lz
from clock import Clock, Ticking
from layerzero.integrations.optimize import selection
from layerzero.integrations.optimize.layers import layer, layer_timing
from layerzero.integrations.optimize.layers.layer_timing import attention_costs
from layerzero.integrations.optimize.modules import find as modules
from layerzero.integrations.optimize.modules import norms
from layerzero.integrations.optimize.swaps import candidate
from layerzero.integrations.optimize.swaps.swap import SIZES, Way, size_of
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.timing import Paced, Sizes, Untimed, timed

transformers = pytest.importorskip("transformers", "5.0", reason="needs transformers >= 5")

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


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def of_layers(each):
    return "DecoderLayer" in each.module


def taking(*, own, plain, noise=0.0):
    ratios = ({Way.STOCK: 1.0, Way.OWN: own, Way.PLAIN: plain},) * 3
    return Sizes(ratios, ({Way.STOCK: 0.0, Way.OWN: noise, Way.PLAIN: noise},) * 3, (9,) * 3, 1.0)


@pytest.fixture
def clock(monkeypatch):
    timing.forget()
    made = Clock()
    monkeypatch.setattr(timing, "CLOCK", made)
    yield made
    timing.forget()


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
        layer.Layer, "compute", clock.costs(layer.Layer.compute, lambda state, hidden, named: ours(hidden.shape[1]))
    )


def layers(report):
    return [each for each in report.replaced if each.kind == "layer"]


def test_layers_that_are_slower_are_taken_out_and_the_report_says_so(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 1.0, ours=lambda tokens: 2.0)
    model = llama()
    report = lz.optimize(model)
    assert layers(report) == []
    assert all(vars(each).get("_layerzero") is None for each in model.model.layers)
    why = [each.why for each in report.left if "layers" in each.path]
    assert len(why) == 2
    assert "layer: no gain on random rows" in why[0]
    assert "1.00 ± 0.00 on 1 (own code)" in str(report).replace("\n", " ")


def test_layers_that_are_faster_stay(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 1.0)
    report = lz.optimize(llama())
    assert len(layers(report)) == 2, str(report)
    assert "0.50 ± 0.00 on 64" in str(report)


def test_a_size_that_loses_runs_the_layers_own_code(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 3.0 if tokens == 4 else 1.0)
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


def test_layers_of_one_shape_are_timed_once_a_process(clock, monkeypatch):
    costing(clock, monkeypatch, own=lambda tokens: 2.0, ours=lambda tokens: 1.0)
    lz.optimize(llama())
    before = clock.now
    report = lz.optimize(llama())
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
    report = lz.optimize(llama())
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
    report = lz.optimize(llama())
    (told,) = [each for each in report.paced if each.module == "LlamaRMSNorm"]
    assert told.sizes.ratios[0][Way.PLAIN] == pytest.approx(3.0, rel=0.01)
    assert not told.kept
    assert all(each.kind != "norm" for each in report.replaced)


def test_a_clock_that_stands_still_decides_nothing(clock):
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
def test_what_a_cpu_emulates_stays_though_one_token_loses(clock, monkeypatch, emulated):
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


def test_no_round_begins_after_the_time(clock):
    ways = {way: lambda: lambda: clock.costs(int, 1.0)() for way in (Way.STOCK, Way.PLAIN)}
    found = timed([ways] * 3)
    assert found.rounds == (timing.FEWEST,) * 3


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
        if x.numel() // x.shape[-1] >= self.most:
            raise ValueError("too many rows")
        return x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt() * self.weight


@quiet
@pytest.mark.usefixtures("ticking")
def test_a_module_that_raises_while_it_is_timed_is_taken_out_and_the_others_count():
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

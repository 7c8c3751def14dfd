"""``budget_s`` bounds all that ``lz.optimize`` does; the clock is the test's, and a run of the model moves it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import layerzero as lz
from clock import Clock, Ticking
from layerzero.integrations.optimize import entrance, selection
from layerzero.integrations.optimize.modules import find as modules
from layerzero.integrations.optimize.selection import time_kinds
from layerzero.integrations.optimize.swaps.swap import Way
from layerzero.integrations.optimize.times import report as reports
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times import workload as workloads
from layerzero.integrations.optimize.times.timing import timed
from layerzero.integrations.optimize.times.workload import RUN, TimeLeft, Workload
from layerzero.tuning.measurement import tune_run
from layerzero.tuning.measurement.timing import Deadline, TimeOverError
from layerzero.tuning.measurement.tune import run_jobs

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning")


class Scaled(nn.Module):
    """A norm's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.tiny = nn.Parameter(torch.ones(16)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt() * self.weight


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(workloads, "CLOCK", made)
    monkeypatch.setattr(timing, "WALL", made)
    return made


@pytest.fixture
def began(clock, monkeypatch):
    """When each run of the model, and each measuring of kernels, began; and what the latter was given."""
    found: list[tuple[str, float]] = []
    tune = Workload.tune

    def tuning(self, deadline, **more):
        found.append(("kernels", deadline.left_s))
        tuned = tune(self, deadline=Deadline(0.0), **more)  # the inputs' calls are recorded in a run
        clock.now += max(deadline.left_s, 0.0)
        return tuned

    monkeypatch.setattr(Workload, "tune", tuning)
    return found


def slow(clock, began, seconds):
    """A model that takes so long on its clock, and the call of it."""
    model, x = nn.Sequential(Scaled(), Scaled()).eval(), torch.randn(3, 16)

    def call():
        began.append((RUN, clock.now))
        clock.now += seconds
        return model(x)

    return model, call


@pytest.mark.parametrize("budget_s", [1.0, 5.0, 20.0, 60.0, 120.0])
def test_no_run_of_the_model_begins_that_would_end_too_late(clock, began, budget_s):
    model, call = slow(clock, began, 2.0)
    report = lz.optimize(model, call, rounds=2, budget_s=budget_s, isolate=False)
    runs = [at for what, at in began if what == RUN]
    assert runs
    assert all(at + 2.0 <= budget_s for at in runs[1:])  # of the first nobody knew how long it takes
    assert report.seconds == clock.now <= max(budget_s, 2.0)


def test_what_looks_for_modules_leaves_time_to_time_the_whole(clock, began, monkeypatch):
    """Else what it found stays on without a look at whether the model became slower."""
    model, call = slow(clock, began, 2.0)
    model = nn.Sequential(*[Scaled() for _ in range(40)], *model).eval()
    look = modules.find

    def looking(search):
        for each in look(search):
            clock.now += isinstance(each, reports.Replaced)  # a second for each that is checked
            yield each

    monkeypatch.setattr(entrance, "FINDERS", tuple(looking if each is look else each for each in entrance.FINDERS))
    report = lz.optimize(model, call, rounds=1, budget_s=30.0, isolate=False)
    assert report.timed is not None
    assert "no time was left to check it" in str(report)


def test_the_default_budget_bounds_it_too(clock, began):
    model, call = slow(clock, began, 50.0)
    report = lz.optimize(model, call, isolate=False)
    assert clock.now <= 120.0
    assert "of which budget_s gave 120 s" in str(report)


def test_without_a_budget_nothing_is_left_out(clock, began, monkeypatch):
    monkeypatch.setattr(Workload, "tune", lambda self, **_: run_jobs([], self.device, effort=None, budget_s=0))
    model, call = slow(clock, began, 1000.0)
    report = lz.optimize(model, call, rounds=1, budget_s=None, isolate=False)
    assert report.timed is not None
    assert report.time.left_out == []
    assert "left out" not in str(report)


@pytest.mark.parametrize(("gains", "kept"), [(True, 2), (False, 0), (None, 0)])
def test_a_model_too_slow_to_be_timed_is_decided_as_without_inputs(clock, began, monkeypatch, gains, kept):
    def measured(*_):
        if gains is None:
            raise TimeOverError
        ratios = {Way.STOCK: 1.0, Way.OWN: 1.0, Way.PLAIN: 0.5 if gains else 2.0}
        return timing.Sizes((ratios,) * 3, (dict.fromkeys(ratios, 0.0),) * 3, (7,) * 3, 0.0)

    timing.forget()
    monkeypatch.setattr(modules, "measured", measured)
    monkeypatch.setattr(timing, "CLOCK", clock)  # of one that stands still quick tests ask for no time
    model, call = slow(clock, began, 4.0)
    report = lz.optimize(model, call, rounds=1, budget_s=5.0, isolate=False)
    timing.forget()
    assert len(report.replaced) == kept
    assert sum("forward" in vars(each) for each in model.modules()) == kept
    text = str(report)
    assert "left out for want of time, of which budget_s gave 5 s:" in text
    assert "comparing and timing the whole, instead of which random rows decide, as without inputs: about 20 s" in text
    assert len([at for what, at in began if what == RUN]) == 1


def test_a_run_that_is_faster_now_leaves_time_to_be_timed(clock, began):
    model, x = nn.Sequential(Scaled(), Scaled()).eval(), torch.randn(3, 16)

    def call():
        clock.now += 0.1 if "forward" in vars(model[0]) else 4.0
        return model(x)

    report = lz.optimize(model, call, rounds=2, budget_s=15.0, isolate=False)
    assert report.timed is not None
    assert report.timed.speedup == pytest.approx(40.0)
    assert len(report.replaced) == 2
    assert clock.now <= 15.0


@pytest.mark.parametrize("emulated", [True, False])
def test_without_time_stays_what_is_known_to_gain(emulated):
    timing.forget()
    found = timing.decided("a shape", "Linear", [""], lambda: None, lambda: True, emulated=emulated)
    assert found.late
    assert found.stays == emulated


def test_rounds_count_what_stock_takes():
    """Where stock takes ten times as long, a round takes as long as ten runs, and without one kind it does as well."""
    on, spent = {}, [0.0]

    def sample():
        seconds = 1.0 if on["a"] else 10.0
        spent[0] += seconds
        return seconds

    switches = {kind: (lambda state, kind=kind: on.__setitem__(kind, state)) for kind in ("a", "b", "c")}
    found = time_kinds(switches, sample, 3, fits=lambda count: spent[0] + count <= 40)
    assert found.speedup == pytest.approx(10.0)
    assert found.together
    assert spent[0] <= 40


def test_a_budget_of_nothing_runs_nothing(clock, began):
    model, call = slow(clock, began, 1.0)
    report = lz.optimize(model, call, budget_s=0.0)
    assert began == []
    assert report.replaced == []
    assert "everything, the first run of the model included: an unknown time, 0 s were left" in str(report)


def test_kernels_get_what_the_models_runs_leave(clock, began):
    model, call = slow(clock, began, 1.0)
    lz.optimize(model, call, rounds=1, budget_s=100.0, isolate=False)
    ((_, given),) = [each for each in began if each[0] == "kernels"]
    assert given == 99.0 - selection._runs(1, 1)
    clock.now, began[:] = 0.0, []
    model, call = slow(clock, began, 10.0)
    lz.optimize(model, call, rounds=1, budget_s=150.0, isolate=False)
    ((_, given),) = [each for each in began if each[0] == "kernels"]
    assert given == 70.0  # half of what the first run left


def test_a_child_gets_the_remaining_time(clock, monkeypatch):
    stops = []

    def rehearse(pairs, *, stop, modules):
        stops.append([stop()])
        clock.now += 6.0  # a child that would go on for a minute
        stops[-1].append(stop())
        return []

    monkeypatch.setattr(tune_run, "rehearse", rehearse)
    monkeypatch.setattr(tune_run, "is_new", lambda *_: True)
    whole = Deadline(20.0, clock)
    workload = Workload(lambda: lz.rms_norm(torch.ones(4, 64), torch.ones(64)), torch.device("cpu"))
    tuned = workload.tune(deadline=whole.sooner(10.0), isolate=True)
    assert stops == [[False, True]]  # half of the ten seconds that are left for kernels
    assert tuned.seconds <= 10.0


def test_a_report_says_that_the_thread_had_no_core(clock):
    def waits():
        clock.now += 1.0  # on the wall; the thread's own clock counts what it computes

    workload = Workload(waits, torch.device("cpu"))
    timed = time_kinds({}, workload.sample, 2)
    assert workload.core_share < 0.5
    timed.core_share = workload.core_share
    assert "optimize again on an idle machine" in str(timed)
    timed.core_share = 1.0
    assert "idle machine" not in str(timed)


def test_modules_that_there_is_no_time_to_check_stay_and_are_counted(clock, monkeypatch):
    kinds = modules._candidate

    def checked(kind, module):
        clock.now += 1.0
        return kinds(kind, module)

    monkeypatch.setattr(modules, "_candidate", checked)
    model = nn.Sequential(*(Scaled() for _ in range(6))).eval()
    report = lz.optimize(model, budget_s=20.0)
    assert clock.now <= 20.0
    assert len(report.replaced) == 3
    (told,) = [each for each in report.time.left_out if "Scaled" in each.what]
    assert (told.what, told.times) == ("checking modules of Scaled", 3)
    assert {each.why for each in report.left if each.module == "Scaled"} == {reports.NO_TIME}


def test_without_inputs_what_was_not_timed_is_not_kept(monkeypatch):
    timing.forget()
    clock = Clock()
    monkeypatch.setattr(workloads, "CLOCK", clock)
    monkeypatch.setattr(timing, "CLOCK", clock)

    def over(around, passed, group):
        clock.now += 100.0
        assert passed()
        raise TimeOverError

    monkeypatch.setattr("layerzero.integrations.optimize.modules.find.measured", over)
    report = lz.optimize(nn.Sequential(Scaled()).eval(), budget_s=50.0)
    assert report.replaced == []
    assert "no time was left to time it against the model's own code" in report.left[0].why
    assert "timing Scaled on random rows" in str(report)


def test_no_round_of_a_timing_begins_after_the_end(monkeypatch):
    own = Clock()
    monkeypatch.setattr(timing, "CLOCK", own)
    deadline = Deadline(10.0, own)

    def run():
        own.now += 1.0

    ways = {way: lambda: run for way in (Way.STOCK, Way.PLAIN)}
    with pytest.raises(TimeOverError):
        timed([ways], passed=deadline.passed)
    assert own.now == 10.0  # two first runs, and two rounds that run each way twice


def test_a_timing_ends_once_it_is_clear_and_goes_on_while_it_is_not(monkeypatch):
    own = Clock()
    monkeypatch.setattr(timing, "CLOCK", own)
    counts = dict.fromkeys((Way.STOCK, Way.PLAIN, Way.PACKED), 0)

    def rounds_of(costs):
        counts.update(dict.fromkeys(counts, 0))

        def way(name):
            def run():
                counts[name] += 1
                own.now += 1e-4 * costs[name](counts[name])

            return lambda: run

        return timed([{name: way(name) for name in costs}]).rounds[0]

    stock = {Way.STOCK: lambda _: 1.0}
    assert rounds_of(stock | {Way.PLAIN: lambda _: 0.9}) == 7  # of seven rounds all say so
    assert rounds_of(stock | {Way.PLAIN: lambda _: 1.1}) == 7
    assert rounds_of(stock | {Way.PLAIN: lambda _: 1.0}) == 7
    assert rounds_of(stock | {Way.PLAIN: lambda count: 0.9 if count // 2 % 2 else 1.1}) == timing.MOST
    assert rounds_of(stock | {Way.PLAIN: lambda count: 0.9 if count // 2 % 2 else 1.1, Way.PACKED: lambda _: 2.0}) == 60
    assert counts[Way.PACKED] < counts[Way.PLAIN] / 4  # what is slower for sure takes no further part


def test_layers_are_switched_without_walking_the_model(monkeypatch):
    """One walk over all modules puts attention on; timing and proofs flip the setting alone."""
    transformers = pytest.importorskip("transformers")
    from layerzero.integrations.optimize.attention.transformers import AttentionSwap

    timing.forget()
    monkeypatch.setattr(timing, "CLOCK", Ticking())
    walks = []
    keeping = AttentionSwap._keep
    monkeypatch.setattr(AttentionSwap, "_keep", lambda self: walks.append(1) or keeping(self))
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    report = lz.optimize(transformers.LlamaForCausalLM(config).eval())
    timing.forget()
    assert report.paced
    assert len(walks) <= 6, len(walks)


def test_kinds_are_timed_together_where_time_lacks_for_each():
    on, runs = {}, []

    def sample():
        runs.append(dict(on))
        return 1.0 if any(on.values()) else 2.0

    switches = {kind: (lambda state, kind=kind: on.__setitem__(kind, state)) for kind in ("a", "b", "c")}
    found = time_kinds(switches, sample, 3, fits=lambda count: len(runs) + count <= 10)
    assert found.together
    assert "a, b, c: kept together; there was no time to time each apart" in str(found)
    assert len(runs) <= 10
    assert on == {"a": True, "b": True, "c": True}
    runs.clear()
    assert time_kinds(switches, sample, 3, fits=lambda count: len(runs) + count <= 3) is None
    assert runs == []
    assert on == {"a": False, "b": False, "c": False}


def test_a_step_is_expected_to_take_the_least_that_one_took(clock):
    time = TimeLeft(10.0)
    for seconds in (4.0, 1.0, 2.0):
        with time.taking("step"):
            clock.now += seconds
    assert time.expected_s("step", 3) == 3.0
    assert time.fits("step", 3)
    assert not time.fits("step", 4)
    assert time.allows("the fifth", "another")
    clock.now = 10.0
    assert not time.allows("the fifth", "another")

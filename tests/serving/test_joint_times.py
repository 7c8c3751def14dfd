"""Kernels chosen together: by runs of an invented world, whose times and conversions are known, and in a plan."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.freeze import Frost
from layerzero.serving import joint_times
from layerzero.serving import solve as solving
from layerzero.serving.joint_times import LAST_ROUNDS, LEAST, ROUNDS, together
from layerzero.tuning.measurement.comparison import record_times


def never():
    return False


class World:
    """A chain of calls whose runs take their kernels' times and conversions, microseconds, and some noise."""

    def __init__(self, seed, noise=0.0):
        self.draw, self.noise, self.runs = random.Random(seed), noise, 0
        self.times = {
            f"s{number}": {f"k{place}": self.draw.uniform(80, 120) for place in range(self.draw.randint(1, 3))}
            for number in range(self.draw.randint(2, 5))
        }
        for name, kernels in self.times.items():  # the fastest alone is chosen for itself
            self.times[name] = dict(sorted(kernels.items(), key=lambda each: each[1]))
        self.neighbours = list(itertools.pairwise(self.times))
        self.conversions = {
            (first, one, second, other): self.draw.choice((0, 0, 60))
            for first, second in self.neighbours
            for one, other in itertools.product(self.times[first], self.times[second])
        }

    def takes(self, kernels):
        chosen = {name: next(iter(each)) for name, each in self.times.items()} | dict(kernels)
        us = sum(self.times[name][kernel] for name, kernel in chosen.items())
        return us + sum(self.conversions[a, chosen[a], b, chosen[b]] for a, b in self.neighbours)

    def run_s(self, kernels):
        self.runs += 1
        return self.takes(kernels) * (1 + self.draw.uniform(-self.noise, self.noise)) / 1e6

    def best(self):
        every = itertools.product(*self.times.values())
        return min(self.takes(dict(zip(self.times, kernels, strict=True))) for kernels in every)


def test_the_kernels_are_those_of_the_shortest_of_all_runs_unless_it_gains_too_little():
    changed = 0
    for seed in range(80):
        world = World(seed)
        found = together(world.times, world.neighbours, world.run_s, never)
        alone, best = world.takes({}), world.best()
        if alone / best - 1 >= LEAST:
            assert world.takes(found.kernels) == pytest.approx(best)
            assert found.together_us == pytest.approx(best)
            changed += bool(found.reasons)
        else:
            assert not found.reasons
            assert world.takes(found.kernels) == alone
    assert changed > 20


def test_noise_makes_no_choice_slower_by_more_than_what_it_hides():
    for seed in range(40):
        world = World(seed, noise=0.01)
        found = together(world.times, world.neighbours, world.run_s, never)
        assert world.takes(found.kernels) <= world.takes({})


def test_without_time_or_other_kernels_each_stays_as_chosen_for_itself():
    world = World(3)
    found = together(world.times, world.neighbours, world.run_s, lambda: True)
    assert world.runs == 0
    assert found.kernels == {name: next(iter(each)) for name, each in world.times.items()}
    assert "no time" in found.note
    alone = {name: dict([next(iter(each.items()))]) for name, each in world.times.items()}
    found = together(alone, world.neighbours, world.run_s, never)
    assert world.runs == 0
    assert "no call has two kernels" in found.note


def test_a_path_that_runs_do_not_confirm_is_left():
    """Ten runs in which another kernel takes half, as in a world that is busy otherwise, then none."""
    turns = itertools.count()
    times = {"a": {"x": 10.0, "y": 11.0}}

    def run_s(kernels):
        return 0.5 if kernels and next(turns) < ROUNDS else 1.0

    found = together(times, [], run_s, never)
    assert found.kernels == {"a": "x"}
    assert not found.reasons
    assert found.second.candidates == ("y",)
    assert "is left" in found.note
    assert next(turns) == ROUNDS + LAST_ROUNDS


# in a plan


class Chain(nn.Module):
    """A norm, then an activation of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, rows):
        return lz.gelu(lz.rms_norm(rows, self.weight))


@pytest.fixture
def clock(monkeypatch):
    """Microseconds that kernels of our own take; nothing else counts."""
    taken = [0.0]
    monkeypatch.setattr(joint_times, "_now_s", lambda: taken[0] / 1e6)
    monkeypatch.setattr(solving, "_measured", lambda *_, **__: [])
    lz.configure(plan_mode=True)
    yield taken
    ENGINE.frozen = None
    lz.configure(plan_mode=False)


def norms(clock, *, moved=10.0, dense=12.0):
    """Two norms, of which the one that is faster alone leaves its result in another order of memory."""
    ran = []

    def kernel(name, takes, leave):
        def run(input, weight, *, eps=1e-6):
            clock[0] += takes
            ran.append(name)
            return leave(torch.nn.functional.rms_norm(input, weight.shape, weight, eps))

        lz.register_kernel("norm.rms", f"user.{name}")(run)

    kernel("moved", moved, lambda each: each.transpose(0, 1).contiguous().transpose(0, 1))
    kernel("dense", dense, lambda each: each)

    def gelu(input, *, approximate="none"):
        clock[0] += 20.0 if input.is_contiguous() else 40.0
        return torch.nn.functional.gelu(input, approximate=approximate)

    lz.register_kernel("activation.gelu", "user.gelu")(gelu)
    return ran


def timed(facts, **times_us):
    record_times(
        facts,
        {
            REGISTRY.kernel(f"user.{name}"): Measurement(median_us=us, p95_us=us, variance_us2=0.0, samples=30)
            for name, us in times_us.items()
        },
    )


def solved(**more):
    rows = torch.randn(4, 16)
    timed(lz.facts("rms_norm", rows, torch.ones(16)), moved=10.0, dense=12.0)
    return lz.solve(Chain(), rows, **more)


def kernel_of(plan, operation):
    return next(each for name, each in plan.choices.items() if name.startswith(operation))


def test_a_plan_has_the_kernel_that_spares_its_neighbour_a_conversion_and_says_which_lost(clock, tmp_path):
    ran = norms(clock)
    plan = solved()
    norm = kernel_of(plan, "norm.rms")
    assert norm.kernel == "user.dense"
    assert norm.why == "user.moved lost: alone its calls take 10 us for 12, with their neighbours 18 more"
    (joint,) = plan.solved.joint
    assert [joint.alone_us, joint.together_us] == pytest.approx([50.0, 32.0])
    assert [*joint.lost.values()] == ["user.moved"]
    assert all(text in str(plan) for text in ("user.moved lost", "a run takes 32 us; 50 with each kernel"))
    plan.write(tmp_path / "plan.json")
    assert Frost.load(tmp_path / "plan.json") == plan
    lz.configure(plan_mode=False)  # what a process that holds the plan need not set
    lz.freeze(tmp_path / "plan.json")
    ran.clear()
    model, rows = Chain(), torch.randn(4, 16)
    with torch.no_grad():
        model(rows)
        assert ran == ["dense"]
        assert "user.moved lost" in str(lz.explain(lz.rms_norm, rows, model.weight.detach()))


def test_without_plan_mode_or_evidence_each_kernel_is_chosen_for_itself(clock):
    norms(clock)
    lz.configure(plan_mode=False)
    plan = solved()
    assert kernel_of(plan, "norm.rms").kernel == "user.moved"
    assert not plan.solved.joint
    lz.configure(plan_mode=True)
    (joint,) = lz.solve(Chain(), torch.randn(3, 16)).solved.joint  # of other sizes nothing was measured here
    assert "no call has two kernels" in joint.note


def test_what_cannot_run_is_left_as_chosen_for_itself(clock):
    norms(clock)
    with pytest.warns(lz.LayerZeroWarning, match="plan_mode: kernels were chosen each for itself: weights without"):
        plan = lz.solve(Chain().to("meta"), torch.empty(4, 16, device="meta"))
    assert not plan.solved.joint

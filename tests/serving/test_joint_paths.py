"""The shortest path over candidates, against every path written out."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from layerzero.serving.joint_times import Path, Step, shortest, spared


def every(steps):
    """All paths by their time, those of first candidates first among equals."""
    found = []
    for candidates in itertools.product(*(step.times_us for step in steps)):
        chosen = dict(zip((step.name for step in steps), candidates, strict=True))
        time_us = 0.0
        for step in steps:
            time_us += step.times_us[chosen[step.name]]
            for before, pairs in step.conversions_us.items():
                time_us += pairs.get((chosen[before], chosen[step.name]), 0.0)
        found.append(Path(candidates, time_us))
    return sorted(found, key=lambda each: each.time_us)


def drawn(seed, *, chain):
    """Steps of integer times, so that sums are exact in any order."""
    draw = random.Random(seed)
    steps = []
    for number in range(draw.randint(1, 6)):
        times = {f"k{place}": float(draw.randint(0, 30)) for place in range(draw.randint(1, 3))}
        before = steps[-1:] if chain else draw.sample(steps, draw.randint(0, min(3, len(steps))))
        conversions = {
            each.name: {
                pair: math.inf if draw.random() < 0.1 else float(draw.randint(-5, 20))
                for pair in itertools.product(each.times_us, times)
                if draw.random() < 0.7
            }
            for each in before
        }
        steps.append(Step(f"s{number}", times, conversions))
    return steps


@pytest.mark.parametrize("chain", [True, False])
def test_the_two_cheapest_paths_are_those_of_all_written_out(chain):
    for seed in range(400):
        steps = drawn(seed, chain=chain)
        best, second = shortest(steps)
        paths = every(steps)
        assert best == paths[0]  # first candidates first: the sort is stable
        assert (second is None) == (len(paths) == 1)
        if second is not None:
            assert second.time_us == paths[1].time_us
            assert second in paths
            assert second.candidates != best.candidates


def test_without_conversions_each_step_has_its_fastest():
    for seed in range(50):
        steps = [Step(each.name, each.times_us) for each in drawn(seed, chain=True)]
        best, _ = shortest(steps)
        assert [step.times_us[name] for step, name in zip(steps, best.candidates, strict=True)] == [
            min(step.times_us.values()) for step in steps
        ]


def test_a_path_is_never_longer_than_the_fastest_of_each_step():
    for seed in range(100):
        steps = drawn(seed, chain=False)
        alone = tuple(min(step.times_us, key=step.times_us.__getitem__) for step in steps)
        taken = next(each.time_us for each in every(steps) if each.candidates == alone)
        assert shortest(steps)[0].time_us <= taken


def test_equals_stay_with_the_first_candidates():
    steps = [Step("a", {"x": 1.0, "y": 1.0}), Step("b", {"x": 2.0, "y": 2.0}, {"a": {}})]
    best, second = shortest(steps)
    assert best == Path(("x", "x"), 3.0)
    assert second == Path(("x", "y"), 3.0)


def test_a_slower_kernel_wins_where_its_neighbour_need_not_convert():
    steps = [
        Step("attend", {"dense": 10.0, "moved": 9.0}),
        Step("project", {"p": 5.0}, {"attend": {("moved", "p"): 4}}),
    ]
    best, second = shortest(steps)
    assert best == Path(("dense", "p"), 15.0)
    assert second == Path(("moved", "p"), 18.0)


def test_a_fused_form_is_a_candidate_that_only_fits_computed_before():
    apart = {("norm", "before"): math.inf, ("fused", "quantize"): math.inf}
    steps = [
        Step("norm", {"norm": 4.0, "fused": 5.0}),
        Step("quantize", {"quantize": 3.0, "before": 0.0}, {"norm": apart}),
    ]
    assert shortest(steps)[0] == Path(("fused", "before"), 5.0)


def test_what_is_spared_is_what_the_first_candidate_takes_more_with_its_neighbours():
    moved = {("moved", "p"): 40.0, ("dense", "p"): 1.0}
    steps = [
        Step("attend", {"moved": 90.0, "dense": 100.0}),
        Step("project", {"p": 50.0, "q": 75.0}, {"attend": moved}),
    ]
    best, _ = shortest(steps)
    assert best == Path(("dense", "p"), 151.0)
    assert spared(steps, best) == {"attend": 29.0}
    assert not spared(steps, Path(("moved", "p"), 180.0))


def test_steps_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="step a: wanted at least one candidate"):
        shortest([Step("a", {})])
    with pytest.raises(ValueError, match="step a: wanted conversions with steps before it, got b"):
        shortest([Step("a", {"k": 1.0}, {"b": {}}), Step("b", {"k": 1.0})])

"""Times of calls that nobody measured: how good they are, and what they claim."""

from __future__ import annotations

import math
import random
import statistics

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from roofline_times import POWERS, PREFILL, WITHIN, measured, roofline, sizes

from layerzero.core.arguments import Axis
from layerzero.ops import OPERATIONS
from layerzero.tuning.prediction.fitting import fit, held_out_error
from layerzero.tuning.prediction.predict import (
    HOST_MARGIN,
    MAX_DISTANCE,
    MIN_CONFIDENCE,
    Meaning,
    Model,
    Point,
    extents,
    meaning_of,
    predict,
)
from layerzero.tuning.storage import learning


def test_held_out_shapes_of_a_roofline_are_predicted_to_a_few_percent():
    found = held_out_error([measured(seed=seed) for seed in range(5)])
    assert found.points == 175
    assert found.predicted > 170
    assert found.median_error < 0.035
    assert found.p90_error < 0.3, "of points whose removal leaves a gap of a factor of 4 at a bend"
    assert found.within_claim > 0.75


def test_waits_for_the_host_are_held_out_with_the_margin_that_predictions_give_them():
    waiting = [Point({"rows": 2**each}, 10.0, 2.0, 10.0) for each in range(10)]
    working = [Point({"rows": 2**each}, 40.0, 40.0, 9.0) for each in range(10)]
    for points in (waiting, working, [Point({"rows": 2**each}, 10.0) for each in range(10)]):
        found = held_out_error([points])
        assert (found.predicted, found.within_claim) == (10, 1.0)
        assert found.p90_error == pytest.approx(0.0, abs=1e-6), "all take as long as one another"


def test_sizes_between_measured_ones_are_predicted_within_what_is_claimed():
    model, draw = fit(measured()), random.Random(1)
    errors, within, silent = [], 0, 0
    for _ in range(300):
        batch, seq = draw.randint(1, 16), int(2 ** draw.uniform(7, 13))
        found = predict(model, sizes(batch, seq))
        if found is None:
            silent += 1
            continue
        errors.append(abs(math.log2(found.time_us / roofline(batch, seq))))
        within += errors[-1] <= 2 * found.error
    assert silent < 15
    assert sorted(errors)[150] < math.log2(1.05)
    assert within / len(errors) > 0.85


def test_where_a_kernel_switches_its_way_the_error_says_so():
    def law(rows):
        return 10 + rows / 8 if rows < 2**9 else 3 * (10 + rows / 8)

    model = fit([Point({"rows": 2**each}, law(2**each)) for each in range(18)])
    for rows in (20, 200, 360, 600, 50_000):
        found = predict(model, {"rows": rows})
        assert abs(math.log2(found.time_us / law(rows))) <= 2 * found.error
    even = fit([Point({"rows": 2**each}, 10 + 2**each / 8) for each in range(18)])
    assert predict(even, {"rows": 360}).error < 0.1 < predict(model, {"rows": 360}).error


def test_small_calls_take_what_launching_takes():
    points = [Point({"rows": 2**each}, max(5.0, 2**each / 100)) for each in range(3, 18)]
    model = fit(points)
    assert predict(model, {"rows": 1}).time_us == pytest.approx(5.0, rel=0.05), "smaller than all"
    assert predict(model, {"rows": 20}).time_us == pytest.approx(5.0, rel=0.02)
    assert predict(model, {"rows": 700}).time_us == pytest.approx(7.0, rel=0.2)
    assert predict(model, {"rows": 50_000}).time_us == pytest.approx(500.0, rel=0.05)


def test_sequences_and_heads_run_side_by_side():
    model = fit(measured())
    asked = sizes(8, 1500) | {"heads": 16, "kv_heads": 16}
    assert predict(model, asked).time_us == predict(model, sizes(4, 1500)).time_us
    assert predict(model, sizes(8, 1500) | {"kv_heads": 16}).error > predict(model, sizes(8, 1500)).error
    away = [predict(model, sizes(8, 1500) | {"kv_heads": heads}).error for heads in (32, 16, 8)]
    assert away == sorted(away), "heads on one, where each had its own, are farther from all that was measured"


def test_what_runs_side_by_side_and_in_tiles_is_what_the_operation_says():
    """Prefill alone works in tiles: one query fills none; each kv head serves its heads, wherever they are beside."""
    assert PREFILL == Meaning(("batch", "heads"), (("heads", "kv_heads"),), ("seq_q", "seq_k"))
    given = sizes(3, 200) | {"kv_heads": 8}
    assert extents(given, PREFILL, 128) == {"batch*heads": 96, "heads/kv_heads": 4, "seq_q": 256, "seq_k": 256}
    decode = meaning_of(OPERATIONS["attention.gqa.decode"].schema.axes)
    assert extents(given | {"seq_q": 1}, decode, 128) == {
        "batch*heads": 96,
        "heads/kv_heads": 4,
        "seq_q": 1,
        "seq_k": 200,
    }
    herd = Axis("herds", beside=True, carries=("sheep",))
    invented = meaning_of((herd, Axis("sheep", beside=True), Axis("meadows", beside=True), Axis("fence", tiled=True)))
    assert invented == Meaning(("sheep", "meadows"), (("sheep", "herds"),), ("fence",))
    norms = meaning_of(OPERATIONS["norm.rms"].schema.axes)
    assert extents({"rows": 3, "hidden": 5}, norms, 128) == {"rows": 3, "hidden": 5}


def in_tiles(tile, masking=1.0):
    """Made-up attention that works in tiles of queries and keys, and takes more where their ends are masked."""

    def law(batch, seq):
        whole = -(-seq // tile) * tile
        return (5 + batch * whole / 200 + batch * whole * whole / 1e5) * (masking if seq % 128 else 1)

    return law


@pytest.mark.parametrize(("tile", "masking"), [(1, 1.0), (64, 1.0), (128, 1.0), (128, 1.2), (256, 1.1)])
def test_tiles_are_told_by_lengths_between_their_multiples(tile, masking):
    law, draw = in_tiles(tile, masking), random.Random(tile)
    asked = [(batch, seq) for batch in (1, 4, 16) for seq in (128, 512, 2048)]
    asked += [(1, 305), (4, 202), (16, 351), (1, 1219), (4, 809), (16, 1403)]
    model = fit([Point(sizes(*each), law(*each) * math.exp(draw.gauss(0, 0.005)), meaning=PREFILL) for each in asked])
    assert model.tile == (1 if tile == 1 else 128)
    for batch, seq in ((2, 641), (8, 257), (6, 1000), (2, 1024)):
        assert predict(model, sizes(batch, seq)).time_us == pytest.approx(law(batch, seq), rel=0.25)


def test_even_lengths_tell_no_tiles():
    even = [
        Point(sizes(batch, seq), in_tiles(128, 1.2)(batch, seq), meaning=PREFILL)
        for batch in (1, 4, 16)
        for seq in (128, 512, 2048)
    ]
    assert fit(even).tile == 1


@given(offset=st.floats(0, 10), slopes=st.tuples(st.floats(0, 1), st.floats(0, 1)), asked=st.tuples(WITHIN, WITHIN))
def test_a_power_law_is_found_between_its_points(offset, slopes, asked):
    def law(a, b):
        return 2 ** (offset + slopes[0] * math.log2(a) + slopes[1] * math.log2(b))

    model = fit([Point({"rows": 4**a, "hidden": 4**b}, law(4**a, 4**b)) for a in range(6) for b in range(6)])
    found = predict(model, {"rows": asked[0], "hidden": asked[1]})
    assume(found is not None)
    assert abs(math.log2(found.time_us / law(*asked))) <= 0.3 + 2 * found.error
    assert found.confidence > 0.8


@given(points=st.lists(st.tuples(POWERS, POWERS, st.floats(0.1, 1e6)), max_size=30), asked=st.tuples(POWERS, POWERS))
def test_far_away_there_is_no_evidence_and_near_by_it_is_a_time(points, asked):
    model = fit([Point({"rows": a, "hidden": b}, time) for a, b, time in points])
    if model is None:
        return
    model = learning.decode(msgspec.json.encode(model))
    assert isinstance(model, Model)
    found = predict(model, {"rows": asked[0], "hidden": asked[1]})
    nearest = min(abs(math.log2(a / asked[0])) + abs(math.log2(b / asked[1])) for a, b, _ in points)
    if nearest > MAX_DISTANCE:
        assert found is None
    if found is not None:
        assert math.isfinite(found.time_us)
        assert found.time_us > 0
        assert MIN_CONFIDENCE <= found.confidence <= 1
        assert found.noise > 0


def test_a_direction_that_was_never_measured_counts_as_more_work_and_as_distance():
    model = fit(measured())
    same, longer = (predict(model, sizes(2, 700) | {"seq_k": keys}) for keys in (700, 1400))
    assert same.time_us < longer.time_us, "queries always were as many as keys"
    assert same.distance < longer.distance
    assert predict(model, {"batch": 2}) is None
    assert predict(model, sizes(1, 128 * 2**10)) is None, "16 times the longest, in queries and in keys"


def test_a_lone_time_says_something_of_its_neighbours_and_nothing_farther_away():
    assert fit([]) is None
    model = fit([Point(sizes(1, 512), 80.0, meaning=PREFILL)])
    assert predict(model, sizes(1, 512)).time_us == pytest.approx(80.0)
    near = predict(model, sizes(1, 511))
    assert near.time_us == pytest.approx(80.0, rel=0.01)
    assert near.confidence > 0.9
    doubled = predict(model, sizes(2, 512))
    assert doubled.time_us == pytest.approx(120.0), "half of it grows"
    assert doubled.error == pytest.approx(0.5)
    assert predict(model, sizes(4, 512)).error == pytest.approx(1.0)
    assert predict(model, sizes(1, 8192)) is None
    two = fit([Point({"rows": 4}, 1.0), Point({"rows": 8}, 2.0)])
    assert 1.0 < predict(two, {"rows": 6}).time_us < 2.0
    assert predict(fit([Point({"rows": 4}, 1.0)] * 9), {"rows": 4}).time_us == pytest.approx(1.0)


def test_the_same_sizes_again_are_no_neighbours():
    model = fit([Point({"rows": a, "hidden": b}, 1.0) for a, b in ((1, 1), (1, 1), (4, 2), (4, 2))])
    assert predict(model, {"rows": 1, "hidden": 2}).time_us == pytest.approx(1.0)


def test_noise_lowers_the_confidence():
    draw = random.Random(3)
    wild = [Point({"rows": 2**n}, 10 * math.exp(draw.gauss(0, 0.5))) for n in range(16)]
    tame = [Point({"rows": 2**n}, 10 * math.exp(draw.gauss(0, 0.01))) for n in range(16)]
    assert predict(fit(tame), {"rows": 300}).confidence > 0.99
    found = predict(fit(wild), {"rows": 300})
    assert found.error > 0.5
    assert found.confidence < 0.95


# device and host apart

LIBRARIES = {"a": (17, 6, 2.4, 450), "b": (27, 4, 3.0, 300), "c": (45, 5, 3.2, 600), "d": (12, 8, 1.5, 150)}
"""Made-up ones: us on the host, us of the smallest on the device, TB/s, TFLOP/s."""

COARSE = [(batch, seq) for batch in (1, 4, 16, 64) for seq in (128, 512, 2048, 8192)]


def on_device(library, batch, seq):
    _, least, bandwidth, rate = LIBRARIES[library]
    return least + 8 * batch * seq * 4096 / bandwidth / 1e6 + 2 * batch * 4096 * seq * seq / rate / 1e6


def waited_for(library, batch, seq, pace):
    return max(LIBRARIES[library][0] * pace, on_device(library, batch, seq))


def drawn_pace(draw, share):
    """How many times slower than when calm the host is: in a share of all cases by 1.4 to 2."""
    return draw.uniform(1.4, 2.0) if draw.random() < share else 1.0


def on_a_drifting_host(draw, share):
    """A coarse grid of times, of which a share met a slow host."""
    slow = {place: drawn_pace(draw, share) for place in COARSE}
    found = {}
    for library, (host_us, *_) in LIBRARIES.items():
        found[library] = []
        for batch, seq in COARSE:
            device_us = on_device(library, batch, seq) * math.exp(draw.gauss(0, 0.01))
            burst_us = max(host_us * slow[batch, seq] * math.exp(abs(draw.gauss(0, 0.03))), 0.95 * device_us)
            burst_us = None if device_us > 500 else burst_us
            felt_us = max(device_us, burst_us or 0.0)
            found[library].append(Point(sizes(batch, seq), felt_us, device_us, burst_us, PREFILL))
    return found


def chosen_on_a_drifting_host(share, apart):
    """Median error, and geometric mean of what the choice takes of the best, where the host goes on drifting."""
    errors, ratios = [], []
    for seed in range(8):
        draw = random.Random(seed)
        grid = on_a_drifting_host(draw, share)
        models = {
            library: fit(points if apart else [Point(each.sizes, each.time_us, meaning=PREFILL) for each in points])
            for library, points in grid.items()
        }
        for _ in range(50):
            batch, seq = int(2 ** draw.uniform(0, 6)), int(2 ** draw.uniform(7, 13))
            pace = drawn_pace(draw, share)
            times = {library: waited_for(library, batch, seq, pace) for library in LIBRARIES}
            found = {library: predict(model, sizes(batch, seq)) for library, model in models.items()}
            errors += [abs(math.log2(found[library].time_us / times[library])) for library in LIBRARIES]
            chosen = min(found, key=lambda library: found[library].time_us)
            ratios.append(times[chosen] / min(times.values()))
    return statistics.median(errors), statistics.geometric_mean(ratios)


@pytest.mark.parametrize(("share", "of_before"), [(0.35, 1.2), (0.6, 0.9)])
def test_a_drifting_host_spoils_no_choice_where_it_is_told_apart(share, of_before):
    error, ratio = chosen_on_a_drifting_host(share, apart=True)
    error_before, ratio_before = chosen_on_a_drifting_host(share, apart=False)
    assert error < 0.75 * error_before
    assert ratio - 1 < of_before * (ratio_before - 1), "slow in a third of all calls is bent away by the neighbours"
    assert ratio < 1.02, "a pace that nobody can foresee is most of it"


def test_what_waits_for_the_host_takes_what_the_host_takes():
    points = [
        Point({"rows": 2**each}, max(17.0, 2**each / 64), 2.0 + 2**each / 64, max(17.0, 2**each / 64))
        for each in range(17)
    ]
    model = fit(points)
    assert model.host_us == 17.0
    assert predict(model, {"rows": 1}).time_us == pytest.approx(17.0 * HOST_MARGIN)
    assert predict(model, {"rows": 700}).time_us == pytest.approx(17.0 * HOST_MARGIN), "12.9 us on the device"
    assert predict(model, {"rows": 700}).error < 0.05, "an error of the device hides behind the host"
    assert predict(model, {"rows": 50_000}).time_us == pytest.approx(783, rel=0.05)


def test_a_few_times_without_parts_do_not_count_beside_those_with():
    apart = [Point({"rows": 2**each}, 2.0**each, 2.0**each, 0.9 * 2**each) for each in range(8)]
    whole = [Point({"rows": 3 * 2**each}, 9.0 * 2**each) for each in range(8)]
    assert predict(fit(apart + whole[:6]), {"rows": 48}).time_us == pytest.approx(48, rel=0.02)
    assert predict(fit(apart[:3] + whole), {"rows": 48}).time_us == pytest.approx(144, rel=0.1)
    assert fit(apart).host_us == 0, "no call waited for it, so it is not known"


PARTS = st.lists(
    st.tuples(POWERS, POWERS, st.floats(0.5, 1e5), st.none() | st.floats(0.5, 1e5)), min_size=4, max_size=30
)


@given(parts=PARTS, asked=st.tuples(POWERS, POWERS))
def test_nothing_is_quicker_than_its_host(parts, asked):
    model = fit([Point({"rows": a, "hidden": b}, max(d, h or 0), d, h) for a, b, d, h in parts])
    found = None if model is None else predict(model, {"rows": asked[0], "hidden": asked[1]})
    if found is None:
        return
    assert found.time_us >= model.host_us
    assert math.isfinite(found.time_us)
    assert found.error > 0
    waited = [h for _, _, d, h in parts if h is not None and h > 1.1 * d]
    assert model.host_us == 0 if not waited else model.host_us <= statistics.median_high(waited)


# in the database

"""Times of calls that nobody measured, as the database learns and gives them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from roofline_times import TIME

import layerzero as lz
from layerzero.core.evidence import Evidence, Provenance
from layerzero.engine.order import costs, reliable
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.prediction.fitting import Time, weighed
from layerzero.tuning.prediction.predict import HOST_MARGIN
from layerzero.tuning.storage import archive, learning
from layerzero.tuning.storage.store import TimeStore


def test_a_time_that_is_mostly_noise_teaches_nothing(store, kernels):
    for rows in (1, 2, 4, 8):
        store.record(kernels[0], facts(rows), replace(TIME, noise=2.0))
    assert store.database.read("SELECT count(*) FROM models") == [(0,)]


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    return TimeStore()


@pytest.fixture
def kernels():
    def right(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    for name in ("a", "b"):
        lz.register_kernel("norm.rms", f"user.{name}", priority=50)(right)
    return [REGISTRY.kernel("user.a"), REGISTRY.kernel("user.b")]


def facts(rows, hidden=64):
    return lz.facts("rms_norm", torch.empty(rows, hidden), torch.empty(hidden))


def fill(store, kernel, factor=1.0, every=(1, 2, 4, 8, 16, 32, 64, 128)):
    for rows in every:
        store.record(kernel, facts(rows), replace(TIME, median_us=factor * (5 + rows)))


def test_a_later_process_predicts_what_nobody_measured(store, kernels):
    fill(store, kernels[0])
    fill(store, kernels[1], 3.0)
    store.record(kernels[1], facts(48), replace(TIME, median_us=20.0))
    found = TimeStore().evidence(kernels, facts(48))
    assert found["user.a"].provenance is Provenance.PREDICTED
    assert found["user.a"].time_us == pytest.approx(53, rel=0.1)
    assert 0 < found["user.a"].confidence < 1
    assert found["user.b"].provenance is Provenance.MEASURED, "what was measured is not predicted"
    assert TimeStore().evidence(kernels, facts(128 * 128)) == {}, "too far"
    assert TimeStore().evidence(kernels, facts(48, 63)) == {}, "another alignment"
    assert TimeStore().evidence(kernels, lz.facts("rms_norm", torch.empty(48, 64).half(), torch.empty(64).half())) == {}


@pytest.mark.parametrize("rows", [31, 33, 64])
def test_one_measured_call_serves_its_neighbours(store, kernels, rows):
    for kernel, time_us in zip(kernels, (10.0, 30.0), strict=True):
        store.record(kernel, facts(32), replace(TIME, median_us=time_us))
    found = store.evidence(kernels, facts(rows))
    assert {each.provenance for each in found.values()} == {Provenance.PREDICTED}
    assert found["user.a"].time_us < found["user.b"].time_us
    assert found["user.a"].confidence > 0.9
    far = store.evidence(kernels, facts(32 * 8))
    assert far["user.a"].confidence < found["user.a"].confidence
    assert store.evidence(kernels, facts(32 * 128)) == {}


def test_graphs_are_predicted_from_graphs(store, kernels):
    fill(store, kernels[0])
    asked = facts(48)
    assert store.evidence(kernels, asked.on(asked.device, capturing=True)) == {}


def test_what_has_to_be_adapted_is_another_regime(store, kernels, monkeypatch):
    fill(store, kernels[0])
    monkeypatch.setattr("layerzero.tuning.storage.store.adapted", lambda kernel, facts: "split")
    assert store.evidence(kernels, facts(48)) == {}


def test_what_is_forgotten_predicts_nothing(store, kernels):
    fill(store, kernels[0])
    assert store.evidence(kernels, facts(48))
    archive.forget(store.database, list(archive.rows(store.database)))
    assert store.evidence(kernels, facts(48)) == {}
    assert store.database.read("SELECT count(*) FROM models") == [(0,)]


def test_the_same_time_again_teaches_nothing(store, kernels, monkeypatch):
    fill(store, kernels[0])
    store.settle()
    learnt = []
    real = learning.learn
    monkeypatch.setattr(learning, "learn", lambda *args, **more: (learnt.append(args), real(*args, **more)))
    store.record(kernels[0], facts(8), replace(TIME, median_us=13.1))
    store.settle()  # a record merges for 0.1 s, and leaves the rest to the next one
    assert learnt == []
    store.record(kernels[0], facts(8), replace(TIME, median_us=26.0))
    store.settle()
    assert len(learnt) == 1


def test_what_an_earlier_version_learnt_is_learnt_anew_and_a_later_one_ignored(store, kernels):
    fill(store, kernels[0])
    known = store.evidence(kernels, facts(48))
    store.database.write(lambda connection: connection.execute("UPDATE models SET format = 2, model = '[]'"))
    assert TimeStore().evidence(kernels, facts(48)) == known
    assert store.database.read("SELECT DISTINCT format FROM models") == [(learning.MODEL_FORMAT,)]
    store.database.write(lambda connection: connection.execute("UPDATE models SET format = 99, model = '[]'"))
    assert TimeStore().evidence(kernels, facts(48)) == {}


def test_a_time_that_now_tells_the_parts_teaches(store, kernels, monkeypatch):
    fill(store, kernels[0])
    store.settle()
    learnt = []
    real = learning.learn
    monkeypatch.setattr(learning, "learn", lambda *args, **more: (learnt.append(args), real(*args, **more)))
    for parts, times in (((9.0, 13.0), 1), ((9.1, 13.1), 1), ((6.0, 13.0), 2)):
        store.record(kernels[0], facts(8), replace(TIME, median_us=13.0, device_us=parts[0], host_us=parts[1]))
        store.settle()
        assert len(learnt) == times


def told_apart(store, kernel, host_us, slow=None):
    """Times of calls that wait for their hosts, up to 4 times as long for some rows."""
    for rows in (1, 2, 4, 8, 16, 32, 64):
        felt_us = host_us * (slow or {}).get(rows, 1.0)
        store.record(kernel, facts(rows), replace(TIME, median_us=felt_us, device_us=2.0 + rows / 8, host_us=felt_us))


def test_calls_that_met_a_slow_host_all_at_once_count_as_on_a_calm_one(store, kernels):
    told_apart(store, kernels[0], 20.0, {8: 2.0})
    told_apart(store, kernels[1], 30.0, {8: 2.2})
    found = TimeStore().evidence(kernels, facts(8))
    assert found["user.a"].cost_us == pytest.approx(20.0 * HOST_MARGIN)
    assert (found["user.a"].time_us, found["user.b"].time_us) == (40.0, 66.0), "as measured"
    assert found["user.b"].cost_us == pytest.approx(33.0 * HOST_MARGIN), "what it took more than the others is its own"
    assert found["user.a"].confidence > 0.95
    assert TimeStore().evidence(kernels, facts(16))["user.a"].confidence > 0.95


def test_a_pace_is_that_of_one_run(store, kernels, monkeypatch):
    told_apart(store, kernels[0], 20.0)
    told_apart(store, kernels[1], 50.0)
    lz.register_kernel("norm.rms", "user.c", priority=40)(lambda input, weight, *, eps=1e-6: input)
    third = REGISTRY.kernel("user.c")
    told_apart(store, third, 31.0)
    monkeypatch.setattr("layerzero.tuning.storage.rows.now", lambda: "2100-01-01T00:00:00.000Z")
    for kernel, host_us in zip(kernels, (40.0, 100.0), strict=True):  # these two met a slow host, much later
        store.record(kernel, facts(8), replace(TIME, median_us=host_us, device_us=3.0, host_us=host_us))
    found = TimeStore().evidence([*kernels, third], facts(8))
    times = {name: each.cost_us / HOST_MARGIN for name, each in found.items()}
    assert times == pytest.approx({"user.a": 20.0, "user.b": 50.0, "user.c": 31.0})
    assert found["user.a"].time_us == 40.0


def test_times_without_parts_are_compared_as_they_are(store, kernels):
    store.record(kernels[0], facts(8), replace(TIME, median_us=20.0))
    store.record(kernels[1], facts(8), replace(TIME, median_us=18.0, device_us=3.0, host_us=18.0))
    found = TimeStore().evidence(kernels, facts(8))
    assert {name: each.time_us for name, each in found.items()} == {"user.a": 20.0, "user.b": 18.0}


def test_a_device_that_is_not_waited_for_counts_alone(store, kernels):
    store.record(kernels[0], facts(8), replace(TIME, median_us=23.0, device_us=22.0, host_us=23.0))
    assert TimeStore().evidence(kernels[:1], facts(8))["user.a"].cost_us == 22.0


def test_predictions_make_no_ties(store, kernels):
    lz.register_kernel("norm.rms", "user.fast", priority=10)(lambda input, weight, *, eps=1e-6: input)
    fast = REGISTRY.kernel("user.fast")
    draw = random.Random(5)
    for kernel, factor in ((kernels[0], 1.03), (fast, 1.0)):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            noisy_us = factor * (5 + rows) * math.exp(draw.gauss(0, 0.05))
            store.record(kernel, facts(rows), replace(TIME, median_us=noisy_us))
    found = costs(store.evidence([kernels[0], fast], facts(48)), [kernels[0], fast])
    assert {each.cost_noise for each in found.values()} == {0.0}


def test_a_calm_time_after_a_noisy_one_teaches(store, kernels):
    for noise in (2.0, 0.02):
        for rows in (1, 2, 4, 8, 16):
            store.record(kernels[0], facts(rows), replace(TIME, median_us=5.0 + rows, noise=noise))
    assert TimeStore().evidence(kernels, facts(6))["user.a"].time_us == pytest.approx(11.0, rel=0.05)


def test_one_kernel_that_needs_more_of_its_host_at_some_sizes_is_believed(store, kernels):
    told_apart(store, kernels[0], 20.0, {8: 2.0})
    told_apart(store, kernels[1], 25.0)
    found = TimeStore().evidence(kernels, facts(8))
    times = {name: each.cost_us / HOST_MARGIN for name, each in found.items()}
    assert times == pytest.approx({"user.a": 40.0, "user.b": 25.0})


def test_a_noisy_time_teaches_what_the_device_took(store, kernels):
    for rows in (1, 2, 4, 8, 16):
        parts = {"device_us": 2.0 + rows, "host_us": 1.0}
        store.record(kernels[0], facts(rows), replace(TIME, median_us=99.0, noise=2.0, **parts))
    assert TimeStore().evidence(kernels, facts(6))["user.a"].time_us == pytest.approx(8.0, rel=0.1)


def test_the_error_of_a_database_is_known(store, kernels):
    fill(store, kernels[0], every=[2**n for n in range(14)])
    found = archive.prediction_error(store.database.path)
    assert found.points == 14
    assert found.predicted >= 8
    assert found.median_error < 0.2


def test_dates_of_any_kind_can_stand_beside_each_other():
    dates = ("2026-11-22T00:00:00.000Z", "2026-11-22T00:00:01", "yesterday", "")
    times = [
        Time(f"k{number}", b"", "", "", 20.0, 0.01, 20, 0.1, date, "", 3.0, 20.0) for number, date in enumerate(dates)
    ]
    found = weighed(times, {(time.kernel, ""): 10.0 for time in times})
    assert {each.cost_us for each in found.values()} == {20.0 * HOST_MARGIN}, "no two of them are of one run"


@pytest.mark.parametrize(("predicted_us", "off_by", "counts"), [(90, 0.2, False), (90, 0.05, True), (120, 0.5, True)])
def test_a_prediction_is_ahead_of_a_time_by_more_than_it_may_be_off_by(predicted_us, off_by, counts):
    found = {
        "measured": Evidence(100.0, Provenance.MEASURED, 1.0, 0.01),
        "slower": Evidence(150.0, Provenance.MEASURED, 1.0, 0.01),
        "predicted": Evidence(predicted_us, Provenance.PREDICTED, 0.8, off_by),
    }
    assert reliable(found).keys() == found.keys() - (set() if counts else {"predicted"})
    del found["measured"], found["slower"]
    assert reliable(found).keys() == found.keys()

"""Recordings: every call is counted while one runs, none costs more afterwards, and manifests are checked."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.core.recipe import CallRecipe, TensorRecipe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.tuning.measurement.workload import FORMAT, Manifest, Recorded, every_call_of, jobs_of, jobs_of_file
from others import OTHERS


def norm(rows=4, hidden=64):
    return lz.rms_norm(torch.ones(rows, hidden), torch.ones(hidden))


@pytest.mark.usefixtures("path")
def test_every_call_is_counted_and_only_while_it_runs():
    norm()
    with lz.record() as recording:
        for _ in range(5):
            norm()
        norm(rows=7)
        with lz.scope(strict_mode=True):
            norm(rows=7)
    norm()
    assert recording.calls == 7
    shapes = {each.call.tensors["input"].shape: each.count for each in recording.manifest().calls}
    assert shapes == {(4, 64): 5, (7, 64): 2}
    assert not ENGINE.watchers


@pytest.mark.usefixtures("path")
def test_afterwards_calls_are_hits_again(monkeypatch):
    with lz.record():
        norm()
    norm()
    dispatcher = CALLS["rms_norm"].dispatcher
    monkeypatch.setattr(type(dispatcher), "choose", lambda *_, **__: pytest.fail("it was no hit"))
    norm()


def test_other_threads_are_seen():
    with lz.record() as recording:
        threads = [threading.Thread(target=norm, args=(rows,)) for rows in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert recording.calls == 8


def test_two_recordings_do_not_end_each_other():
    outer = lz.record()
    with lz.record() as inner:
        norm()
    norm()
    assert (outer.calls, inner.calls) == (2, 1)
    outer.stop()
    assert outer.stop().calls == outer.manifest().calls  # again is no error


def test_an_error_in_the_program_loses_nothing(tmp_path):
    file = tmp_path / "workload.json"
    with pytest.raises(ZeroDivisionError), lz.record(file, model="minilm"):
        norm()
        1 / 0  # noqa: B018
    manifest = Manifest.load(file, model="minilm")
    assert [each.count for each in manifest.calls] == [1]
    assert (manifest.format, manifest.layerzero) == (FORMAT, lz.__version__)


def test_a_recorded_workload_is_tuned_most_frequent_first(tmp_path):
    file = tmp_path / "workload.json"
    q = torch.randn(1, 1, 4, 16)
    with lz.record(file):
        norm(rows=64)
        for length in range(33, 60):  # one class
            k = torch.randn(1, length, 4, 16)
            lz.attention(q, k, k, layout="BSHD")
    jobs = jobs_of(Manifest.load(file), "cpu")
    assert [(job.operation, job.count) for job in jobs[:2]] == [("attention.standard.decode", 27), ("norm.rms", 1)]
    lengths = [job.recipe.tensors["key"].shape[1] for job in jobs if "decode" in job.operation]
    assert lengths == [46, 33, 59], "of those that are equally frequent the middle one is the first, then both ends"
    lz.configure(deny=OTHERS)
    found = lz.tune(manifest=file, samples=3, isolate=False)
    assert [each.report.operation for each in found.contests[:2]] == ["attention.standard.decode", "norm.rms"]
    assert jobs_of(Manifest.load(file), "cuda") == []
    x = torch.ones(64, 64)
    assert lz.explain("rms_norm", x, torch.ones(64)).chosen.provenance == "measured"


RECIPES = st.builds(
    lambda rows, hidden, eps: CallRecipe(
        "norm.rms",
        None,
        "cpu",
        {
            "input": TensorRecipe((rows, hidden), (hidden, 1), "float32"),
            "weight": TensorRecipe((hidden,), (1,), "float32"),
        },
        {"eps": eps},
    ),
    st.integers(1, 10**6),
    st.integers(1, 10**5),
    st.floats(1e-9, 1.0),
)


@settings(deadline=None)  # each example is on disk before it is read
@given(st.lists(st.builds(Recorded, st.integers(1, 10**9), RECIPES), max_size=5), st.text(max_size=20))
def test_a_manifest_survives_its_file(tmp_path_factory, calls, model):
    file = tmp_path_factory.mktemp("manifest") / "workload.json"
    manifest = Manifest(FORMAT, time.time(), "0.1.0", calls, model)
    manifest.save(file)
    assert Manifest.load(file) == manifest
    assert [each.name for each in file.parent.iterdir()] == ["workload.json"]


def test_what_is_no_manifest_is_refused(tmp_path):
    file = tmp_path / "workload.json"
    good = Manifest(FORMAT, time.time(), "0.1.0", [])
    for content, message in [
        (b"{}", "wanted a manifest"),
        (b"[1", "wanted a manifest"),
        (msgspec.json.encode(msgspec.structs.replace(good, format=9)), "format 1, got 9"),
        (msgspec.json.encode(msgspec.to_builtins(good) | {"extra": 1}), "unknown field"),
        (
            msgspec.json.encode(
                msgspec.structs.replace(good, calls=[Recorded(0, CallRecipe("norm.rms", None, "cpu", {}, {}))])
            ),
            "made at least once",
        ),
        (
            msgspec.json.encode(
                msgspec.structs.replace(good, calls=[Recorded(1, CallRecipe("norm.none", None, "cpu", {}, {}))])
            ),
            "known operations",
        ),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Manifest.load(file)
    good.save(file)
    with pytest.raises(ValueError, match="of the model 'llama', got one of ''"):
        Manifest.load(file, model="llama")


def test_a_manifest_that_is_no_text_is_an_error_that_names_the_file(tmp_path):
    file = tmp_path / "workload.json"
    file.write_bytes(b'{"format":1,"created_unix_s":1.0,"layerzero":"\xff","calls":[]}')
    with pytest.raises(ValueError, match=r"workload\.json: wanted a manifest that lz\.record wrote: "):
        Manifest.load(file)


def test_calls_of_the_same_sizes_have_names_of_their_own():
    query = torch.randn(1, 8, 4, 16)
    with lz.record() as recording:
        for more in ({"causal": False}, {"causal": True}, {"causal": True, "window": (2, 0)}):
            lz.attention(query, query, query, layout="BSHD", **more)
        other = query.transpose(1, 2)
        lz.attention(other, other, other, causal=False, layout="BHSD")
        lz.attention(query.requires_grad_(), query, query, causal=False, layout="BSHD")
    names = {each.name for each in every_call_of(recording.manifest(), "cpu")}
    start = "attention.standard.prefill 1x8x4x16"
    assert f"{start} causal=True window=2,0 float32" in names
    assert f"{start} with gradients float32" in names
    assert {f"{start} float32", f"{start} causal=True float32"} < names
    assert len(names) == 5


def test_an_old_manifest_is_used_with_a_warning(tmp_path):
    file = tmp_path / "workload.json"
    Manifest(FORMAT, time.time() - 8 * 86400, "0.1.0", []).save(file)
    with pytest.warns(lz.LayerZeroWarning, match="recorded 8 days ago"):
        Manifest.load(file)
    lz.configure(manifest={"stale_days": 9})
    Manifest.load(file)  # warnings are errors


@pytest.mark.parametrize("asked", [lz.tune, lz.warmup])
def test_a_manifest_of_another_device_says_so(tmp_path, asked):
    file = tmp_path / "workload.json"
    with lz.record(file):
        lz.rms_norm(torch.randn(3, 8), torch.randn(8))
    manifest = Manifest.load(file)
    elsewhere = [Recorded(each.count, msgspec.structs.replace(each.call, device="cuda")) for each in manifest.calls]
    msgspec.structs.replace(manifest, calls=elsewhere).save(file)
    with pytest.raises(ValueError, match="wanted calls on cpu, got 1 on cuda"):
        asked("*", manifest=file, device="cpu")


@pytest.mark.parametrize(
    ("tensors", "params"),
    [
        ({"input": TensorRecipe((-1, 8), (8, 1), "float32")}, {"eps": 1e-6}),
        ({"input": TensorRecipe((3, 8), (-8, 1), "float32")}, {"eps": 1e-6}),
        ({"input": TensorRecipe((3, 8), (8,), "float32")}, {"eps": 1e-6}),
        ({"input": TensorRecipe((3, 8), (8, 1), "float5")}, {"eps": 1e-6}),
        ({"input": TensorRecipe((3, 9), (9, 1), "float32")}, {"eps": 1e-6}),
        ({"input": TensorRecipe((3, 8), (8, 1), "float32")}, {"nonsense": 1}),
        ({}, {"eps": 1e-6}),
    ],
)
def test_a_damaged_call_is_an_error_that_names_the_file(tmp_path, tensors, params):
    file = tmp_path / "workload.json"
    call = CallRecipe("norm.rms", None, "cpu", tensors | {"weight": TensorRecipe((8,), (1,), "float32")}, params)
    Manifest(FORMAT, time.time(), "0.1.0", [Recorded(1, call)]).save(file)
    with pytest.raises(ValueError, match=r"workload\.json: wanted calls as lz\.record writes them, got another: "):
        jobs_of_file(file, "cpu")

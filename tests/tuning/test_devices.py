"""On which GPU things are measured and tried: the one that was meant, and the memory and cores that are there."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os

import pytest
import torch

import layerzero as lz
from layerzero.core.device import Device
from layerzero.engine.registry import REGISTRY
from layerzero.integrations.optimize.times import workload
from layerzero.testing.process import APART, apart_on, by_device
from layerzero.tuning.measurement import online
from layerzero.tuning.measurement import tune as tuning
from layerzero.tuning.measurement.clocks import current
from layerzero.tuning.measurement.timing import Deadline
from layerzero.tuning.verification import build_child

H200 = Device.named("H200")


@pytest.mark.parametrize(("visible", "index", "seen"), [
    (None, 0, None), (None, 2, "2,0,1,3"), ("", 1, None), ("4,5,6", 1, "5,4,6"), ("4", 2, None),
    ("MIG-a,MIG-b", 1, "MIG-b,MIG-a"),
])  # fmt: skip
def test_a_childs_first_gpu_is_the_callers_and_the_others_stay(monkeypatch, visible, index, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = apart_on(dataclasses.replace(H200, index=index))
    assert found == (APART if seen is None else {**APART, "CUDA_VISIBLE_DEVICES": seen})


def test_calls_of_two_gpus_are_children_of_two_places():
    facts = lz.facts("rms_norm", torch.ones(4, 32), torch.ones(32))
    calls = [
        (name, facts.on(dataclasses.replace(H200, index=index), capturing=False))
        for name, index in (("a", 1), ("b", 0), ("c", 1))
    ]
    found = [[name for name, _ in each] for each in by_device([*calls, ("d", facts)])]
    assert found == [["a", "c"], ["b"], ["d"]]


def test_a_build_is_made_where_its_call_was(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        build_child,
        "run_apart",
        lambda _, tasks, environment, **__: seen.append((len(tasks), environment.get("CUDA_VISIBLE_DEVICES"))),
    )
    kernel = dataclasses.replace(REGISTRY.kernel("torch.rms_norm"), jit=True, cache_folder=lambda: None)
    facts = lz.facts("rms_norm", torch.ones(4, 32), torch.ones(32))
    h100 = dataclasses.replace(Device.named("H100"), index=1)
    build_child.build_apart(
        [(kernel, facts.on(each, capturing=False)) for each in (H200, h100)], lambda *_: None, lambda: False
    )
    assert seen == [(1, None), (1, "1,0")]


def test_a_cpu_has_no_order():
    assert apart_on(Device.detect("cpu")) == APART


@pytest.mark.parametrize(("cores", "at_once", "free", "jobs"), [
    (16, 4, math.inf, 4), (16, 1, math.inf, 8), (192, 4, 64 * 2**30, 4), (192, 4, 2**30, 1), (2, 1, math.inf, 1),
])  # fmt: skip
def test_compilers_have_cores_and_memory(monkeypatch, cores, at_once, free, jobs):
    monkeypatch.setattr(build_child, "_CORES", cores)
    monkeypatch.setattr(build_child, "AT_ONCE", at_once)
    assert build_child.compilers(free) == jobs


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities here")
def test_cores_are_those_that_this_process_may_use():
    assert len(os.sched_getaffinity(0)) == build_child._CORES


@pytest.fixture
def inside(monkeypatch):
    """The devices that were made the current one, the last of them last."""
    entered = []

    @contextlib.contextmanager
    def device(which):
        entered.append(which)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return entered


def test_what_is_tuned_on_another_gpu_is_timed_there(monkeypatch, inside):
    """Events of the device that was current before lay around nothing."""
    seen = []
    monkeypatch.setattr(tuning, "asked_jobs", lambda *_, **__: [])
    monkeypatch.setattr(tuning, "run_jobs", lambda *_, **__: seen.append(list(inside)))
    monkeypatch.setattr(tuning, "device_here", torch.device)  # here or not
    tuning.tune("rms_norm", device="cuda:1")
    tuning.tune("rms_norm", device="cpu")
    assert seen == [[torch.device("cuda:1")], []]
    assert isinstance(current(torch.device("cpu")), contextlib.nullcontext)


def test_a_sample_of_a_call_lies_between_events_of_its_device(monkeypatch):
    said = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            said.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"stream of {index}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    result, _ = online._with_events(lambda **_: said.append("call") or 7, {}, 1)
    assert result == 7
    assert said == ["stream of 1", "call", "stream of 1"]


def test_a_models_calls_are_measured_on_its_gpu(monkeypatch, inside):
    seen = []
    monkeypatch.setattr(workload, "run_jobs", lambda *_, **__: seen.append(list(inside)))
    made = workload.Workload(lambda: None, torch.device("cuda", 1))
    made.tune(deadline=Deadline(1.0), isolate=False)
    assert seen == [[torch.device("cuda", 1)]]

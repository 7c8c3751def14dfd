"""Sampling on a GPU: events on the caller's stream, read by a thread that no capture minds."""

from __future__ import annotations

import time

import pytest
import torch

import layerzero as lz
from layerzero.tuning.measurement import online
from layerzero.tuning.measurement.online import Sampler
from layerzero.tuning.storage import environment as conditions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def sampler(monkeypatch):
    sampler = Sampler()
    monkeypatch.setattr(online, "SAMPLER", sampler)
    monkeypatch.setattr(online, "PAUSE_S", 0.005)
    lz.configure(allow=["torch"], sampling_rate=1.0)
    return sampler


def arguments():
    return torch.randn(512, 1024, device="cuda"), torch.randn(1024, device="cuda")


def wait_for_samples(least):
    until = time.monotonic() + 20
    while lz.sampled().taken < least and time.monotonic() < until:
        time.sleep(0.01)
    assert lz.sampled().taken >= least


def test_events_are_read_by_the_thread(sampler):
    x, w = arguments()
    want = torch.nn.functional.rms_norm(x, (1024,), w, 1e-6)
    for _ in range(50):
        torch.testing.assert_close(lz.rms_norm(x, w), want)
    wait_for_samples(30)
    assert lz.sampled().dropped == 0
    (seen,) = sampler._seen.values()
    assert all(0.0 < each < 1e6 for each in seen.times_us)


def test_a_capture_stands_what_the_thread_asks_meanwhile(sampler):
    x, w = arguments()
    for _ in range(20):
        lz.rms_norm(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    waiting = x
    for _ in range(200):
        waiting = lz.rms_norm(waiting, w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        result = lz.rms_norm(x, w)
        time.sleep(0.2)  # the thread asks its events now
    taken = lz.sampled().taken
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, (1024,), w, 1e-6))
    wait_for_samples(taken)


def test_a_condition_is_read_where_nvml_is_there():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    found = conditions.condition(torch.device("cuda", 0))
    assert {each.partition("=")[0] for each in found.split(",")} <= {"memory", "power", "temperature"}
    assert "memory=" in found

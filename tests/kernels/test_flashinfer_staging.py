"""FlashInfer's calls run one at a time; no plan is written where the device has yet to copy the one before."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch

from layerzero.backends import shape_cache
from layerzero.backends.flashinfer import attention, plan
from layerzero.backends.flashinfer.plan import Staging
from layerzero.core import limits as limit
from layerzero.core.ledger import home_of
from layerzero.engine.registry import REGISTRY

CUDA = torch.device("cuda", 0)


def test_one_thread_at_a_time_sets_and_launches_on_a_device(monkeypatch):
    """Its host code runs without Python's lock: what one call set is what it launches with."""
    inside = []

    def load(facts):
        def run(number, *, wanted):
            inside.append((number, [each.locked() for each in shape_cache._LAUNCHING.values()]))
            return wanted

        return run

    monkeypatch.setattr(shape_cache, "_LAUNCHING", {})
    made = attention.kernel("flashinfer.invented", "norm.rms", load, limit.dtype("float32"), priority=1)
    runs = [made.load(types.SimpleNamespace(device=types.SimpleNamespace(index=index))) for index in (0, 1, 0)]
    assert [run(number, wanted=4) for number, run in enumerate(runs)] == [4, 4, 4]
    assert inside == [(0, [True, False]), (1, [False, True]), (2, [True, False])]
    assert not any(each.locked() for each in shape_cache._LAUNCHING.values())
    alone = {"flashinfer.all_reduce", "flashinfer.all_reduce_add_rms_norm"}  # ranks may be threads that wait for others
    kernels = [each for each in REGISTRY.kernels() if each.backend is attention.FLASHINFER]
    assert {each.id for each in kernels if not hasattr(each.load, "__wrapped__")} == alone
    assert all(home_of(each).startswith("layerzero.backends.flashinfer.") for each in kernels)


class Device:
    """A queue of copies that nothing works off until somebody waits for it."""

    def __init__(self):
        self.queued, self.read = [], []

    def reach(self, number):
        while len(self.read) < number:
            buffer = self.queued[len(self.read)]
            self.read.append(buffer.tolist())


@pytest.fixture
def device(monkeypatch):
    made = Device()

    class Event:
        at = 0

        def record(self, stream):
            assert stream == "the stream of cuda:0"
            self.at = len(made.queued)

        def query(self):
            return len(made.read) >= self.at

        def synchronize(self):
            made.reach(self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.numel() == 1)
    monkeypatch.setattr(plan, "_UNREAD", {})
    return made


class Wrapper:
    """Writes each plan into one buffer, as FlashInfer's do."""

    def __init__(self, device):
        self.device, self._pinned, self.other = device, torch.zeros(1), torch.zeros(2)

    def plan(self, number, *, fails=False):
        self._pinned.fill_(number)
        self.device.queued.append(self._pinned)
        if fails:
            raise ValueError("the plan")


def test_a_host_that_is_ahead_waits_before_it_writes_a_plan_over_one(device):
    planned = Staging(Wrapper(device), CUDA)
    planned.plan(1)
    assert device.read == [], "the first waits for nothing"
    planned.plan(2)
    planned.plan(3)
    device.reach(3)
    assert device.read == [[1.0], [2.0], [3.0]]


def test_a_buffer_outlives_its_wrapper_until_it_is_read(device):
    """A new step of each forward pass: the pinned memory of the last one would be given to the next."""
    wrapper = Wrapper(device)
    pinned = weakref.ref(wrapper._pinned)
    Staging(wrapper, CUDA).plan(1)
    device.queued = [device.queued[0].clone()]
    del wrapper
    gc.collect()
    assert pinned() is not None
    Staging(Wrapper(device), CUDA).plan(2)
    assert pinned() is not None, "not read yet"
    device.reach(1)
    Staging(Wrapper(device), CUDA).plan(3)
    assert pinned() is None


def test_a_plan_that_raised_may_have_sent_something(device):
    planned = Staging(Wrapper(device), CUDA)
    with pytest.raises(ValueError, match="the plan"):
        planned.plan(1, fails=True)
    planned.plan(2)
    assert device.read == [[1.0]]


def test_a_cpu_has_no_queue():
    told = []
    Staging(types.SimpleNamespace(plan=lambda *given: told.append(given)), torch.device("cpu")).plan(1, 2)
    assert told == [(1, 2)]

"""What happens off the hit path is counted and passed on; a hit makes no event, and no listener harms a call."""

from __future__ import annotations

import gc
import logging
import os
import queue
import subprocess
import sys
import weakref
from contextvars import Context, ContextVar

import pytest
import torch

import layerzero as lz
import vocabularies
from counting import calls_of_ours, events
from layerzero.engine import accelerator
from layerzero.engine.events import EVENTS, MOST_WAITING

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")


@pytest.fixture
def heard():
    found = []
    listener = lz.on_event(found.append)

    def all_so_far():
        assert listener.flush(30)
        return found

    yield all_so_far
    listener.close()


def norm(rows=2, width=8):
    return lz.rms_norm(torch.ones(rows, width), torch.ones(width))


def breaks(input, weight, *, eps):
    raise RuntimeError("no such luck")


def test_a_choice_is_told_with_kernel_class_reason_and_microseconds(heard):
    norm()
    (event,) = heard()
    assert (event.kind, event.kernel, event.operation) == ("selection", "torch.rms_norm", "norm.rms")
    assert event.call_class.startswith("norm.rms float32 hidden<16")
    assert "what torch runs itself" in event.reason
    assert event.took_us > 0
    assert event.to_dict()["took_us"] == event.took_us
    assert "instead" not in event.to_dict()


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="on_event: wanted a function of an event, got int"):
        lz.on_event(3)


def test_a_hit_makes_no_event_and_no_call_of_ours(heard, path):
    x, weight = torch.ones(2, 8), torch.ones(8)
    before = EVENTS.selections()
    unheard = calls_of_ours(lambda: lz.rms_norm(x, weight))
    assert len(heard()) == 1
    for _ in range(100):
        lz.rms_norm(x, weight)
    assert len(heard()) == 1, "hits are not told"
    assert sum(EVENTS.selections().values()) == sum(before.values()) + 1, "nor counted"
    EVENTS.reset()
    assert calls_of_ours(lambda: lz.rms_norm(x, weight)) == unheard


@pytest.mark.usefixtures("heard")
@pytest.mark.skipif(accelerator.HOT is None, reason=accelerator.ABSENT)
def test_a_hit_in_c_calls_nothing_but_its_kernel_while_listened_to():
    """Calls of C count, too."""
    x, weight = torch.ones(2, 8), torch.ones(8)
    with torch.no_grad():
        made = events(lambda: lz.rms_norm(x, weight))
        EVENTS.reset()
        assert events(lambda: lz.rms_norm(x, weight)) == made
    assert made[0] == "Owner.rms_norm"
    assert len(made) <= 3, "torch's own operator, and the kernel's function around it"


def test_a_failure_and_what_ran_instead_are_told(heard):
    lz.register_kernel("norm.rms", "mine.breaks", priority=100)(breaks)
    lz.configure(unmeasured="priority", allow=["torch", "mine.breaks"])
    norm()
    told = {each.kind: each for each in heard()}
    assert [each.kernel for each in heard() if each.kind == "selection"] == ["mine.breaks", "torch.rms_norm"]
    assert told["failure"].reason == "RuntimeError: no such luck"
    assert (told["fallback"].kernel, told["fallback"].instead) == ("mine.breaks", "torch.rms_norm")


def test_a_departure_from_what_is_frozen_is_told(heard):
    norm()
    lz.freeze()
    lz.configure(deny=["torch.rms_norm"])
    try:
        norm()
        (departure,) = [each for each in heard() if each.kind == "departure"]
        assert departure.reason.startswith("torch.rms_norm is frozen for norm.rms float32")
    finally:
        lz.thaw()


def test_a_choice_of_what_has_no_tensors_is_told(heard, tmp_path):
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    file.write_text(vocabularies.byte_level())
    before = lz.metrics().misses.get("tokenize", 0)
    lz.tokenize(["a text"], tokenizer_id=str(file))
    assert "tokenize.encode" in {each.operation for each in heard()}
    assert lz.metrics().misses["tokenize"] == before + 1


@pytest.mark.parametrize(("rate", "wanted"), [(0.0, 0), (0.25, 2), (1.0, 8)])
def test_choices_are_sampled_and_failures_are_not(heard, rate, wanted):
    lz.configure(telemetry_sampling_rate=rate)
    for width in range(8):
        norm(width=8 << width)
    assert len(heard()) == wanted
    assert sum(EVENTS.selections().values()) == 8
    lz.register_kernel("norm.rms", "mine.breaks", priority=100)(breaks)
    lz.configure(unmeasured="priority")
    norm()
    assert {"failure", "fallback"} <= {each.kind for each in heard()}


def test_a_listener_runs_in_the_context_of_the_call():
    place, seen = ContextVar("place", default="nowhere"), queue.SimpleQueue()
    listener = lz.on_event(lambda _: seen.put(place.get()))
    place.set("here")
    norm()
    assert seen.get(timeout=60) == "here"
    listener.close()


def test_what_a_calls_context_has_goes_with_it_once_it_was_told(heard):
    """A model's memory stayed until something else was told."""
    kept = [torch.ones(1)]
    gone = weakref.ref(kept[0])
    Context().run(lambda: (ContextVar("kept").set(kept.pop()), norm()))
    assert heard()
    gc.collect()
    assert gone() is None


def test_a_listener_that_raises_is_told_of_once_and_goes_on(caplog):
    seen = []

    def receive(event):
        seen.append(event)
        raise ValueError("no connection")

    listener = lz.on_event(receive)
    for width in (8, 16, 32):
        norm(width=width)
    assert listener.flush(60)
    assert (len(seen), listener.errors, lz.metrics().listener_errors) == (3, 3, 3)
    assert len([each for each in caplog.records if "raised ValueError: no connection" in each.message]) == 1


def test_a_listener_that_hangs_loses_its_own_events_alone(caplog, heard):
    gate, entered = queue.SimpleQueue(), queue.SimpleQueue()

    def hangs(event):
        entered.put(event)
        gate.get()

    listener = lz.on_event(hangs)
    norm()
    entered.get(timeout=60)
    kernel, facts = lz.list_kernels("rms_norm")[0], lz.facts("rms_norm", torch.ones(2, 8), torch.ones(8))
    with caplog.at_level(logging.WARNING, "layerzero"):
        for _ in range(2 * MOST_WAITING):
            EVENTS.tell("failure", kernel, facts, "again")
            if EVENTS.lost()[0] % 100 == 0:
                heard()  # the other one keeps up
    assert norm(3, 16).shape == (3, 16), "calls go on"
    assert listener.dropped >= MOST_WAITING
    assert lz.metrics().events_dropped == EVENTS.lost()[0] >= MOST_WAITING
    assert len([each for each in caplog.records if "does not take its events" in each.message]) >= 1
    assert len([each for each in caplog.records if "hangs" in each.message]) == 1
    assert not listener.flush(0.0)
    for _ in range(2 * MOST_WAITING):
        gate.put(None)
    assert listener.flush(60)
    listener.close()
    assert lz.metrics().events_dropped >= MOST_WAITING, "what was lost stays counted"


@pytest.mark.slow
def test_a_process_ends_although_a_listener_hangs():
    code = "import time, torch, layerzero as lz\nlz.on_event(lambda _: time.sleep(1e6))\n"
    code += "lz.rms_norm(torch.ones(2, 8), torch.ones(8)); print('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_thread_of_its_own(tmp_path):
    seen = tmp_path / "seen"

    def receive(event):
        with seen.open("a") as file:
            file.write(f"{os.getpid()} {event.kernel}\n")

    listener = lz.on_event(receive)
    norm()
    assert listener.flush(60)
    child = os.fork()
    if child == 0:
        norm(3, 1024)
        os._exit(0 if listener.flush(60) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [line.split() for line in seen.read_text().splitlines()] == [
        [str(os.getpid()), "torch.rms_norm"],
        [str(child), "torch.rms_norm"],
    ]
    listener.close()


def test_a_closed_listener_is_waited_for_and_its_flush_says_so():
    entered, gate, had = queue.SimpleQueue(), queue.SimpleQueue(), []

    def receive(event):
        entered.put(None)
        gate.get(timeout=60)
        had.append(event)
        raise ValueError("no connection")

    listener = lz.on_event(receive)
    for width in (8, 16, 32):
        norm(width=width)
    entered.get(timeout=60)
    listener.close()
    norm(width=64)
    assert not listener.flush(0.0), "three wait still"
    for _ in range(3):
        gate.put(None)
    assert listener.flush(60)
    assert (len(had), lz.metrics().listener_errors) == (3, 3), "errors behind the end count as well"
    listener.close()
    lz.on_event(receive).close()
    assert (listener.flush(0.0), lz.metrics().listener_errors) == (True, 3)


def test_a_listener_that_heard_nothing_ends_with_nothing_to_wait_for():
    listener = lz.on_event(lambda _: None)
    listener.close()
    assert listener.flush(0.0)


@pytest.mark.slow
def test_a_process_ends_behind_what_a_closed_listener_has_to_take():
    code = """
import queue, torch, layerzero as lz
gate = queue.SimpleQueue()
listener = lz.on_event(lambda event: (gate.get(), print("had", flush=True)))
for width in (8, 16, 32):
    lz.rms_norm(torch.ones(2, width), torch.ones(width))
listener.close()
flush = listener.flush
listener.flush = lambda *_: ([gate.put(None) for _ in range(3)], flush(60))  # the end asks the closed one, too
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "had\n" * 3), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_counts_from_zero():
    lz.register_kernel("norm.rms", "mine.breaks", priority=100)(breaks)
    lz.configure(unmeasured="priority", allow=["torch", "mine.breaks"])
    norm()
    EVENTS.built(lz.list_kernels("rms_norm")[0], lz.facts("rms_norm", torch.ones(2, 8), torch.ones(8)), 2.5)
    before = lz.metrics()
    assert before.kernels
    assert before.misses
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        here = lz.metrics()
        os.write(tell, repr((here.kernels, here.misses, here.selecting_seconds, here.resting)).encode())
        os._exit(0)
    os.close(tell)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with os.fdopen(told) as pipe:
        assert pipe.read() == "((), {}, 0.0, ('mine.breaks in norm.rms',))", "what rests goes on to rest"
    assert lz.metrics().kernels == before.kernels

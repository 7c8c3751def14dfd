"""What a call would have chosen if it were built is built behind it, takes over, and breaks nothing where it fails."""

from __future__ import annotations

import contextvars
import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import layerzero as lz
from background_calls import CALL, LIMIT_S, build, chosen, codes, compiling, run, told
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import BUILT, BuildOutcome
from layerzero.serving import background_builds, readiness
from layerzero.serving.background_builds import BUILDS
from layerzero.tuning.storage import host_notes
from layerzero.tuning.verification import build_child

pytestmark = pytest.mark.usefixtures("soon")


def test_a_call_does_not_wait_and_the_kernel_takes_over(here):
    lz.configure(jit="background")
    lz.rms_norm(*CALL)
    assert here.began.wait(LIMIT_S)
    assert codes("test.compiles") == ["JIT_DISABLED"]
    status = lz.jit_status()
    assert (status.setting, status.building, status.done) == ("background", ("test.compiles",), False)
    epoch = ENGINE.epoch
    here.may.set()
    assert BUILDS.idle.wait(LIMIT_S)
    assert ENGINE.epoch > epoch
    assert chosen() == "test.compiles"
    assert [thread for thread, _ in here.builds] == ["layerzero-building"]
    assert [each.kernel_id for each in lz.jit_status().built] == ["test.compiles"]
    run()
    assert [thread for thread, _ in here.builds] == ["layerzero-building", "MainThread"], "loaded, not built again"


def test_a_library_that_exits_as_it_builds_has_failed_and_others_go_on_to_build(here):
    """As setuptools does where a compiler fails. The thread ended, and held the host's right to build."""
    here.error = SystemExit("error: command 'cc' failed")
    here.may.set()
    build()
    assert BUILDS._thread.is_alive()
    assert not BUILDS.host.held
    assert "command 'cc' failed" in str(BUILDS.failed[0])


def test_what_would_not_be_chosen_is_not_built(here):
    build(avoid_sources=["test"])
    assert here.builds == []


@pytest.mark.parametrize("setting", ["never", "inline"])
def test_never_builds_nothing_and_inline_builds_in_the_call(here, setting):
    here.may.set()
    lz.configure(jit=setting)
    lz.rms_norm(*CALL)
    assert BUILDS.waits == 0
    assert [thread for thread, _ in here.builds] == (["MainThread"] if setting == "inline" else [])


def test_the_variable_and_a_scope_say_how(monkeypatch):
    monkeypatch.setenv("LAYERZERO_JIT", "inline")
    CONFIGURATION.reset()
    assert lz.jit_status().setting == "inline"
    with lz.scope(jit="never"):
        assert lz.jit_status().setting == "never"
    with pytest.raises(lz.PolicyError, match="'background' or 'inline' or 'never'"):
        lz.configure(jit="later")


def test_the_policy_of_the_calls_scope_decides(here):
    here.may.set()
    with lz.scope(jit="background", avoid_sources=["test"]):
        run()
    assert here.builds == []
    with lz.scope(jit="background"):
        run()
    assert len(here.builds) == 1


def test_what_a_calls_context_has_goes_with_it_once_all_is_built(here):
    """The memory of a model's captured steps stayed until something else was built."""
    here.may.set()
    lz.configure(jit="background")
    kept = [torch.ones(1)]
    gone = weakref.ref(kept[0])
    contextvars.Context().run(lambda: (contextvars.ContextVar("kept").set(kept.pop()), run()))
    gc.collect()
    assert len(here.builds) == 1
    assert gone() is None


def test_the_queue_is_bounded_and_drops_the_oldest(here):
    lz.configure(jit="background", builds={"max_waiting": 2})
    lz.rms_norm(*CALL)
    assert here.began.wait(LIMIT_S)
    for hidden in (64, 128, 256):
        lz.rms_norm(torch.ones(4, hidden), torch.ones(hidden))
    assert (BUILDS.waits, lz.jit_status().dropped) == (2, 1)
    here.may.set()
    assert BUILDS.idle.wait(LIMIT_S)
    assert [hidden for _, hidden in here.builds] == [32, 128, 256]


def test_nothing_is_asked_for_under_capture_or_when_choices_are_frozen(here):
    lz.configure(jit="background")
    facts = lz.facts("rms_norm", *CALL)
    report = lz.explain(facts)
    from layerzero.engine.functions import CALLS

    dispatcher = CALLS["rms_norm"].dispatcher
    dispatcher._build_later(report.candidates, facts.on(facts.device, capturing=True))
    assert BUILDS.waits == 0
    lz.rms_norm(*CALL)  # asks
    assert here.began.wait(LIMIT_S)


def test_another_rank_builds_and_this_one_takes_over(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    artefact = tmp_path / "artefact"
    loads = []

    def load(facts):
        loads.append(facts)
        return lambda input, weight, *, eps: input * weight

    shared = compiling("test.shared", load, accepts=("eps",), priority=99, prebuilt=lambda _: artefact.is_file())
    lz.register_backend([shared])
    other = host_notes.HostLock()
    assert other.take()
    other.tell(["test.shared"], 0)
    lz.configure(jit="background")
    lz.rms_norm(*CALL)
    asked = threading.Event()
    take = BUILDS.host.take
    monkeypatch.setattr(BUILDS.host, "take", lambda: (asked.set(), take())[1])
    assert asked.wait(LIMIT_S)
    assert "builds test.shared" in lz.jit_status().elsewhere
    assert loads == []
    artefact.touch()  # the other rank is done
    assert BUILDS.idle.wait(LIMIT_S)
    assert chosen() == "test.shared"
    other.leave()


@pytest.mark.usefixtures("here")
def test_this_process_is_not_another_one_that_builds(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    assert BUILDS.host.take()
    BUILDS.host.tell([], 0)  # between the last build and the end of the turn
    assert lz.jit_status().elsewhere == ""
    BUILDS.host.leave()


def test_a_call_that_waits_for_its_turn_is_told(here, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    other, asked = host_notes.HostLock(), threading.Event()
    assert other.take()
    lz.configure(jit="background")
    take = BUILDS.host.take
    monkeypatch.setattr(BUILDS.host, "take", lambda: (asked.set(), take())[1])
    lz.rms_norm(*CALL)
    assert asked.wait(LIMIT_S)
    status = lz.jit_status()
    assert (status.waiting, status.done) == (1, False)
    other.leave()
    here.may.set()
    assert BUILDS.idle.wait(LIMIT_S)
    assert lz.jit_status().done


def test_builds_beside_each_other_have_seconds_of_their_own(apart, monkeypatch):
    def both_at_once(pairs, told, stop, *, begins):
        assert len(pairs) == 2
        for kernel, facts in pairs:
            begins(kernel, facts)
        time.sleep(0.2)
        for kernel, facts in pairs:
            (apart / f"{facts.size('hidden')}.so").touch()
            told(kernel, facts, BuildOutcome())

    monkeypatch.setattr(background_builds, "build_apart", both_at_once)
    monkeypatch.setattr(background_builds, "GATHER_S", 0.5)
    lz.configure(jit="background")
    for hidden in (32, 64):
        lz.rms_norm(torch.ones(4, hidden), torch.ones(hidden))
    assert BUILDS.idle.wait(LIMIT_S)
    assert [each.seconds >= 0.2 for each in lz.jit_status().built] == [True, True]


@pytest.mark.slow
def test_two_children_build_at_once_and_one_thread_hears_of_both(apart):
    kernel = sys.modules["background_kernels"].KERNEL
    pairs = [(kernel, lz.facts("rms_norm", torch.ones(4, hidden), torch.ones(hidden))) for hidden in (32, 64, 128)]
    heard = []

    def hear(_kernel, facts, outcome=None):
        heard.append((facts.size("hidden"), outcome and outcome.log, threading.current_thread()))

    build_child.build_apart(pairs, hear, lambda: False, at_once=2, begins=hear)
    here = threading.current_thread()
    expected = [(hidden, log, here) for hidden in (32, 64, 128) for log in (None, "")]
    assert sorted(heard, key=lambda each: (each[0], each[1] is not None)) == expected
    lines = [line.split() for line in (apart / "log").read_text().splitlines()]
    by = {name: pid for pid, what, name in lines if what == "builds"}
    assert by["32.so"] != by["64.so"]
    assert by["128.so"] in (by["32.so"], by["64.so"]), "whichever is free"


@pytest.mark.slow
def test_a_child_builds_and_a_wiped_cache_is_noticed(apart):
    build()
    assert told(apart)[0][0] == "builds"
    assert ("loads", "32.so") in told(apart), "this process loads it before it takes over"
    assert chosen() == "background.rms_norm"
    (apart / "32.so").unlink()
    assert codes("background.rms_norm") == ["JIT_DISABLED"]
    ENGINE.bump()
    run()
    assert chosen() == "background.rms_norm", "it was built again"


def test_the_end_of_the_process_is_heard_of_once_and_only_by_a_thread_that_runs(here, monkeypatch):
    heard = []
    monkeypatch.setattr(background_builds.atexit, "register", lambda method: heard.append("register"))
    monkeypatch.setattr(background_builds.atexit, "unregister", lambda method: heard.append("unregister"))
    with monkeypatch.context() as none_left:
        none_left.setattr(threading.Thread, "start", no_thread)
        lz.configure(jit="background")
        lz.rms_norm(*CALL)
        lz.rms_norm(torch.ones(4, 64), torch.ones(64))
        assert heard == []
    here.may.set()
    run(torch.ones(4, 4096), torch.ones(4096))
    assert heard == ["unregister", "register"]


def no_thread(self):
    raise RuntimeError("can't start new thread")


_ENDS = """
import os, sys, torch, layerzero as lz
import background_kernels
lz.configure(jit="background")
lz.rms_norm(torch.ones(4, 32), torch.ones(32))
from layerzero.serving.background_builds import BUILDS
while not BUILDS.building:
    pass
print(BUILDS.building)
"""


@pytest.mark.slow
def test_a_process_that_ends_amid_a_build_ends_and_leaves_nothing_half_built(apart, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.delenv("LAYERZERO_JIT")
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "('background.rms_norm',)"), ended.stderr
    assert not (apart / "32.so").exists()


def test_nobody_looks_for_a_build_that_could_not_run(here, monkeypatch):
    asked = []
    monkeypatch.setattr(BUILT, "ready", lambda kernel, _: asked.append(kernel.id))
    report = lz.explain("rms_norm", *(each.to("meta") for each in CALL), device="cpu")
    assert "test.compiles" in asked
    assert set(asked) == {each for each, found in report.failures.items() if found[-1].code == "JIT_DISABLED"}
    assert "liger.rms_norm" not in asked


def test_a_status_is_told_in_words(here):
    here.may.set()
    build()
    status = readiness.jit_status()
    assert "test.compiles" in str(status)
    assert status.to_dict()["built"][0]["kernel_id"] == "test.compiles"


def test_kernels_of_one_module_are_built_by_one_child():
    from layerzero.tuning.verification.build_child import _lanes

    def asked(function, kernel_ids, **more):
        def meta(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="meta")

        caches = {name: meta(8, 16, 2, 64) for name in ("key_cache", "value_cache")}
        index = {"block_tables": meta(2, 4, dtype=torch.int32), "context_lens": meta(2, dtype=torch.int32)}
        libraries = {"flashinfer-python": "0.7.2"}
        report = lz.explain(function, device="H200", libraries=libraries, **caches, **index, **more)
        known = {each.id: each for each in lz.list_kernels()}
        return [(known[each], report.facts) for each in kernel_ids]

    one = torch.empty((2, 1, 4, 64), dtype=torch.bfloat16, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    pairs = asked(
        "paged_attention", ["flashinfer.paged_decode_tensor_cores", "flashinfer.paged_decode"], query=one
    ) + asked(
        "paged_attention", ["flashinfer.fa2.paged_tokens", "flashinfer.fa3.paged_tokens"], query=one[:, 0],
        cu_seqlens_q=starts, max_seqlen_q=1, causal=True,
    )  # fmt: skip
    tensor_cores, plain, tokens, hopper = _lanes(pairs).values()
    assert tensor_cores == tokens, "both take the module for batches"
    assert len({tensor_cores, plain, hopper}) == 3

"""Processes of kernels: the time they get to build, their environments and costs, and the program's end."""

from __future__ import annotations

import dataclasses
import errno
import gc
import importlib
import itertools
import math
import os
import signal
import socket
import sys
import threading
import types
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn.functional import rms_norm

import layerzero as lz
from layerzero.core.errors import IsolatedKernelError
from layerzero.core.reasons import ReasonCode
from layerzero.engine import accelerator, isolation
from layerzero.engine.config import current_policy
from layerzero.engine.registry import REGISTRY
from layerzero.serving.isolation import arena as arenas
from layerzero.serving.isolation import kernels, messages
from layerzero.serving.isolation.arena import Arena, Mapping
from layerzero.serving.isolation.child import Server
from layerzero.serving.isolation.messages import Awake, Form, Run
from layerzero.serving.isolation.worker import Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes of their own need Linux")

WEIGHT = torch.linspace(0.5, 1.5, 64)


@pytest.fixture(name="module")
def _module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sys.modules.pop("isolated_kernels", None)
    return importlib.import_module("isolated_kernels")


def end_all():
    kernels.end_all()
    kernels.LIBRARIES.clear()


@pytest.fixture(scope="module", autouse=True)
def _ends():
    yield
    end_all()


@pytest.fixture(name="fresh")
def _fresh():
    """No process is there yet, and none stays: others share one, which takes 2 s to begin."""
    end_all()
    yield
    end_all()


@pytest.fixture(name="apart")
def _apart(module):
    """A kernel that compiles, in a process of its own."""
    kernel = dataclasses.replace(module.KERNELS[0], jit=True)
    yield kernels.IsolatedKernel(kernel, lz.explain("rms_norm", rows(), WEIGHT).facts)
    for library in kernels.LIBRARIES.values():
        library.worker.worked()
        library.worker._rests_until = 0.0


def rows(first: float = 0.5) -> torch.Tensor:
    return torch.full((4, 64), first)


def test_a_program_without_an_interpreter_is_told_so(fresh, module, monkeypatch):
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: "")
    monkeypatch.setattr("sys.executable", "")
    facts = lz.explain("rms_norm", rows(), WEIGHT).facts
    with pytest.raises(IsolatedKernelError, match=r"no process of .* could be started.*set_executable"):
        kernels.IsolatedKernel(module.KERNELS[0], facts)


def test_a_process_that_has_no_open_file_left_is_told_so(monkeypatch):
    def none_left(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("socket.socketpair", none_left)
    with pytest.raises(IsolatedKernelError, match=r"no process of any could be started.*Too many open files"):
        Worker("any").start(0, [])


@pytest.mark.slow
def test_each_process_has_the_time_to_build_until_a_result(module, fresh, apart, monkeypatch):
    limits, ask = [], Worker.ask

    def recorded(self, request, timeout_s, what, meanwhile=None):
        if isinstance(request, Run) and request.kernel:
            limits.append(timeout_s)
        return ask(self, request, timeout_s, what, meanwhile)

    monkeypatch.setattr(Worker, "ask", recorded)
    with pytest.raises(IsolatedKernelError, match="does not like"):
        apart(rows(module.RAISES), WEIGHT, eps=1e-5)
    apart(rows(), WEIGHT, eps=1e-5)
    apart(rows(), WEIGHT, eps=1e-5)
    kernels.end_all()
    apart(rows(), WEIGHT, eps=1e-5)
    usual_s = current_policy()["isolation.timeout_s"]
    assert limits == [kernels.BUILD_S, kernels.BUILD_S, usual_s, kernels.BUILD_S]


@pytest.mark.usefixtures("module")
@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [math.inf, 1e300, 1e-12])
def test_a_call_may_take_as_long_as_the_settings_say_whatever_a_system_counts_to(apart, limit_s):
    apart(rows(), WEIGHT, eps=1e-5)
    may = suppress(IsolatedKernelError) if limit_s < 1 else nullcontext()
    with lz.scope(**{"isolation.timeout_s": limit_s}), may:
        apart(rows(), WEIGHT, eps=1e-5)


def test_large_calls_are_answered_also_behind_those_that_failed(module, apart):
    def large(first: float) -> torch.Tensor:
        made = torch.linspace(-1, 1, 2048 * 64).view(2048, 64)
        made[0, 0] = first
        return made

    for first in (0.5, 0.25, module.TURNS, 0.5, module.TURNS):  # the layout of a result is not that of the one before
        result = apart(large(first), WEIGHT, eps=1e-5)
        assert torch.equal(result, rms_norm(large(first), (64,), WEIGHT, 1e-5))
        assert result.is_contiguous() == (first != module.TURNS)
    with pytest.raises(IsolatedKernelError, match="does not like"):
        apart(large(module.RAISES), WEIGHT, eps=1e-5)
    with pytest.raises(IsolatedKernelError, match=r"ended with SIGSEGV, in apart\.rms"):
        apart(large(module.CRASHES), WEIGHT, eps=1e-5)
    again = apart(large(0.125), WEIGHT, eps=1e-5)
    assert torch.equal(again, rms_norm(large(0.125), (64,), WEIGHT, 1e-5))
    del result, again
    assert kernels.LIBRARIES["apart",].arena.take(1) is not None
    assert kernels.LIBRARIES["apart",].arena.held == 0, "errors hold no room"


@pytest.mark.parametrize("turned", [False, True])
def test_large_results_arrive_as_they_lie(module, apart, turned):
    x = torch.linspace(-1.0, 1.0, 1024 * 64).view(1024, 64)
    x[0, 0] = module.TURNS if turned else 0.5
    for _ in range(3):  # either way to copy
        result = lz.rms_norm(x, WEIGHT, 1e-5)
        assert torch.equal(result, rms_norm(x, (64,), WEIGHT, 1e-5))
        assert result.is_contiguous() is not turned
    assert kernels.LIBRARIES["apart",].worker.pid


def test_a_copy_past_the_caches_is_one():
    stream = getattr(accelerator.HOT, "stream", None)
    if stream is None:
        pytest.skip("the extension is absent, or for another kind of CPU")
    source = torch.arange(512, dtype=torch.int64).view(torch.uint8)
    for start, at, size in itertools.product((0, 1, 17), (0, 3, 15, 16), (0, 1, 15, 63, 64, 200, 1024)):
        to = torch.zeros(2048, dtype=torch.uint8)
        stream(to.data_ptr() + at, source.data_ptr() + start, size)
        assert torch.equal(to[at : at + size], source[start : start + size])
        assert not to[:at].any()
        assert not to[at + size :].any()
    with pytest.raises(TypeError, match="stream: wanted two addresses and bytes, got 1"):
        stream(1)
    with pytest.raises(ValueError, match="stream: wanted memory, got -1 bytes"):
        stream(1, 1, -1)


@pytest.mark.skipif(accelerator.HOT is None, reason=accelerator.ABSENT)
def test_a_process_of_a_built_in_kernel_has_the_extension_too(fresh):
    """Else only this process copied past the caches; a plugin's import brought it."""
    built_in = kernels.IsolatedKernel(REGISTRY.kernel("torch.rms_norm"), lz.explain("rms_norm", rows(), WEIGHT).facts)
    built_in(rows(), WEIGHT, eps=1e-5)
    (library,) = kernels.LIBRARIES.values()
    assert Path(accelerator.HOT.__file__).name in Path(f"/proc/{library.worker.pid}/maps").read_text()


@pytest.mark.parametrize(("streams", "moves", "ways"), [(40, 400, [0, 1, 1, 1]), (40, 60, [0, 1, 0, 0])])
def test_copies_go_the_way_that_took_less_and_try_the_other_now_and_then(monkeypatch, streams, moves, ways):
    taken, now = [], [0]

    def way(number, us):
        def copy(to, address, size):
            taken.append(number)
            now[0] += us * 1000

        return copy

    monkeypatch.setattr(accelerator, "HOT", types.SimpleNamespace(stream=way(1, streams)))
    monkeypatch.setattr(arenas.ctypes, "memmove", way(0, moves))
    monkeypatch.setattr(arenas.time, "perf_counter_ns", lambda: now[0])
    copy = arenas.Copier()
    for _ in range(2 * arenas.TRIED_EVERY):
        copy(1, 1, 1 << 20)
    assert taken[:4] == ways
    assert taken.count(1 - ways[-1]) in (2, 3), "of each way, the slower one was tried again"
    taken.clear()
    copy(1, 1, arenas.LARGE - 1)
    assert taken == [0], "a small one is copied as ever"


def test_the_cost_of_a_call_is_that_of_one_that_finds_the_process_asleep(apart, monkeypatch):
    apart(rows(), WEIGHT, eps=1e-5)
    paused = []
    monkeypatch.setattr(kernels.time, "sleep", paused.append)
    kernels.LIBRARIES["apart",]._measured()
    assert len(paused) == 2 * kernels.SAMPLES
    assert min(paused) > messages.AWAKE_NS / 1e9


def test_other_threads_read_results_amid_a_fork(monkeypatch):
    arena, seen = Arena(1 << 20), []
    at, room = arena.hold(1 << 14)
    result, arena.filling = torch.frombuffer(room, dtype=torch.uint8).fill_(7), None
    mapped = arena._map

    def watched(*asked):
        mapped(*asked)
        seen.append(result.unique().tolist())  # what another thread would read now

    monkeypatch.setattr(arena, "_map", watched)
    arena.leave()
    assert seen == [[7]]
    os.pwrite(arena.file, bytes(1 << 14), at)
    assert result.unique().tolist() == [7], "the file is another's now"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # from Python 3.12 on
def test_a_fork_amid_a_call_leaves_its_result_right(module, apart):
    given = torch.linspace(-1, 1, 4 * 64).view(4, 64)
    apart(given, WEIGHT, eps=1e-5)  # the room of the next result is known
    given[0, 0], process, results = module.STOPS, kernels.LIBRARIES["apart",].worker.pid, []
    thread = threading.Thread(target=lambda: results.append(apart(given, WEIGHT, eps=1e-5)))
    thread.start()
    os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOWAIT)
    forked = os.fork()
    if not forked:
        os._exit(0)
    os.waitpid(forked, 0)
    os.kill(process, signal.SIGCONT)
    thread.join()
    assert torch.equal(results[0], rms_norm(given, (64,), WEIGHT, 1e-5))


def test_a_result_without_elements_needs_no_room(module, apart):
    for count in (0, 0, 4, 0):  # the first of a form, and one whose form is known
        given = torch.ones(4, count, 64)
        result = apart(given, WEIGHT, eps=1e-5)
        assert result.shape == given.shape
        assert torch.equal(result, rms_norm(given, (64,), WEIGHT, 1e-5))


@pytest.mark.slow
def test_one_plan_for_many_shapes_leaves_few_forms(fresh, apart, monkeypatch):
    numbers, ask = [], Worker.ask

    def recorded(self, request, timeout_s, what, meanwhile=None):
        if isinstance(request, Run):
            numbers.append(request.form)  # the process keeps a form for each
        return ask(self, request, timeout_s, what, meanwhile)

    monkeypatch.setattr(Worker, "ask", recorded)
    monkeypatch.setattr(kernels, "MAX_LOADED", 4)
    for count in (*range(1, 12), 3, 3):
        given = torch.linspace(-1, 1, count * 64).view(count, 64)
        assert torch.equal(apart(given, WEIGHT, eps=1e-5), rms_norm(given, (64,), WEIGHT, 1e-5))
    library = kernels.LIBRARIES["apart",]
    assert max(numbers) < 4
    assert max(len(library._forms), len(library._known)) <= 4


@pytest.mark.slow
def test_results_that_are_kept_for_ever_leave_room_for_calls(module, fresh):
    lz.configure(**{"isolation.memory_mb": 4})
    apart = kernels.IsolatedKernel(module.KERNELS[0], lz.explain("rms_norm", rows(), WEIGHT).facts)
    given = [torch.full((2048, 64), float(number)) for number in range(12)]  # 6 MiB of results
    results = [apart(each, WEIGHT, eps=1e-5) for each in given]
    arena = kernels.LIBRARIES["apart",].arena
    inside = [arena.base <= each.data_ptr() < arena.base + arena.size for each in results]
    assert inside[0]
    assert not inside[-1]
    given.append(torch.ones(4096, 64))
    results.append(apart(given[-1], WEIGHT, eps=1e-5))  # with its result, half of the memory
    for each, result in zip(given, results, strict=True):
        assert torch.equal(result, rms_norm(each, (64,), WEIGHT, 1e-5))


class Sent:
    """A socket that tells when a request is on its way."""

    def __init__(self, real):
        self.real, self.sent = real, threading.Event()
        self.recv, self.close, self.setsockopt = real.recv, real.close, real.setsockopt

    def send(self, message):
        self.real.send(message)
        self.sent.set()


def test_the_programs_end_does_not_wait_for_a_call_that_hangs(module, fresh, apart):
    apart(rows(), WEIGHT, eps=1e-5)
    worker = kernels.LIBRARIES["apart",].worker
    worker._socket = watched = Sent(worker._socket)
    errors = []

    def hangs():
        try:
            apart(rows(module.HANGS), WEIGHT, eps=1e-5)
        except IsolatedKernelError as error:
            errors.append(str(error))

    thread = threading.Thread(target=hangs)
    thread.start()
    watched.sent.wait()
    kernels.end_all()
    thread.join()
    assert "ended with SIGKILL, in apart.rms" in errors[0], "not as one that was waited for"


@pytest.fixture(name="python")
def _python(tmp_path):
    """What is no interpreter: it writes down that it was started, and fails."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho started >> {tmp_path}/starts\nexit 1\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("mode", ["in_process", "subprocess", "container"])
def test_an_interpreter_isolates_its_library_in_every_mode(mode, module, python):
    lz.configure(**{"backend_isolation": mode, "isolate": ["apart"], "isolation.pythons": {"foreign": str(python)}})
    policy, (apart, *_, foreign) = current_policy(), module.KERNELS
    assert isolation.key(foreign, policy) == ("foreign", str(python))
    assert isolation.isolated(foreign, policy)
    assert kernels.unable(foreign, policy) is None
    assert isolation.isolated(apart, policy) == (mode != "in_process")


@pytest.mark.usefixtures("module")
def test_an_environment_that_fails_is_asked_once(python):
    lz.configure(**{"backend_isolation": "subprocess", "isolation.pythons": {"foreign": str(python)}})
    for _ in range(2):
        reasons = lz.explain("rms_norm", rows(), WEIGHT).reasons("foreign.rms")
        assert reasons[0].code is ReasonCode.NOT_INSTALLED
    assert (python.parent / "starts").read_text() == "started\n"


def test_each_environment_of_a_library_has_a_cost_of_its_own(module, python, monkeypatch):
    cost = isolation.CallCost(7.0, 8.0, 9)
    monkeypatch.setitem(isolation.COSTS, ("foreign", str(python)), cost)
    foreign, pythons = module.KERNELS[-1], "isolation.pythons"
    with lz.scope(**{pythons: {"foreign": str(python)}}):
        assert isolation.cost(foreign, current_policy(), lz.Device.detect("cpu")) == cost
    with lz.scope(**{pythons: {"foreign": sys.executable}}):
        assert isolation.cost(foreign, current_policy(), lz.Device.detect("cpu")) == isolation.BEFORE_MEASURED


@pytest.mark.usefixtures("module")
def test_a_process_of_an_environment_that_is_named_no_more_ends_after_its_call(python, monkeypatch):
    key, ended, settings = ("foreign", str(python)), [], {"isolation.pythons": {"foreign": str(python)}}
    lz.configure(**settings)
    monkeypatch.setitem(kernels.LIBRARIES, key, kernels.Library("foreign", 1 << 20, key[1:]))
    library = kernels.LIBRARIES[key]
    monkeypatch.setattr(library.worker, "end", lambda: ended.append(key))
    with library._turn():
        with lz.scope(**settings):
            lz.configure(**{"isolation.pythons": {}})
            assert kernels.LIBRARIES[key] is library, "an open scope names it"
        lz.configure(deterministic=True)
        assert key not in kernels.LIBRARIES
        assert not ended, "it is at a call"
    assert ended == [key]


@pytest.mark.usefixtures("module")
def test_it_ends_where_the_system_has_no_more_threads_too(python, monkeypatch):
    def none(_):
        raise RuntimeError("can't start new thread")

    key, ended = ("foreign", str(python)), []
    lz.configure(**{"isolation.pythons": {"foreign": str(python)}})
    monkeypatch.setitem(kernels.LIBRARIES, key, kernels.Library("foreign", 1 << 20, key[1:]))
    monkeypatch.setattr(kernels.LIBRARIES[key].worker, "end", lambda: ended.append(key))
    monkeypatch.setattr("threading.Thread.start", none)
    lz.configure(**{"isolation.pythons": {}})
    assert ended == [key]


def test_a_request_that_came_before_is_made_anew_where_its_numbers_mean_something_else():
    server = Server(Mapping(arenas.shared_file(1 << 16)))

    def answer(dtype: str, *, new: bool, room: int = 0) -> messages.Answer:
        form = Form(((dtype, (1,), (1,)),), (True,), ()) if new else None
        return server.answer(msgspec.msgpack.encode(Run(0, 0, (0,), (), (room, 64), 1, deterministic=0, new=form)))

    for dtype in ("float32", "int64", "float32"):
        for new in (True, False, False):
            assert answer(dtype, new=new).results == ((0, (dtype, (1, 1), (1, 1))),)
    for room in range(arenas.MAX_KEPT + 9):
        answer("float32", new=False, room=64 * room)
    assert len(server._calls) <= arenas.MAX_KEPT


def test_each_wait_that_was_in_vain_doubles_how_many_are_slept_through(monkeypatch):
    monkeypatch.setattr(messages, "AWAKE_NS", 0)
    ours, its = socket.socketpair()
    with ours, its:
        awake = Awake(ours)
        assert not any(awake.came() for _ in range(3))  # in vain, asleep once, in vain again
        its.send(b"a message")
        assert [awake.came() for _ in range(5)] == [False, False, False, True, True]
        ours.recv(16)
        assert not any(awake.came() for _ in range(2))  # in vain, asleep once: both gains halved it
        its.close()
        assert awake.came()  # what ends the wait is a message, too


def test_signals_make_no_wait_for_an_answer_longer(module, apart):
    """Each began the system's wait anew, so that a process that hung held its caller for good."""
    signals = []

    def came(*_):
        signals.append(1)
        if len(signals) == 100:
            raise TimeoutError("it waits as long as there are signals")

    before = signal.signal(signal.SIGALRM, came)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with (
            lz.scope(**{"isolation.timeout_s": 0.2}),
            pytest.raises(IsolatedKernelError, match=r"gave no answer for 0\.2 s and was killed"),
        ):
            kernels.library(apart._library).call(
                *(apart._load, apart._key, (rows(module.HANGS), WEIGHT), {"eps": 1e-5}, frozenset(), 0.2, None),
                builds=False,
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_an_error_whose_text_is_no_unicode_costs_its_call_alone(module, apart):
    apart(rows(), WEIGHT, eps=1e-5)
    process = kernels.LIBRARIES["apart",].worker.pid
    with pytest.raises(IsolatedKernelError, match=r"ValueError: a file named \\udcff\.so"):
        apart(rows(module.NO_UNICODE), WEIGHT, eps=1e-5)
    assert kernels.LIBRARIES["apart",].worker.pid == process


def test_a_process_warns_of_nondeterministic_code_where_its_caller_does(module, apart):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        apart(rows(module.WARNS), WEIGHT, eps=1e-5)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_memory_of_a_library_that_is_gone_goes_with_its_last_result():
    def made() -> tuple[int, torch.Tensor]:
        arena = Arena(1 << 20)
        _, room = arena.hold(1 << 14)
        result, arena.filling = torch.frombuffer(room, dtype=torch.uint8).fill_(7), None
        return arena.file, result

    file, result = made()
    gc.collect()
    forked = os.fork()
    if not forked:
        result.fill_(8)
        os._exit(0)
    os.waitpid(forked, 0)
    assert result.unique().tolist() == [7], "a fork has memory of its own"
    del result
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)

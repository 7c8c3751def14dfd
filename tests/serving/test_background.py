"""What a call would have chosen if it were built is built behind it, takes over, and breaks nothing where it fails."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.core.recipe import CallRecipe
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import BUILT, BuildOutcome
from layerzero.engine.registry import REGISTRY
from layerzero.serving import background_builds, own_builds, readiness
from layerzero.serving.background_builds import BUILDS
from layerzero.testing.children import End
from layerzero.tuning.storage import builds
from layerzero.tuning.verification import build_child

HERE = str(Path(__file__).parent)
CALL = torch.ones(4, 32), torch.ones(32)
LIMIT_S = 120.0
"""How long a test waits for what it expects; nothing is compared with it."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(background_builds, "GATHER_S", 0.0)
    monkeypatch.setattr(background_builds, "LOOK_S", 0.01)


def in_background(**more):
    monkey = {"jit": "background", **more}
    lz.configure(**monkey)


def chosen(*call):
    return lz.which("rms_norm", *(call or CALL))["kernel_id"]


def codes(kernel, *call):
    return [str(each.code) for each in lz.explain("rms_norm", *(call or CALL)).reasons(kernel)]


@pytest.fixture
def here():
    """A kernel that compiles in this process, when the test lets it; and who built what."""

    class Here:
        may, began, builds, error = threading.Event(), threading.Event(), [], None

    state = Here()
    state.may, state.began, state.builds = threading.Event(), threading.Event(), []

    def load(facts):
        state.builds.append((threading.current_thread().name, facts.size("hidden")))
        state.began.set()
        assert state.may.wait(LIMIT_S)
        if state.error is not None:
            raise state.error

        def rms_norm(input, weight, *, eps):
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

        return rms_norm

    lz.register_backend(
        [
            lz.Kernel(
                id="test.compiles",
                operations=("norm.rms",),
                backend=lz.Backend("test", "compiles", origin="code"),
                load=load,
                accepts=("eps",),
                jit=True,
                priority=50,
            )
        ]
    )
    yield state
    state.may.set()


def test_a_call_does_not_wait_and_the_kernel_takes_over(here):
    in_background()
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
    lz.rms_norm(*CALL)
    assert BUILDS.idle.wait(LIMIT_S)
    assert [thread for thread, _ in here.builds] == ["layerzero-building", "MainThread"], "loaded, not built again"


def test_what_would_not_be_chosen_is_not_built(here):
    in_background(avoid_sources=["test"])
    lz.rms_norm(*CALL)
    assert BUILDS.idle.wait(LIMIT_S)
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
        lz.rms_norm(*CALL)
        assert BUILDS.idle.wait(LIMIT_S)
    assert here.builds == []
    with lz.scope(jit="background"):
        lz.rms_norm(*CALL)
        assert BUILDS.idle.wait(LIMIT_S)
    assert len(here.builds) == 1


def test_a_failure_is_told_once_with_its_log_and_not_tried_again(here, caplog):
    here.error = RuntimeError("\n".join([*(["noise"] * 40), "g++: fatal error: killed"]))
    here.may.set()
    in_background()
    with caplog.at_level(logging.WARNING, "layerzero"):
        for _ in range(2):
            ENGINE.bump()
            lz.rms_norm(*CALL)
            assert BUILDS.idle.wait(LIMIT_S)
    (told,) = [each.getMessage() for each in caplog.records if "did not build" in each.getMessage()]
    assert "g++: fatal error: killed" in told
    assert told.count("noise") < build_child.LINES
    assert len(here.builds) == 1
    assert [each.kernel for each in lz.jit_status().failed] == ["test.compiles"]
    assert chosen() == "torch.rms_norm"


def test_the_queue_is_bounded_and_drops_the_oldest(here, monkeypatch):
    monkeypatch.setattr(background_builds, "MAX_WAITING", 2)
    in_background()
    lz.rms_norm(*CALL)
    assert here.began.wait(LIMIT_S)
    for hidden in (64, 128, 256):
        lz.rms_norm(torch.ones(4, hidden), torch.ones(hidden))
    assert (BUILDS.waits, lz.jit_status().dropped) == (2, 1)
    here.may.set()
    assert BUILDS.idle.wait(LIMIT_S)
    assert [hidden for _, hidden in here.builds] == [32, 128, 256]


def test_nothing_is_asked_for_under_capture_or_when_choices_are_frozen(here):
    in_background()
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
    lz.register_backend(
        [
            lz.Kernel(
                id="test.shared",
                operations=("norm.rms",),
                backend=lz.Backend("test", "shared", origin="code"),
                load=lambda facts: loads.append(facts) or (lambda input, weight, *, eps: input * weight),
                accepts=("eps",),
                jit=True,
                prebuilt=lambda _: artefact.is_file(),
                priority=99,
            )
        ]
    )
    other = builds.HostLock()
    assert other.take()
    other.tell(["test.shared"], 0)
    in_background()
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
    other, asked = builds.HostLock(), threading.Event()
    assert other.take()
    in_background()
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


def test_what_memory_does_not_hold_is_not_drawn_for_a_build(here, monkeypatch, caplog):
    monkeypatch.setattr(build_child, "available_bytes", lambda: 1000.0)
    here.may.set()
    in_background()
    with caplog.at_level(logging.WARNING, "layerzero"):
        lz.rms_norm(*CALL)
        assert BUILDS.idle.wait(LIMIT_S)
    assert here.builds == []
    assert "may be used on the device\nit is not tried again in this process" in caplog.text


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """A kernel that a child builds: its artefact is a file in a folder."""
    monkeypatch.setenv("BACKGROUND_KERNELS", str(tmp_path))
    monkeypatch.syspath_prepend(HERE)
    sys.modules.pop("background_kernels", None)
    importlib.import_module("background_kernels")

    return tmp_path


def built_apart():
    in_background()
    lz.rms_norm(*CALL)
    assert BUILDS.idle.wait(LIMIT_S)


def told(folder):
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return [(what, name) for _, what, name in lines]


def test_builds_beside_each_other_have_seconds_of_their_own(apart, monkeypatch):
    def both_at_once(pairs, told, stop, *, begins):
        assert len(pairs) == 2
        for kernel, facts in pairs:
            begins(kernel, facts)
        time.sleep(0.2)
        for kernel, facts in pairs:
            (apart / f"{facts.size('hidden')}.so").touch()
            told(kernel, facts, BuildOutcome())

    monkeypatch.setattr(build_child, "build_apart", both_at_once)
    monkeypatch.setattr(background_builds, "GATHER_S", 0.5)
    in_background()
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


def test_a_child_builds_and_a_wiped_cache_is_noticed(apart):
    built_apart()
    assert told(apart)[0][0] == "builds"
    assert ("loads", "32.so") in told(apart), "this process loads it before it takes over"
    assert chosen() == "background.rms_norm"
    (apart / "32.so").unlink()
    assert codes("background.rms_norm") == ["JIT_DISABLED"]
    ENGINE.bump()
    lz.rms_norm(*CALL)
    assert BUILDS.idle.wait(LIMIT_S)
    assert chosen() == "background.rms_norm", "it was built again"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "ninja: no such compiler"),
        pytest.param("die", "SIGSEGV", marks=pytest.mark.slow),
        pytest.param("be killed", "SIGKILL", marks=pytest.mark.slow),
        pytest.param("lack room", "No space left on device", marks=pytest.mark.slow),
        pytest.param("keep nothing", "left nothing where its library", marks=pytest.mark.slow),
    ],
)
def test_a_child_that_fails_leaves_what_ran_before(apart, monkeypatch, caplog, how, said):
    monkeypatch.setenv("BACKGROUND_KERNELS_DO", how)
    with caplog.at_level(logging.WARNING, "layerzero"):
        built_apart()
    assert said in caplog.text
    assert chosen() == "torch.rms_norm"
    (failed,) = lz.jit_status().failed
    assert said in failed.log


@pytest.mark.slow
@pytest.mark.parametrize("how", ["be killed", "lack room", "keep nothing"])
def test_what_another_time_may_cure_is_left_alone_in_this_process_only(apart, monkeypatch, how):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(apart / "cache"))
    monkeypatch.setenv("BACKGROUND_KERNELS_DO", how)
    built_apart()
    before = told(apart)
    ENGINE.bump()
    built_apart()
    assert told(apart) == before, "not again in this process"
    BUILDS.failures.clear()  # as in a new process
    monkeypatch.delenv("BACKGROUND_KERNELS_DO")
    ENGINE.bump()
    built_apart()
    assert chosen() == "background.rms_norm"


@pytest.mark.parametrize(("hidden", "known"), [(32, False), (4096, False), (32, True)])
def test_what_lacked_a_compiler_is_built_once_one_is_there(here, monkeypatch, tmp_path, hidden, known):
    monkeypatch.setattr(background_builds, "SEEK_S", 0.01)
    lie = ["none"]
    for module in (builds, background_builds):
        monkeypatch.setattr(module, "compilers", lambda: lie[0])
    here.may.set()
    here.error = without_compiler()
    if known:  # an earlier process tried
        monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
        lz.configure()
        kernel = REGISTRY.kernel("test.compiles")
        BUILDS.failures.add(kernel, lz.facts("rms_norm", *CALL), "no compiler", lasting=True)
        BUILDS.failures.clear()
    in_background()
    lz.rms_norm(*CALL)
    assert BUILDS.idle.wait(LIMIT_S)
    assert chosen() != "test.compiles"
    assert len(here.builds) == (not known)
    here.error, lie[0] = None, "g++"
    assert not lz.jit_status().failed, "what does not hold any more is not told"
    epoch, until = ENGINE.epoch, time.monotonic() + LIMIT_S
    while hidden == 32 and ENGINE.epoch == epoch and time.monotonic() < until:  # nobody asks for what hits serve
        time.sleep(0.01)
    call = torch.ones(4, hidden), torch.ones(hidden)
    lz.rms_norm(*call)
    assert BUILDS.idle.wait(LIMIT_S)
    assert chosen(*call) == "test.compiles"


def test_compilers_are_looked_for_where_libraries_do(tmp_path, monkeypatch):
    for variable in ("CC", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = []

    def look():
        builds._compilers.cache_clear()
        seen.append(builds.compilers())

    look()
    for place in ("g++", "clang", "cuda/bin/nvcc"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch(mode=0o755)
        look()
    assert len(set(seen)) == 3, "nobody looks for nvcc there yet"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    look()
    assert len(set(seen)) == 4
    builds._compilers.cache_clear()


@pytest.mark.slow
def test_a_failure_is_known_to_the_next_process_until_a_version_changes(apart, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(apart / "cache"))
    monkeypatch.setenv("BACKGROUND_KERNELS_DO", "raise")
    built_apart()
    before = told(apart)
    BUILDS.failures.clear()  # as in a new process
    built_apart()
    assert told(apart) == before
    monkeypatch.setattr(builds, "compilers", lambda: "another compiler")
    monkeypatch.delenv("BACKGROUND_KERNELS_DO")
    ENGINE.bump()
    built_apart()
    assert chosen() == "background.rms_norm"


def test_a_folder_that_cannot_be_written_breaks_nothing(here, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file" / "below"))
    here.may.set()
    here.error = RuntimeError("no room")
    in_background()
    lz.rms_norm(*CALL)
    assert BUILDS.idle.wait(LIMIT_S)
    assert [each.log for each in lz.jit_status().failed] == ["RuntimeError: no room"]


def without_compiler():
    raised = RuntimeError("\n".join(["backend='inductor' raised:", *["many lines"] * 40, "Set TORCHDYNAMO_VERBOSE=1"]))
    raised.__cause__ = FileNotFoundError(2, "No such file or directory", "/usr/bin/g++")
    return raised


def test_a_missing_compiler_is_named_and_told_once(here, caplog):
    here.may.set()
    here.error = without_compiler()
    in_background()
    with caplog.at_level(logging.WARNING, "layerzero"):
        for hidden in (32, 4096):
            lz.rms_norm(torch.ones(4, hidden), torch.ones(hidden))
            assert BUILDS.idle.wait(LIMIT_S)
    (told,) = [each.message for each in caplog.records if "background" in each.message]
    assert "\n" not in told
    assert "test.compiles is not built in the background: a C++ compiler that works was not found" in told
    assert "name it in CXX" in told
    assert [hidden for _, hidden in here.builds] == [32], "no other class would build"
    why = "a C++ compiler that works was not found: install one (g++), or name it in CXX"
    assert [each.log for each in lz.jit_status().failed] == [why] * 2, "other processes are told of each class"
    (line,) = lz.jit_status().failures()
    assert " and 1 more (" in line
    assert f": {why}; another kernel runs" in line


def test_what_does_not_fit_beside_what_runs_is_not_built_here_either(here, monkeypatch):
    here.may.set()
    monkeypatch.setattr(own_builds, "short_of_memory", lambda recipe: "its tensors take more than is free")
    in_background()
    lz.rms_norm(*CALL)
    assert BUILDS.idle.wait(LIMIT_S)
    assert here.builds == []
    assert [each.log for each in lz.jit_status().failed] == ["its tensors take more than is free"]


def test_a_device_that_does_not_answer_fails_a_build_and_not_its_process(monkeypatch):
    def lost(recipe):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(build_child, "short_of_memory", lost)
    recipe = CallRecipe.of(lz.facts("rms_norm", *CALL))
    outcome = build_child.built(ENGINE.registry.kernel("torch.rms_norm"), recipe)
    assert outcome.log == "RuntimeError: CUDA error: device-side assert triggered"


def test_the_end_of_the_process_is_heard_of_once_and_only_by_a_thread_that_runs(here, monkeypatch):
    heard = []
    monkeypatch.setattr(background_builds.atexit, "register", lambda method: heard.append("register"))
    monkeypatch.setattr(background_builds.atexit, "unregister", lambda method: heard.append("unregister"))
    with monkeypatch.context() as none_left:
        none_left.setattr(threading.Thread, "start", no_thread)
        in_background()
        lz.rms_norm(*CALL)
        lz.rms_norm(torch.ones(4, 64), torch.ones(64))
        assert heard == []
    here.may.set()
    lz.rms_norm(torch.ones(4, 4096), torch.ones(4096))
    assert BUILDS.idle.wait(LIMIT_S)
    assert heard == ["unregister", "register"]


def no_thread(self):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("kind", "step", "started", "lasting"),
    [
        ("hung", "", True, True),
        ("hung", None, True, True),
        ("hung", None, False, False),
        ("died", "", True, True),
        ("killed", "", True, False),
    ],
)
def test_a_build_that_hangs_is_not_tried_again_wherever_it_hangs(monkeypatch, kind, step, started, lasting):
    def run_apart(worker, tasks, *, ended, begins, **more):
        task = tasks.popleft()
        begins(task)
        ended(task, End(kind, step=step, started=started))

    kernel = background_kernel()
    told, begun = [], []
    monkeypatch.setattr(build_child, "run_apart", run_apart)
    pairs = [(kernel, lz.facts("rms_norm", *CALL))]
    build_child.build_apart(
        pairs,
        lambda _kernel, _facts, outcome: told.append(outcome.lasting),
        lambda: False,
        begins=lambda *pair: begun.append(pair),
    )
    assert (told, begun) == ([lasting], pairs)


def background_kernel():
    return lz.Kernel(
        id="test.hangs",
        operations=("norm.rms",),
        backend=lz.Backend("test", "hangs", origin="code"),
        load=lambda facts: None,
        jit=True,
    )


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
    monkeypatch.setenv("PYTHONPATH", HERE, prepend=":")
    monkeypatch.delenv("LAYERZERO_JIT")
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "('background.rms_norm',)"), ended.stderr
    assert not (apart / "32.so").exists()


def test_notes_of_builds_count_as_long_as_their_files_exist(tmp_path):
    from layerzero.engine import jit

    kernel = lz.Kernel(
        id="test.noted",
        operations=("norm.rms",),
        backend=lz.Backend("test", "noted", origin="code"),
        load=lambda _: None,
        jit=True,
        cache_folder=lambda: tmp_path,
    )
    facts = lz.facts("rms_norm", *CALL)
    assert not BUILT.ready(kernel, facts)
    with jit.opened_files() as opened:
        (tmp_path / "part").write_text("compiled")
        (tmp_path / "part").rename(tmp_path / "kernel.cubin")
        (tmp_path.parent / "elsewhere").write_text("no artefact")
    jit.note(kernel, facts, opened)
    assert BUILT.ready(kernel, facts)
    assert not BUILT.ready(kernel, lz.facts("rms_norm", torch.ones(4, 4096), torch.ones(4096)))
    (tmp_path / "kernel.cubin").unlink()
    assert not BUILT.ready(kernel, facts), "the cache was wiped"


def test_a_file_that_is_only_locked_stands_for_what_lies_beside_it(tmp_path):
    from layerzero.engine import jit

    kernel = lz.Kernel(
        id="test.locked",
        operations=("norm.rms",),
        backend=lz.Backend("test", "locked", origin="code"),
        load=lambda _: None,
        jit=True,
        cache_folder=lambda: tmp_path,
    )
    facts = lz.facts("rms_norm", *CALL)
    with jit.opened_files() as opened:
        os.close(os.open(tmp_path / "abc.lock", os.O_RDONLY | os.O_CREAT))
    jit.note(kernel, facts, opened)
    assert not BUILT.ready(kernel, facts), "the library kept nothing: a full disk, perhaps"
    (tmp_path / "abc.o").write_text("compiled, and read outside of Python")
    jit.note(kernel, facts, opened)
    assert BUILT.ready(kernel, facts)
    (tmp_path / "abc.o").unlink()
    assert not BUILT.ready(kernel, facts), "the lock alone is no artefact"


def test_notes_are_read_once_while_their_folder_stays_as_it_is(tmp_path, monkeypatch):
    from layerzero.core.system import disk
    from layerzero.engine import jit

    read, real = [], disk.read_plain
    monkeypatch.setattr(disk, "read_plain", lambda path, most: (read.append(path), real(path, most))[1])
    folder, noted = tmp_path / jit.NOTES, jit.Noted()
    assert noted.files(folder / "a.json") is None
    assert not read, "a folder that does not exist is not looked into"
    folder.mkdir()

    def settle():
        past = time.time_ns() - 10 * jit.SETTLED_NS
        os.utime(folder, ns=(past, past))

    assert [noted.files(folder / "a.json") for _ in range(2)] == [None, None]
    assert len(read) == 2, "it was changed just now, and may change again at what the file system calls the same time"
    settle()
    assert [noted.files(folder / name) for name in ("a.json", "b.json") * 3] == [None] * 6
    assert len(read) == 4
    (folder / "a.json").write_text('["a.cubin"]')
    assert noted.files(folder / "a.json") == ["a.cubin"], "another process built it"
    settle()
    assert [noted.files(folder / "a.json") for _ in range(3)] == [["a.cubin"]] * 3
    assert len(read) == 6
    shutil.rmtree(folder)
    assert noted.files(folder / "a.json") is None, "it was wiped"


def test_nobody_looks_for_a_build_that_could_not_run(here, monkeypatch):
    asked = []
    monkeypatch.setattr(BUILT, "ready", lambda kernel, _: asked.append(kernel.id))
    report = lz.explain("rms_norm", *(each.to("meta") for each in CALL), device="cpu")
    assert "test.compiles" in asked
    assert set(asked) == {each for each, found in report.failures.items() if found[-1].code == "JIT_DISABLED"}
    assert "liger.rms_norm" not in asked


def test_a_status_is_told_in_words(here):
    here.may.set()
    in_background()
    lz.rms_norm(*CALL)
    assert BUILDS.idle.wait(LIMIT_S)
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

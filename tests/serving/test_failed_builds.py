"""Builds behind calls that fail: what is told, what is tried again and when, and what runs meanwhile."""

from __future__ import annotations

import logging
import time

import pytest
import torch

import layerzero as lz
from background_calls import CALL, LIMIT_S, build, chosen, compiling, run, told, without_compiler
from layerzero.core.recipe import CallRecipe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.serving import background_builds, own_builds
from layerzero.serving.background_builds import BUILDS
from layerzero.testing.children import End
from layerzero.tuning.storage import host_notes
from layerzero.tuning.verification import build_child

pytestmark = pytest.mark.usefixtures("soon")


def test_a_failure_is_told_once_with_its_log_and_not_tried_again(here, caplog):
    here.error = RuntimeError("\n".join([*(["noise"] * 40), "g++: fatal error: killed"]))
    here.may.set()
    lz.configure(jit="background")
    with caplog.at_level(logging.WARNING, "layerzero"):
        for _ in range(2):
            ENGINE.bump()
            run()
    (told,) = [each.getMessage() for each in caplog.records if "did not build" in each.getMessage()]
    assert "g++: fatal error: killed" in told
    assert told.count("noise") < build_child.LINES
    assert len(here.builds) == 1
    assert [each.kernel for each in lz.jit_status().failed] == ["test.compiles"]
    assert chosen() == "torch.rms_norm"


def test_what_memory_does_not_hold_is_not_drawn_for_a_build(here, monkeypatch, caplog):
    monkeypatch.setattr(build_child, "available_bytes", lambda: 1000.0)
    here.may.set()
    lz.configure(jit="background")
    with caplog.at_level(logging.WARNING, "layerzero"):
        run()
    assert here.builds == []
    assert "may be used on the device\nit is not tried again in this process" in caplog.text


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
        build()
    assert said in caplog.text
    assert chosen() == "torch.rms_norm"
    (failed,) = lz.jit_status().failed
    assert said in failed.log


@pytest.mark.slow
@pytest.mark.parametrize("how", ["be killed", "lack room", "keep nothing"])
def test_what_another_time_may_cure_is_left_alone_in_this_process_only(apart, monkeypatch, how):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(apart / "cache"))
    monkeypatch.setenv("BACKGROUND_KERNELS_DO", how)
    build()
    before = told(apart)
    ENGINE.bump()
    build()
    assert told(apart) == before, "not again in this process"
    BUILDS.failures.clear()  # as in a new process
    monkeypatch.delenv("BACKGROUND_KERNELS_DO")
    ENGINE.bump()
    build()
    assert chosen() == "background.rms_norm"


@pytest.mark.parametrize(("hidden", "known"), [(32, False), (4096, False), (32, True)])
def test_what_lacked_a_compiler_is_built_once_one_is_there(here, monkeypatch, tmp_path, hidden, known):
    monkeypatch.setattr(background_builds, "SEEK_S", 0.01)
    lie = ["none"]
    for module in (host_notes, background_builds):
        monkeypatch.setattr(module, "compilers", lambda: lie[0])
    here.may.set()
    here.error = without_compiler()
    if known:  # an earlier process tried
        monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
        lz.configure()
        kernel = REGISTRY.kernel("test.compiles")
        BUILDS.failures.add(kernel, lz.facts("rms_norm", *CALL), "no compiler", lasting=True)
        BUILDS.failures.clear()
    build()
    assert chosen() != "test.compiles"
    assert len(here.builds) == (not known)
    here.error, lie[0] = None, "g++"
    assert not lz.jit_status().failed, "what does not hold any more is not told"
    epoch, until = ENGINE.epoch, time.monotonic() + LIMIT_S
    while hidden == 32 and ENGINE.epoch == epoch and time.monotonic() < until:  # nobody asks for what hits serve
        time.sleep(0.01)
    call = torch.ones(4, hidden), torch.ones(hidden)
    run(*call)
    assert chosen(*call) == "test.compiles"


def test_compilers_are_looked_for_where_libraries_do(tmp_path, monkeypatch):
    for variable in ("CC", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = []

    def look():
        host_notes._compilers.cache_clear()
        seen.append(host_notes.compilers())

    look()
    for place in ("g++", "clang", "cuda/bin/nvcc"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch(mode=0o755)
        look()
    assert len(set(seen)) == 3, "nobody looks for nvcc there yet"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    look()
    assert len(set(seen)) == 4
    host_notes._compilers.cache_clear()


@pytest.mark.slow
def test_a_failure_is_known_to_the_next_process_until_a_version_changes(apart, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(apart / "cache"))
    monkeypatch.setenv("BACKGROUND_KERNELS_DO", "raise")
    build()
    before = told(apart)
    BUILDS.failures.clear()  # as in a new process
    build()
    assert told(apart) == before
    monkeypatch.setattr(host_notes, "compilers", lambda: "another compiler")
    monkeypatch.delenv("BACKGROUND_KERNELS_DO")
    ENGINE.bump()
    build()
    assert chosen() == "background.rms_norm"


def test_a_folder_that_cannot_be_written_breaks_nothing(here, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file" / "below"))
    here.may.set()
    here.error = RuntimeError("no room")
    build()
    assert [each.log for each in lz.jit_status().failed] == ["RuntimeError: no room"]


def test_a_missing_compiler_is_named_and_told_once(here, caplog):
    here.may.set()
    here.error = without_compiler()
    lz.configure(jit="background")
    with caplog.at_level(logging.WARNING, "layerzero"):
        for hidden in (32, 4096):
            run(torch.ones(4, hidden), torch.ones(hidden))
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
    build()
    assert here.builds == []
    assert [each.log for each in lz.jit_status().failed] == ["its tensors take more than is free"]


def test_a_device_that_does_not_answer_fails_a_build_and_not_its_process(monkeypatch):
    def lost(recipe):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(build_child, "short_of_memory", lost)
    recipe = CallRecipe.of(lz.facts("rms_norm", *CALL))
    outcome = build_child.built(ENGINE.registry.kernel("torch.rms_norm"), recipe)
    assert outcome.log == "RuntimeError: CUDA error: device-side assert triggered"


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

    kernel = compiling("test.hangs", None)
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


def test_a_build_whose_error_is_no_unicode_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    kernel, facts = REGISTRY.kernel("torch.rms_norm"), lz.facts("rms_norm", *CALL)
    host_notes.Failures().add(kernel, facts, "a file named \udcff.cpp", lasting=True)
    assert host_notes.Failures().of(kernel, facts).log == r"a file named \udcff.cpp"

"""Children that end in every way: who is blamed, who goes on, and that nobody is left when the parent is ended."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import apart_worker
import msgspec
import pytest
import torch

from layerzero.core.ledger import Verdict
from layerzero.core.system import resources
from layerzero.core.system.resources import Kills
from layerzero.testing import children, conformance, process
from layerzero.testing.child_main import Tell, jobs_of
from layerzero.testing.children import DEATHS, Task, Waits, run_apart

HANGS_S = 0.01
"""How long what hangs for ever may be silent; only what hangs is given it."""


class Asker:
    """Asks, and keeps what it is told."""

    def __init__(self, *tasks):
        self.tasks, self.found, self.ended, self.begun = deque(tasks), [], {}, []

    def run(self, **given):
        run_apart("apart_worker", self.tasks, found=self._found, ended=self._ended, begins=self.begun.append, **given)
        return self

    def _found(self, task, value):
        self.found.append((task.job.act, value))
        if task.job.act == "steps":
            task.job.done.append(value)

    def _ended(self, task, end):
        self.ended.setdefault(task.about or task.job.act, []).append(end)
        if task.job.act == "steps" and end.step is not None:
            task.job.done.append(end.step)
            return task
        return None

    def answers(self, act):
        return [value for name, value in self.found if name == act]


def task(act, owner=None, **more):
    seconds = HANGS_S if act == "hang" else 600.0
    return Task(apart_worker.Job(act), owner or act, seconds, **more)


@pytest.fixture(scope="module")
def asked():
    """Ways to end, one after another, with what answers between; each takes a child, and there are more below."""
    acts = ["segfault", "answer", "hang", "SIGKILL", "bad_alloc", "dies unbegun", "dies between two", "steps"]
    return Asker(*(task(act) for act in (*acts, "garbage", "reads", "answer"))).run()


@pytest.mark.parametrize(("worker", "document"), [
    ("layerzero.cli.doctor", {"plugin": "good"}),
    ("layerzero.tuning.verification.build_child", None),
    ("layerzero.tuning.verification.child", None),
    ("layerzero.testing.conformance", None),
])  # fmt: skip
def test_every_worker_says_what_it_takes(worker, document):
    decoder = jobs_of(importlib.import_module(worker))
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(b'{"nothing": 1}')
    if document is not None:
        assert decoder.decode(msgspec.json.encode(document)).plugin == "good"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "text"),
    [
        ("exit", "it ended the process with exit code 3: the last word; it ran the call"),
        ("raises", "it ended the process with exit code 1: ZeroDivisionError: division by zero; "),
    ],
)
def test_what_it_said_last_is_told(act, text):
    (end,) = Asker(task(act)).run().ended[act]
    assert (end.verdict, end.started) == (Verdict.CRASHED, True)
    assert str(end).startswith(text)


@pytest.mark.parametrize(
    ("act", "verdict", "text"),
    [
        ("segfault", Verdict.CRASHED, "it ended the process with SIGSEGV; it ran the call"),
        ("hang", Verdict.HUNG, "no sign of life for 0.01 s"),
        ("SIGKILL", None, "its process was killed from outside with SIGKILL"),
        ("bad_alloc", None, "its process had too little memory and ended with SIGABRT: what():  std::bad_alloc"),
        ("dies unbegun", None, "the child process did not answer: it ended the process with exit code 4"),
    ],
)
def test_who_ended_a_process_is_blamed_and_who_was_killed_is_not(asked, act, verdict, text):
    (end,) = asked.ended[act]
    assert end.verdict is verdict
    assert str(end).startswith(text)
    assert end.started
    assert asked.answers(act) == []


def test_the_others_are_answered_and_by_the_same_child_as_long_as_it_lives(asked):
    assert len(asked.answers("answer")) == 2
    assert len(asked.answers("dies between two")) == 1, "what was answered is asked once"
    alike = [asked.answers(act)[0]["pid"] for act in ("garbage", "reads")]
    assert asked.answers("answer")[1]["pid"] == alike[0] == alike[1], "neither print nor read is a message"
    assert not asked.tasks


def test_a_job_of_several_steps_goes_on_behind_the_one_that_ended_it(asked):
    assert asked.answers("steps") == ["one", "three"]
    (end,) = asked.ended["steps"]
    assert (end.step, end.how) == ("two", "SIGABRT")
    assert [each.job.act for each in asked.begun].count("steps") == 3


@pytest.mark.slow
def test_after_three_deaths_an_owner_is_asked_no_more_and_others_are():
    tasks = [task("exit", "deadly", about=number) for number in range(DEATHS + 2)]
    asked = Asker(*tasks, task("answer")).run()
    ends = [asked.ended[number][0] for number in range(1, DEATHS + 2)]
    assert [end.kind for end in ends] == ["died"] * (DEATHS - 1) + ["given up"] * 2
    assert str(ends[-1]) == "not tried: 3 processes died or hung in other classes"
    assert len(asked.answers("answer")) == 1


@pytest.mark.slow
def test_lanes_work_at_the_same_time_in_children_of_their_own():
    lanes = [task("answer", lane=lane) for lane in ("one", "two", "one", "two")]
    asked = Asker(*lanes).run(at_once=2)
    pids = [value["pid"] for value in asked.answers("answer")]
    assert len(pids) == 4
    assert len(set(pids)) == 2


@pytest.mark.slow
def test_who_is_done_with_a_lane_goes_on_in_the_next_while_others_are_at_work(tmp_path, monkeypatch):
    """One child waits for what only the third lane brings; the other has done the second before."""
    monkeypatch.setenv("APART_MEETING", str(tmp_path / "pipe"))
    os.mkfifo(tmp_path / "pipe")
    lanes = [task("meets a writer", lane="one"), task("answer", lane="two"), task("meets a reader", lane="three")]
    asked = Asker(*lanes).run(at_once=2)
    pids = {name: value["pid"] for name, value in asked.found}
    assert pids["answer"] == pids["meets a reader"] != pids["meets a writer"]


@pytest.mark.slow
def test_where_no_child_gets_to_its_first_job_not_every_lane_tries(monkeypatch):
    monkeypatch.setenv("APART_AT_IMPORT", "exit")
    began = []
    real = children._Child

    def child(*given):
        began.append(given)
        return real(*given)

    monkeypatch.setattr(children, "_Child", child)
    asked = Asker(*[task("answer", lane=str(number)) for number in range(9)]).run(at_once=2)
    assert len(asked.ended["answer"]) == 9
    assert not any(end.started for end in asked.ended["answer"])
    assert len(began) <= DEATHS + 1, "two are at it at the same time"


def test_where_one_works_others_that_get_to_no_job_take_nothing_away():
    """As where its compiler has the memory that they would need to start."""
    left = [task("answer", lane=str(number)) for number in range(9)]
    runner = children._Runner(deque(left), None, lambda *told: ended.append(told), None)
    ended = []

    def child(lane, *, ready):
        more = {"task": None, "step": None, "at": "", "began": 0.0, "over": False, "useful": ready}
        return SimpleNamespace(lane=lane, ready=ready, end=lambda: None, **more)

    working = child("at work", ready=True)
    runner.children.append(working)
    for number in range(DEATHS):
        assert runner.may_begin(2)
        runner.children.append(child(str(number), ready=False))
        runner._gone(runner.children[-1], "killed", "SIGKILL")
    assert (list(runner.tasks), ended) == (left, [])
    assert not runner.may_begin(2), "the one that works does it all"
    runner._gone(working, "killed", "SIGKILL")
    assert runner.may_begin(2), "somebody has to"
    runner.children.append(child("3", ready=False))
    runner._gone(runner.children[-1], "killed", "SIGKILL")
    assert (len(runner.tasks), len(ended)) == (0, 9)


@pytest.mark.parametrize(("at_import", "text"), [
    ("exit", "it ended the process with exit code 3: no such library"),
    ("hang", "no sign of life for 0 s"),
])  # fmt: skip
def test_what_dies_before_it_reads_a_job_is_no_kernel_s_fault(monkeypatch, at_import, text):
    monkeypatch.setenv("APART_AT_IMPORT", at_import)
    if at_import == "hang":
        monkeypatch.setattr(children, "START_S", 0.0)
    asked = Asker(task("answer"), task("steps")).run()
    ends = [asked.ended["answer"][0], asked.ended["steps"][0]]
    assert [(end.started, end.verdict, end.reason) for end in ends] == [(False, None, text)] * 2


def test_a_job_without_sense_ends_the_run_and_the_child():
    with pytest.raises(ValueError, match="that makes no sense"):
        Asker(task("refused"), task("answer")).run()


def test_a_memory_limit_is_named_where_it_ended_something(monkeypatch):
    counts = iter(range(9))
    monkeypatch.setattr(resources, "kills", lambda: Kills(next(counts), "a"))
    (end,) = Asker(task("SIGKILL")).run().ended["SIGKILL"]
    assert end.verdict is None
    assert end.words == "the memory limit ended 1 processes of its group meanwhile"


# where a child imports from


def test_nothing_in_the_working_folder_runs_in_place_of_a_library(monkeypatch, tmp_path):
    for name in ("msgspec", "sympy", "torch", "layerzero"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend(str(tmp_path))
    ((_, value),) = Asker(task("answer")).run().found
    assert str(tmp_path) not in value["path"]
    assert "" not in value["path"]


def paths(*modules):
    return process.child_environment(modules, {})["PYTHONPATH"].split(os.pathsep)


def test_a_module_that_is_asked_for_is_found_where_this_process_finds_it(monkeypatch, tmp_path):
    (tmp_path / "a_module_of_mine.py").write_text("")
    (tmp_path / "a_package_of_mine").mkdir()
    (tmp_path / "a_package_of_mine" / "__init__.py").write_text("")
    (tmp_path / "typer.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "typer", raising=False)
    assert str(tmp_path) not in paths()
    assert paths("a_module_of_mine")[-1] == str(tmp_path)
    assert paths("a_package_of_mine.kernels", "no_such_module")[-1] == str(tmp_path)
    assert paths("typer")[0] == str(tmp_path), "another typer would hide it"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert paths()[0] == str(tmp_path), "the user named it"


# nobody is left


PARENT = """
from collections import deque
import apart_worker
from layerzero.testing.children import Task, run_apart
run_apart("apart_worker", deque([Task(apart_worker.Job({act!r}), "", 600.0)]), found=print, ended=print)
"""


@pytest.mark.parametrize(
    ("act", "sent", "code"),
    [
        pytest.param("hold", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("hold the lock", signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("hold the lock", signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_children_end_with_their_parent(tmp_path, act, sent, code):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(act=act)],
        env=os.environ | {"APART_PIPE": str(pipe), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with parent, pipe.open("rb") as held:
        assert int(held.readline()) != parent.pid
        parent.send_signal(sent)
        assert held.read() == b"", "it ends when the last process that holds the pipe does"
        told, _ = parent.communicate()
    assert parent.returncode == code
    assert told == b"", "an interrupted child is no finding"


def test_who_waits_for_the_machine_is_not_to_blame(monkeypatch):
    asked = itertools.count()
    monkeypatch.setattr(children, "waits", lambda _: Waits({1: 90.0 * next(asked)}))
    monkeypatch.setattr(children, "LEAST_S", 0.0)
    (end,) = Asker(task("hang")).run().ended["hang"]
    assert (end.kind, end.verdict, end.step) == ("starved", None, "the step")
    assert "no sign of life for 0.01 s: it waited for a core for 90 s" in str(end)


@pytest.mark.parametrize(("error", "status"), [
    (torch.OutOfMemoryError("CUDA out of memory"), "not tried"),  # the reference may need more than a kernel
    (TypeError("none"), "wrong"),
])  # fmt: skip
def test_a_check_that_finds_no_memory_for_itself_says_nothing_of_the_kernel(error, status):
    def play(_):
        raise error

    said = []
    job = conformance.Play(conformance.Ask(None, None, "", "cpu", 0, 1, []), "torch.silu", "mlp.silu", False, [])
    conformance._run(conformance.KernelCheck("small", play), job, Tell(said.append))
    assert said[-1].value.status == status
    assert said[-1].value.message.startswith("the check itself raised")


@pytest.mark.parametrize(("named", "frozen", "why"), [
    ("", False, "wanted a Python interpreter for child processes, got none"),
    ("/nowhere/python", False, "No such file"),
    (sys.executable, True, "got a program with Python inside it"),
])  # fmt: skip
def test_where_no_child_can_be_started_all_is_given_up(monkeypatch, named, frozen, why):
    """A program with Python inside it has no interpreter, or would start itself again, which would do the same."""
    monkeypatch.setattr(process.multiprocessing.spawn, "get_executable", lambda: named)
    monkeypatch.setattr(sys, "executable", named and sys.executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    asked = Asker(task("answer"), task("steps"), task("answer", lane="another")).run(at_once=2)
    ends = [end for all_of in asked.ended.values() for end in all_of]
    assert [(end.kind, end.started, end.verdict) for end in ends] == [("not begun", False, None)] * 3
    assert all(why in str(end) and str(end).startswith("no child process could be started") for end in ends)
    assert asked.found == []


def test_a_program_without_an_interpreter_may_name_one_at_any_time(monkeypatch):
    monkeypatch.setattr(process.multiprocessing.spawn, "get_executable", lambda: None)  # as it was imported
    monkeypatch.setattr(sys, "executable", "/opt/python")
    assert process.interpreter() == "/opt/python"
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(process.multiprocessing.spawn, "get_executable", lambda: os.path.realpath("/proc/self/exe"))
    with pytest.raises(OSError, match="got a program with Python inside it"):
        process.interpreter()


def test_a_program_names_the_interpreter_of_its_children(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/opt/program")
    monkeypatch.setattr(process.multiprocessing.spawn, "get_executable", lambda: b"/opt/python")
    assert process.interpreter() == "/opt/python"

"""The one runner of children that may die: jobs in, messages out, blame on what was running when one ended.

    tasks = deque([Task(Question("mine.rms", call), owner="mine.rms", seconds=60.0)])
    run_apart("layerzero.tuning.verification.child", tasks, found=keep, ended=blame)

A child imports torch and libraries, which takes seconds, then does one job after another; where one ends it, another
child goes on. Children are fresh interpreters, never forks. What interrupts this process ends them, and they end when
it does. What they do stands in :mod:`layerzero.testing.child_main`. One thread drives them all.

A process that hangs runs or sleeps. With more threads than cores, some of its threads queue, too: a process whose
threads together ran for most of the silence did not wait for the machine. Only Linux has these numbers.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from layerzero.core.ledger import Verdict
from layerzero.core.system import log, resources
from layerzero.engine.failures import says_out_of_memory
from layerzero.testing.child_main import Message
from layerzero.testing.process import APART, OUTSIDE, Process, child_environment, how_it_ended

_PROC = Path("/proc")

_FAULTS, _STATE = 12, 3
"""Fields of ``/proc/PID/stat``: faults that read a disk, and the first one behind the name, which may hold anything."""

LEAST_S = 1.0
"""A shorter silence says nothing: any process waits a while for a core."""

SHARE = 0.5
"""Of a silence, what a thread waited for a core; with less, it had time to give a sign."""

FAULTS_A_SECOND = 10.0
"""Pages read from a disk: a machine that swaps reads hundreds a second, each thread at most some thousand."""


@dataclass(frozen=True, slots=True)
class Waits:
    """What a process has waited for the machine since it began.

    Attributes:
        queued_s: for a core, each thread by its number.
        faults: pages that were read from a disk.
        ran_s: how long it ran meanwhile, each thread by its number.
    """

    queued_s: dict[int, float] = field(default_factory=dict)
    faults: int = 0
    ran_s: dict[int, float] = field(default_factory=dict)

    def since(self, before: Waits, seconds: float) -> str:
        """What kept it for most of so many seconds, in words; empty where it did not wait for the machine."""
        if seconds < LEAST_S:
            return ""
        queued = max((now - before.queued_s.get(thread, 0.0) for thread, now in self.queued_s.items()), default=0.0)
        ran = sum(now - before.ran_s.get(thread, 0.0) for thread, now in self.ran_s.items())
        if queued > SHARE * seconds > ran:
            return f"it waited for a core for {queued:.0f} s of {seconds:.0f}"
        faults = self.faults - before.faults
        if faults > FAULTS_A_SECOND * seconds:
            return f"the machine swapped: it read its memory back from a disk {faults} times in {seconds:.0f} s"
        return ""


def waits(process: int) -> Waits:
    """What a process has waited so far; nothing where the system does not tell."""
    queued: dict[int, float] = {}
    ran: dict[int, float] = {}
    folder = _PROC / str(process)
    with contextlib.suppress(OSError, ValueError, IndexError):
        faults = int((folder / "stat").read_text().rpartition(")")[2].split()[_FAULTS - _STATE])
        for thread in (folder / "task").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                times = (thread / "schedstat").read_text().split()
                ran[int(thread.name)], queued[int(thread.name)] = int(times[0]) / 1e9, int(times[1]) / 1e9
        return Waits(queued, faults, ran)
    return Waits(queued, 0, ran)


START_S = 120.0
"""How long a child may be silent outside of a step: importing and making a call take seconds, and are no kernel's."""

BUILD_S = 600.0
"""How long a step may be silent that compiles."""

DEATHS = 3
"""After so many children that ended in steps of one owner, its other tasks are given up: each costs a new process.

After so many that got to no job at all, no further one is begun while one works, and all is given up where none does.
"""

_KILLED = "its process was killed from outside with"
_END_S = 10.0  # how long a child may take to end once it has no more jobs
_LOOK_S = 0.05  # how often children are looked at that say nothing


Kind = Literal["not begun", "died", "hung", "killed", "starved", "given up", "stopped"]


@dataclass(slots=True, eq=False)
class Task:
    """One job for a child, and what the asker knows of it.

    Attributes:
        job: what the child gets: a msgspec struct.
        owner: what is given up after ``DEATHS`` children: a kernel's id.
        seconds: how long a step may be silent.
        lane: tasks of one lane are done one after the other, never by two children at once.
        about: the asker's own.
        harmful: whether children are likely to end in it, which does not count against the owner.
    """

    job: Any
    owner: str
    seconds: float
    lane: str = ""
    about: Any = None
    harmful: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """What became of a task that has no answer.

    Attributes:
        kind: why; one that was killed was so from outside, or since memory ran out; one that starved was silent for as
            long as one that hung, and waited for the machine.
        how: an exit code or a signal in words, or the time of silence.
        words: the last line that the child said, or what else is known.
        step: the step that ran; None if none had begun.
        at: what it was about to run.
        seconds: since the step began.
        started: whether the child got as far as to take a job.
    """

    kind: Kind
    how: str = ""
    words: str = ""
    step: str | None = None
    at: str = ""
    seconds: float = 0.0
    started: bool = True

    @property
    def verdict(self) -> Verdict | None:
        """What it says about the kernel; nothing where none had begun, or where others ended the process."""
        return None if self.step is None else {"died": Verdict.CRASHED, "hung": Verdict.HUNG}.get(self.kind)

    @property
    def reason(self) -> str:
        """How the process ended, in words."""
        if self.kind == "given up":
            return f"not tried: {DEATHS} processes died or hung in other classes"
        if self.kind == "stopped":
            return "the time given was over before its turn ended"
        if self.kind == "not begun":
            return f"no child process could be started: {self.words}"
        silent = "no sign of life for"
        how = {"died": "it ended the process with", "hung": silent, "starved": silent}
        killed = "its process had too little memory and ended with" if says_out_of_memory(self.words) else _KILLED
        text = f"{how.get(self.kind, killed)} {self.how}"
        return f"{text}: {self.words}" if self.words else text

    def __str__(self) -> str:
        if self.step is None and self.kind not in ("not begun", "given up", "stopped"):
            return f"the child process did not answer: {self.reason}"
        return f"{self.reason}; it ran {self.at}" if self.at else self.reason


def run_apart(
    worker: str,
    tasks: deque[Task],
    *,
    found: Callable[[Task, Any], None],
    ended: Callable[[Task, End], Task | None],
    begins: Callable[[Task], None] = lambda _: None,
    at_once: int = 1,
    modules: Iterable[str] = (),
    environment: Mapping[str, str] = APART,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Have every task done by children, as many as it takes.

    Args:
        worker: the module that does the jobs.
        tasks: what to do; it is emptied, and what is appended meanwhile is done, too.
        found: called with what a step found, in plain values.
        ended: called with a task that has no answer; what it returns is left to do of it.
        begins: called with the task of each step that begins.
        at_once: children that work at the same time, each in a lane of its own; one that is done with its lane goes on
            in the first that no other has, at work or about to start.
        modules: what the jobs import by name.
        environment: further variables of the children.
        stop: called all the while; once it is true, children are killed, and what has no answer ends as stopped.
    Raises: ValueError where a child says that the jobs make no sense. Whatever ends this early, as a KeyboardInterrupt
        does, ends the children, too.
    """
    runner = _Runner(tasks, found, ended, begins)
    given = child_environment((worker, *modules), environment)
    try:
        while tasks or runner.children:
            if stop():
                runner.stop()
                return
            while runner.may_begin(at_once) and (task := runner.free()) is not None:
                runner.begin(worker, given, task.lane)
            runner.turn()
    finally:
        for child in runner.children:
            child.end()


class _Child(Process):
    """A process, what it is at, and how long it may be silent."""

    def __init__(self, worker: str, environment: Mapping[str, str], lane: str) -> None:
        super().__init__(worker, environment)
        self.lane, self.at, self.limit = lane, "", START_S
        self.ready = self.useful = self.over = False
        self.since = self.began = time.monotonic()
        self.waits = Waits()
        self.task: Task | None = None
        self.step: str | None = None


@dataclass(slots=True, eq=False)
class _Runner:
    """The children, and what to do about what they say or do not say."""

    tasks: deque[Task]
    found: Callable[[Task, Any], None]
    ended: Callable[[Task, End], Task | None]
    begins: Callable[[Task], None]
    children: list[_Child] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    unready: int = 0

    def may_begin(self, at_once: int) -> bool:
        """Whether another child may work, and is likely to get to a job."""
        return len(self.children) < at_once and (self.unready < DEATHS or not self.children)

    def begin(self, worker: str, environment: Mapping[str, str], lane: str) -> None:
        """Start a child; where the system refuses and none works, give all up."""
        try:
            self.children.append(_Child(worker, environment, lane))
        except OSError as error:
            self.unready = DEATHS
            if not self.children:
                self._give_up(list(self.tasks), End("not begun", words=str(error), started=False))

    def free(self) -> Task | None:
        """The first task in a lane that no child works in."""
        taken = {child.lane for child in self.children if not child.over}
        return next((task for task in self.tasks if task.lane not in taken), None)

    def stop(self) -> None:
        end = End("stopped")
        for child in list(self.children):
            child.end()
            self.children.remove(child)
            if child.task is not None:
                self.ended(child.task, end)
        self._give_up(list(self.tasks), end)

    def turn(self) -> None:
        """Read messages, and find children that ended or are silent for too long."""
        wait([child.answers for child in self.children if not child.silent], _LOOK_S)
        for child in list(self.children):
            code = child.poll()  # before it is heard: what it said at last is still to be taken in
            for message in child.messages():
                child.since, child.waits = time.monotonic(), waits(child.pid)
                self._take(child, message)
            if code is not None and -code in OUTSIDE:
                short = resources.kills().since(child.killed_before)
                words = f"the memory limit ended {short} processes of its group meanwhile" if short > 0 else ""
                self._gone(child, "killed", how_it_ended(code), words)
            elif code is not None:
                words = child.last_words()
                kind: Kind = "killed" if says_out_of_memory(words) else "died"  # C++ ends a process that has none left
                self._gone(child, kind, how_it_ended(code), words)
            elif time.monotonic() - child.since > child.limit:
                words = waits(child.pid).since(child.waits, time.monotonic() - child.since)
                self._gone(child, "starved" if words else "hung", f"{child.limit:g} s", words)

    def _take(self, child: _Child, message: Message) -> None:
        task = child.task
        if message.kind == "wants":
            if not child.ready:
                child.ready, self.unready = True, 0
            self._give(child)
        elif message.kind == "refused":
            raise ValueError(message.text)
        elif task is None:
            log.warning("a child process reported a job that it does not have: %s", message)
        elif message.kind == "begins":
            child.step, child.at, child.began = message.text, "", time.monotonic()
            child.limit = message.seconds or task.seconds
            self.begins(task)
        elif message.kind == "runs":
            child.at = message.text
        else:
            child.step, child.useful, child.task = None, True, task if message.more else None
            child.limit = max(task.seconds, START_S)
            self.found(task, message.value)

    def _give(self, child: _Child) -> None:
        """Give a child the next task of its lane, or else of a free lane; without one, let it end."""
        own = (task for task in self.tasks if task.lane == child.lane)
        task = next(own, None) or self.free()
        if task is None:
            child.task, child.limit, child.over = None, _END_S, True
            child.jobs.close()
            return
        self.tasks.remove(task)
        child.task, child.lane, child.step, child.at = task, task.lane, None, ""
        child.limit = max(task.seconds, START_S)
        child.send(task.job)

    def _gone(self, child: _Child, kind: Kind, how: str, words: str = "") -> None:
        """Blame the step that a child ended in, and see to what is left."""
        child.end()
        self.children.remove(child)
        task, begun = child.task, child.step is not None
        end = End(kind, how, words, child.step, child.at, time.monotonic() - child.began, child.ready)
        if not child.ready:  # the next one would get no further
            self.unready += 1
            if not any(each.ready and not each.over for each in self.children):
                self._give_up([each for each in self.tasks if each.lane == child.lane or self.unready >= DEATHS], end)
        elif task is None and how != "exit code 0":
            log.info("of a child process that had finished its task: %s", end.reason)
        elif task is not None:
            again = self.ended(task, end) if begun or not child.useful else task  # else the cause is unknown
            if again is not None:
                self.tasks.appendleft(again)
            self.deaths[task.owner] += begun and not task.harmful
            if self.deaths[task.owner] >= DEATHS:
                self._give_up([each for each in self.tasks if each.owner == task.owner], End("given up"))

    def _give_up(self, tasks: Iterable[Task], end: End) -> None:
        for task in tasks:
            self.tasks.remove(task)
            self.ended(task, end)

"""Builds in the background: what a call would have chosen if it were built is built behind it, for the next.

A miss leaves the facts of its call in a bounded queue and goes on. A thread of low priority finds which kernel would
win if everything were built. Where the library keeps what it compiles, a child process compiles; else the thread does.
One process of a host builds at a time. What was built takes over by a new epoch; what failed is reported once, and is
not tried again until a version changes or, where it lacked a compiler, one is there. When the process ends, its
children do; a library moves files into its cache whole.

``lz.solve`` builds the kernels of its buckets, and their variants for smaller calls within a bucket, at once.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.system import forking, log
from layerzero.core.system.resources import started
from layerzero.engine.bucket_table import BucketTable
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.events import EVENTS
from layerzero.engine.frozen_choices import FrozenChoice, candidate_of
from layerzero.engine.jit import BUILT, BuildIdentity, BuildOutcome, build_of
from layerzero.engine.policy import Policy
from layerzero.serving.own_builds import Chosen, built_here, taken_over, wanted, with_builds
from layerzero.tuning.measurement.timing import Deadline
from layerzero.tuning.storage.host_notes import FailedBuild, Failures, HostLock, compilers
from layerzero.tuning.verification.build_child import build_apart

MAX_ASKED = 10_000
"""Builds that are remembered as requested."""

GATHER_S = 0.5
"""How long it waits for more calls before it starts a process for those that came."""

BREATH_S = 0.001
"""Between two such searches: each takes a millisecond in which no other thread runs Python."""

LOOK_S = 1.0
"""How often it looks whether another process of the host is done."""

SEEK_S = 60.0
"""How often it looks whether a compiler that builds lacked is there by now."""

END_S = 2.0
"""How long the end of the process waits for its children to be ended."""

NICENESS = 10


_Lack = tuple[str, str, Hashable, Policy]
"""A build that is missing, under a policy."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call that waits: what it is about, which builds it lacks, and the context in which it was made."""

    facts: Facts
    lacks: tuple[_Lack, ...]
    context: contextvars.Context


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be built, for which call."""

    chosen: Chosen
    waiting: Waiting


class Builds:
    """The queue and its thread, which starts with the first call."""

    def __init__(self) -> None:
        self.host = HostLock()
        self.begin()
        forking.in_child(self.begin)

    def begin(self) -> None:
        """Build nothing and have no thread: at first, and in a process that was forked."""
        self.host.close()
        self._lock = forking.lock()
        self._asked: dict[_Lack, None] = {}
        self._epoch = ENGINE.epoch
        self._waiting: deque[Waiting] = deque()
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.host, self.failures = HostLock(), Failures()
        self.building: tuple[str, ...] = ()
        self.built: list[tuple[str, str, float]] = []
        self.failed: list[FailedBuild] = []
        self._lacking: dict[str, tuple[BuildOutcome, str]] = {}
        """What a build reported missing on this machine for a kernel, by its id, and which compilers lay here."""
        self._among = ""
        """Which compilers lay here when a call was left without a build that had failed; empty where none was."""
        self._taken = 0
        """Calls that the thread took out of the queue and is not done with."""
        self.dropped, self.elsewhere = 0, False
        self.idle = threading.Event()
        self.idle.set()

    @property
    def waits(self) -> int:
        """How many calls wait: in the queue, or for their turn while nothing is built for them yet."""
        return len(self._waiting) + (0 if self.building else self._taken)

    def add(self, kernels: Iterable[Kernel], facts: Facts) -> None:
        """Ask for what a call lacks, each build once; never waits."""
        policy = current_policy()
        asked = [(*build_of(kernel, facts), policy) for kernel in kernels]  # another policy may want another kernel
        with self._lock:
            if self._epoch != ENGINE.epoch:  # something else may be wanted now
                self._epoch = ENGINE.epoch
                self._asked.clear()
            lacks = tuple(each for each in asked if each not in self._asked)
            if not lacks or self._ending.is_set():
                return
            while len(self._asked) + len(lacks) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]
            self._asked.update(dict.fromkeys(lacks))
            while len(self._waiting) >= policy["builds.max_waiting"]:
                for dropped in self._waiting.popleft().lacks:
                    self._asked.pop(dropped, None)
                self.dropped += 1
            self._waiting.append(Waiting(facts, lacks, contextvars.copy_context()))
            self.idle.clear()
            if self._thread is None:
                self._start()
        self._wake.set()

    def _start(self) -> None:
        self._thread = started("layerzero-building", self._work)
        if self._thread is None:
            log.debug("nothing is built in the background: no thread could be started")
            return
        atexit.unregister(self.end)  # a forked child has its parent's
        atexit.register(self.end)

    def end(self) -> None:
        """Build no more: children are ended, and nothing half-built is left where it would be found."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _work(self) -> None:
        step_back()
        while not self._ending.is_set():
            if not self._wake.wait(SEEK_S if self._among else None):
                self._seek()
                continue
            self._ending.wait(GATHER_S)
            with self._lock:
                batch = list(self._waiting)
                self._taken = len(batch)
                self._waiting.clear()
                self._wake.clear()
            try:
                self._build(batch)
            except Exception:
                log.exception("building in the background failed for %d calls", len(batch))
            del batch  # contexts of calls keep what they computed with
            self.building = ()
            self._taken = 0
            self.host.leave()
            with self._lock:
                if not self._waiting:
                    self.idle.set()

    def _build(self, batch: list[Waiting]) -> None:
        """Build what each call would choose; where that fails, what it would choose then."""
        while batch and not self._ending.is_set():
            chosen: dict[BuildIdentity, _Asked] = {}
            for waiting in batch:
                found = waiting.context.run(wanted, waiting.facts, self._passed_over)
                if found is not None:
                    chosen.setdefault(found.identity, _Asked(found, waiting))
                self._ending.wait(BREATH_S)
            if not chosen or not self._turn([each.chosen for each in chosen.values()]):
                return
            left = [each for each in chosen.values() if not each.chosen.ready()]
            if len(left) < len(chosen):  # another process built it meanwhile
                ENGINE.new_winner()
            batch = self._run(left)
            self.building, self._taken = (), len(batch)

    def _passed_over(self, kernel: Kernel, facts: Facts) -> bool:
        """The same as ``given_up``; what the machine lacks is noted for these calls, too, so that others know."""
        outcome = self._lacks(kernel)
        if outcome is not None and self.failures.of(kernel, facts) is None:
            self.failures.add(kernel, facts, outcome.log, lasting=outcome.lasting)
        return self.given_up(kernel, facts)

    def given_up(self, kernel: Kernel, facts: Facts) -> bool:
        """Whether it is not built for calls like this one: it failed, or this machine lacks what it takes."""
        return self.failure(kernel, facts) != ""

    def failure(self, kernel: Kernel, facts: Facts) -> str:
        """Why it is not built for calls like this one, in a line; empty where it is not given up."""
        failed, outcome = self.failures.of(kernel, facts), self._lacks(kernel)
        why = failed.gist if failed is not None else "" if outcome is None else outcome.log
        if why:
            self._among = self._among or compilers()
        return why

    def _lacks(self, kernel: Kernel) -> BuildOutcome | None:
        """What a build reported missing; None where there is nothing, or other compilers lie here since."""
        outcome, among = self._lacking.get(kernel.id, (None, ""))  # read once: warmup may take it away meanwhile
        return outcome if among == compilers() else None

    def _seek(self) -> None:
        """Let calls ask again for what did not build, once other compilers lie here: hits would never ask."""
        if self._among != compilers():
            self._among = ""
            log.info("other compilers lie here: what did not build may be built now")
            ENGINE.new_winner()

    def note(self, kernel: Kernel, facts: Facts, outcome: BuildOutcome) -> None:
        """Remember what became of a build that was made elsewhere in this process, which tells of it itself."""
        if not outcome.log:
            self.failures.forget(kernel, facts)
            self._lacking.pop(kernel.id, None)
            return
        self.failures.add(kernel, facts, outcome.log, lasting=outcome.lasting)
        if outcome.lacks:
            self._lacking[kernel.id] = outcome, compilers()

    def _turn(self, chosen: list[Chosen]) -> bool:
        """Wait until no other process of this host builds, or until it has built all this; False at the end."""
        while not self.host.take():
            self.elsewhere = True
            if all(each.kernel.builds_apart and each.ready() for each in chosen):
                break
            if self._ending.wait(LOOK_S):
                return False
        self.elsewhere = False
        return True

    def _tell_lacking(self, kernel: Kernel, outcome: BuildOutcome) -> None:
        """Say once what this machine lacks: no build of the kernel would end otherwise, whatever its shapes."""
        known = {each.lacks for each, _ in list(self._lacking.values())}  # warmup may add to them meanwhile
        level = logging.DEBUG if outcome.lacks in known else logging.WARNING
        self._lacking[kernel.id] = outcome, compilers()
        text = "%s is not built in the background: %s; `lz.warmup` tries again, and jit='never' asks for no build"
        log.log(level, text, kernel.id, outcome.log)

    def _run(self, asked: list[_Asked]) -> list[Waiting]:
        """Build, in children what they can build for this process; the calls whose builds failed."""
        contexts = {each.chosen.identity: each.waiting for each in asked}
        again: list[Waiting] = []
        began: dict[BuildIdentity, float] = {}  # several are under way at once
        open_ones = {each.chosen.identity: each.chosen.kernel.id for each in asked}

        def told(each: Chosen, outcome: BuildOutcome) -> None:
            now = time.monotonic()
            seconds = now - began.get(each.identity, now)
            open_ones.pop(each.identity, None)
            self._tell(open_ones.values())
            waiting = contexts[each.identity]
            if not outcome.log and each.kernel.builds_apart and not self._ending.is_set():
                outcome = waiting.context.run(taken_over, each)
            if not self._accepted(each, outcome, seconds):
                again.append(waiting)

        self._tell(open_ones.values())
        chosen = [each.chosen for each in asked]
        apart = {each.identity: each for each in chosen if each.kernel.builds_apart}
        build_apart(
            [(each.kernel, each.facts) for each in apart.values()],
            lambda kernel, facts, outcome: told(apart[build_of(kernel, facts)], outcome),
            self._ending.is_set,
            begins=lambda kernel, facts: began.update({build_of(kernel, facts): time.monotonic()}),
        )
        for each in chosen:
            if not each.kernel.builds_apart and not self._ending.is_set():
                began[each.identity] = time.monotonic()
                told(each, contexts[each.identity].context.run(built_here, each))
        return again

    def _tell(self, building: Iterable[str]) -> None:
        self.building = tuple(building)
        self.host.tell(list(self.building), self.waits)

    def _accepted(self, each: Chosen, outcome: BuildOutcome, seconds: float) -> bool:
        """Let a build take over, or remember that it failed; whether it did not fail."""
        if self._ending.is_set():
            return True
        if outcome.log:
            failed = self.failures.add(each.kernel, each.facts, outcome.log, lasting=outcome.lasting)
            EVENTS.built(each.kernel, each.facts, seconds, failed.gist)
            self.failed.append(failed)
            if outcome.lacks:
                self._tell_lacking(each.kernel, outcome)
                return False
            until = "until a version or a compiler changes" if outcome.lasting else "in this process"
            log.warning("%s\nit is not tried again %s; `lz.warmup` tries again", failed, until)
            return False
        self.failures.forget(each.kernel, each.facts)
        EVENTS.built(each.kernel, each.facts, seconds)
        self.built.append((each.kernel.id, each.report.operation, seconds))
        log.info("built in the background: %s for %s in %.1f s", each.kernel.id, each.report.operation, seconds)
        ENGINE.new_winner()
        return True


def step_back() -> None:
    """Have a lower priority than the threads that serve; on Linux a thread has its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except (AttributeError, OSError) as error:  # another system, or one that does not allow it
        log.debug("the thread that builds keeps its priority: %s", error)


BUILDS = Builds()
"""The one of this process."""


def build_chosen(calls: Sequence[Facts], deadline: Deadline) -> list[str]:
    """Build what calls would choose if it were built, and where that fails, what they would choose then.

    Returns: what was left, and why.
    """
    return _build(lambda: [each for facts in calls if (each := wanted(facts, BUILDS.given_up))], deadline)


def build_within(
    calls: Sequence[Facts], choices: Mapping[str, tuple[Facts, FrozenChoice]], deadline: Deadline
) -> list[str]:
    """Build the kernels of the buckets that calls lie in, for these calls.

    A library may compile another variant for a smaller call: Triton has one for sizes that are multiples of 16, and one
    for those that are not.

    Returns: what was left, and why.
    """
    policy = CONFIGURATION.policy
    table = BucketTable((facts, policy, name, choice) for name, (facts, choice) in choices.items())

    def found() -> Iterable[Chosen]:
        for facts in calls:
            rows = table.rows(facts, policy)
            if not rows:
                continue
            report = with_builds(facts)
            candidate = candidate_of(report, rows[0].choice)
            if candidate is None or not candidate.legal or not candidate.kernel.jit:
                continue
            if not BUILT.ready(candidate.kernel, facts) and not BUILDS.given_up(candidate.kernel, facts):
                yield Chosen(candidate, report)

    return _build(found, deadline)


def _build(find: Callable[[], Iterable[Chosen]], deadline: Deadline) -> list[str]:
    """Build what is found to be lacking, until nothing is or the time is over."""

    def noted(kernel: Kernel, facts: Facts, outcome: BuildOutcome) -> None:
        if not outcome.log and kernel.builds_apart:
            outcome = taken_over(chosen[build_of(kernel, facts)])
        BUILDS.note(kernel, facts, outcome)

    while True:
        chosen: dict[Any, Chosen] = {each.identity: each for each in find()}
        endless = deadline.left_s == math.inf
        here = [each for each in chosen.values() if not each.kernel.builds_apart] if endless else []
        apart = [(each.kernel, each.facts) for each in chosen.values() if each.kernel.builds_apart]
        if deadline.passed() or not (apart or here):
            break
        build_apart(apart, noted, deadline.passed)
        for each in here:
            noted(each.kernel, each.facts, built_here(each))
        ENGINE.bump()
    lacking = dict.fromkeys(each.kernel.id for each in chosen.values())
    return [f"not built in time, lz.warmup builds it: {', '.join(lacking)}"] if lacking else []

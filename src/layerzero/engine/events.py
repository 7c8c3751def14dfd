"""Choices, builds, fallbacks and failures: counted, and passed to listeners that no call ever waits for.

All of them happen off the hit path. A hit is not counted, since a counter would cost what the whole hit costs. Each
listener has a thread and a bounded queue of its own: one that hangs or raises loses its own events, and the log says
so once.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

import msgspec

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import class_text
from layerzero.core.plan import Plan
from layerzero.core.system import forking, log
from layerzero.core.system.resources import started
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.pick import why

MOST_WAITING = 1000
"""Events that wait for one listener; further ones are dropped and counted. 1,000 take about 1 MB."""

END_S = 1.0
"""How long the end of the process waits for each listener."""

RATE = "telemetry_sampling_rate"
"""The setting that says which share of the choices listeners get."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened on the way to a kernel.

    Attributes:
        kind: ``selection``, ``fallback``, ``failure``, ``departure`` (of a frozen choice) or ``build``.
        kernel: the kernel in question; of a fallback or a departure the one that could not run.
        operation: what was called.
        call_class: the class of the call: dtype, layout, sizes as powers of two.
        reason: why it was chosen, what it raised, or why it could not be kept; empty for a build that worked.
        instead: the kernel that ran in its place; empty where none did.
        took_us: how long the choice or the build took, in microseconds; None for what takes no time.
        at_ns: when it ended, in nanoseconds since 1970.
    """

    kind: str
    kernel: str
    operation: str
    call_class: str
    reason: str
    instead: str
    took_us: float | None
    at_ns: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is empty is left out."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value not in ("", None)}


class BuildCounts(msgspec.Struct):
    """How often a kernel was built for an operation in this process, how often that failed, and how long all took."""

    built: int = 0
    failed: int = 0
    seconds: float = 0.0


class Listener:
    """A function that gets every event, on a thread of its own; :func:`on_event` makes one.

    Attributes:
        name: of the function.
        dropped: events that its queue had no room for.
        errors: how often it raised.
    """

    def __init__(self, receive: Callable[[Event], object]) -> None:
        self._receive = receive
        self.name = getattr(receive, "__qualname__", type(receive).__name__)
        self._lock = forking.lock()
        self._closed = False
        self._begin()
        forking.in_child(self._begin)

    def _begin(self) -> None:
        """Have an empty queue and no thread: at first, and in a process that was forked."""
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.dropped = self.errors = 0

    def put(self, event: Event, context: Context) -> None:
        """Leave an event in the queue, or drop it; never waits."""
        if self._queue.qsize() >= MOST_WAITING:
            self.dropped += 1
            if self.dropped == 1:
                log.warning(
                    "the listener %s does not take its events: %d wait, and further ones are dropped and counted; "
                    "look at what it waits for (lz.metrics().events_dropped)", self.name, MOST_WAITING,
                )  # fmt: skip
            return
        self._queue.put((event, context))
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = started("layerzero-listener", self._work, self._queue)

    def _work(self, waiting: queue.SimpleQueue[Any]) -> None:
        while (item := waiting.get()) is not None:
            if isinstance(item, queue.SimpleQueue):  # of flush
                item.put(None)
                continue
            event, context = item
            try:
                context.run(self._receive, event)
            except BaseException as error:  # noqa: BLE001  # whatever an exporter raises: it has no other caller
                self.errors += 1
                if self.errors == 1:
                    log.warning(
                        "the listener %s raised %s: %s; it goes on to get events, and further errors are counted "
                        "(lz.metrics().listener_errors)", self.name, type(error).__name__, error,
                    )  # fmt: skip
            del item, context  # a caller's context keeps what it computed with

    def flush(self, timeout_s: float = END_S) -> bool:
        """Wait until the listener has had what was there by now; whether it had, in so many seconds."""
        if self._thread is None:
            return self._queue.empty()
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self._lock:
            if not self._closed:  # behind the end nothing is taken
                self._queue.put(done)
        if self._closed:
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)
            return self.ended
        with contextlib.suppress(queue.Empty):
            done.get(timeout=timeout_s)
            return True
        return False

    def close(self) -> None:
        """Get no further events; those that wait are still delivered."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._thread is not None:
                    self._queue.put(None)
        EVENTS.remove(self)

    @property
    def ended(self) -> bool:
        """Whether it is closed, and had all of its events."""
        return self._closed and (self._thread is None or not self._thread.is_alive())


class Events:
    """The counters of this process, and its listeners."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._listeners: tuple[Listener, ...] = ()
        self._share = 0.0
        self._begin()
        forking.in_child(self._begin)

    def reset(self) -> None:
        """Count from zero, without listeners (for tests)."""
        for each in self._listeners:
            each.close()
        self._begin()

    def _begin(self) -> None:
        """Count from zero: at first, and in a process that was forked, whose parent tells its own numbers."""
        self._ending: tuple[Listener, ...] = ()
        self._selections: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._builds: defaultdict[tuple[str, str], BuildCounts] = defaultdict(BuildCounts)
        self._lost = (0, 0)
        self.selecting_ns = 0

    def selected(self, plan: Plan, began_ns: int) -> None:
        """Count a choice, which began at a time of ``time.perf_counter_ns``."""
        took_ns = time.perf_counter_ns() - began_ns
        with self._lock:
            self._selections[plan.kernel.id, plan.report.operation] += 1
            self.selecting_ns += took_ns
        if self._listeners and self._sampled():
            self.tell("selection", plan.kernel, plan.report.facts, why(plan.report), took_us=took_ns / 1000)

    def _sampled(self) -> bool:
        """Whether listeners get this choice: evenly spaced ones, as many as the setting says."""
        with self._lock:
            self._share += CONFIGURATION.policy[RATE]
            taken = self._share >= 1
            self._share -= taken
        return bool(taken)

    def built(self, kernel: Kernel, facts: Facts, seconds: float, error: str = "") -> None:
        """Count a build, or one that failed."""
        with self._lock:
            counts = self._builds[kernel.id, facts.operation.name]
            counts.seconds += seconds
            if error:
                counts.failed += 1
            else:
                counts.built += 1
        self.tell("build", kernel, facts, error, took_us=seconds * 1e6)

    def tell(
        self, kind: str, kernel: Kernel, facts: Facts, reason: str, *, instead: str = "", took_us: float | None = None
    ) -> None:
        """Pass something on to listeners; nothing where there are none."""
        if not self._listeners:
            return
        event = Event(
            kind, kernel.id, facts.operation.name, class_text(facts), reason, instead, took_us, time.time_ns()
        )
        context = copy_context()  # of the caller, so that a span has its parent
        for each in self._listeners:
            each.put(event, context)

    def add(self, listener: Listener) -> None:
        """Let a listener get events from now on."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        atexit.unregister(self.flush)
        atexit.register(self.flush)

    def remove(self, listener: Listener) -> None:
        """Let a listener get no more; what it lost stays counted, and what waits for it is still waited for."""
        with self._lock:
            if listener in self._listeners:
                self._listeners = tuple(each for each in self._listeners if each is not listener)
                self._ending = (*self._ending, listener)
            for each in (ended := [each for each in self._ending if each.ended]):
                self._lost = self._lost[0] + each.dropped, self._lost[1] + each.errors
            self._ending = tuple(each for each in self._ending if each not in ended)

    def flush(self) -> None:
        """Wait until every listener has had its events, each a second at most; closed ones as well."""
        for each in (*self._listeners, *self._ending):
            each.flush()

    def lost(self) -> tuple[int, int]:
        """How many events listeners had no room for, and how often they raised."""
        with self._lock:
            listeners, (dropped, errors) = (*self._listeners, *self._ending), self._lost
        return dropped + sum(each.dropped for each in listeners), errors + sum(each.errors for each in listeners)

    def listeners(self) -> tuple[Listener, ...]:
        return self._listeners

    def selections(self) -> dict[tuple[str, str], int]:
        """How often each kernel was chosen for an operation; a copy."""
        with self._lock:
            return dict(self._selections)

    def builds(self) -> dict[tuple[str, str], BuildCounts]:
        """What was built, by kernel and operation; a copy."""
        with self._lock:
            return {key: msgspec.structs.replace(each) for key, each in self._builds.items()}


EVENTS = Events()
"""Those of this process."""


def on_event(receive: Callable[[Event], object]) -> Listener:
    """Call a function with every choice, build, fallback, failure and departure of this process, on a thread.

        listener = lz.on_event(lambda event: print(event.to_dict()))
        listener.close()

    Nothing is on the hit path: a call that finds its plan makes no event. Of choices, listeners get the share that
    ``telemetry_sampling_rate`` says. The function runs in the context of the call (``contextvars``). It may take its
    time, hang or raise: at most 1,000 events wait for it, further ones are dropped and counted, and no call waits.

    Returns: the listener, whose ``close`` ends it and whose ``flush`` waits for what is under way.
    Raises: TypeError for what cannot be called.
    """
    if not callable(receive):
        raise TypeError(f"on_event: wanted a function of an event, got {type(receive).__name__}")
    listener = Listener(receive)
    EVENTS.add(listener)
    return listener

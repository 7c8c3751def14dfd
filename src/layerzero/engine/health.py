"""Which kernels failed at run time: a breaker for each (kernel, operation), with backoff and a half-open trial.

An exception that comes up through a kernel may not be its own. Activation checkpointing ends a recomputation by an
exception out of a saved-tensor hook, a hook that offloads tensors may run out of memory, and a program's signal handler
may raise anywhere. A caller further up waits for it, so it passes through as it is: no kernel failed, and none is tried
in its place.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from msgspec import structs

from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.plan import Candidate
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import forking
from layerzero.engine.policy import Lock, bound_by

FIRST_RETRY_S = 10.0
"""How long a kernel rests after its first failure; doubles with each further one."""

LONGEST_RETRY_S = 3600.0

EVERYWHERE = ""
"""In place of a device's name: whatever the device."""

MAX_DEVICE_ERRORS = 3
"""Device errors of one library, in whatever kernels, after which the process does without it."""


@dataclass(slots=True)
class Breaker:
    """The failures of one kernel in one operation.

    Attributes:
        failures: how often it failed since it last worked.
        error: what it said last.
        retry_at: when it may be tried again, on the monotonic clock; infinite where it never may.
        hint: what would help, where that is known.
        code: the reason that it gives meanwhile.
    """

    failures: int
    error: str
    retry_at: float
    hint: str = ""
    code: ReasonCode = ReasonCode.UNHEALTHY


@dataclass(slots=True)
class Counts:
    """How often, in the life of this process, a kernel failed in an operation, and another ran in its place."""

    failures: int = 0
    fallbacks: int = 0


_Place = tuple[str, str, str]
"""A kernel, an operation and the name of a device."""


class Health:
    """The breakers of this process.

    A breaker opens at the first failure, for calls that another kernel may run. Where none may (a lock, no fallback, a
    single library), the kernel is called meanwhile, see :meth:`woken`: one passing error is no outage. When its time
    has come the epoch is bumped by a timer, since hits read no clock; the kernel is then a candidate again (half open),
    and the next failure rests it twice as long. A breaker says nothing about another operation or kind of device. Only
    a library that repeats errors of the device is disabled as a whole.

    Attributes:
        context_lost: what an error of the device that stays means for this process; empty where there was none.
    """

    def __init__(self, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._lock = forking.lock()
        self._breakers: dict[_Place, Breaker] = {}
        self._timers: dict[_Place, threading.Timer] = {}
        self._counts: dict[tuple[str, str], Counts] = {}
        self._device_errors: dict[str, int] = {}
        self._disabled: dict[str, str] = {}
        self.context_lost = ""
        forking.in_child(self._begin_in_child)

    def _begin_in_child(self) -> None:
        """Count from zero in a forked child: what its parent counted, that one tells. What rests does so as long."""
        self._counts, self._timers = {}, {}  # the threads of timers are the parent's
        for key, breaker in self._breakers.items():
            if (rest_s := breaker.retry_at - self._clock()) > 0:
                self._start_timer(key, rest_s)

    def any_rests(self) -> bool:
        """Whether there is anything to ask; a miss asks this once for all kernels."""
        return bool(self._breakers or self._disabled)

    def reasons(self, kernel: Kernel, operation: str, device: str = EVERYWHERE) -> list[Reason]:
        """Why the kernel rests on a kind of device, empty if it does not."""
        if not self.any_rests():
            return []
        if kernel.source in self._disabled:
            wanted, got = f"fewer than {MAX_DEVICE_ERRORS} device errors in this process", self._disabled[kernel.source]
            return [Reason(ReasonCode.UNHEALTHY, kernel.source, wanted, got)]
        found = [self._breakers.get((kernel.id, operation, place)) for place in (device, EVERYWHERE)]
        breaker = next((each for each in found if each is not None and self._clock() < each.retry_at), None)
        if breaker is None:
            return []
        rest_s = breaker.retry_at - self._clock()
        wanted = "no failure" if rest_s == float("inf") else f"no failure; tried again in {rest_s:.0f} s"
        got = f"failed {breaker.failures} times, last: {breaker.error}"
        if breaker.code is ReasonCode.BACKEND_ERROR:
            return [Reason(breaker.code, operation, "a result", breaker.error, breaker.hint)]
        return [Reason(breaker.code, f"{kernel.id} in {operation}", wanted, got, breaker.hint)]

    def nothing_else(self, judged: Iterable[Candidate], lock: Lock | None) -> bool:
        """Whether kernels rest and none is legal that a lock allows."""
        if not self._breakers:
            return False
        return not any(each.legal for each in bound_by(lock, judged))

    def woken(self, judged: list[Candidate], facts: Facts, lock: Lock | None) -> list[Candidate]:
        """Let kernels run that nothing but their rest refuses, where :meth:`nothing_else` may."""
        if not self.nothing_else(judged, lock):
            return judged
        return [structs.replace(each, reasons=()) if self._only_rests(each, facts) else each for each in judged]

    def _only_rests(self, candidate: Candidate, facts: Facts) -> bool:
        kernel, operation, device = candidate.kernel, facts.operation.name, facts.device.name
        found = [self._breakers.get((kernel.id, operation, place)) for place in (device, EVERYWHERE)]
        if kernel.source in self._disabled or any(each is not None and each.retry_at == float("inf") for each in found):
            return False
        rests = [reason.code for reason in self.reasons(kernel, operation, device)]
        return bool(rests) and [reason.code for reason in candidate.reasons] == rests

    def failed(
        self,
        kernel: Kernel,
        operation: str,
        error: BaseException,
        *,
        device: str = EVERYWHERE,
        forever: bool = False,
        code: ReasonCode = ReasonCode.UNHEALTHY,
        hint: str = "",
    ) -> Breaker:
        """Open the breaker on a kind of device; ``forever`` bans the kernel for the life of the process."""
        key, counted = (kernel.id, operation, device), (kernel.id, operation)
        text = f"{type(error).__name__}: {str(error).strip()[:200]}"
        with self._lock:
            before = self._breakers.get(key)
            failures = before.failures + 1 if before else 1
            if before is not None and not forever and self._clock() < before.retry_at:
                self._breakers[key] = breaker = replace(before, failures=failures, error=text)
                self._counts.setdefault(counted, Counts()).failures += 1
                return breaker  # it rests already, and nothing else may run: what may run did not change
            rest_s = float("inf") if forever else min(FIRST_RETRY_S * 2 ** (failures - 1), LONGEST_RETRY_S)
            breaker = self._breakers[key] = Breaker(failures, text, self._clock() + rest_s, hint, code)
            self._counts.setdefault(counted, Counts()).failures += 1
            self._start_timer(key, rest_s)
        self._on_change()
        return breaker

    def pardon(self, kernel: Kernel, operation: str, device: str = EVERYWHERE) -> None:
        """Take back the latest failure: the reference could not do the call either."""
        key = (kernel.id, operation, device)
        with self._lock:
            breaker = self._breakers.pop(key, None)
            if breaker is not None and breaker.failures > 1:
                self._breakers[key] = replace(breaker, failures=breaker.failures - 1, retry_at=0.0)
        self._on_change()

    def fell_back(self, kernel: Kernel, operation: str) -> None:
        """Count that another kernel ran in place of this one."""
        with self._lock:
            self._counts.setdefault((kernel.id, operation), Counts()).fallbacks += 1

    def device_error(self, backend: Backend, error: BaseException) -> None:
        """Count a device error of a library; too many disable it, with all its kernels, for the process.

        Torch stays, since the references need it; so do functions registered by hand, which only share a name.
        """
        if backend.name in ("torch", "reference") or backend.origin == "decorator":
            return
        with self._lock:
            count = self._device_errors[backend.name] = self._device_errors.get(backend.name, 0) + 1
            if count >= MAX_DEVICE_ERRORS:
                text = str(error).strip().partition("\n")[0][:200]
                self._disabled[backend.name] = f"{count} device errors, last: {text}"
        self._on_change()

    def worked(self, kernel: Kernel, operation: str, device: str = EVERYWHERE) -> None:
        """Close the breakers of a half-open trial that went well."""
        if self._breakers:
            with self._lock:
                for key in ((kernel.id, operation, device), (kernel.id, operation, EVERYWHERE)):
                    breaker = self._breakers.get(key)
                    if breaker is not None and self._clock() >= breaker.retry_at:  # a late success lifts no newer rest
                        del self._breakers[key]

    def _start_timer(self, key: _Place, rest_s: float) -> None:
        previous = self._timers.pop(key, None)
        if previous is not None:
            previous.cancel()
        if rest_s == float("inf"):
            return
        timer = self._timers[key] = threading.Timer(rest_s, self._on_change)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the system has no more threads: another change ends the rest
            Context().run(timer.start)  # which keeps the context, without a GIL

    def breakers(self) -> dict[tuple[str, str], Breaker]:
        """A copy of the breakers, for doctor; of a kernel that rests on several kinds of devices, the longest rest."""
        with self._lock:
            ordered = sorted(self._breakers.items(), key=lambda each: each[1].retry_at)
            return {(kernel, operation): breaker for (kernel, operation, _), breaker in ordered}

    def counts(self) -> dict[tuple[str, str], Counts]:
        """A copy of the counters, for doctor."""
        with self._lock:
            return {key: Counts(each.failures, each.fallbacks) for key, each in self._counts.items()}

    def disabled(self) -> dict[str, str]:
        """Libraries that too many device errors disabled, and the last error of each."""
        with self._lock:
            return dict(self._disabled)

    def reset(self) -> None:
        with self._lock:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()
            self._breakers.clear()
            self._counts.clear()
            self._device_errors.clear()
            self._disabled.clear()
            self.context_lost = ""
        self._on_change()


_OF_TORCH = (("torch.utils.checkpoint", "_StopRecomputationError"), ("torch.utils.checkpoint", "CheckpointError"))
"""Classes that mean the same without a hook: where torch does not tell which hooks are set, they are looked up."""


def let_pass(error: BaseException) -> None:
    """Raise an exception again that a hook of autograd or a signal handler raised; return for every other one."""
    kinds = tuple(kind for kind in (_class(*each) for each in _OF_TORCH) if kind is not None)
    if isinstance(error, kinds) or not _codes(error).isdisjoint(_codes_of_hooks() | _codes_of_handlers()):
        raise error


def _class(module: str, name: str) -> type | None:
    found = getattr(sys.modules.get(module), name, None)  # what was not imported was not raised
    return found if isinstance(found, type) else None


def _codes(error: BaseException) -> set[CodeType]:
    """The code of every frame that the exception came through."""
    found, trace = set(), error.__traceback__
    while trace is not None:
        found.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return found


def _codes_of_hooks() -> set[CodeType]:
    """The hooks that are set around the call: those that a kernel sets are gone when its exception arrives here."""
    asked = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = asked(True) if asked is not None else None
    return set() if hooks is None else {code for hook in hooks if (code := _code(hook)) is not None}


def _codes_of_handlers() -> set[CodeType]:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return {code for handler in handlers if (code := _code(handler)) is not None}


def _code(function: Any) -> CodeType | None:
    """The code that runs when something is called; None for what is not Python."""
    function = getattr(function, "func", function)  # functools.partial
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)  # a bound method has that of its function
    return code if isinstance(code, CodeType) else None

"""Which kernels failed at run time: a breaker for each (kernel, operation), with backoff and a half-open trial."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode

FIRST_RETRY_S = 10.0
"""How long a kernel rests after its first failure; doubles with each further one."""

LONGEST_RETRY_S = 3600.0


@dataclass(slots=True)
class Breaker:
    """The failures of one kernel in one operation.

    Attributes:
        failures: how often it failed since it last worked.
        error: what it said last.
        retry_at: when it may be tried again, on the monotonic clock; infinite where it never may.
    """

    failures: int
    error: str
    retry_at: float


class Health:
    """The breakers of this process.

    A breaker opens at the first failure. When its time has come the epoch is bumped by a timer, since hits read no
    clock; the kernel is then a candidate again (half open), and the next failure rests it twice as long.
    """

    def __init__(self, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._breakers: dict[tuple[str, str], Breaker] = {}
        self._timers: dict[tuple[str, str], threading.Timer] = {}

    def reasons(self, kernel: Kernel, operation: str) -> list[Reason]:
        """Why the kernel rests, empty if it does not."""
        if not self._breakers:
            return []
        breaker = self._breakers.get((kernel.id, operation))
        if breaker is None or self._clock() >= breaker.retry_at:
            return []
        rest_s = breaker.retry_at - self._clock()
        wanted = "no failure" if rest_s == float("inf") else f"no failure; tried again in {rest_s:.0f} s"
        got = f"failed {breaker.failures} times, last: {breaker.error}"
        return [Reason(ReasonCode.UNHEALTHY, f"{kernel.id} in {operation}", wanted, got)]

    def failed(self, kernel: Kernel, operation: str, error: BaseException, *, forever: bool = False) -> Breaker:
        """Open the breaker; ``forever`` bans the kernel for the life of the process."""
        key = (kernel.id, operation)
        text = f"{type(error).__name__}: {str(error).strip()[:200]}"
        with self._lock:
            before = self._breakers.get(key)
            failures = before.failures + 1 if before else 1
            rest_s = float("inf") if forever else min(FIRST_RETRY_S * 2 ** (failures - 1), LONGEST_RETRY_S)
            breaker = self._breakers[key] = Breaker(failures, text, self._clock() + rest_s)
            self._start_timer(key, rest_s)
        self._on_change()
        return breaker

    def worked(self, kernel: Kernel, operation: str) -> None:
        """Close the breaker after a half-open trial went well."""
        if self._breakers:
            with self._lock:
                breaker = self._breakers.get((kernel.id, operation))
                if breaker is not None and self._clock() >= breaker.retry_at:  # a late success lifts no newer rest
                    del self._breakers[kernel.id, operation]

    def _start_timer(self, key: tuple[str, str], rest_s: float) -> None:
        previous = self._timers.pop(key, None)
        if previous is not None:
            previous.cancel()
        if rest_s == float("inf"):
            return
        timer = self._timers[key] = threading.Timer(rest_s, self._on_change)
        timer.daemon = True
        timer.start()

    def breakers(self) -> dict[tuple[str, str], Breaker]:
        """A copy of the breakers, for doctor."""
        with self._lock:
            return dict(self._breakers)

    def reset(self) -> None:
        """Forget every failure."""
        with self._lock:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()
            self._breakers.clear()
        self._on_change()

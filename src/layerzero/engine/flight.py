"""Concurrent misses of one key choose once: the others wait and get the plan or the error.

Who waits holds nothing that the chooser could need, and a thread that is choosing itself never waits, so that no two
wait for each other: a kernel whose loading calls LayerZero again chooses anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from layerzero.core.plan import Plan
from layerzero.core.system import forking


class _Flight:
    def __init__(self) -> None:
        # Held until then; an Event costs ten times as much to make. A forked child forgets it with its flight.
        self.landed = threading.Lock()
        self.landed.acquire()
        self.plan: Plan | None = None
        self.error: BaseException | None = None


class Flights:
    """The choices that are being made in this process."""

    def __init__(self) -> None:
        self.forget()
        forking.in_child(self.forget)  # their threads exist in the parent only

    def forget(self) -> None:
        """Start without any, with a lock that nobody holds."""
        self._lock = forking.lock()
        self._flights: dict[Hashable, _Flight] = {}
        self._here = threading.local()

    def once(self, key: Hashable, choose: Callable[[], Plan]) -> Plan:
        """The plan that ``choose`` gives, called by one of the threads that ask for a key at the same time.

        Raises: what ``choose`` raised, in every thread that waited for it.
        """
        if getattr(self._here, "choosing", False):
            return choose()
        with self._lock:
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
        if not mine:
            return self._awaited(flight, choose)
        self._here.choosing = True
        try:
            flight.plan = choose()
        except BaseException as error:
            flight.error = error
            raise
        finally:
            self._here.choosing = False
            with self._lock:
                self._flights.pop(key, None)
            flight.landed.release()
        return flight.plan

    def _awaited(self, flight: _Flight, choose: Callable[[], Plan]) -> Plan:
        with flight.landed:
            pass
        if flight.plan is not None:
            return flight.plan
        if isinstance(flight.error, Exception):
            raise flight.error
        return choose()  # the other thread was interrupted, which is nothing about this call


FLIGHTS = Flights()
"""The choices that are being made in this process."""

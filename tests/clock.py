"""A clock for tests of what ends when its time is over."""

from __future__ import annotations

from array import array


class Clock:
    """A clock that goes on by what is said.

    Its time lies where no proof of a module's code looks: code that changes what it reads keeps its own forward.
    """

    def __init__(self):
        self._now = array("d", [0.0])

    @property
    def now(self):
        return self._now[0]

    @now.setter
    def now(self, seconds):
        self._now[0] = seconds

    def __call__(self):
        return self.now

    def costs(self, function, seconds):
        """A function that takes so long; ``seconds`` may depend on its arguments."""

        def run(*args, **named):
            self.now += seconds(*args, **named) if callable(seconds) else seconds
            return function(*args, **named)

        return run


class Ticking(Clock):
    """A clock that each look moves, so that all take as long, and the fewest rounds take the time that there is."""

    def __call__(self):
        self.now += 0.05
        return self.now

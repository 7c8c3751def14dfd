"""Which calls this process has chosen for, in whatever epoch: what choices are frozen of.

Plans fall with every epoch, and epochs begin for many reasons: a setting, a finished build, a new winner. The facts of
the calls stay, so that a choice can be made for each of them again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from layerzero.core.facts import Facts
from layerzero.core.system import forking
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.frozen_choices import class_name
from layerzero.engine.policy import Policy

MAX_CALLS, MAX_CLASSES = 4096, 2048
"""Calls that are remembered. Of more, one of each class stays, and classes that were met longest ago are dropped."""


class Past(NamedTuple):
    """A call that was chosen for: its facts, and the settings of the scopes that held, outermost first."""

    facts: Facts
    layers: tuple[Mapping[str, Any], ...]

    @property
    def policy(self) -> Policy:
        """What the settings are now where the call was made."""
        return CONFIGURATION.effective(*self.layers) if self.layers else CONFIGURATION.policy


class History:
    """The calls of this process, one for each key that was chosen for; bounded.

    Attributes:
        dropped: how many classes were dropped because there were too many.
    """

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._calls: dict[tuple[str, Hashable, Policy | None], Past] = {}
        self.dropped = 0

    def add(self, function: str, key: Hashable, facts: Facts, policy: Policy) -> None:
        """Remember a call of a function; ``policy`` is what it was chosen under."""
        name: tuple[str, Hashable, Policy | None] = function, key, None
        layers: tuple[Mapping[str, Any], ...] = ()
        if policy is not CONFIGURATION.policy:
            name, layers = (function, key, policy), CONFIGURATION.layers_of(policy)
        past = Past(facts, layers)
        with self._lock:
            self._calls.pop(name, None)  # the latest are last
            self._calls[name] = past
            if len(self._calls) > MAX_CALLS:
                self._thin()

    def _thin(self) -> None:
        """Keep the latest call of each class: decoding meets a new size at every step, and few new classes."""
        latest = {class_name(past.facts, past.policy): name for name, past in self._calls.items()}
        chosen = set(latest.values())
        kept = [name for name in self._calls if name in chosen]
        self.dropped += max(0, len(kept) - MAX_CLASSES)
        self._calls = {name: self._calls[name] for name in kept[-MAX_CLASSES:]}

    def calls(self) -> Sequence[Past]:
        """The calls, those that were chosen for longest ago first."""
        with self._lock:
            return tuple(self._calls.values())

    def forget(self, function: str | None = None) -> None:
        """Forget the calls of a function that is taken back, or all of them."""
        with self._lock:
            kept = {} if function is None else {name: each for name, each in self._calls.items() if name[0] != function}
            self._calls = kept
            self.dropped = 0 if function is None else self.dropped

"""What calls that differ in sizes only have in common, kept between misses for one epoch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")

MAX_KEPT = 256
"""Kinds of calls that are remembered; scales and dropout rates that are new each time must not fill memory."""


class Kept(Generic[Value]):
    """Values by key, at most :data:`MAX_KEPT`.

    Nothing of a kernel outlives the epoch in which it goes, but for what a decision that was under way still writes.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Value]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Start a new epoch. Who is deciding now writes into what is let go of here."""
        self._kept = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; it is made where there is none, and not kept where the key has no hash."""
        keeping = self._kept
        try:
            kept = keeping.get(key)
        except TypeError:  # an argument without a hash
            return make()
        if kept is None:
            if len(keeping) >= MAX_KEPT:
                keeping.clear()
            kept = keeping[key] = (make(),)
        return kept[0]

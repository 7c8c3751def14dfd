"""What a model computes by LayerZero or by what it had: put in place and taken away, alone or several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Exchange(Protocol):
    """What may be on or off."""

    @property
    def is_on(self) -> bool:
        """Whether it is on."""

    def on(self) -> None:
        """Put it in place."""

    def off(self) -> None:
        """Take it away."""


class Together:
    """Several that are timed as one: those of one kind in one model."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges

    def __len__(self) -> int:
        return len(self._exchanges)

    @property
    def is_on(self) -> bool:
        """Whether any of them is on."""
        return any(each.is_on for each in self._exchanges)

    def on(self) -> None:
        """Let LayerZero compute."""
        for each in self._exchanges:
            each.on()

    def off(self) -> None:
        """Give them back what they had."""
        for each in self._exchanges:
            each.off()

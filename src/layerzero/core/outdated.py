"""What plans were chosen by has changed outside of any call: who keeps plans is told to choose anew."""

from __future__ import annotations

from collections.abc import Callable

_LISTENERS: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    """Call a function whenever something says so."""
    _LISTENERS.append(listener)


def tell() -> None:
    """Say that kept plans are not to be used any more."""
    for listener in _LISTENERS:
        listener()

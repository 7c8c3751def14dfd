"""Calls that could not be measured: those that memory does not hold in one line, each other one in its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text


def not_measured(skipped: Mapping[str, str], needs_bytes: Mapping[str, int], *, everything: bool) -> Iterator[Text]:
    """Say which calls were not measured and why.

    ``skipped`` has the reasons by call, ``needs_bytes`` what those of them need that memory does not hold; these are
    told by their number and the largest, unless ``everything`` is asked for.
    """
    large = [name for name in skipped if name in needs_bytes]
    fold = len(large) > 1 and not everything
    for name, why in skipped.items():
        if not (fold and name in needs_bytes):
            yield Text(f"not measured: {name}: {why}", style="yellow")
    if fold:
        largest = max(large, key=lambda name: needs_bytes[name])
        text = f"{len(large)} calls were not measured for want of memory, the largest {largest}: {skipped[largest]}"
        yield Text(f"{text}; --all lists them", style="yellow")

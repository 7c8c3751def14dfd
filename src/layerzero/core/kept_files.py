"""Builds that lie in files whose names are known: what ``Kernel.prebuilt`` may be, so that builds can be passed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerzero.core.facts import Facts


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """Whether the build for a call is there, and the files that it consists of.

    Attributes:
        folder: where they lie.
        names: those of a call's build, relative to the folder, what is read first last; empty where one is missing.
    """

    folder: Callable[[], Path]
    names: Callable[[Facts], Sequence[str]]

    def __call__(self, facts: Facts) -> bool:
        """Whether all of them exist."""
        return bool(self.names(facts))

"""An object that the caller keeps, for kernels to keep things on: made once of a step's tables, or of a weight.

A call brings a handle as an argument of its own. It changes no result: a kernel that has a use for it finds there what
it made before, one that has none leaves it be. A choice depends on its kind, which it tells for the tensors of the
call, so that a handle of other tensors, or of tensors that were written into since, is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from layerzero.core.errors import NotPreparedError
from layerzero.core.system import forking

FOREIGN, STALE = "foreign", "stale"
"""Kinds of a handle that does not belong to a call: made of other tensors, or of values that changed since."""

CAPTURABLE = "capturable"
"""The kind of a handle whose buffers stay where they are, so that a captured graph can go on reading them."""

Kept = TypeVar("Kept")


class OfKind:
    """Stands for a handle of a recorded call: the object is gone, its kind is known."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class Slot(Protocol):
    """What one kernel keeps on a handle."""

    def update(self, handle: Handle) -> None:
        """Read the values again, after they changed. What is captured in a graph keeps its buffers."""


class _Forgotten(set[tuple[object, ...]]):
    """What was looked at of tensors of inference mode: nothing says whether they were written into since."""

    def add(self, _: tuple[object, ...]) -> None:
        """Keep nothing."""


class Handle:
    """One slot for each kernel that keeps something, made on its first call with the handle.

    Args:
        tensors: what it is made of.
        kind: what a choice depends on while it belongs to a call.
    Attributes:
        looked_at: operations and sizes for which the numbers in its tensors were found to be right. Not for tensors of
            inference mode, in which torch counts no writes.
    """

    def __init__(self, tensors: tuple[Tensor, ...], kind: str) -> None:
        self._tensors = tensors
        self._versions = self._current_versions()
        self.kind = kind
        self._begin()

    def _begin(self) -> None:
        """Know nothing yet, and keep nothing."""
        self.looked_at: set[tuple[object, ...]] = (
            _Forgotten() if any(each.is_inference() for each in self._tensors) else set()
        )
        self._slots: dict[Hashable, Slot] = {}
        self._lock = forking.rlock()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle begins with: all but what kernels keep here, which they make anew for it."""
        state = {name: each for name, each in self.__dict__.items() if name not in ("looked_at", "_slots", "_lock")}
        return state | {"_versions": self._versions if self.is_stale else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
        self._versions = self._current_versions() if self._versions is None else (-1,) * len(self._tensors)

    def _current_versions(self) -> tuple[int, ...]:
        """How often torch wrote into the tensors; those of inference mode do not count."""
        return tuple([0 if tensor.is_inference() else tensor._version for tensor in self._tensors])

    @property
    def versions(self) -> tuple[int, ...]:
        """What its tensors were when it was made or brought up to date."""
        return self._versions

    @property
    def is_stale(self) -> bool:
        """Whether its tensors were written into since it was made or brought up to date."""
        return self._versions != self._current_versions()

    def kind_for(self, *tensors: Tensor | None) -> str:
        """Its kind; ``foreign`` for other tensors than it was made of, ``stale`` once these changed."""
        for mine, theirs in zip(self._tensors, tensors, strict=True):  # each call asks: a generator costs as much again
            if mine is not theirs:
                return FOREIGN
        return STALE if self.is_stale else self.kind

    def slot(self, owner: Hashable, make: Callable[[Self], Kept]) -> Kept:
        """What a kernel keeps here, made on its first call.

        Raises: NotPreparedError inside a CUDA graph capture if it does not exist yet: making it reads device values.
        """
        slot = self._slots.get(owner)
        if slot is None:
            with self._lock:
                slot = self._slots.get(owner)
                if slot is None:
                    if self._tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
                        problem = (
                            "handle: wanted one that was used before the capture, got a new one; run one forward pass "
                            "with it outside of the capture first"
                        )
                        raise NotPreparedError(type(self).__name__, [problem])
                    slot = self._slots[owner] = make(self)  # type: ignore[assignment]  # an owner keeps one type
        return slot  # type: ignore[return-value]

    @property
    def capturable(self) -> bool:
        """Whether its buffers stay where they are."""
        return self.kind == CAPTURABLE

    def refresh(self) -> None:
        """Bring every slot up to date after the tensors changed, outside of any capture.

        What a subclass keeps as ``host`` is read again.
        """
        self.__dict__.pop("host", None)
        with self._lock:
            slots, self._slots = self._slots, {}
            self.looked_at.clear()
            for owner, slot in slots.items():  # one that raises takes those after it along: all are made anew
                slot.update(self)
                self._slots[owner] = slot
            self._versions = self._current_versions()

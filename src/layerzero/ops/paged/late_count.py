"""What is counted on a device and heard of on the host later: a copy that nobody waits for."""

from __future__ import annotations

import torch
from torch import Tensor


class LateCount:
    """How many values were wrong so far, wherever they were counted.

    A count on a GPU is copied behind the work that made it; the host knows it once it has arrived.

    Attributes:
        is_late: whether something was counted on a GPU, so that it may be told by a later question.
    """

    def __init__(self) -> None:
        self._on_host = self._told = 0
        self._counted: Tensor | None = None
        self._seen: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def add(self, wrong: Tensor | int) -> None:
        """Count what is wrong: a number, or a tensor of bool where it lies."""
        if isinstance(wrong, int):
            self._on_host += wrong
            return
        count = wrong.sum()
        self._counted = count if self._counted is None else self._counted + count
        if self._counted.is_cuda:
            self._seen = torch.zeros((), dtype=torch.int64, pin_memory=True) if self._seen is None else self._seen
            if self._arrived is None:
                self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._seen.copy_(self._counted, non_blocking=True)
            self._arrived.record(torch.cuda.current_stream(self._counted.device))

    @property
    def is_late(self) -> bool:
        return self._seen is not None

    def untold(self) -> int:
        """How many were counted since the last question, as far as the host knows by now."""
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return 0
        seen = self._counted if self._seen is None else self._seen
        total = self._on_host + (0 if seen is None else int(seen))
        count, self._told = total - self._told, total
        return count

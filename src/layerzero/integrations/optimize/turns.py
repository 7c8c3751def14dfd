"""Who computes with a common memory: one thread at a time, and one stream of a device after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from layerzero.core import forking


class Turns:
    """A lock for threads, and for each device an event behind what was launched last."""

    def __init__(self) -> None:
        self._lock = forking.rlock()
        self._last: dict[torch.device, tuple[torch.cuda.Event, torch.cuda.Stream]] = {}

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Wait for the turn before, as a thread and on the stream that is current; the next one waits for this.

        Turns within a turn are of the same thread and wait for nothing more. Who captures a graph of his own has
        synchronised before: in a capture no event from outside may be waited for.
        """
        with self._lock:
            if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
                yield
                return
            stream = torch.cuda.current_stream(device)
            event, before = self._last.get(device, (None, stream))
            if event is None:
                event = torch.cuda.Event()
            elif before != stream:
                stream.wait_event(event)
            try:
                yield
            finally:
                event.record(stream)
                self._last[device] = event, stream

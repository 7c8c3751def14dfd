"""Who computes with a common memory: one thread at a time, and one stream of a device after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from layerzero.core.system import forking


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
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            elif before != stream:
                stream.wait_event(event)
            try:
                yield
            finally:
                event.record(stream)
                self._last[device] = event, stream


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that is current; None where a device has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Compute on another stream, for whom it is; the current one goes on behind it."""
    if stream is None or stream == (current := torch.cuda.current_stream(stream.device)):
        yield
        return
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def used_here(tensors: Iterable[Tensor]) -> None:
    """Tell torch's allocator that the current stream reads tensors that may be of another one's memory."""
    for each in tensors:
        if each.is_cuda:
            each.record_stream(torch.cuda.current_stream(each.device))

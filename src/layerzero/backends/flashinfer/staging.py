"""Memory of the host in which FlashInfer writes a plan, kept from being written again before the device has read it.

A wrapper writes every plan into the same pinned buffer and has it copied without waiting (``cudaMemcpyAsync`` at the
end of ``PrefillPlan``, ``PrefillSM90Plan`` and ``MLAPlan`` in include/flashinfer/attention/scheduler.cuh, 0.7.2). Where
lengths and starts are on the host nothing else waits, so a host that is two steps ahead overwrites what the device has
yet to copy. A wrapper that goes gives its buffer to the next one at once: torch does not know of that copy.
"""

from __future__ import annotations

from typing import Any

import torch

from layerzero.core.system import forking

_UNREAD: dict[int, tuple[torch.cuda.Event, list[torch.Tensor]]] = {}
"""Pinned buffers that a device may still copy from, by an event behind the copy."""

_LOCK = forking.lock()


class Staging:
    """Plans of one wrapper, each once the device has read the one before."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper, self._device = wrapper, device
        self._read: torch.cuda.Event | None = None

    def plan(self, *given: Any, **told: Any) -> None:
        """Have the wrapper plan; waits where the device has not come to the copy of its plan before."""
        if self._device.type != "cuda":
            self._wrapper.plan(*given, **told)
            return
        if self._read is None:
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._read.synchronize()
        try:
            self._wrapper.plan(*given, **told)
        finally:
            self._read.record(torch.cuda.current_stream(self._device))
            _keep(self._read, _pinned(self._wrapper))


def _pinned(wrapper: Any) -> list[torch.Tensor]:
    """The pinned buffers of a wrapper, whatever it calls them: that of pod.py has two."""
    return [each for each in vars(wrapper).values() if isinstance(each, torch.Tensor) and each.is_pinned()]


def _keep(read: torch.cuda.Event, buffers: list[torch.Tensor]) -> None:
    """Keep buffers until the device has read them, and let go of those that it has read."""
    with _LOCK:
        done = [name for name, (event, _) in _UNREAD.items() if event is not read and event.query()]  # type: ignore[no-untyped-call]
        for name in done:
            del _UNREAD[name]
        _UNREAD[id(read)] = read, buffers

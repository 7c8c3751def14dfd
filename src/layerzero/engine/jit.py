"""Which compiled artefacts exist: a JIT kernel is refused until it was built for the class of the call."""

from __future__ import annotations

import threading

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import call_class


class Built:
    """The (kernel, class of calls) pairs that were compiled in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: set[tuple[str, tuple[object, ...]]] = set()

    def ready(self, kernel: Kernel, facts: Facts) -> bool:
        """Whether the kernel was built for calls like this one."""
        return bool(self._pairs) and (kernel.id, call_class(facts)) in self._pairs

    def add(self, kernel: Kernel, facts: Facts) -> None:
        """Remember that it was built."""
        with self._lock:
            self._pairs.add((kernel.id, call_class(facts)))

    def clear(self) -> None:
        """Forget all artefacts."""
        with self._lock:
            self._pairs.clear()


BUILT = Built()
"""The artefacts of this process."""

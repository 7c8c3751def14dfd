"""Which compiled artefacts exist: a JIT kernel is refused until it was built for the class of the call."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import call_class


class Built:
    """What was compiled in this process: (kernel, what its artefact is made for) pairs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: set[tuple[str, Hashable]] = set()

    def ready(self, kernel: Kernel, facts: Facts) -> bool:
        """Whether the kernel was built for calls like this one."""
        return bool(self._pairs) and (kernel.id, _artefact(kernel, facts)) in self._pairs

    def add(self, kernel: Kernel, facts: Facts) -> None:
        """Remember that it was built."""
        with self._lock:
            self._pairs.add((kernel.id, _artefact(kernel, facts)))

    def clear(self) -> None:
        """Forget all artefacts."""
        with self._lock:
            self._pairs.clear()


def _artefact(kernel: Kernel, facts: Facts) -> Hashable:
    return call_class(facts) if kernel.artefact is None else kernel.artefact(facts)


BUILT = Built()
"""The artefacts of this process."""

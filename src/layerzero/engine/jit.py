"""Which compiled artefacts exist: a JIT kernel is refused until it was built for the class of the call."""

from __future__ import annotations

import threading

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import call_class


class Built:
    """The builds of this process: kernel, class of calls, and the exact sizes that the kernel is built for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._builds: set[tuple[object, ...]] = set()

    def ready(self, kernel: Kernel, facts: Facts) -> bool:
        """Whether the kernel was built for calls like this one."""
        return bool(self._builds) and _build(kernel, facts) in self._builds

    def add(self, kernel: Kernel, facts: Facts) -> None:
        """Remember that it was built."""
        with self._lock:
            self._builds.add(_build(kernel, facts))

    def clear(self) -> None:
        """Forget all artefacts."""
        with self._lock:
            self._builds.clear()


def _build(kernel: Kernel, facts: Facts) -> tuple[object, ...]:
    return (kernel.id, call_class(facts), *(facts[name] for name in kernel.built_for))


BUILT = Built()
"""The artefacts of this process."""

"""Which compiled artefacts exist: a JIT kernel is refused until it was built for calls like this one.

Which calls are alike the kernel says (``build_key``); where it says nothing, those of one class are.
"""

from __future__ import annotations

from collections.abc import Hashable

from layerzero.core import forking
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import call_class


class Built:
    """What was compiled in this process: a kernel, the kind of device, and what its artefact depends on."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._pairs: set[tuple[str, str, Hashable]] = set()

    def ready(self, kernel: Kernel, facts: Facts) -> bool:
        """Whether the kernel was built for calls like this one."""
        if self._pairs and (kernel.id, facts.device.name, _key(kernel, facts)) in self._pairs:
            return True
        return kernel.prebuilt is not None and kernel.prebuilt(facts)

    def add(self, kernel: Kernel, facts: Facts) -> None:
        """Remember that it was built."""
        with self._lock:
            self._pairs.add((kernel.id, facts.device.name, _key(kernel, facts)))

    def clear(self) -> None:
        """Forget all artefacts."""
        with self._lock:
            self._pairs.clear()


def _key(kernel: Kernel, facts: Facts) -> Hashable:
    return kernel.build_key(facts.seen_in(kernel.layout)) if kernel.build_key else call_class(facts)


BUILT = Built()
"""The artefacts of this process."""

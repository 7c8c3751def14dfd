"""A bound on the memory of packed forms: what would go beyond it is not kept, and the weight is read as it lies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from layerzero.core.system import forking
from layerzero.ops.linear.packed import Pack, PackedWeight, Packing


class Budget:
    """Bytes that the packed forms of one model may take together.

    Attributes:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lock = forking.rlock()
        self._weights: weakref.WeakSet[Bounded] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        """The same bound for a copy's own forms."""
        return Budget(self.limit)

    @property
    def used(self) -> int:
        """Bytes of the forms that are kept now."""
        return sum(each.bytes for each in self._weights)

    def packed(self, weight: Tensor, full: Callable[[], None]) -> PackedWeight:
        """A packed weight within the bound; ``full`` is called where a form had no room."""
        made = Bounded(weight)
        made.budget, made.full = self, full
        self._weights.add(made)
        return made


class Bounded(PackedWeight):
    """A packed weight that keeps a form only where there is room for it.

    The call that wanted it gets a form all the same, which is gone afterwards: it was chosen for it.
    """

    budget: Budget
    full: Callable[[], None]

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def form(self, owner: Hashable, pack: Pack) -> Any:
        """The weight as a kernel wants it, kept where there is room."""
        if owner in self._slots:
            return super().form(owner, pack)
        with self.budget.lock:
            if self.budget.used + self.weight.nbytes <= self.budget.limit:
                found = super().form(owner, pack)
                if self.budget.used <= self.budget.limit:
                    return found
                self._slots.pop(owner, None)  # the form takes more than the weight
                self.full()
                return found
            self.full()
        return Packing(self, pack).form

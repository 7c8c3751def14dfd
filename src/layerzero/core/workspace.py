"""What was measured of the memory that a kernel takes besides its results."""

from __future__ import annotations

import math
from typing import NamedTuple

from layerzero.core.facts import Facts


class Workspace(NamedTuple):
    """Bytes that a kernel took besides its results for a call of a class, and the day when that was measured.

    Of another call of the class, :meth:`of` says what it is likely to take: as much more as it has more elements.
    """

    bytes: int
    elements: int
    date: str

    def of(self, facts: Facts) -> Workspace:
        """What a call of the same class takes."""
        more = elements_of(facts) / max(self.elements, 1)
        return self if more <= 1 else self._replace(bytes=math.ceil(self.bytes * more))


def elements_of(facts: Facts) -> int:
    """Elements of all tensors of a call."""
    return sum(math.prod(each.shape) for each in facts.tensors.values())

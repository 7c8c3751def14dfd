"""Classes of the sizes of a step: few numbers stand for all, so that traffic brings no call of a new class.

A call is chosen for once for each class: 2 to 3 ms on a CPU, a spike in a step of 10 (AMD EPYC, 2026-11-26). What only
grows, and what is a promise that may be wider than need be, has few values therefore.
"""

from __future__ import annotations

from collections.abc import Sequence


def columns_for(needed: int) -> int:
    """Columns of tables for so many pages: 16, or the next power of two."""
    return max(16, 1 << (needed - 1).bit_length()) if needed else 0


def bound_for(longest: int) -> int:
    """A bound of the new tokens of a sequence: 16, 64, 256 and so on."""
    bound = 16
    while bound < longest:
        bound *= 4
    return bound


def promise_for(counts: Sequence[int]) -> int | None:
    """How many sequences from the first on have one new token, as a power of 4; None for none."""
    first = next((place for place, count in enumerate(counts) if count != 1), len(counts))
    return 1 << (first.bit_length() - 1 & ~1) if first else None


def numbers_to(most: int) -> list[int]:
    """Numbers up to this one that stand for all others: of each power of two the first, the middle one and the last."""
    found = {most}
    for power in range(most.bit_length()):
        found |= {each for each in (1 << power, 3 << power >> 1, (2 << power) - 1) if each <= most}
    return sorted(found)


def counts_of(batch: int, tokens: int) -> list[list[int]]:
    """New tokens of each sequence of a batch: one each, then one list for each class of sums, bounds and promises."""
    found = [[1] * batch]
    promises = [0, *(1 << power for power in range(0, (batch - 1).bit_length(), 2))]
    for total in numbers_to(tokens):
        for decodes in promises:
            left, others = total - decodes, batch - decodes - 1
            below, bound = 1, 16
            while below < left and others >= 0:
                longest = min(bound, left)
                if left - longest <= others * longest:
                    rest = left - longest
                    spread = [rest // others + (number < rest % others) for number in range(others)] if others else []
                    found.append([*[1] * decodes, longest, *spread])
                below, bound = bound, bound * 4
    return found

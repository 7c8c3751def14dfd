"""Sums of shares that are not negative, fitted to times.

In plain Python: torch's threads do not survive a fork, and there are few points and fewer terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from layerzero.tuning.predicting.prediction import sumprod

_RIDGE = 1e-9

_SWEEPS, _SETTLED = 300, 1e-6
"""How often shares are gone through, unless none moves any more: 30 times choose at 1.033 of the best where 300 and
more do at 1.030 (an H200's times, a fifth of them predicted from the rest, 2026-11-22)."""


class Sum(NamedTuple):
    """Shares of terms, what they leave over (log2), and how far the fit follows each point.

    Attributes:
        follows: of each point, what it moves the logarithm of every point by.
    """

    shares: tuple[float, ...]
    residuals: list[float]
    follows: list[list[float]]


def fit_sum(found: Sequence[Sequence[float]], y: Sequence[float]) -> Sum:
    """Fit shares of each row of terms to times whose log2 is given: relative errors, least squares, none negative."""
    times = [2.0**each for each in y]
    weights = [time_us**-2.0 for time_us in times]  # what is to be small is relative
    shares = _nonnegative(found, times, weights)
    fits = [sumprod(row, shares) for row in found]
    used = [number for number, share in enumerate(shares) if share > 0]
    rows = [[row[number] for number in used] for row in found]
    inverse = _inverse(_gram(rows, weights))
    images = [[sumprod(line, row) for line in inverse] for row in rows]
    follows = [
        [min(sumprod(image, row) * weight * own / other, 1.0) for row, other in zip(rows, fits, strict=True)]
        for image, weight, own in zip(images, weights, fits, strict=True)
    ]
    residuals = [own - math.log2(each) for own, each in zip(y, fits, strict=True)]
    return Sum(tuple(shares), residuals, follows)


def _gram(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[list[float]]:
    columns = list(zip(*rows, strict=True))
    heavy = [[value * weight for value, weight in zip(column, weights, strict=True)] for column in columns]
    gram = [[sumprod(one, other) for other in columns] for one in heavy]
    for number, line in enumerate(gram):
        line[number] *= 1 + _RIDGE
    return gram


def _nonnegative(rows: Sequence[Sequence[float]], target: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Weighted least squares without negative shares: each share in turn is what is best beside the others, or 0."""
    gram = _gram(rows, weights)
    heavy = [value * weight for value, weight in zip(target, weights, strict=True)]
    wanted = [sumprod(column, heavy) for column in zip(*rows, strict=True)]
    shares = [0.0 for _ in wanted]
    for _ in range(_SWEEPS):
        moved = 0.0
        for number, line in enumerate(gram):
            if line[number] > 0:  # products of sizes may be too small to count
                share = max(0.0, shares[number] + (wanted[number] - sumprod(line, shares)) / line[number])
                moved = max(moved, abs(share - shares[number]))
                shares[number] = share
        if moved <= _SETTLED * max(shares):
            break
    return shares


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Gauss-Jordan on a small positive definite matrix."""
    size = len(matrix)
    work = [[*row, *(1.0 if i == j else 0.0 for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(work[row][column]))
        work[column], work[pivot] = work[pivot], work[column]
        scale = work[column][column]
        work[column] = [value / scale for value in work[column]]
        for row in range(size):
            if row != column and work[row][column]:
                factor = work[row][column]
                work[row] = [value - factor * lead for value, lead in zip(work[row], work[column], strict=True)]
    return [row[size:] for row in work]

"""Sums of shares that are not negative, fitted to times.

In plain Python: torch's threads do not survive a fork, and there are few points and fewer terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from layerzero.tuning.predicting.prediction import sumprod

_RIDGE = 1e-9


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
    """Weighted least squares without negative shares: the active-set method of Lawson and Hanson (1974)."""
    gram = _gram(rows, weights)
    scale = [math.sqrt(line[number]) or 1.0 for number, line in enumerate(gram)]  # 0 where products are too small
    size = range(len(scale))
    gram = [[gram[i][j] / scale[i] / scale[j] for j in size] for i in size]
    heavy = [value * weight for value, weight in zip(target, weights, strict=True)]
    wanted = [sumprod(column, heavy) / scale[i] for i, column in enumerate(zip(*rows, strict=True))]
    shares, used = [0.0 for _ in size], list[int]()
    for _ in range(3 * len(scale)):
        pull = [wanted[i] - sumprod(gram[i], shares) for i in size]
        free = [i for i in size if i not in used and pull[i] > _RIDGE * wanted[i]]
        if not free:
            break
        used.append(max(free, key=lambda i: pull[i]))
        while True:
            inverse = _inverse([[gram[i][j] for j in used] for i in used])
            solved = [sumprod(line, [wanted[j] for j in used]) for line in inverse]
            if min(solved) > 0:
                break
            # as far towards the solution as all shares stay positive; who reaches zero is out
            step = min(shares[i] / (shares[i] - value) for i, value in zip(used, solved, strict=True) if value <= 0)
            for i, value in zip(used, solved, strict=True):
                shares[i] += step * (value - shares[i])
            used = [i for i in used if shares[i] > _RIDGE * max(shares)]
            shares = [share if i in used else 0.0 for i, share in enumerate(shares)]
            if not used:
                return [share / each for share, each in zip(shares, scale, strict=True)]
        for i, value in zip(used, solved, strict=True):
            shares[i] = value
    return [share / each for share, each in zip(shares, scale, strict=True)]


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

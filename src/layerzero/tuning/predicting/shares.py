"""Sums of shares that are not negative, fitted to times.

In plain Python: torch's threads do not survive a fork, and there are few points and fewer terms.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.tuning.predicting.prediction import sumprod

_SWEEPS, _SETTLED = 300, 1e-6
"""How often shares are gone through, unless none moves any more: 30 times choose at 1.033 of the best where 300 and
more do at 1.030 (an H200's times, a fifth of them predicted from the rest, 2026-11-22)."""


def fit_sum(rows: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[float, ...]:
    """Fit shares of each row of terms to times: relative errors, least squares, none negative.

    Each share in turn is what is best beside the others, or 0. They start from the largest time, half of it always
    there (the first term), half growing with all there is (the last): what few times leave open stays so, and all
    kernels of a call err alike in that.
    """
    columns = list(zip(*rows, strict=True))
    weights = [time_us**-2.0 for time_us in times]  # what is to be small is relative
    heavy = [[value * weight for value, weight in zip(column, weights, strict=True)] for column in columns]
    gram = [[sumprod(one, other) for other in columns] for one in heavy]
    wanted = [sumprod(column, times) for column in heavy]
    shares = [0.0 for _ in wanted]
    shares[0] = shares[-1] = max(times) / 2
    for _ in range(_SWEEPS):
        moved = 0.0
        for number, line in enumerate(gram):
            if line[number] > 0:  # products of sizes may be too small to count
                share = max(0.0, shares[number] + (wanted[number] - sumprod(line, shares)) / line[number])
                moved = max(moved, abs(share - shares[number]))
                shares[number] = share
        if moved <= _SETTLED * max(shares):
            break
    return tuple(shares)

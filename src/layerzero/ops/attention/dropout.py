"""What dropout has to show, since no single result can: its mean, its spread, and that each run drops others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerzero.core.judge import Given, Property, Tolerance
from layerzero.ops.attention.reference import attention_reference

RATE = 0.5
RUNS = 64
ALPHA = 1e-9
"""How improbable a right kernel's mean may be before it counts as wrong."""

SPREAD = (0.8, 1.25)
"""What the squared distances from the mean may be of what they should be, all together: 64 runs of the smallest cases
move that by less than 2 % by chance."""


def dropout_keeps_the_mean(tolerance: Mapping[torch.dtype, Tolerance]) -> Property:
    """The property of operations with ``dropout_p``: at 0.5 a weight is 0 or twice itself, each as often.

    The distance of a result from the one without dropout is then a sum of ``±w v`` over keys, whose tails are no wider
    than those of normal numbers of the same variance (Hoeffding, 1963), so that the bound of the mean is a strict one.
    """

    def check(results: Sequence[tuple[Tensor, ...]], truth: tuple[Tensor, ...], given: Given) -> str:
        plain = truth[0]
        allowed = tolerance[given.dtype].beside(given.wider)
        weights, values = _weights(given.basis), given.basis["value"]
        group = plain.shape[2] // values.shape[2]
        values = values.repeat_interleave(group, 2)
        variance = torch.einsum("bqhk,bkhd->bqhd", weights.square(), values.square())
        size = 2 * torch.einsum("bqhk,bkhd->bqhd", weights, values.abs())
        rounding = allowed.atol + allowed.rtol * size
        outputs = [result[0].to(torch.float64) for result in results]
        energy = sum(float((output - plain).square().sum()) for output in outputs) / len(outputs)
        ratio = energy / float(variance.sum())
        if ratio < SPREAD[0] / 4:
            return f"with dropout_p={RATE} the results are those without it: it is ignored"
        for number, (one, other) in enumerate(itertools.pairwise(outputs), 1):
            if torch.equal(one, other):
                return f"with dropout_p={RATE} runs {number} and {number + 1} dropped the same weights"
        off = torch.stack(outputs).mean(0) - plain
        far = math.sqrt(2 * math.log(4 * plain.numel() / ALPHA))
        excess = off.abs() / (far * (variance / len(outputs)).sqrt() + rounding)
        along = torch.einsum("bqhd,bkhd->bqhk", plain, values)
        together = far * math.sqrt(float((weights * along).square().sum()) / len(outputs))
        together += float((plain.abs() * rounding).sum())
        drift = float((plain * off).sum())
        if float(excess.max()) > 1 or abs(drift) > together:
            scale = 1 + drift / float(plain.square().sum())
            return (
                f"with dropout_p={RATE} the mean of {len(outputs)} runs is not the result without it: on the whole it "
                f"is {scale:.3g} times that, and one element is {float(excess.max()):.3g} times too far off"
            )
        if not SPREAD[0] <= ratio <= SPREAD[1]:
            return (
                f"with dropout_p={RATE} results spread {ratio:.3g} times as much as when half the weights are dropped"
            )
        return ""

    runs = ({"dropout_p": RATE},) * RUNS
    return Property("dropout keeps the mean", check, "each weight is dropped or scaled, apart from the others", runs)


def _weights(arguments: Mapping[str, object]) -> Tensor:
    """The attention weights: what comes of values that are 1 for one key and 0 for the others.

    Shapes: → (B, S_q, H, S_k)
    """
    given = {name: value for name, value in arguments.items() if name not in ("dropout_p", "return_lse")}
    key = given["key"]
    assert isinstance(key, Tensor)
    batch, keys, heads, _ = key.shape
    ones = torch.eye(keys, dtype=key.dtype, device=key.device).view(1, keys, 1, keys)
    weights = attention_reference(**{**given, "value": ones.expand(batch, keys, heads, keys)})  # type: ignore[arg-type]
    assert isinstance(weights, Tensor)
    return weights

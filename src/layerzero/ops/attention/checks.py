"""What each function of attention asks of a call: numbers that act on scores, slopes, counts of heads, defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Operation
from layerzero.core.reasons import ReasonCode


def _is_window(window: object) -> bool:
    sides = isinstance(window, (tuple, list)) and all(type(side) is int and side >= -1 for side in window)
    return sides and len(window) == 2  # type: ignore[arg-type]  # sides is False for what has no length


def score_problems(arguments: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the numbers that act on scores; types are the schema's business."""
    problems = []
    scale, softcap, window = arguments["scale"], arguments.get("softcap"), arguments.get("window")
    if isinstance(scale, (int, float)) and not math.isfinite(scale):
        problems.append(f"scale: wanted a finite number, got {scale}")
    if isinstance(softcap, (int, float)) and not (math.isfinite(softcap) and softcap > 0):
        problems.append(f"softcap: wanted a finite number above 0 or None, got {softcap}")
    if window is not None and not _is_window(window):
        problems.append(f"window: wanted (left, right), each -1 (unbounded) or a count of keys, got {told(window)}")
    return problems


def slope_problems(slopes: object, heads: int, sequences: int) -> list[str]:
    """What is wrong with the shape of ALiBi's slopes, which the schema leaves open."""
    if not isinstance(slopes, Tensor) or tuple(slopes.shape) in ((heads,), (sequences, heads)):
        return []
    return [f"alibi_slopes: wanted shape ({heads},) or ({sequences}, {heads}), got {tuple(slopes.shape)}"]


def check_heads(function: str, query: Sequence[int], key: Sequence[int]) -> None:
    """Refuse counts of heads that mean nothing, of queries (T, H, D) and keys (T, K, D). Raises: InvalidCallError."""
    (_, heads, head_dim), kv_heads = query, key[1]
    if not heads or not kv_heads or not head_dim:
        shapes = f"query {tuple(query)} and key {tuple(key)}"
        raise InvalidCallError(function, [f"wanted heads and head dim above 0, got {shapes}"])
    if heads % kv_heads:
        problem = f"query heads must be a multiple of kv heads: got {heads} query heads and {kv_heads} kv heads"
        shapes = f"query {tuple(query)}, key {tuple(key)}"
        raise InvalidCallError(function, [f"{problem} ({shapes})"], ReasonCode.GQA_HEADS_MISMATCH)


def without_defaults(
    operation: Operation, arguments: Mapping[str, Any], head_dim: int, *, newest: bool = False
) -> dict[str, Any]:
    """The operation's arguments, None for a default that is spelled out: kernels without that argument stay legal.

    Args:
        newest: whether each query is its sequence's newest token, so that nothing lies to the right of its window.
    """
    known = operation.schema.known
    found = {name: value for name, value in arguments.items() if name in known}
    scale, window = found.get("scale"), found.get("window")
    if isinstance(scale, (int, float)) and math.isclose(scale, head_dim**-0.5, rel_tol=1e-7):
        found["scale"] = None
    if window is not None and _is_window(window):
        left, right = window
        if newest:
            found["window"] = None if left < 0 else (left, 0)
        else:
            found["window"] = None if left == right == -1 else (left, right)
    return found

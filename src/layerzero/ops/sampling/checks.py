"""Rows that nothing can be drawn of: who finds one on a CPU raises, while on a GPU looking would mean waiting."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError

_MAX_TOLD = 4
"""Bad rows that an error lists."""


def check_values(layout: str | None = None, **arguments: Tensor) -> list[str]:
    """List the rows that nothing can be drawn of, and shares and temperatures of rows that are none."""
    problems = []
    for name in ("logits", "probs"):
        tensor = arguments.get(name)
        if tensor is not None:
            problems += undrawable(tensor, name)
    for name in ("row_p", "row_temperature"):
        of_rows = arguments.get(name)
        if of_rows is not None and bool(of_rows.isnan().any()):
            problems.append(f"{name}: wanted a number for each row, got NaN")
    return problems


def undrawable(tensor: Tensor, name: str) -> list[str]:
    """List the rows that nothing can be drawn of, a few of them."""
    if name == "logits":
        bad = tensor.isnan().any(-1) | (tensor == torch.inf).any(-1) | (tensor == -torch.inf).all(-1)
        wanted = "no NaN, no +inf, and a number above -inf"
    else:
        bad = ~(tensor.isfinite() & (tensor >= 0)).all(-1) | (tensor == 0).all(-1)
        wanted = "finite numbers from 0 up, one of them above"
    found = []
    for where in bad.nonzero().tolist()[:_MAX_TOLD]:
        row = tensor[tuple(where)]
        at = f"[{', '.join(map(str, where))}]" if where else ""
        found.append(f"{name}{at}: wanted {wanted}, got {_told(row, name)}")
    return found


def _told(row: Tensor, name: str) -> str:
    for text, found in (("NaN", row.isnan()), ("+inf", row == torch.inf)):
        if bool(found.any()):
            return f"{text} at {int(found.int().argmax())}"
    if name == "logits":
        return "-inf everywhere"
    negative = row < 0
    if bool(negative.any()):
        at = int(negative.int().argmax())
        return f"{row[at].item():g} at {at}"
    return "0 everywhere"


def check_drawable(total: Tensor, tensor: Tensor, operation: str, called: str = "") -> None:
    """Raise where a sum of weights says that nothing can be drawn of a row. Raises: InvalidCallError.

    ``called`` is the argument's name, where it is neither logits nor probs.
    """
    bad = ~(total.isfinite() & (total > 0))
    if not bool(bad.any()):
        return
    name = "probs" if operation.endswith(".probs") else "logits"
    problems = undrawable(tensor, name)
    if problems:
        raise InvalidCallError(operation, [each.replace(name, called or name, 1) for each in problems])
    wanted = f"{called or name}: wanted rows that something can be drawn of"
    got = f"one whose probabilities add up to {total[bad][0].item():g}"
    hint = "; is a row_temperature NaN?" if name == "logits" else ""  # only what draws of logits has that argument
    raise InvalidCallError(operation, [f"{wanted}, got {got}{hint}"])


def check_signs(tensor: Tensor, operation: str) -> None:
    """Raise where what a caller says to be probabilities is none; a sum would not tell. Raises: InvalidCallError."""
    if operation.endswith(".probs"):
        check_drawable((tensor.amin(-1) >= 0).float(), tensor, operation)

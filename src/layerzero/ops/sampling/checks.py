"""Rows that nothing can be drawn of: who finds one on a CPU raises, while on a GPU looking would mean waiting."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.errors import InvalidCallError
from layerzero.core.values import Check

_MAX_TOLD = 4
"""Bad rows that an error lists."""


def check_values(layout: str | None = None, **arguments: Tensor) -> list[Check]:
    """Values on the device: rows that something can be drawn of, shares and temperatures of rows that are numbers."""
    named = (name for name in ("logits", "probs") if arguments.get(name) is not None)
    found = [drawable(arguments[name], name) for name in named]
    for name in ("top_p", "min_p", "temperature"):
        of_rows = arguments.get(f"{name}_by_row")
        if of_rows is not None:
            text = f"{name}: wanted a number for each row, got NaN"
            found.append(Check(of_rows.isnan().any(), None, lambda _, __, text=text: text))  # type: ignore[misc]
    return found


def undrawable(tensor: Tensor, name: str) -> list[str]:
    """List the rows that nothing can be drawn of, a few of them."""
    return values.problems([drawable(tensor, name)])


def drawable(tensor: Tensor, name: str, called: str = "") -> Check:
    """Whether something can be drawn of each row of ``logits`` or ``probs``, as an expression where they lie."""
    if name == "logits":
        bad = tensor.isnan().any(-1) | (tensor == torch.inf).any(-1) | (tensor == -torch.inf).all(-1)
        wanted = "no NaN, no +inf, and a number above -inf"
    else:
        bad = ~(tensor.isfinite() & (tensor >= 0)).all(-1) | (tensor == 0).all(-1)
        wanted = "finite numbers from 0 up, one of them above"

    def first(places: Tensor) -> Tensor:
        """Of each row how many are NaN, +inf and below 0, where the first of these is, and the bits of the last."""
        rows = tensor.reshape(bad.numel(), tensor.shape[-1])[places]
        found = torch.stack((rows.isnan(), rows == torch.inf, rows < 0), 1)
        at = found.int().argmax(-1)
        return torch.cat((found.sum(-1), at, bits_of(rows.gather(1, at[:, 2:]))), 1)

    def say(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        at = f"[{', '.join(map(str, place))}]" if place else ""
        return f"{called or name}{at}: wanted {wanted}, got {_told(got, name)}"

    return Check(bad, first, say, _MAX_TOLD)


def _told(got: tuple[int, ...], name: str) -> str:
    nans, infinite, negative, first_nan, first_infinite, first_negative, bits = got
    if nans:
        return f"NaN at {first_nan}"
    if infinite:
        return f"+inf at {first_infinite}"
    if name == "logits":
        return "-inf everywhere"
    return f"{number_of(bits):g} at {first_negative}" if negative else "0 everywhere"


def bits_of(tensor: Tensor) -> Tensor:
    """Floating numbers as integers of 64 bits, which travel beside places; :func:`number_of` takes them back."""
    return tensor.double().view(torch.int64)


def number_of(bits: int) -> float:
    """The floating number that integers of 64 bits stand for."""
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found


def check_drawable(total: Tensor, tensor: Tensor, operation: str, called: str = "") -> None:
    """Raise where a sum of weights says that nothing can be drawn of a row. Raises: InvalidCallError.

    ``called`` is the argument's name, where it is neither logits nor probs.
    """
    bad = ~(total.isfinite() & (total > 0))
    if not bool(bad.any()):
        return
    name = "probs" if (called or operation).endswith("probs") else "logits"
    problems = undrawable(tensor, name)
    if problems:
        raise InvalidCallError(called_by(operation), [each.replace(name, called or name, 1) for each in problems])
    wanted = f"{called or name}: wanted rows that something can be drawn of"
    got = f"one whose probabilities add up to {total[bad][0].item():g}"
    hint = "; is a temperature NaN?" if name == "logits" else ""  # only what draws of logits has that argument
    raise InvalidCallError(called_by(operation), [f"{wanted}, got {got}{hint}"])


def called_by(operation: str) -> str:
    """The public function whose calls an operation serves, by its name: what a caller knows an error by."""
    from layerzero.ops.calls import function_for  # which imports every family, this one as well

    return function_for(operation).name


def check_signs(tensor: Tensor, operation: str) -> None:
    """Raise where what a caller says to be probabilities is none; a sum would not tell. Raises: InvalidCallError."""
    if operation.endswith(".probs"):
        check_drawable((tensor.amin(-1) >= 0).float(), tensor, operation)

"""Which rows can be drawn from, and which draws of them are right.

A CPU call raises for a row that nothing can be drawn of; on a GPU, looking would mean waiting. Draws are right that the
reference's probabilities allow, as often as these say.

A kernel computes in float32, where a value close to the bound of what is kept may fall on its other side: two logits
become one probability, a sum is rounded. Such a place may come or not, and of its row nothing is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.errors import InvalidCallError
from layerzero.core.judges import Distribution
from layerzero.core.values import Check
from layerzero.ops.sampling.formulas import keep_min_p, keep_top_k, keep_top_p, probabilities, within

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
    """Floating numbers as integers of 64 bits, which travel with places; :func:`number_of` takes them back."""
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
    hint = "; is a temperature NaN, or so low that logits overflow?" if name == "logits" else ""
    raise InvalidCallError(called_by(operation), [f"{wanted}, got {got}{hint}"])


def called_by(operation: str) -> str:
    """The public function whose calls an operation serves, by its name: what a caller knows an error by."""
    from layerzero.ops.calls import function_for  # which imports every family, this one as well

    return function_for(operation).name


def check_signs(tensor: Tensor, operation: str) -> None:
    """Raise where what a caller says to be probabilities is none; a sum would not tell. Raises: InvalidCallError."""
    if operation.endswith(".probs"):
        check_drawable((tensor.amin(-1) >= 0).float(), tensor, operation)


def check_target(target: Tensor, name: str, lens: Tensor | None = None) -> None:
    """Raise where nothing can be drawn of a row of the target's that is read. Raises: InvalidCallError."""
    total = torch.where((target >= 0).all(-1), target.sum(-1), -1.0)
    if lens is not None:
        total = torch.where(_read(target, lens + 1), total, 1.0)
        if not bool((total > 0).all()):
            target = rows_read(target, lens + 1)
    check_drawable(total, target, name, "target_probs")


def _read(probs: Tensor, lens: Tensor | None) -> Tensor:
    """Which rows of probabilities are read: the first so many. Shapes: (B, N, V), (B,) → (B, N)."""
    if lens is None:
        return torch.ones(probs.shape[:2], dtype=torch.bool, device=probs.device)
    return within(probs, lens)


def rows_read(probs: Tensor, lens: Tensor | None) -> Tensor:
    """The same probabilities, with others than nothing where they are not read."""
    return probs if lens is None else torch.where(_read(probs, lens).unsqueeze(-1), probs, 1.0)


def check_draft(drafted: Tensor | None, name: str, lens: Tensor | None = None) -> None:
    """Raise for what no draft was drawn from: NaN, infinity, numbers below 0. Raises: InvalidCallError.

    Rows of zeros may be: of a token that pads, or where the draft left nothing.
    """
    if drafted is None or not drafted.numel():
        return
    drafted = rows_read(drafted, lens)
    least, most = drafted.aminmax()  # NaN if there is one
    if not (least >= 0 and most.isfinite()):
        raise InvalidCallError(called_by(name), values.problems([drafted_problem(drafted)]))


def drafted_problem(drafted: Tensor) -> Check:
    """Of rows, and of the first wrong ones where it is: an index an element took 1 GB of 64 x 8 x 128,256."""

    def say(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"draft_probs{[*place, got[0]]}: wanted finite numbers from 0 up, got {number_of(got[1]):g}"

    def first(places: Tensor) -> Tensor:
        rows = drafted.reshape(-1, drafted.shape[-1])[places]
        at = (~(rows.isfinite() & (rows >= 0))).int().argmax(-1, keepdim=True)
        return torch.cat((at, bits_of(rows.gather(1, at))), 1)

    right = (drafted.amin(-1) >= 0) & drafted.amax(-1).isfinite()  # NaN if there is one
    return Check(~right, first, say, _MAX_TOLD)


NEAR = 1e-5
"""How near a bound a value, or a sum of a row, is too near to tell: softmax of float32 is off by 4e-6 at exp(-60)."""

REASON = "a place comes as often as its probability says, among those that are kept; near the bound float32 decides"

Sets = Callable[[Tensor, Mapping[str, Any]], tuple[Tensor, Tensor]]
"""The places that are surely kept, and those that may be."""


def _all(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    every = torch.ones_like(weights, dtype=torch.bool)
    return every, every


def _top_k(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    top_k, by_row = given.get("top_k"), given.get("top_k_by_row")
    return keep_top_k(weights, top_k, by_row), keep_top_k(weights, top_k, by_row, near=NEAR)


def _top_p(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    top_p, by_row = given.get("top_p"), given.get("top_p_by_row")
    return keep_top_p(weights, top_p, by_row, -NEAR), keep_top_p(weights, top_p, by_row, NEAR, NEAR)


def _min_p(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    min_p, by_row = given.get("min_p"), given.get("min_p_by_row")
    return keep_min_p(weights, min_p, by_row, NEAR), keep_min_p(weights, min_p, by_row, -NEAR)


def _top_k_top_p(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    first, widest = _top_k(weights, given)
    sure, may = _top_p(weights * first, given)
    doubtful = (first != widest).any(-1, keepdim=True)  # of other places the same share are others
    return sure & first, torch.where(doubtful, widest, may & first)


def _filtered(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    def has(name: str) -> bool:
        return given.get(name) is not None or given.get(f"{name}_by_row") is not None

    by_few = {(True, True): _top_k_top_p, (True, False): _top_k, (False, True): _top_p, (False, False): _all}
    sure, may = by_few[has("top_k"), has("top_p")](weights, given)
    if has("min_p"):
        first, widest = _min_p(weights, given)
        sure, may = sure & first, may & widest
    return sure, may


SETS: Mapping[str, Sets] = {
    "categorical": _all,
    "topk": _top_k,
    "topp": _top_p,
    "minp": _min_p,
    "topk_topp": _top_k_top_p,
    "filtered": _filtered,
}


def judge(kind: str, *, logits: bool) -> Distribution:
    """The judge of an operation's draws."""
    sets = SETS[kind]

    def weights_of(arguments: Mapping[str, Any]) -> Tensor:
        tensor = arguments["logits" if logits else "probs"]
        return probabilities(tensor, arguments.get("temperature"), arguments.get("temperature_by_row"), logits=logits)

    def of_kept(arguments: Mapping[str, Any]) -> Tensor:
        weights = weights_of(arguments)
        return weights * sets(weights, arguments)[0]

    def support(arguments: Mapping[str, Any]) -> Tensor:
        weights = weights_of(arguments)
        return sets(weights, arguments)[1] & (weights > 0)

    return Distribution(of_kept, REASON, support=support)

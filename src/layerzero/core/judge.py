"""What a right result is: a judge for each kind of result, for everything that compares a kernel with the truth.

The operation says which judge its results have, and why (:attr:`layerzero.core.operation.Operation.judge`): numbers
near the reference's, the very same values, places whose scores tie, draws of a distribution
(:mod:`layerzero.core.judges`), or anything that a check can say. What only several results together show (that
two runs differ, what their mean is) is a :class:`Property`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerzero.core.dtypes import dtype_name, names_of


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a kernel may be from the reference in float64: ``|got - want| <= atol + rtol * |want|``."""

    rtol: float
    atol: float

    def beside(self, other: Tolerance | None) -> Tolerance:
        """The wider of both, each number for itself."""
        return self if other is None else Tolerance(max(self.rtol, other.rtol), max(self.atol, other.atol))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Given:
    """What a judge knows about the call whose result it judges.

    Attributes:
        dtype: that of the call.
        basis: what the judge made of the call's arguments before anything ran.
        wider: the kernel's own tolerance, where it declares one.
        canonical: moves a result from the layout of the call to that of the schema.
        moved: how far the result moves where what the call brings is a step of its dtype off; None: not to be known.
    """

    dtype: torch.dtype
    basis: Any = None
    wider: Tolerance | None = None
    canonical: Callable[[Tensor], Tensor] = _as_it_is
    moved: Callable[[], Tensor] | None = None


class Judge:
    """Says what is wrong with one result of a call; in words, what is right.

    Attributes:
        reason: why results are judged like this.
    """

    __slots__ = ()
    reason: str

    @property
    def dtypes(self) -> frozenset[torch.dtype] | None:
        """The dtypes of calls that it can judge; None for any."""
        return None

    def basis(self, arguments: Mapping[str, Any]) -> Any:  # noqa: ARG002  # the reference's result says it all
        """What it needs to know of a call: its canonical arguments, floating ones in float64; read before it runs."""
        return None

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        """Say in one line how a result is not what the reference's says; empty if it is right.

        ``got`` has the right shape, dtype and device; ``want`` is float64 where it is floating.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Elementwise(Judge):
    """Numbers near the reference's.

    Attributes:
        tolerance: by dtype of the call, how far each may be.
        reason: why that far.
        summed: from the call's canonical arguments, floating ones in float64, the size of the error that a result has
            for each unit of relative error in what is added up to make it, in the result's shape: ``rtol`` holds of
            it as well. A small sum of large numbers is no more exact than they are.
    """

    tolerance: Mapping[torch.dtype, Tolerance]
    reason: str
    summed: Callable[[Mapping[str, Any]], Tensor] | None = None

    def __str__(self) -> str:
        allowed = (f"{dtype_name(dtype)}: rtol {each.rtol}, atol {each.atol}" for dtype, each in self.tolerance.items())
        of_sums = "" if self.summed is None else "; rtol of what is added up, too"
        return f"numbers near the reference's in float64 ({'; '.join(allowed)}{of_sums})"

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(self.tolerance)

    def basis(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """The size of what is added up, where that counts; else the reference's result says it all."""
        return None if self.summed is None else self.summed(arguments)

    def allowed(self, given: Given) -> Tolerance:
        """The tolerance of a call. Raises: ValueError for a dtype that has none."""
        if given.dtype not in self.tolerance:
            wanted = f"wanted a call in {names_of(self.dtypes) or 'no dtype at all'}, which have a tolerance"
            raise ValueError(f"{wanted}; got one in {dtype_name(given.dtype)}: add it to the operation's tolerance")
        return self.tolerance[given.dtype].beside(given.wider)

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        place = _as_it_is if given.basis is None else given.canonical
        found = apart(place(got), place(want), self.allowed(given), given.basis)
        if not found or given.moved is None:
            return found
        return apart(place(got), place(want), self.allowed(given), given.basis, STEPS * place(given.moved()))


STEPS = 16.0
"""How much farther a result may be than it moves where what a call brings is a step off.

Scores of 128 equal products, which round the same way, were off by 9 times as much (float32, 2026-12-01).
"""


def apart(
    got: Tensor, want: Tensor, tolerance: Tolerance, summed: Tensor | None = None, more: Tensor | float = 0.0
) -> str:
    """Say which element of a result is farthest from what was wanted; empty if all are near enough.

    ``summed`` is what :attr:`Elementwise.summed` said of the call; ``more`` is allowed as well.
    """
    wide, truth = got.detach().to(torch.float64), want.to(torch.float64)
    if torch.allclose(wide, truth, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True):
        return ""
    terms = 0.0 if summed is None else summed.nan_to_num(0.0, 0.0, 0.0)  # of no number nothing is allowed
    allowed = tolerance.atol + tolerance.rtol * (truth.abs() + terms) + more
    same = _same(wide, truth)
    excess = ((wide - truth).abs() / allowed).masked_fill(same, 0.0)
    excess = excess.masked_fill(~same & ~(wide.isfinite() & truth.isfinite()), float("inf"))
    if not (excess > 1).any():
        return ""
    place = torch.unravel_index(excess.argmax(), excess.shape)
    where = tuple(int(axis) for axis in place)
    row = truth[where[:-1]] if where else truth
    hidden = bool((row == 0).all()) or truth[place].item() == -torch.inf
    why = "; the reference gives 0 or -inf for all of this row: what it needs is masked, or cancels" if hidden else ""
    of_sums = "" if summed is None else f", {summed[place].item():.3g} summed"
    return (
        f"{int((excess > 1).sum())} of {truth.numel()} elements too far; worst at {where}: "
        f"wanted {truth[place].item():.8g}, got {wide[place].item():.8g}, {float(excess[place]):.3g} times the "
        f"tolerance (rtol {tolerance.rtol}, atol {tolerance.atol}{of_sums}){why}"
    )


def _same(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def first_of(wrong: Tensor) -> tuple[int, ...]:
    """Where the first True lies."""
    return tuple(wrong.nonzero()[0].tolist())


def first_wrong(wrong: Tensor, what: str, want: Tensor, got: Tensor, form: str = ".9g") -> str:
    """Say how many elements are wrong, and of the first what was wanted and got; empty if none is."""
    if not wrong.any():
        return ""
    where = first_of(wrong)
    found = f"wanted {want[where].item():{form}}, got {got[where].item():{form}}"
    return f"{int(wrong.sum())} of {wrong.numel()} {what}; first at {where}: {found}"


@dataclass(frozen=True, slots=True)
class Exact(Judge):
    """The reference's very values, rounded to the result's dtype; NaN where it has NaN."""

    reason: str

    def __str__(self) -> str:
        return "the reference's very values"

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:  # noqa: ARG002  # a judge's names
        got, want = got.detach(), want.to(got.dtype)
        return first_wrong(~_same(got, want), "elements differ, and none may", want, got, "")


@dataclass(frozen=True, slots=True)
class Indices(Judge):
    """Places along the last axis of scores, best first: the reference's, or others whose scores tie with them.

    Attributes:
        scores: from the call's canonical arguments, floating ones in float64, the scores that places are chosen by.
        reason: why places may differ.
        ties: by dtype of the call, how far two scores may be apart that tie; where there is none, not at all.

    Shapes: scores (*, N), result (*) for one place a row, or (*, k) for k different ones.
    """

    scores: Callable[[Mapping[str, Any]], Tensor]
    reason: str
    ties: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)

    def __str__(self) -> str:
        return "the reference's places, or others whose scores tie"

    def basis(self, arguments: Mapping[str, Any]) -> Tensor:
        return self.scores(arguments).to(torch.float64)

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        """Say which place lies outside, is named twice, or has another score."""
        scores: Tensor = given.basis
        got, want = given.canonical(got.detach()).long(), given.canonical(want).long()
        several = got.ndim == scores.ndim
        if not several:
            got, want = got.unsqueeze(-1), want.unsqueeze(-1)
        count = scores.shape[-1]
        outside = (got != want) & ((got < 0) | (got >= count))
        if outside.any():
            where = first_of(outside)
            return f"{place_of(where, several)}: wanted a place from 0 to {count - 1}, got {int(got[where])}"
        ordered = got.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if twice.any():
            where = first_of(twice)
            return f"{where[:-1]}: wanted different places, got {int(ordered[where])} twice"
        if count == 0:  # no place is named
            return ""
        mine, theirs = (scores.gather(-1, each.clamp(0, max(count - 1, 0))) for each in (got, want))
        tie = self.ties.get(given.dtype, Tolerance(0.0, 0.0)).beside(given.wider)
        near = torch.isclose(mine, theirs, rtol=tie.rtol, atol=tie.atol, equal_nan=True)
        wrong = (got != want) & ~near
        if not wrong.any():
            return ""
        where = first_of(wrong)
        found = f"got {int(got[where])} with {mine[where].item():.8g}"
        wanted = f"wanted {int(want[where])} with a score of {theirs[where].item():.8g}, or one that ties"
        count_wrong = f"{int(wrong.sum())} of {want.numel()} places are wrong"
        return f"{count_wrong}; first at {place_of(where, several)}: {wanted}; {found}"


def place_of(where: tuple[int, ...], several: bool) -> tuple[int, ...]:
    """A place in the result, which has no axis of its own for one place a row."""
    return where if several else where[:-1]


Holds = Callable[[Sequence[tuple[Tensor, ...]], tuple[Tensor, ...], Given], str]
"""Says in one line what does not hold of the results of each run; empty if it holds.

It gets them, those of the reference without what the runs add, and as ``basis`` the call's arguments: all in the
canonical layout, and the last two in float64 where they are floating."""


@dataclass(frozen=True, slots=True)
class Property(Judge):
    """Something that holds of the results of a call, whatever they are.

    As the judge of a result it judges that result alone. Among :attr:`Operation.properties` it judges the results of
    several runs, of each kernel that accepts what they add.

    Attributes:
        name: what holds, in a few words.
        check: says what does not hold.
        reason: why it should.
        runs: for each run the arguments that it adds to the call's; a function gets these and gives the value.
    """

    name: str
    check: Holds
    reason: str = ""
    runs: tuple[Mapping[str, Any], ...] = ({},)

    def __str__(self) -> str:
        return self.name

    @property
    def arguments(self) -> frozenset[str]:
        return frozenset(name for run in self.runs for name in run)

    def basis(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        return self.check([(given.canonical(got.detach()),)], (given.canonical(want),), given)


def reproducible(argument: str, one: Any, other: Any) -> Property:
    """The property that an argument decides what is random: equal values give equal results, another gives others.

    Args:
        one, other: two values, or functions that give them for a call's arguments (a generator with a seed).
    """

    def check(results: Sequence[tuple[Tensor, ...]], truth: tuple[Tensor, ...], given: Given) -> str:
        first, again, others = results
        if not all(torch.equal(left, right) for left, right in zip(first, again, strict=True)):
            return f"two runs with the same {argument} gave different results"
        if all(torch.equal(left, right) for left, right in zip(first, others, strict=True)):
            return f"runs with different values of {argument} gave the same results: it is ignored"
        return ""

    reason = "what is random follows from it alone"
    runs = ({argument: one}, {argument: one}, {argument: other})
    return Property(f"{argument} decides what is random", check, reason, runs)

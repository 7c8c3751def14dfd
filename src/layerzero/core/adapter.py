"""What a plan may do to an operation's arguments beyond copies and views, so that a kernel becomes legal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Write(Protocol):
    """Write the statements of an adaptation into a plan.

    They may name the function's arguments, which they assign anew, and what ``Adapter.names`` has. ``layout`` is that
    of the tensors at this place of the plan.
    """

    def __call__(self, arguments: Sequence[str], facts: Any, layout: str | None, /) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """Something that a plan may do to an operation's arguments so that a kernel becomes legal.

    Attributes:
        text: what happens, for people; ``{argument}`` stands for the argument that a limit found fault with.
        write: writes the statements, given all such arguments of one plan.
        names: what the statements may name beside the arguments.
        names_sizes: whether the statements name sizes, so that calls of other sizes have others.
        moved: whether they come after the tensors were moved to the kernel's layout.
        absorbs: whether the arguments are gone from the call afterwards, at their neutral values.
        absorbed: the arguments that it can absorb; those of a call that are there go along.
        gives: a tensor that the statements make, which the kernel gets in place of what they absorb.
        writes_anew: tensors that are dense afterwards, whatever they were before.
        gives_alone: arguments for whose sake it makes what it gives, and writes no other tensor.
    """

    text: str
    write: Write
    names: Mapping[str, Any] = field(default_factory=dict)
    names_sizes: bool = False
    moved: bool = False
    absorbs: bool = False
    absorbed: tuple[str, ...] = ()
    gives: str = ""
    writes_anew: tuple[str, ...] = ()
    gives_alone: frozenset[str] = frozenset()

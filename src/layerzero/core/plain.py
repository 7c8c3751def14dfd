"""Operations without tensors: what they bring in place of shapes, and what their public functions get of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from layerzero.core.facts import Facts
    from layerzero.core.operation import Case, Operation, Routed


@dataclass(frozen=True, slots=True)
class Plain:
    """What an operation without tensors brings, so that it is measured, proved and explained like the others.

    Attributes:
        draw: canonical arguments of a case, given what the asker named (``tokenizer_id=...``).
        prove: given a kernel's callable maker and the arguments that name what it must agree with, lists differences
            from the reference on everything that differs between implementations; empty means that it is the same.
        restored: canonical arguments of one call, from the parameters of its recipe in another process.
        portable: what the recipe's parameters must be so that another process can restore the call.
        equal: whether two results are the same.
        recipe: from the facts of a call the parameters by which another process asks about such a call.
        case: sizes of a call like the one that such parameters describe, to measure with.
        described: canonical arguments, without data, and sizes of the call that such parameters describe.
    """

    draw: Callable[[Case, Mapping[str, Any]], dict[str, Any]]
    prove: Callable[[Callable[[Mapping[str, Any]], Callable[..., Any]], Mapping[str, Any]], list[str]]
    restored: Callable[[Mapping[str, Any]], dict[str, Any]]
    portable: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    equal: Callable[[Any, Any], bool]
    recipe: Callable[[Facts], Mapping[str, Any]]
    case: Callable[[Mapping[str, Any]], Case]
    described: Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], Mapping[str, int]]]


class Ways(Protocol):
    """What the public function of an operation without tensors gets from the engine.

    Attributes:
        table: what runs, by the key that the function makes of a call; another one in each epoch, empty at first.
    """

    table: dict[Any, Any]

    def find(self, key: Any, arguments: Mapping[str, Any]) -> tuple[Callable[..., Any], Any]:
        """Choose for a call, and run it: what runs later calls of its kind, and its result."""

    def scoped(self) -> dict[Any, Any]:
        """The table of the settings that hold here; ``table`` where no block is open."""

    def forget(self) -> None:
        """Choose anew at the next call, because what calls name has changed."""

    def failed(self, key: Any, error: BaseException, arguments: Mapping[str, Any]) -> Any:
        """Answer a call whose kernel raised: another one runs where that is safe, else the error reaches the caller."""


class PlainBinding(NamedTuple):
    """What a public function says of calls that are bound to what one of them chose.

    Attributes:
        passed: the name of the argument that each call passes.
        kind: of that argument, first whether it is one or several, in words, then its sizes as choices tell them apart;
            raises InvalidCallError for what is neither.
        finish: from what a kernel gave to what the function returns.
        changed: whether what the example named is another now; None where it cannot be.
        quick: given what runs, the whole of a call in one function: the result, or None for another kind than that of
            the example. None where ``kind`` and ``finish`` are all there is.
    """

    passed: str
    kind: Callable[[Any], tuple[Any, ...]]
    finish: Callable[[Any], Any]
    changed: Callable[[], bool] | None = None
    quick: Callable[[Callable[..., Any]], Callable[[Any], Any]] | None = None


@dataclass(frozen=True, slots=True)
class PlainFunction:
    """What the user calls, of operations without tensors.

    Attributes:
        name: public name.
        signature: a Python function with the public signature and docstring; its body is never run.
        route: from the public arguments to an operation and canonical ones; raises InvalidCallError.
        operations: those that the route can return.
        make: the public function itself, given the engine's ways: it makes a key, finds what runs, and runs it.
        bind: what ``lz.bind`` needs, given all public arguments of an example.
    """

    name: str
    signature: Callable[..., Any]
    route: Callable[[Mapping[str, Any]], Routed]
    operations: tuple[Operation, ...]
    make: Callable[[Ways], Callable[..., Any]]
    bind: Callable[[Mapping[str, Any]], PlainBinding]

"""A function without tensors, bound to one kind of call: what runs is chosen once, and calls look nothing up."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from layerzero.asking.answers import check_operation
from layerzero.core.errors import InvalidCallError
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Plan, Report
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.plain import PLAIN_CALLS, plain_facts


class PlainBound:
    """What ``lz.bind`` hands out for a function without tensors.

    Attributes:
        function: name of the public function.
        plan: what runs; chosen anew by the first guarded call after the epoch moved, what the example named changed,
            or in a forked child.
        guard: whether calls are looked at.
        parameters: the name of what a call passes.
    """

    def __init__(self, function: PlainFunction, arguments: dict[str, Any], wanted: str, *, guard: bool) -> None:
        self.function, self.guard, self._wanted = function.name, guard, wanted
        self._dispatcher, self._call = PLAIN_CALLS[function.name]
        self._ways, self._example = self._dispatcher.ways, arguments
        self._choose()
        self.parameters = (self._binding.passed,)
        self._fixed = {name: value for name, value in arguments.items() if name != self._binding.passed}

    def _choose(self) -> None:
        """Choose for calls like the example, in the epoch that holds now."""
        ENGINE.registry.ready()
        function = self._dispatcher.function
        binding = self._binding = function.bind(self._example)
        self._table, self._changed = self._ways.table, binding.changed
        self._kind = binding.kind(self._example[binding.passed])
        routed = function.route(dict(self._example))
        self.plan: Plan = self._dispatcher.choose(plain_facts(routed), current_policy())
        check_operation(self._wanted, self.plan.report)
        self._run: Callable[[Any], Any] = self.plan.run
        whole = self._whole if self.guard else _nothing
        self._quick: Callable[[Any], Any] = whole if binding.quick is None else binding.quick(self._run)

    def _whole(self, items: Any) -> Any:
        """A call of the kind that was bound; None for another."""
        binding = self._binding
        return binding.finish(self._run(items)) if binding.kind(items) == self._kind else None

    @property
    def report(self) -> Report:
        """Why this kernel: every candidate with its score or a reason."""
        return self.plan.report

    def __repr__(self) -> str:
        guard = "" if self.guard else ", guard=False"
        return f"<lz.{self.function} bound to {self.plan.kernel_id}, takes {self.parameters[0]}{guard}>"

    def __call__(self, items: Any) -> Any:
        """Run a call of the kind that was bound."""
        if not self.guard:
            found = self._quick(items)
            return self._binding.finish(self._run(items)) if found is None else found
        # another table: another epoch or process, settings of a block, or somebody listens
        if self._ways.table is not self._table or (self._changed is not None and self._changed()):
            return self._anew(items)
        try:
            found = self._quick(items)
        except (KeyboardInterrupt, SystemExit, InvalidCallError):
            raise
        except BaseException:  # noqa: BLE001  # some libraries panic in classes of their own; the function answers it
            return self._call(items, **self._fixed)
        return self._other(items) if found is None else found

    def _other(self, items: Any) -> Any:
        """Answer a call of other sizes. Raises: InvalidCallError for several in place of one, or one of several."""
        kind = self._binding.kind(items)
        if kind[0] != self._kind[0]:
            problem = f"{self.parameters[0]}: wanted {self._kind[0]} as bound, got {kind[0]}"
            raise InvalidCallError(f"{self.function}, bound", [f"{problem}; bind again, or call lz.{self.function}"])
        return self._call(items, **self._fixed)

    def _anew(self, items: Any) -> Any:
        """Answer a call after what was chosen here stopped to hold; what a block decides holds for its calls alone."""
        if SCOPES.active or ENGINE.watchers:
            return self._other(items)
        self._choose()
        return self._other(items) if self._binding.kind(items) != self._kind else self(items)


def _nothing(_: Any) -> None:
    """What an unguarded call knows of its items, where the function has no quick way."""


def bind_plain(function: PlainFunction, wanted: str, args: Any, kwargs: Any, *, guard: bool) -> PlainBound:
    """Bind a function without tensors. Raises: TypeError for arguments that it does not take; what choosing raises."""
    try:
        bound = inspect.signature(function.signature).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"bind {function.name}: {error}") from None
    bound.apply_defaults()
    return PlainBound(function, dict(bound.arguments), wanted, guard=guard)

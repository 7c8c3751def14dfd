"""A function without tensors, bound to one kind of call: what runs is chosen once, and calls look nothing up."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from layerzero.asking.answers import check_operation
from layerzero.core.errors import InvalidCallError
from layerzero.core.forking import forked
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Plan, Report
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.plain import PLAIN_CALLS, PlainDispatcher, plain_facts


class PlainBound:
    """What ``lz.bind`` hands out for a function without tensors.

    Attributes:
        function: name of the public function.
        plan: what runs; chosen anew by the first guarded call after the epoch moved, or in a forked child.
        guard: whether calls are looked at.
        parameters: the name of what a call passes.
    """

    def __init__(self, function: PlainFunction, arguments: dict[str, Any], wanted: str, *, guard: bool) -> None:
        self.function, self.guard, self._wanted = function.name, guard, wanted
        self._dispatcher, self._call = PLAIN_CALLS[function.name]
        self._example = arguments
        self._binding = function.bind(arguments)
        self.parameters = (self._binding.passed,)
        self._fixed = {name: value for name, value in arguments.items() if name != self._binding.passed}
        self._kind = self._binding.kind(arguments[self._binding.passed])
        self._choose(self._dispatcher)

    def _choose(self, dispatcher: PlainDispatcher) -> None:
        """Choose for calls like the example, in the epoch that holds now."""
        ENGINE.registry.ready()
        self._epoch, self._forked = ENGINE.epoch, forked()
        routed = PLAIN_CALLS[self.function][0].function.route(dict(self._example))
        self.plan: Plan = dispatcher.choose(plain_facts(routed), current_policy())
        check_operation(self._wanted, self.plan.report)
        self._run: Callable[[Any], Any] = self.plan.run

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
            return self._binding.finish(self._run(items))
        kind = self._binding.kind(items)
        if kind[0] != self._kind[0]:
            problem = f"{self.parameters[0]}: wanted {self._kind[0]} as bound, got {kind[0]}"
            raise InvalidCallError(f"{self.function}, bound", [f"{problem}; bind again, or call lz.{self.function}"])
        if kind != self._kind or SCOPES.active or ENGINE.watchers:  # other sizes, or somebody else decides or listens
            return self._call(items, **self._fixed)
        if self._epoch != ENGINE.epoch or self._forked != forked():
            self._choose(self._dispatcher)
        try:
            raw = self._run(items)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001  # some libraries panic in classes of their own; the function answers it
            return self._call(items, **self._fixed)
        return self._binding.finish(raw)


def bind_plain(function: PlainFunction, wanted: str, args: Any, kwargs: Any, *, guard: bool) -> PlainBound:
    """Bind a function without tensors. Raises: TypeError for arguments that it does not take; what choosing raises."""
    try:
        bound = inspect.signature(function.signature).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"bind {function.name}: {error}") from None
    bound.apply_defaults()
    return PlainBound(function, dict(bound.arguments), wanted, guard=guard)

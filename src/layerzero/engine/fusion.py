"""What compiled code computes by itself: torch's own expressions of operations that a compiler fuses.

A norm or an activation moves bytes, and a compiler computes it in one loop with what stands before and behind; through
an operator of ours it sees nothing. Between an addition and a product, compiled, a norm with its activation took 20 us
by torch's expressions and 51 by our operators (1 x 1024, bfloat16, two threads, AMD EPYC, torch 2.13, 2026-11-24). So
Dynamo gets the expression and the operator, whose result is not read: its checks of the arguments hold while it traces,
and compilers that drop dead code drop it. An exported program keeps the operators alone.

A user with wishes keeps the operator, which chooses when it runs: see :func:`wishes`. Dynamo guards what this module
says, so that code which was compiled under the other answer is compiled anew, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from layerzero.core.errors import PolicyError
from layerzero.core.operation import Function
from layerzero.engine.config import CONFIGURATION, SCOPES
from layerzero.engine.policy import Policy

Expression = Callable[..., Callable[[], object] | None]


class Fusing:
    """Whether compiled code may compute by itself, in one word that Dynamo guards.

    Attributes:
        wish: whether it may not, so that each function is compiled twice at most.
    """

    __slots__ = ("_base", "wish")

    def __init__(self) -> None:
        self._base, self.wish = "", False

    def look(self, *, frozen: bool, registered: bool) -> None:
        """Note what holds for the whole process now."""
        try:
            self._base = wishes(CONFIGURATION.policy, frozen=frozen, registered=registered)
        except PolicyError as error:  # calls raise it
            self._base = str(error)
        self.scoped()

    def scoped(self, _: int = 0) -> None:
        """Note what open scopes wish for, in whatever threads: compiled code cannot ask for its own."""
        self.wish = bool(self.why())

    def why(self) -> str:
        """Why it may not; empty where it may."""
        scoped = (wishes(policy, frozen=False, registered=False) for policy in SCOPES.policies)
        return self._base or next((f"a scope: {each}" for each in scoped if each), "")


def wishes(policy: Policy, *, frozen: bool, registered: bool) -> str:
    """Why compiled code has to choose a kernel when it runs; empty without wishes.

    ``registered`` says that the program itself registered kernels, which is a wish for them.
    """
    if frozen:
        return "choices are frozen"
    if policy.strict_mode or not policy.allow_adaptation:  # the expression would cast
        return "strict_mode or allow_adaptation=False"
    if policy.locks or policy.rules:
        return "locks or rules"
    if policy.prefer_sources or policy.avoid_sources or policy.allow or policy.deny:
        return "kernels that are preferred, avoided, allowed or denied"
    if policy.debug or policy.deterministic or not policy.enabled or policy["unmeasured"] != "stock":
        return "debug, deterministic, enabled=False or unmeasured=priority"
    if policy.invariant:
        return "batch_invariant or require_tp_invariant"
    if registered:
        return "kernels that the program registered"
    return ""


FUSING = Fusing()
"""What holds in this process."""

SCOPES.watch(FUSING.scoped)  # a scope may be open already


def expression_of(function: Function) -> Expression | None:
    """Torch's own way to a function's result, where a compiler fuses it; None for all others."""
    if function.mutates or not all(operation.fuses for operation in function.operations):
        return None
    return function.operations[0].stock


def expressed(expression: Expression, arguments: Mapping[str, Any], promised: Any) -> Any:
    """The result by torch's expression, or ``promised``, the operator's, where torch's would be another thing.

    Runs while Dynamo traces: of torch's types and Python's alone.
    """
    run = expression(**arguments)
    if run is None:
        return promised
    found: Any = run()
    results, wanted = (each if isinstance(each, tuple) else (each,) for each in (found, promised))
    for one, other in zip(results, wanted, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape:
            return promised
    return found


def exporting() -> bool:
    """Whether a program is being exported. Of torch 2.11's function, Dynamo knows that the answer is yes, always."""
    return torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)


def written() -> bool:
    """Whether a call becomes part of a program that is exported or traced, which others run without LayerZero."""
    return exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def told() -> str:
    """A line on what compiled code does, for explanations of a call that a compiler fuses."""
    if why := FUSING.why():
        return f"torch.compile keeps the operator, which chooses when it runs ({why})"
    return "torch.compile computes torch's own expression of it, fused with what stands around it"

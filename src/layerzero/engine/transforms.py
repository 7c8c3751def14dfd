"""Calls inside a transform (vmap, grad, jvp, functionalize) or a torch.jit.trace: they see torch's operators alone.

The reference is made of them, so it runs, where the operator's word allows it: a lock on another kernel, a denial or
``fallback_enabled: false`` makes such a call an error, as anywhere else where nothing legal is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from layerzero.core.errors import InvalidCallError, NoKernelFoundError
from layerzero.core.facts import CallState, FactsBuilder
from layerzero.core.operation import Routed
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.legality import policy_reasons
from layerzero.engine.policy import Policy, names_kernel
from layerzero.engine.reference import reference_call
from layerzero.engine.registry import Registry

_HINT = (
    "inside a transform (vmap, grad, jvp, functionalize, forward-mode AD, torch.jit.trace) only the reference runs; "
    "call it outside, or allow the reference there, as with lz.scope"
)


def reference_in_transform(
    routed: Routed, policy: Policy, registry: Registry, read_state: Callable[[], CallState]
) -> Any:
    """Run the reference of a call whose tensors hide what they are made of.

    What Dynamo traces here is what the compiler differentiates: a call that writes into a tensor of a graph, which no
    operator of ours may do. It reads no state of the call, which nobody asks for unless policy says something.

    Raises: NoKernelFoundError where policy does not allow it; InvalidCallError where torch cannot write into a tensor
        that the operation changes.
    """
    if torch.compiler.is_dynamo_compiling() and _is_free(policy):
        with _without_autocast(routed):
            return reference_call(routed)
    with _untraced():
        _check_policy(routed, policy, registry, read_state())
    mutated = routed.operation.schema.mutated
    with _without_autocast(routed):
        try:
            return reference_call(routed)
        except (RuntimeError, NotImplementedError) as error:
            if not mutated:
                raise
            told = str(error).strip().partition("\n")[0][:200]
            problem = f"{', '.join(mutated)}: wanted tensors that torch can write into inside this transform: {told}"
            raise InvalidCallError(routed.operation.name, [problem]) from error


@contextmanager
def _untraced() -> Iterator[None]:
    """Let sizes be numbers meanwhile: in a torch.jit.trace they are tensors, which no rule compares with its own."""
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _without_autocast(routed: Routed) -> AbstractContextManager[Any]:
    if not torch._C._is_any_autocast_enabled():  # asking for it raises on devices that have none, such as meta
        return nullcontext()
    device = next(value for value in routed.arguments.values() if isinstance(value, torch.Tensor)).device.type
    return torch.autocast(device, enabled=False)


def _is_free(policy: Policy) -> bool:
    """Whether nothing is said that could refuse the reference."""
    return bool(policy.fallback_enabled and not (policy.deny or policy.rules or policy.locks))


def _check_policy(routed: Routed, policy: Policy, registry: Registry, state: CallState) -> None:
    """Raise NoKernelFoundError where policy refuses the reference, or a lock names another kernel."""
    if _is_free(policy):
        return
    name = routed.operation.name
    facts = FactsBuilder(routed.operation).of_valid(routed.arguments, layout=routed.layout, state=state)
    reference = next((each for each in registry.candidates(name) if each.is_reference), None)
    if reference is None:
        raise NoKernelFoundError(name, {}, _HINT)
    reasons = policy_reasons(reference, facts, policy)
    lock = registry.lock_for(policy, facts)
    if lock is not None and lock.otherwise == "error" and not names_kernel(lock.kernel, reference):
        locked = f"lock {lock.operation} = {lock.kernel}"
        reasons.append(Reason(ReasonCode.POLICY_DENIED, locked, lock.kernel, "the reference"))
    if reasons:
        raise NoKernelFoundError(name, {reference.id: reasons}, _HINT)

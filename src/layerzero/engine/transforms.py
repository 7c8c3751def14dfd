"""Calls inside a transform (vmap, grad, jvp, functionalize) or a torch.jit.trace: they see torch's operators alone.

The reference is made of them, so it runs, where the operator's word allows it: a lock on another kernel, a denial or
``fallback_enabled: false`` makes such a call an error, as anywhere else where nothing legal is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from layerzero.core import graph_capture
from layerzero.core.device import Device
from layerzero.core.eager_state import declared
from layerzero.core.errors import InvalidCallError, NoKernelFoundError
from layerzero.core.facts import CallState, FactsBuilder
from layerzero.core.operation import Function, Routed
from layerzero.core.plan import Plan, Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import log
from layerzero.engine.legality import cast_reasons, policy_reasons
from layerzero.engine.pick import SHAPES_ONLY
from layerzero.engine.policy import Policy, names_kernel
from layerzero.engine.probe import Machine
from layerzero.engine.reference import fake_call, reference_call
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
    operator of ours may do. It reads no state of the call, which is only used where policy says something.

    Raises: NoKernelFoundError where policy does not allow it; InvalidCallError where torch cannot write into a tensor
        that the operation changes.
    """
    _refuse_casts(routed, policy)
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


def refuse_hidden(
    function: Function, arguments: Mapping[str, Any], default_layout: str | None, error: RuntimeError
) -> None:
    """Name the numbers that a transform hides from a check of the route: torch's own error names none.

    Raises: InvalidCallError where there are any.
    """
    numbers = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
        and not (value.is_floating_point() or value.is_complex())
        and torch._C._functorch.is_functorch_wrapped_tensor(value)
    }
    if numbers:
        seen = {name: _first_of_batch(value) for name, value in numbers.items()}
        refused = functools.partial(_is_refused, function, default_layout)
        hidden = [name for name in numbers if refused({**arguments, **seen, name: numbers[name]})] or list(numbers)
        helps = "batch the other tensors alone (in_dims=None for these), or make one call of all sequences"
        problem = (
            f"{' or '.join(hidden)}: wanted numbers that every call of a vmap shares, got numbers for each; {helps}"
        )
        raise InvalidCallError(function.name, [problem]) from error


def _first_of_batch(value: torch.Tensor) -> torch.Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        batched = torch._C._functorch.maybe_get_bdim(value)
        value = torch._C._functorch.get_unwrapped(value)
        value = value.select(batched, 0) if batched >= 0 and value.shape[batched] else value
    return value


def _is_refused(function: Function, default_layout: str | None, arguments: dict[str, Any]) -> bool:
    """Whether a check cannot read what it reads; what it says of numbers that it reads is about those of one call."""
    try:
        function.route(arguments, default_layout)
    except RuntimeError:
        return True
    except InvalidCallError:
        pass
    return False


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
    bent = policy.deny or policy.rules or policy.locks or policy.invariant
    return bool(policy.fallback_enabled and not bent)


def _refuse_casts(routed: Routed, policy: Policy) -> None:
    """Raise NoKernelFoundError where a call cast its tensors and policy wants none cast."""
    reasons = cast_reasons(routed, policy)
    if reasons:
        raise NoKernelFoundError(routed.operation.name, {f"reference.{routed.operation.name}": reasons})


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


def capturing(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the call is made inside a CUDA graph capture. Raises: InvalidCallError for one of another device."""
    if not tensors or not tensors[0].is_cuda:
        return False
    inside = torch.cuda.is_current_stream_capturing()
    graph_capture.check_device(tensors[0].device.index, inside=inside)
    return inside


def call_state(
    tensors: Sequence[torch.Tensor], policy: Policy, reads: frozenset[str], device: Device | None = None
) -> CallState:
    """Read what matters for a call with these tensors; ``reads`` names the function's further state.

    ``device`` is the call's device, if that is not where its tensors lie.
    """
    cuda = bool(tensors) and tensors[0].is_cuda if device is None else device.torch_type == "cuda"
    requires_grad = False
    if torch.is_grad_enabled():
        for tensor in tensors:
            requires_grad = requires_grad or tensor.requires_grad
    return CallState(
        requires_grad=requires_grad,
        deterministic=policy.deterministic or torch._C._get_deterministic_algorithms(),
        capturing=capturing(tensors),
        autocast=torch._C._is_any_autocast_enabled(),
        read={each.fact: each.read(cuda=cuda) for each in declared(reads)},
    )


def in_transform() -> bool:
    """Whether functorch (vmap, grad, jvp), forward-mode AD or torch.jit.trace is at work.

    Tensors hide what they are made of there; in a trace sizes are tensors, and only torch's operators leave anything.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    return bool(torch._C._is_tracing())


def top_mode() -> object:
    """The mode that sees a call of torch's functions first, or None."""
    modes = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(modes - 1) if modes else None


def is_default_device(mode: object) -> bool:
    """Whether this is what ``torch.set_default_device`` and ``with torch.device`` set; a call should import nothing."""
    kind = type(mode)
    return kind.__name__ == "DeviceContext" and kind.__module__ == "torch.utils._device"


def in_function_mode() -> bool:
    """Whether a mode that is no default device's hears every function of torch, and may compute something else."""
    modes = torch._C._len_torch_function_stack()
    return modes > 0 and not all(is_default_device(torch._C._get_function_stack_at(each)) for each in range(modes))


def in_dispatch_mode() -> bool:
    """Whether a mode (fake tensors, tracing, functionalisation) listens to every operator."""
    return torch._C._len_torch_dispatch_stack() > 0


if TYPE_CHECKING:
    from layerzero.engine.dispatch import Dispatcher


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The machine that calls on tensors without memory are judged for, in place of the one here.

    Attributes:
        machine: its device and libraries.
        plans: what each call would get, by its sizes and arguments; a model repeats its layers' calls.
        refused: reports of calls that no kernel may run there.
    """

    machine: Machine
    plans: dict[Hashable, Plan | None] = field(default_factory=dict)
    refused: list[Report] = field(default_factory=list)


ELSEWHERE: ContextVar[Elsewhere | None] = ContextVar("layerzero_elsewhere", default=None)


def judged_on(tensors: list[torch.Tensor]) -> Device:
    """The device that such a call is judged for: a fake tensor's own; of meta tensors, where warmup and tune work."""
    real = next((each.device for each in tensors if not each.is_meta), None)
    return Device.detect(real or ("cuda" if torch.cuda.is_available() else "cpu"))


def shapes_answer(dispatcher: Dispatcher, arguments: dict[str, Any], policy: Policy) -> Any:
    """Answer a call on meta tensors: its results have shapes only, and no kernel runs."""
    if dispatcher.engine.watchers:
        tell_shapes(dispatcher, arguments, policy)
    routed = dispatcher.function.route(dict(arguments), policy.layout)
    _refuse_casts(routed, policy)
    return fake_call(routed)


def tell_shapes(dispatcher: Dispatcher, arguments: dict[str, Any], policy: Policy) -> None:
    """Tell the watchers which kernel a call would get if its tensors had memory.

    Not while torch compiles or exports: what it traces is called later, and its sizes may be symbols.
    """
    tensors = dispatcher.tensors(arguments)
    if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
        return
    if any(type(size) is not int for each in tensors for size in each.shape):
        return
    elsewhere = ELSEWHERE.get()
    if elsewhere is None:
        plan = _shapes_plan(dispatcher, arguments, policy, Machine(judged_on(tensors)))
    else:
        key = _alike(dispatcher.function.name, arguments, policy)
        if key not in elsewhere.plans:
            elsewhere.plans[key] = _shapes_plan(dispatcher, arguments, policy, elsewhere.machine, elsewhere)
        plan = elsewhere.plans[key]
    if plan is not None:
        for watcher in dispatcher.engine.watchers:
            watcher(dispatcher.function, plan)


def _alike(function: str, arguments: Mapping[str, Any], policy: Policy) -> Hashable:
    """What calls have in common that are judged alike; for arguments that make no key, one that no other call has."""
    leaves, structure = pytree.tree_flatten([*arguments.values()])
    parts = [
        (each.shape, each.stride(), each.dtype, each.requires_grad) if isinstance(each, torch.Tensor) else each
        for each in leaves
    ]
    key = (function, *arguments, *parts, *map(type, leaves), structure, id(policy))
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _shapes_plan(
    dispatcher: Dispatcher,
    arguments: dict[str, Any],
    policy: Policy,
    machine: Machine,
    elsewhere: Elsewhere | None = None,
) -> Plan | None:
    """The plan of a call that has shapes only; it is never run. None where no kernel is legal."""
    device, state = machine.device, None
    assert device is not None
    if elsewhere is not None:
        state = call_state(dispatcher.tensors(arguments), policy, dispatcher.function.state, device)
    report, _ = dispatcher.explain(arguments, policy, machine=machine, call_state=state)
    chosen = report.chosen
    if chosen is None:
        if elsewhere is not None:
            elsewhere.refused.append(report)
        log.warning("%s on tensors without memory: no kernel is legal on %s", report.operation, device.name)
        return None
    if elsewhere is None:
        report = msgspec.structs.replace(report, notes=(*report.notes, SHAPES_ONLY + device.name))
    return Plan(chosen.kernel, report, "", _nothing, _nothing, chosen.adaptations)


def _nothing(**_: Any) -> dict[str, Any]:
    """What has no memory is neither adapted nor run."""
    return {}

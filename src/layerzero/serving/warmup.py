"""Build what compiles before it is needed: a JIT kernel may be chosen only where its artefact exists."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerzero import _assembly
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_named
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Operation
from layerzero.engine import legality, planning
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE, Dispatcher
from layerzero.engine.first_run import first_run
from layerzero.engine.functions import CALLS
from layerzero.engine.jit import BUILT
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, function_of
from layerzero.ops.calls import case_of, case_tensors, derived

log = logging.getLogger("layerzero")


@dataclass(frozen=True, slots=True)
class Built:
    """One artefact that warmup made: kernel, operation, seconds, and the error where it failed."""

    kernel_id: str
    operation: str
    seconds: float
    error: str = ""


def warmup(
    operation: str = "*",
    shapes: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device | None = None,
    **params: Any,
) -> list[Built]:
    """Compile and load every legal kernel of an operation for given shapes, so that calls may choose it.

    Args:
        operation: an operation, function, alias or glob.
        shapes: shapes of the first tensor; attention: (B, S, H, D) with equal lengths and heads, norms: (*, D). The
            operation's own cases if None.
        dtype: dtype of the tensors.
        device: where; the CPU, or the current CUDA device if there is one.
        params: further arguments of the calls.
    Returns: what was built, with seconds and errors. A kernel that fails to build stays refused. One that may not run
        before it was vetted is vetted first, in a child process, as ``lz.vet`` does. Where ``auto_tune_on_warmup`` is
        set, every legal kernel is also measured on these calls, as ``lz.tune`` does.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    implied = OPERATION_ALIASES[operation][1] if operation in OPERATION_ALIASES else {}
    given, wanted = {**implied, **params}, dtype_named(dtype)
    if any(legality.untrusted(kernel, Device.detect(str(target))) for kernel in REGISTRY.kernels(operation)):
        calls = _every_call(operation, shapes, wanted, target, given)
        _assembly.vet([pair for chosen, arguments in calls for pair in _awaiting(chosen, arguments)])
    results = []
    for chosen, arguments in _every_call(operation, shapes, wanted, target, given):
        results += _warm(chosen, arguments)
    if results:
        ENGINE.bump()
    if current_policy()["auto_tune_on_warmup"]:
        _assembly.tune([_facts(*each) for each in _every_call(operation, shapes, wanted, target, given)])
    return results


def _every_call(
    operation: str,
    shapes: Sequence[Sequence[int]] | None,
    dtype: torch.dtype,
    device: torch.device,
    given: Mapping[str, Any],
) -> Iterator[tuple[Operation, dict[str, Any]]]:
    """The calls that warmup makes, their tensors made one call at a time."""
    for name in sorted({name for kernel in REGISTRY.kernels(operation) for name in kernel.operations}):
        chosen = REGISTRY.operation(name)
        if not _covered(operation, name):
            continue
        for tensors, case_params in _calls(chosen, shapes, dtype, device):
            canonical = {"layout": chosen.layouts[0]} if chosen.layouts else {}
            yield chosen, {**canonical, **case_params, **given, **tensors}


def _covered(pattern: str, name: str) -> bool:
    return any(name in kernel.operations for kernel in REGISTRY.kernels(pattern)) and (
        pattern not in FUNCTIONS or any(operation.name == name for operation in FUNCTIONS[pattern].operations)
    )


def _bound(operation: Operation, arguments: dict[str, Any]) -> tuple[Dispatcher, dict[str, Any]]:
    dispatcher = _dispatcher(operation)
    accepted = {parameter.name for parameter in dispatcher.function.parameters}
    given = {name: value for name, value in arguments.items() if name in accepted}
    return dispatcher, dispatcher.function.bind((), given)


def _facts(operation: Operation, arguments: dict[str, Any]) -> Facts:
    dispatcher, bound = _bound(operation, arguments)
    return dispatcher.explain(bound, current_policy())[0].facts


def _awaiting(operation: Operation, arguments: dict[str, Any]) -> Iterator[tuple[Kernel, Facts]]:
    """The kernels that only vetting keeps from a call."""
    dispatcher, bound = _bound(operation, arguments)
    with SCOPES.scope({"allow_jit_compile": True}):
        report, ranked = dispatcher.explain(bound, current_policy())
    for kernel in legality.awaiting(ranked, report.facts):
        yield kernel, report.facts


def _warm(operation: Operation, arguments: dict[str, Any]) -> list[Built]:
    dispatcher, bound = _bound(operation, arguments)
    results = []
    with SCOPES.scope({"allow_jit_compile": True}), torch.no_grad():
        policy = current_policy()
        report, ranked = dispatcher.explain(bound, policy)
        for candidate in ranked:
            kernel = candidate.kernel
            if not candidate.legal or not kernel.jit or BUILT.ready(kernel, report.facts):
                continue
            started = time.perf_counter()
            error = ""
            try:
                plan = planning.build(dispatcher.function, candidate, report, policy)
                with first_run(plan, ENGINE.ledger):
                    for _ in range(2):  # the first call compiles; the second shows that it need not again
                        plan.run(**_copies(bound, operation))
                BUILT.add(kernel, report.facts)
            except Exception as failure:  # noqa: BLE001  # a kernel that does not compile stays refused, and the list says why
                error = f"{type(failure).__name__}: {failure}"
                log.warning("warmup: %s did not build for %s: %s", kernel.id, operation.name, error)
            results.append(Built(kernel.id, operation.name, time.perf_counter() - started, error))
    return results


def _copies(arguments: Mapping[str, Any], operation: Operation) -> dict[str, Any]:
    mutated = operation.schema.mutated
    return {name: value.clone() if name in mutated else value for name, value in arguments.items()}


def _dispatcher(operation: Operation) -> Dispatcher:
    function = function_of(operation.name)
    if function is None:
        raise KeyError(f"{operation.name} belongs to no public function")
    return CALLS[function.name].dispatcher


def _calls(
    operation: Operation, shapes: Sequence[Sequence[int]] | None, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, object]]]:
    cases = operation.cases if shapes is None else tuple(case_of(operation, tuple(shape)) for shape in shapes)
    for case in cases:
        if case is not None:
            yield case_tensors(operation, case, dtype, device), dict(case.params) | derived(operation, case)

"""What happens when a kernel does not do its work: which may run next, what is remembered, what is reported."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from layerzero.core import indices
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, IsolatedKernelError, KernelExecutionError, refuse
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.operation import Routed
from layerzero.core.plan import Plan, Report
from layerzero.core.reasons import ReasonCode
from layerzero.core.system import log
from layerzero.engine import probe
from layerzero.engine.events import EVENTS
from layerzero.engine.first_run import Recent
from layerzero.engine.health import Health, let_pass
from layerzero.engine.policy import Policy
from layerzero.engine.reference import dtype_of, fake_call, leading


class _Engine(Protocol):
    """What of :class:`layerzero.engine.dispatch.Engine` a failure is recorded in."""

    health: Health
    recent: Recent

    @property
    def ledger(self) -> Ledger: ...

    def bump(self) -> None: ...


class WrongResultError(RuntimeError):
    """A kernel returned something of another shape, dtype or device than its operation defines."""


TOGETHER = "the other ranks of the group run it, too, so that no other kernel may run here alone"
"""Why a collective's kernel that failed is replaced by none, and does not rest: the ranks would part for good."""


def not_loaded(kernel: Kernel, report: Report, error: Exception, engine: _Engine) -> None:
    """Remember a kernel that could not be made ready; raise what is no kernel's fault.

    A library that does not load is out for this process, with all its kernels. Where its own module imported, what is
    missing is of this kernel alone, which is out; torch stays in. Any other error rests this kernel.
    """
    let_pass(error)
    if out_of_memory(error):
        raise error
    if report.facts.operation.is_collective:
        raise KernelExecutionError(kernel.id, report.operation, TOGETHER) from error
    backend, missing = kernel.backend, isinstance(error, (ImportError, OSError))
    if missing and backend.name != "torch" and backend.import_name not in sys.modules:
        reason = probe.mark_broken(backend, error)
        log.warning("%s: %s", kernel.id, reason.message)
        EVENTS.tell("failure", kernel, report.facts, str(reason))
        engine.bump()
    else:
        log.warning("%s did not load for %s: %s: %s", kernel.id, report.operation, type(error).__name__, error)
        _failed(engine, kernel, report.facts, error, forever=missing)


def _failed(engine: _Engine, kernel: Kernel, facts: Facts, error: Exception, **rest: Any) -> None:
    """Let a kernel rest on this kind of device, and tell those that listen."""
    engine.health.failed(kernel, facts.operation.name, error, device=facts.device.name, **rest)
    EVENTS.tell("failure", kernel, facts, f"{type(error).__name__}: {error}")


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on whatever device; allocators of CPUs have no error type of their own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or says_out_of_memory(str(error))


NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|^(.*what\(\):\s*)?std::bad_alloc\s*$"
    r"|Failed to allocate memory for requested|\b(CUDA|HIP|XPU)( driver)?( error:)? out of memory"
    r"|\b(CUBLAS|HIPBLAS|CUDNN|MIOPEN)_STATUS_ALLOC_FAILED|\b(cuda|hip)Error(MemoryAllocation|OutOfMemory)",
    re.MULTILINE | re.IGNORECASE,
)
"""Words of torch's allocator on Linux and elsewhere, of C++ behind torch's operators, and of ONNX Runtime's; of the
drivers of GPUs and their libraries, which torch raises as RuntimeError. A message that only mentions ``std::bad_alloc``
may tell of a size that means nothing, as after an overflow."""


def says_out_of_memory(text: str) -> bool:
    """Whether what a library said, as it ended or raised, is that memory ran out."""
    return NO_MEMORY.search(text) is not None


_NOT_CHANGEABLE = ("is being modified inplace", "is being used in an in-place operation")
"""torch's words for what autograd does not let code write into: leaves, their views, one of several views."""

_NOT_SAVED = "Inference tensors cannot be saved for backward"
"""torch's words for a call that records gradients with a tensor for which none can be computed."""

_CAPTURE_LOST = range(900, 908)
"""CUDA's errors of a stream that is being captured (cudaErrorStreamCaptureUnsupported and those that follow it)."""

_INVALIDATED = 901  # something did it before: cudaErrorStreamCaptureInvalidated


def _lost_capture(error: Exception) -> int | None:
    """CUDA's error code where a capture was lost; the context lives on, and everything in it."""
    if not isinstance(error, torch.AcceleratorError):
        return None
    code = getattr(error, "error_code", None)  # torch 2.9 and later
    if code is None and "captur" in str(error):
        code = _INVALIDATED if "previous error during capture" in str(error) else _CAPTURE_LOST[0]
    return code if code in _CAPTURE_LOST else None


def _context_is_dead(error: Exception) -> bool:
    """Whether a device error is one that stays: the next synchronisation raises again."""
    if not isinstance(error, torch.AcceleratorError):
        return False
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def check_values(plan: Plan, arguments: Mapping[str, Any]) -> None:
    """Look at values on the device once a kernel raised: what they are wrong about is not its fault.

    Raises: InvalidCallError.
    """
    facts = plan.report.facts
    operation, rules = facts.operation, indices.rules_of(facts.operation.schema, facts.layout, facts.tensors)
    if facts["capturing"] or not (rules or operation.check_values):
        return
    named = {name: arguments[name] for name in (*facts.tensors, *operation.schema.passed) if name in arguments}
    named |= {name: facts[name] for name in operation.looked_at}
    named |= {"layout": facts.layout} if facts.layout else {}
    refuse(operation.name, indices.problems(rules, named, operation))


def check_retry(
    plan: Plan,
    error: Exception,
    policy: Policy,
    engine: _Engine,
    arguments: Mapping[str, Any],
    tried: Sequence[Kernel] = (),
) -> None:
    """Return if another kernel may run in place of the one that raised; raise what the caller must see otherwise.

    What a hook of autograd or a signal handler raised is not the kernel's: it is raised as it is. So is running out of
    memory, which :func:`layerzero.engine.substitutes.ruled_out` answers, and so are a warning that the user turned into
    an error and values that are the caller's mistake. A capture that is lost ends the call: nothing more can be
    captured, and only the kernel that lost it is at fault. What fails in a collective ends the call, and nothing is
    remembered. A device error that stays leaves a dead context, and whatever was chosen last becomes a suspect. A
    library without code for this device will not get any: it is out. A kernel that writes into its arguments may have
    written already, unless it wrote into copies, in a process of its own. In all other cases the kernel rests (its
    breaker opens) and, if policy allows a fallback, the next one runs.
    """
    let_pass(error)
    kernel, operation, device = plan.kernel, plan.report.operation, plan.report.facts.device.name
    if out_of_memory(error) or isinstance(error, (Warning, InvalidCallError)):
        raise error
    unharmed = isinstance(error, IsolatedKernelError)
    mutated = () if unharmed else plan.report.facts.operation.schema.mutated
    if mutated and any(words in str(error) for words in _NOT_CHANGEABLE):
        raise InvalidCallError(operation, [f"{' or '.join(mutated)}: {error}"]) from error
    if _NOT_SAVED in str(error) and any(
        isinstance(each, torch.Tensor) and each.is_inference() for each in arguments.values()
    ):
        raise InvalidCallError(operation, [f"a tensor that was made in inference mode: {error}"]) from error
    lost, together = _lost_capture(error), plan.report.facts.operation.is_collective
    if lost is not None:
        if lost != _INVALIDATED and not kernel.is_reference and not together:
            _failed(engine, kernel, plan.report.facts, error)
        why = "the CUDA graph capture is lost, since something in it must not be captured; begin a new one"
        raise KernelExecutionError(kernel.id, operation, why) from error
    if together:
        log_failure(plan, error)
        raise KernelExecutionError(kernel.id, operation, TOGETHER) from error
    sticky = _context_is_dead(error)
    if not sticky:
        check_values(plan, arguments)
    if kernel.is_reference and not sticky:  # nothing is wrong with a definition: the call is, or this process
        for failed in tried:
            engine.health.pardon(failed, operation, device)
        raise KernelExecutionError(kernel.id, operation, "it is the reference, the last candidate") from error
    if sticky or mutated or not policy.fallback_enabled:
        log_failure(plan, error)
    if "no kernel image" in str(error):
        hint = f"Install a build of {kernel.source} for {plan.report.facts.device.name}"
        _failed(engine, kernel, plan.report.facts, error, forever=True, code=ReasonCode.BACKEND_ERROR, hint=hint)
    else:
        _failed(engine, kernel, plan.report.facts, error, forever=sticky)
    if isinstance(error, torch.AcceleratorError):
        engine.health.device_error(kernel.backend, error)
    engine.ledger.record_failure(kernel, plan.report.facts, f"{type(error).__name__}: {error}")
    if sticky:
        suspects = engine.recent.accuse(plan, engine.ledger, error)
        engine.health.context_lost = _context_lost(suspects)
        raise KernelExecutionError(kernel.id, operation, engine.health.context_lost) from error
    if mutated:
        why = f"it may have written into {', '.join(mutated)} before it failed"
        raise KernelExecutionError(kernel.id, operation, why) from error
    if not policy.fallback_enabled:
        raise KernelExecutionError(kernel.id, operation, "fallback_enabled is false") from error


def _context_lost(suspects: Sequence[str]) -> str:
    """Why nothing can run in this process any more, which kernel may be the cause, and how to find out."""
    if not suspects:
        return "the device's context is lost; restart the process. Only torch's own kernels ran, none is suspected"
    return (
        "the device's context is lost; restart the process. The error may be that of an earlier launch; suspected, the "
        f"latest first: {'; '.join(suspects)}. They are refused until `layerzero doctor --confirm` or "
        "lz.confirm_suspects() has run each in a child process"
    )


def _said(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} of {dtype_name(dtype)}"


def wrong_result(plan: Plan, result: Any, given: Mapping[str, Any]) -> WrongResultError | None:
    """Compare the first result of a plan with what its operation defines for what was given; None if it fits."""
    facts = plan.report.facts
    got = result if isinstance(result, tuple) else () if result is None else (result,)
    if _as_declared(got, facts, given, plan.gives):
        return None
    wanted = _expected(plan, given)
    laid = f" in layout {facts.layout}" if facts.layout else ""
    for index, (tensor, expected) in enumerate(zip(got, wanted, strict=False)):
        if not isinstance(tensor, torch.Tensor):
            return WrongResultError(f"result {index}: wanted {_said(*expected)}{laid}, got {type(tensor).__name__}")
        if (tuple(tensor.shape), tensor.dtype) != expected:
            got_instead = _said(tuple(tensor.shape), tensor.dtype)
            return WrongResultError(f"result {index}: wanted {_said(*expected)}{laid}, got {got_instead}")
        if tensor.device.type != facts.device.torch_type:
            return WrongResultError(f"result {index}: wanted it on {facts.device.torch_type}, got {tensor.device}")
    if len(got) != len(wanted):
        return WrongResultError(f"wanted {len(wanted)} results, got {len(got)}")
    return None


def _as_declared(got: tuple[Any, ...], facts: Facts, given: Mapping[str, Any], gives: torch.dtype | None) -> bool:
    """Whether results are what the schema says they are; False where it does not say enough: the fake function does.

    That may be the reference on the meta device: 50 us to 500 us, where this takes 3 us (AMD EPYC, 2026-11-26).
    """
    schema = facts.operation.schema
    outputs = schema.results(facts)
    if len(got) != len(outputs):
        return False
    for result, output in zip(got, outputs, strict=True):
        dtype = dtype_of(output, facts) if gives is None or output.own_dtype else gives
        fits = isinstance(result, torch.Tensor) and result.dtype is dtype
        if not fits or result.device.type != facts.device.torch_type:
            return False
        axes = output.axes_in(facts.layout, schema.canonical)
        named = axes[1:] if axes[:1] == ("...",) else axes
        sizes = [given.get(axis) if axis in schema.scalars else facts.get(axis) for axis in named]
        if not axes or list(result.shape) != [*leading(facts, axes), *sizes]:
            return False
    return True


def _expected(plan: Plan, given: Mapping[str, Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the operation's results in the caller's layout, from its fake function."""
    facts = plan.report.facts
    schema = facts.operation.schema
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in facts.tensors.items()
    }
    arguments = {name: facts[name] for name in (*schema.chosen, *schema.bounds)} | empty
    named = (*schema.scalars, *schema.handles)  # a size may be among them, and the group that it follows from
    arguments |= {name: given[name] for name in named if name in given}
    results = fake_call(Routed(facts.operation, arguments, facts.layout))
    results = results if isinstance(results, tuple) else () if results is None else (results,)
    given_as = [None if each.own_dtype else plan.gives for each in schema.results(facts)]
    return [(tuple(each.shape), dtype or each.dtype) for each, dtype in zip(results, given_as, strict=True)]


def log_failure(plan: Plan, error: BaseException) -> None:
    """Write down a failure that no fallback tells of: nothing else may run, or nothing else is left."""
    log.warning("%s failed in %s: %s: %s", plan.kernel.id, plan.report.operation, type(error).__name__, error)


def alone(plan: Plan, error: BaseException) -> NoReturn:
    """Raise what a call ends with whose other kernels may not run, either; the next call asks its kernel again."""
    if isinstance(error, Exception) and out_of_memory(error):
        raise error from None
    log_failure(plan, error)
    locked = plan.report.locked
    why = f"the {locked} allows nothing else" if locked else "no other kernel is legal; lz.explain lists why"
    raise KernelExecutionError(plan.kernel.id, plan.report.operation, why) from error

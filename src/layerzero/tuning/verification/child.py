"""What children of vetting, rehearsing and confirming do: run a kernel on calls, where a crash does no harm.

Results are compared in float64. Calls of ordinary size are compared whole, as conformance does. Others are compared in
the pieces that their operation cuts out of them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import KernelExecutionError, LayerZeroError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, home_of
from layerzero.core.operation import Operation, Routed
from layerzero.core.plain import Plain
from layerzero.core.recipe import CallRecipe
from layerzero.engine.config import SCOPES
from layerzero.engine.failures import out_of_memory
from layerzero.engine.functions import CALLS
from layerzero.engine.plain import plain_facts
from layerzero.engine.reference import as_tuple
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import facts as facts_of
from layerzero.ops import function_of
from layerzero.ops.calls import case_of_sizes
from layerzero.ops.recipes import arguments_of_recipe
from layerzero.testing import execution, quick_checks
from layerzero.testing.child_main import Tell
from layerzero.testing.compare import Expected, check, expected, for_kernel, problems
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import attempt, build, duplicate, lost_context
from layerzero.testing.sizes import CheckSetting, fits
from layerzero.tuning.storage.environment import bounded

MAX_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
"""What the reference may need besides the tensors, in float64: several of 0.1 GB on a CPU, of 2 GB on a GPU."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call that is a piece of a larger one, its truth, and where its result lies in the whole one."""

    call: RandomCall
    truth: Expected
    place: Callable[[Tensor], Tensor]

    def problems(self, results: tuple[Any, ...], kernel: Kernel) -> list[str]:
        """What is wrong with this piece of a kernel's results: also with its log-sum-exps, by which others merge."""
        placed = tuple(self.place(each) if isinstance(each, Tensor) else each for each in results)
        return problems(placed, self.call.arguments, for_kernel(self.truth, kernel))


@dataclass(frozen=True, slots=True)
class Truth:
    """What a call should give, whole or in parts."""

    call: RandomCall
    whole: Expected | None
    parts: tuple[CallPiece, ...] = ()

    def problems(self, kernel: Kernel, run: Callable[..., Any]) -> list[str]:
        """What is wrong with a kernel that runs the call's arguments."""
        if self.whole is not None:
            return check(self.call, run, for_kernel(self.whole, kernel))
        results = as_tuple(run(**self.call.arguments))
        return [problem for part in self.parts for problem in part.problems(results, kernel)]

    def error(self, result: Any) -> float | None:
        """Distance of the first result from the truth, relative to its norm, where that is finite.

        None where the call returns nothing, where two right results differ, and where the result is not finite there.
        """
        results = as_tuple(result)
        if not results or (self.whole is not None and self.whole.random):
            return None
        pairs = [(results[0], self.whole.results[0])] if self.whole is not None else []
        pairs += [(part.place(results[0]), part.truth.results[0]) for part in self.parts]
        off = whole = 0.0
        for got, want in pairs:
            finite = want.isfinite()
            wanted = want.double().where(finite, 0.0)
            off += float((got.double().where(finite, 0.0) - wanted).square().sum())
            whole += float(wanted.square().sum())
        error = math.sqrt(off / whole) if whole else math.sqrt(off)
        return error if math.isfinite(error) else None


def truth_of(call: RandomCall, facts: Facts) -> Truth:
    """Evaluate the reference in float64, for all of a call or for parts of it.

    Raises: RuntimeError or MemoryError where it would take more than its share of the memory.
    """
    operation = facts.operation
    most = MAX_ELEMENTS.get(facts.device.torch_type, MAX_ELEMENTS["cpu"])
    found: Iterable[Any] | None = None
    with bounded(facts):
        if operation.parts is not None and operation.scratch is not None and operation.scratch(facts.sizes()) > most:
            found = operation.parts(call.arguments, facts)
        if not found:  # of a call without queries, too
            return Truth(call, expected(call))
        pieces = [(RandomCall(call.function, each.arguments, f"{call.name}, {each.text}"), each) for each in found]
        return Truth(call, None, tuple(CallPiece(piece, expected(piece), each.place) for piece, each in pieces))


_VERDICTS = {
    quick_checks.PASSED: Verdict.PASSED,
    quick_checks.WRONG: Verdict.WRONG,
    quick_checks.RAISED: Verdict.CRASHED,
}


class ChildTask(msgspec.Struct, frozen=True):
    """The task for a kernel, once modules are imported that register it.

    Attributes:
        call: a call, or one that stands for its class.
        compare: whether the result is compared with the reference.
        sizes: to vet the class: the size of each axis that the operation's cases name. None to run the call alone.
        graph: whether it is captured in a CUDA graph, and what replays give is compared.
    """

    kernel: str
    call: CallRecipe
    modules: list[str]
    compare: bool = True
    sizes: dict[str, int] | None = None
    graph: bool = False


class Reply(msgspec.Struct, frozen=True):
    """What was found, None where that is unknown, and a line about it.

    ``unsafe``: there is no verdict because the process that ran the kernel was killed, or would have been one too many.
    """

    verdict: Verdict | None
    detail: str
    unsafe: bool = False

    @property
    def guilty(self) -> bool:
        """Whether the kernel must not run calls of this class here."""
        return self.verdict not in (None, Verdict.PASSED)


def homes(kernels: Iterable[Kernel], modules: Iterable[str] = ()) -> list[str]:
    """Modules that a child has to import, and those by which it knows kernels; built-in ones and entry points it finds.

    Each is named once.
    """
    found = (home_of(each) for each in kernels if each.backend.origin != "entry_point")
    own = (home for home in found if home and home != "__main__" and not home.startswith("layerzero."))
    return list(dict.fromkeys([*modules, *own]))


def work(question: ChildTask, tell: Tell) -> None:
    """Run a kernel on a call, or vet it for a class, and tell what was found."""
    try:
        for module in question.modules:
            importlib.import_module(module)
    except ImportError as error:
        text = f"the module {module!r} does not import: {error}"
        tell.found(Reply(None, text)) if question.sizes is None else tell.refused(text)
        return
    try:
        if question.graph:
            reply = _captured(question, tell)
        else:
            reply = _ran(question, tell) if question.sizes is None else _vetted(question, question.sizes, tell)
    except KernelExecutionError as error:
        reply = Reply(Verdict.CRASHED, f"it raised {type(error.__cause__).__name__}: {error.__cause__}")
    except (LayerZeroError, LookupError, ImportError, ValueError) as error:  # not legal here, not known here
        reply = Reply(None, str(error))
    except Exception as error:  # noqa: BLE001  # of making the call or of comparing: it says nothing about the kernel
        short = "too little memory" if out_of_memory(error) else f"it could not be tried: {type(error).__name__}"
        reply = Reply(None, f"{short}: {error}")
    if lost := lost_context(Device.detect(question.call.device)):
        tell.leave(f"{reply.detail}; {lost}")
    tell.found(reply)


def _kernel(question: ChildTask) -> Kernel:
    try:
        return REGISTRY.kernel(question.kernel)
    except KeyError:
        raise LookupError(
            f"{question.kernel} cannot be run in a child process, which does not know it: register it through an entry "
            "point, or name the module that registers it with --module"
        ) from None


def _ran(question: ChildTask, tell: Tell) -> Reply:
    kernel, call = _kernel(question), rebuilt(question.call)
    locks = {question.call.operation: kernel.id}
    with SCOPES.scope({"locks": locks, "fallback_enabled": False, "allow_jit_compile": True}):
        tell.begins()
        return _found(call, question, kernel)


def _vetted(question: ChildTask, sizes: dict[str, int], tell: Tell) -> Reply:
    torch.set_num_threads(1)  # small tensors gain nothing from more
    tell.begins()
    kernel, operation = _kernel(question), REGISTRY.operation(question.call.operation)
    if operation.plain is not None:
        return _proved(kernel, operation, operation.plain, question.call)
    function = function_of(operation.name)
    if function is None:
        raise LookupError(f"{operation.name} belongs to no public function, so nothing can call it")
    dtype = dtype_named(question.call.tensors[operation.schema.inputs[0].name].dtype)
    accepted = {parameter.name for parameter in function.parameters}
    params = {name: value for name, value in question.call.params.items() if name in accepted}
    case = case_of_sizes(operation, "class", sizes, params)
    setting = CheckSetting(operation, dtype, question.call.device, question.call.layout or "")
    small = case is None or fits(operation, case, question.call.device)
    call = rebuilt(question.call) if small else None
    found = quick_checks.look(kernel, operation, call, setting, case, tell.runs)
    return Reply(_VERDICTS.get(found.state), found.detail)


def _captured(question: ChildTask, tell: Tell) -> Reply:
    """Capture the call, and compare what replays give; without gradients, which nothing captures alone."""
    kernel, operation = _kernel(question), REGISTRY.operation(question.call.operation)
    call = rebuilt(question.call)
    with SCOPES.scope({"allow_jit_compile": True}):
        trial = attempt(kernel, operation, call)
        if trial is None or trial.reasons:
            return Reply(None, trial.codes if trial else "no call of this operation")
        if kernel.jit:
            build(kernel, operation, call)
        problems = trial.problems(duplicate(call), trial.truth())  # no capture is to blame for what it does without one
        if problems:
            return Reply(None, f"outside of a capture: {'; '.join(problems)}")
        tell.begins()
        found = execution.captured(trial)
    return Reply({"passed": Verdict.PASSED, "wrong": Verdict.WRONG}.get(found.status), found.message)


def _proved(kernel: Kernel, operation: Operation, plain: Plain, call: CallRecipe) -> Reply:
    """Compare what works on a form of its own with the reference, on everything that differs between such forms."""
    given = plain.restored(call.params)

    def load(asked: Mapping[str, Any]) -> Callable[..., Any]:
        items: Any = [] if asked["batched"] else ""
        return kernel.load(plain_facts(Routed(operation, {**asked, "items": items})))

    try:
        problems = plain.prove(load, given)
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever a library raises of what it cannot read
        return Reply(Verdict.WRONG, f"its form cannot be made: {type(error).__name__}: {error}")
    if problems:
        return Reply(Verdict.WRONG, "; ".join(problems))
    return Reply(Verdict.PASSED, "the same as the reference on the whole corpus")


def _found(call: RandomCall, question: ChildTask, kernel: Kernel) -> Reply:
    """Run the call, with its backward pass where it had one, then compare with the reference."""
    recipe = question.call
    arguments = duplicate(call).arguments  # a handle belongs to the tensors that it was made of
    schema = REGISTRY.operation(recipe.operation).schema
    backward = recipe.requires_grad and not schema.mutated
    with torch.set_grad_enabled(backward):
        for tensor in schema.required if backward else ():
            arguments[tensor.name].requires_grad_()
        result = CALLS[call.function].fast(**arguments)
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, Tensor) and first.requires_grad:
            first.float().sum().backward()  # type: ignore[no-untyped-call]
    if recipe.device == "cuda":
        torch.cuda.synchronize()
    if not question.compare:
        return Reply(Verdict.PASSED, "it ran")
    random = [each.name for each in schema.params if each.random and recipe.params.get(each.name) != each.neutral]
    if random:
        return Reply(Verdict.PASSED, f"it ran; {', '.join(random)} leaves nothing to compare")
    try:
        facts = facts_of(call.function, **call.arguments)
        problems = truth_of(call, facts).problems(kernel, CALLS[call.function].fast)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return Reply(Verdict.PASSED, "it ran; the call is too large to compare with the reference")
    if problems:
        return Reply(Verdict.WRONG, "; ".join(problems))
    return Reply(Verdict.PASSED, "its result is the reference's")


def rebuilt(recipe: CallRecipe) -> RandomCall:
    """Make the call again, with random data in the same sizes, strides and alignment."""
    function, arguments = arguments_of_recipe(recipe, REGISTRY.operation(recipe.operation))
    return RandomCall(function.name, arguments)

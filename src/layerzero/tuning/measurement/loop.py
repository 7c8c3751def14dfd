"""The one loop of tuning and comparing: calls in their order until the time is over, with children that help.

A :class:`Party` says which calls there are, what of each is timed, and what the times are compared with. What can run
here is measured at once. What only vetting or a build keeps from a call is handed to child processes: on a GPU they
work during the measuring, on a CPU the measuring waits for them, since they would disturb it. Calls are then measured
again with what came of that. Nothing that takes an unknown time happens in this process while there is a deadline:
children are killed when it passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Report
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.failures import out_of_memory
from layerzero.engine.jit import BUILT, BuildIdentity, BuildOutcome, build_of
from layerzero.inspection.answers import explain
from layerzero.testing.single_run import lost_context, raised
from layerzero.tuning.measurement.clocks import Clock
from layerzero.tuning.measurement.contest import taking_part, window
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.timing import Deadline, Effort, Pace
from layerzero.tuning.storage.environment import needed_bytes
from layerzero.tuning.verification.build_child import build_apart
from layerzero.tuning.verification.vetting import Vetted, vet_calls

BETWEEN = 0.5
"""The share of what time is left that children may take where the measuring waits for them."""

NO_TIME = "no time left for a call of its size"

Pairs = Sequence[tuple[Kernel, Facts]]
J = TypeVar("J")


@dataclass(slots=True, kw_only=True)
class Party(Generic[J]):
    """What the loop measures, and what it learns meanwhile.

    Attributes:
        batch: calls that children get before the first is measured; ``growth`` times more the next time.
        vet_told: called with a line for each class that children vetted.
        unbuilt_why: why builds failed, or were not begun.
        failed: those that failed for good, and kernels that lack a program: no further call of this run asks for them.
        waiting: calls with a kernel that was not built when they were looked at.
    """

    jobs: Sequence[J]
    device: torch.device
    deadline: Deadline
    modules: Sequence[str] = ()
    leave_out: Sequence[str] = ()
    batch: int = 1
    growth: int = 1
    vet_told: Callable[[str], None] | None = None
    vetted: list[Vetted] = field(default_factory=list)
    unbuilt_why: dict[BuildIdentity, str] = field(default_factory=dict)
    failed: set[BuildIdentity | str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    def order(self) -> Iterable[J]:
        """The calls in their order, each made when its turn comes."""
        return self.jobs

    def look(self, number: int, job: J, todo: int, *, again: bool = False) -> str:
        """Measure a call, the first of so many that are still to do; :data:`NO_TIME` leaves it to another run."""
        raise NotImplementedError

    def to_vet(self, jobs: Sequence[J]) -> Pairs:  # noqa: ARG002
        """What only vetting keeps from these calls."""
        return ()

    def to_build(self, jobs: Sequence[J]) -> Pairs:  # noqa: ARG002
        """What children can build for these calls."""
        return ()

    def asks(self, asked: int, children: Children) -> bool:  # noqa: ARG002
        """Whether children get the next calls now, after so many that they had."""
        return True

    def prepare(self, jobs: Sequence[J], children: Children) -> None:
        """Have done what these calls wait for."""
        children.ask(jobs)

    def pauses(self, number: int, job: J, children: Children) -> bool:  # noqa: ARG002
        """Whether this call, and those behind it, wait until the children have done their last tasks."""
        return False

    def revisits(self, seen: dict[int, J]) -> list[int]:
        """Which of the calls that were looked at are measured again after children did something."""
        return list(seen)

    @property
    def verdicts(self) -> dict[tuple[str, str], Vetted]:
        """What came of vetting at last, by kernel and class."""
        return {(each.kernel_id, each.call_class): each for each in self.vetted}

    def may_build(self, kernel: Kernel, facts: Facts) -> bool:
        """Whether a build may still succeed in this run, as far as is known."""
        return self.failed.isdisjoint((kernel.id, build_of(kernel, facts)))

    @property
    def not_built(self) -> dict[str, str]:
        """Kernels that some build is missing of, and why the last one is."""
        return {kernel_id: why for (kernel_id, *_), why in self.unbuilt_why.items()}

    @property
    def not_reached(self) -> int:
        """How many classes children had no time to vet."""
        return sum(not each.reached for each in self.verdicts.values())


def run_loop(party: Party[J]) -> list[J]:
    """Measure a party's calls in their order until the time is over; return those that it did not suffice for."""
    children, deadline, count = Children(party), party.deadline, len(party.jobs)
    turns, begun, seen, left = iter(party.order()), list[J](), dict[int, J](), list[J]()
    asked, batch = 0, party.batch

    def first(until: int) -> list[J]:
        begun.extend(itertools.islice(turns, max(until - len(begun), 0)))
        return begun[:until]

    def measure_again(numbers: Sequence[int]) -> None:
        for place, number in enumerate(numbers):
            if deadline.passed():
                return
            party.look(number, seen[number], len(numbers) - place, again=True)

    def revisit(*, wait_for: bool = False) -> None:
        if children.caught_up(wait_for=wait_for):
            measure_again(party.revisits(seen))

    try:
        for number in range(1, count + 1):
            job = first(number)[-1]
            if number > asked and not deadline.passed() and party.asks(asked, children):
                until = min(number - 1 + batch, count)
                party.prepare(first(until)[asked:], children)
                asked, batch = until, batch * party.growth
                if party.pauses(number, job, children):
                    revisit()
            if deadline.passed() or party.look(number, job, count - number + 1) == NO_TIME:
                left.append(job)
            else:
                seen[number] = job
                if children.built_one():  # calls that wait for it come before the next ones: batches grow
                    measure_again(sorted(party.waiting & seen.keys()))
            if number == asked:
                revisit()
        if asked < count and not deadline.passed():
            party.prepare(begun[asked:], children)
        while not deadline.passed():
            unreached = party.not_reached
            once_more = unreached > 0 and not children.open
            if once_more:  # a part of the time did not suffice for them
                children.ask(list(seen.values()))
            if not children.open:
                break
            revisit(wait_for=True)
            if once_more and unreached <= party.not_reached:  # nor would another
                break
    except BaseException as error:
        children.end(amid=error)
        raise
    children.end()
    return left


class Children:
    """Child processes that vet and build: during the measuring, or, on a CPU, when it waits for them."""

    def __init__(self, party: Party[Any]) -> None:
        self.party, self.parallel = party, party.device.type == "cuda"
        self._pool = ThreadPoolExecutor(1, "layerzero-tuning") if self.parallel else None
        self._futures: list[Future[bool]] = []
        self._left: list[Callable[[Callable[[], bool]], bool]] = []
        self._over = self._built_one = False

    def ask(self, jobs: Sequence[Any], first: Pairs = ()) -> None:
        """Have done what these calls wait for: what is vetted, then what is built, and of that ``first`` before others.

        An H100 that was tuned for 300 s built FlashInfer's modules, a minute each, and for six of its 27 calls no
        FlashAttention 4, which takes 2 to 20 s and which five of them would have chosen (2026-11-24).
        """
        party = self.party
        vet, build = party.to_vet(jobs), [*first, *party.to_build(jobs)]
        if not vet and not build:
            return

        def work(stop: Callable[[], bool]) -> bool:
            if vet:
                party.vetted += vet_calls(vet, modules=party.modules, progress=party.vet_told, go_on=True, stop=stop)
            open_ones = [pair for pair in build if party.may_build(*pair)]  # it may have failed meanwhile
            build_apart(open_ones, self._built, stop, modules=party.modules)
            return True

        if self._pool is None:
            self._left.append(work)
        else:
            self._futures.append(Context().run(self._pool.submit, work, self._is_over))  # its thread has no scope here

    def _is_over(self) -> bool:
        return self._over or self.party.deadline.passed()

    def _built(self, kernel: Kernel, facts: Facts, outcome: BuildOutcome) -> None:
        build = build_of(kernel, facts)
        if outcome.log:
            self.party.unbuilt_why[build] = outcome.log.strip().splitlines()[-1]
            if outcome.lasting:  # what was killed for want of memory, say, is tried again when the next calls ask
                self.party.failed.add(kernel.id if outcome.lacks else build)
            ENGINE.ledger.record_failure(kernel, facts, outcome.log)
        else:
            self.party.unbuilt_why.pop(build, None)
            self._built_one = True

    def built_one(self) -> bool:
        """Whether something was built during the measuring since the last call of this."""
        one, self._built_one = self._built_one, False
        return one

    def caught_up(self, *, wait_for: bool) -> bool:
        """Whether something came out of them since; on a CPU they work now, for a part of what time is left."""
        left, self._left = self._left, []
        stop = self.party.deadline.part(BETWEEN)
        for work in left:
            work(stop)
        if wait_for and self._futures:
            left_s = self.party.deadline.left_s
            wait(self._futures, None if left_s == math.inf else max(left_s, 0.0), return_when="FIRST_COMPLETED")
        done = [each.result() for each in self._futures if each.done()]
        self._futures = [each for each in self._futures if not each.done()]
        return bool(done or left)

    @property
    def open(self) -> bool:
        """Whether more will come."""
        return bool(self._futures or self._left)

    def end(self, amid: BaseException | None = None) -> None:
        """Kill the children that still work. Raises: what their work ended with, unless ``amid`` is raised already."""
        self._over = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for each in self._futures:
            error = None if each.cancelled() else each.exception()
            if error is None:
                continue
            if amid is None:
                raise error
            amid.add_note(f"the work of child processes ended, too: {raised(error)}")


@dataclass(frozen=True, slots=True)
class Step:
    """Where a run is, before and after each call that it looks at.

    Attributes:
        job: the call.
        number, total: which of how many.
        contest: what was found, of a comparison :class:`layerzero.tuning.measurement.bench.Benched`; None before, and
            where there was nothing to measure.
        skipped: why nothing was measured; empty where something was, or will be.
        left_s: seconds that are left of the budget; None without one.
        builds: whether children build now what calls wait for, before this one.
        again: whether it was measured before, without what was built since.
    """

    job: Job
    number: int
    total: int
    contest: Any = None
    skipped: str = ""
    left_s: float | None = None
    builds: bool = False
    again: bool = False


Progress = Callable[[Step], None]


@dataclass(slots=True, kw_only=True)
class TensorParty(Party[Job]):
    """What tuning and comparing share of calls with tensors; ``progress`` is called before and after each."""

    clock: Clock
    effort: Effort
    progress: Progress = lambda _: None
    only: Sequence[str] = ()
    graph: bool = False
    pace: Pace = field(default_factory=Pace)
    needs_bytes: dict[str, int] = field(default_factory=dict)

    def tell(self, number: int, job: Job, contest: Any = None, skipped: str = "", **more: bool) -> None:
        left_s = None if self.deadline.left_s == math.inf else max(self.deadline.left_s, 0.0)
        self.progress(Step(job, number, len(self.jobs), contest, skipped, left_s, **more))

    def report(self, job: Job) -> Report:
        """Which kernels would take part, judged without the call's data."""
        with window():
            return explain(job.facts(self.device))

    def served_facts(self, facts: Facts) -> Facts:
        """A call as it is when what is measured serves it: in a replay, for graphs."""
        return facts.on(facts.device, capturing=self.graph)

    def served(self, report: Report) -> Report:
        """The report of that call."""
        if not self.graph:
            return report
        with window():
            return explain(self.served_facts(report.facts))

    def entrants(self, report: Report) -> list[Kernel]:
        """The kernels that would be measured if all were built."""
        return [each.kernel for each in taking_part(report, self.leave_out, self.only, graph=self.graph)]

    def unbuilt(self, report: Report) -> list[Kernel]:
        """Those of them that would compile in this process, and do not: for children, or not at all."""
        new = [each for each in self.entrants(report) if each.jit and not BUILT.ready(each, report.facts)]
        return [each for each in new if self.compiles_elsewhere(each)]

    def compiles_elsewhere(self, kernel: Kernel) -> bool:  # noqa: ARG002
        """Whether a kernel may not compile in this process; without an end it may."""
        return self.deadline.left_s < math.inf

    def trouble(self, error: Exception, job: Job, report: Report) -> str:
        """Why a call was not measured, so that one call's trouble is reported, and the others are measured.

        Raises: the error itself where the device's context is lost with it.
        """
        if lost_context(report.facts.device):
            raise error
        if not out_of_memory(error):
            return raised(error)
        self.needs_bytes[job.name] = needed_bytes(report.facts)
        return f"too little memory: {raised(error)}"

    def rest(self) -> None:
        """Give back what a call's tensors took of a GPU's memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

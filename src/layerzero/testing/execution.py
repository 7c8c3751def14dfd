"""How a kernel runs: in threads at once, the same bits again, gradients, streams, devices, graph capture."""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Param
from layerzero.core.errors import InvalidCallError
from layerzero.core.graph_capture import capturing
from layerzero.core.judge import Elementwise, Exact
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.engine.failures import check_values
from layerzero.engine.plan_source import PlanUnusableError
from layerzero.engine.reference import as_tuple
from layerzero.ops.linear.packed import PackedWeight
from layerzero.testing import compare
from layerzero.testing.compare import Expected, is_random, seeded
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import Finding, Trial, all_threads, attempt, duplicate, other_values, raised, tensors
from layerzero.testing.sizes import CheckSetting, elements, fits, with_axis

REPEATS = 4
SEED = 0
THREADS, CALLS_A_THREAD, CALLS_ON_CUDA = 3, 16, 64
"""More on a GPU: decodes that shared a workspace were wrong in 8 of 1,600 (FlashInfer 0.7.4, H200, 2026-12-01)."""

GROWTH = 2, 4, 8
"""How many times as long an axis is in the larger calls."""

WARM_RUNS = 3
"""How often a call runs on a side stream before it is captured."""

GROWN_BYTES = 2**20
"""What replays may take of a device's memory without a word; libraries allocate apart from torch."""


def by_value(operation: Operation) -> bool:
    """Whether the judges of all results compare them with the reference's values, NaN and infinities too."""
    return all(isinstance(judge, (Elementwise, Exact)) for judge in operation.judges.values())


def threads(kernel: Kernel, setting: CheckSetting, base: Case, trial: Trial) -> Finding:
    """Two threads run the same plan, each on values of its own, while a third one runs a call that is larger each time.

    Scratch memory that all threads share moves as it grows, while others compute in it. It grows at the first call of a
    size alone, so this check comes before those of other sizes.
    """
    grown = _grown(kernel, setting, base)
    same, other = _Known.of(trial, trial.call), _Known.of(trial, other_values(trial.call))
    calls = CALLS_ON_CUDA if trial.facts.device.torch_type == "cuda" else CALLS_A_THREAD
    chance = is_random(trial.facts.operation, trial.routed.arguments)
    keeping = seeded(SEED, trial.facts.device.torch_type) if chance else nullcontext()  # what threads do to it, too
    with keeping, ThreadPoolExecutor(THREADS) as pool:
        for larger in [_Known.of(each, each.call) for each in grown or [trial]]:
            third = [*same.made(calls // 4), *larger.made(calls // 4)]
            begin = threading.Barrier(THREADS, timeout=60)  # those that begin do not wait for one that cannot
            asked = [pool.submit(_run_all, made, begin) for made in (same.made(calls), other.made(calls), third)]
            if problem := next(filter(None, [each.result() for each in asked]), ""):
                return Finding("wrong", f"with {THREADS} threads at once: {problem}")
    return Finding("passed", f"{THREADS} threads, {len(grown)} larger sizes")


@dataclass(frozen=True, slots=True)
class _Known:
    """A call, how a kernel runs it, and what it should give."""

    trial: Trial
    call: RandomCall
    truth: Expected

    @classmethod
    def of(cls, trial: Trial, call: RandomCall) -> _Known:
        trial.plan()
        return cls(trial, call, compare.for_kernel(compare.expected(call), trial.kernel))

    def made(self, count: int) -> list[tuple[_Known, RandomCall]]:
        """So many calls, each in memory of its own: made before threads begin, which then compute most of the time."""
        return [(self, duplicate(self.call)) for _ in range(count)]


def _run_all(made: Sequence[tuple[_Known, RandomCall]], begin: threading.Barrier) -> str:
    """Make the calls once all threads are ready; then say what is wrong with the first that is."""
    begin.wait()
    results = []
    for known, call in made:
        try:
            results.append(known.trial.run(**call.arguments))
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
            return f"{call.text} {raised(error)}"
    for (known, call), result in zip(made, results, strict=True):
        if problems := compare.problems(result, call.arguments, known.truth):
            return f"{call.text}: {'; '.join(problems)}"
    return ""


def _grown(kernel: Kernel, setting: CheckSetting, base: Case) -> list[Trial]:
    """Larger calls that the kernel takes, smallest first: each axis grown, with those that go with it where needed."""
    found = []
    for (axis, size), times in itertools.product(base.sizes.items(), GROWTH):
        for case in with_axis(setting.operation, base, axis, size * times):
            if fits(setting.operation, case, setting.device) and (trial := setting.taken(kernel, case)):
                found.append((elements(setting.operation, case), trial))
                break
    return [trial for _, trial in sorted(found, key=lambda each: each[0])]


def infinity(trial: Trial) -> Finding:
    """An infinity reaches what it should and nothing else.

    Where float64 gives NaN, infinities met (inf - inf, 0 * inf), and what comes of that depends on the order of the
    work: a kernel may give anything there, and the outcome says so if it gave numbers. So it may where it writes
    float8, some of which have no infinity: vLLM writes the largest number.
    """
    truth = trial.truth()
    numbers = 0

    def blank(got: Tensor, want: Tensor) -> Tensor:
        nonlocal numbers
        unsaid, found = want.double().isnan(), got.double()
        numbers += int((unsaid & ~found.isnan()).sum())
        return found.masked_fill(unsaid, math.nan).to(got.dtype)

    def run(**given: Any) -> Any:
        results = as_tuple(trial.run(**given))
        for name, want in truth.mutated.items():
            if given[name].is_floating_point():
                given[name].copy_(blank(given[name], want))
        pairs = zip(results, truth.results, strict=True)
        return tuple([blank(got, want) if got.is_floating_point() else got for got, want in pairs]) or None

    problems = trial.problems(duplicate(trial.call), truth, run)
    if problems:
        return Finding("wrong", f"with an infinity: {'; '.join(problems)}")
    return Finding("passed", f"{numbers} numbers where infinities meet, float64 gives NaN" if numbers else "")


def repeats(trial: Trial) -> Finding:
    """The same call gives the same bits: in results and in what it writes into. What draws does so from one state."""
    mutated = trial.facts.operation.schema.mutated
    chance = is_random(trial.facts.operation, trial.routed.arguments)
    first: list[Tensor] = []
    with all_threads():
        for number in range(REPEATS):
            call = duplicate(trial.call)
            try:
                with seeded(SEED, trial.facts.device.torch_type) if chance else nullcontext():
                    result = trial.run(**call.arguments)
            except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
                return Finding("wrong", raised(error))
            values = [*as_tuple(result), *(call.arguments[each] for each in mutated)]
            found = [bits(value).clone() for value in values]
            if number and not all(torch.equal(one, other) for one, other in zip(first, found, strict=True)):
                return Finding("wrong", f"declared deterministic, but run {number + 1} gave other bits than run 1")
            first = first or found
    return Finding("passed", f"{REPEATS} runs, the same bits")


def bits(tensor: Tensor) -> Tensor:
    """Its bytes, which torch compares of every dtype: of float8 it compares no numbers."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def results_of_their_own(trial: Trial) -> Finding:
    """A result stays what it was when its plan runs again, and the plan sees values that changed in place."""
    if not trial.facts.operation.schema.outputs:
        return Finding("not tried", "it returns nothing")
    call, second = duplicate(trial.call), other_values(trial.call)
    plan = trial.plan()
    bound = trial.function.bind((), call.arguments)
    first = as_tuple(plan.run(**bound))
    kept = [result.detach().clone() for result in first]
    for name, tensor in tensors(second).items():
        call.arguments[name].copy_(tensor)
    _refresh(trial, call)
    truth = compare.for_kernel(compare.expected(call), trial.kernel)
    problems = compare.problems(plan.run(**bound), call.arguments, truth)
    if problems:
        return Finding("wrong", f"with other values in the same tensors: {'; '.join(problems)}")
    if not all(torch.equal(bits(result), bits(old)) for result, old in zip(first, kept, strict=True)):
        return Finding("wrong", "a second call of the same plan changed the result of the first")
    return Finding("passed")


def _refresh(trial: Trial, call: RandomCall) -> None:
    """Bring the handles of a call up to date, whose tensors were written into."""
    for each in _made_of_tensors(trial):
        handle = call.arguments.get(each.name)
        if handle is not None:
            handle.refresh()


def advanced(trial: Trial) -> Finding:
    """A handle is brought up to date after what it was made of changed: lower counts, the rest turned round.

    Counts that divide a tensor of the handle go on dividing it: its parts come in the opposite order. Those that divide
    another tensor stay, since a call may promise something of its parts.
    """
    call = _with_handles(trial)
    watched = attempt(trial.kernel, trial.facts.operation, call)
    if watched is None or watched.reasons:
        return Finding("refused", watched.codes if watched else "no call with fixed buffers")
    plan = watched.plan()
    bound = trial.function.bind((), call.arguments)
    plan.run(**bound)
    sources = [name for each in _made_of_tensors(trial) for name in each.made_of]
    schemas = [each for each in trial.facts.operation.schema.inputs if each.name in sources]
    divided = {each.shape_vars[:1] for each in schemas}
    others = {each.shape_vars[:1] for each in trial.facts.operation.schema.inputs} - divided
    for each in schemas:
        tensor = call.arguments.get(each.name)
        if not isinstance(tensor, Tensor) or (each.counts and each.counts in others):
            continue
        turned = compare.flipped(tensor, (0,))
        if not each.counts:
            tensor.copy_(turned)
        elif each.counts in divided:  # where parts begin, and behind them where the last one ends
            tensor.copy_(turned[:1] - turned)
        else:  # may shrink, not grow, and not below what the call promises, as pages that sequences share
            before = tensor.clone()
            tensor.copy_((tensor + 1) // 2)
            try:
                check_values(plan, bound)
            except InvalidCallError:
                tensor.copy_(before)
    _refresh(trial, call)
    truth = compare.for_kernel(compare.expected(call), trial.kernel)
    problems = compare.problems(plan.run(**bound), call.arguments, truth)
    return Finding("wrong", f"after advance(): {'; '.join(problems)}") if problems else Finding("passed")


def other_stream(trial: Trial) -> Finding:
    """The kernel waits for the stream that is current, on which its input is only just being written."""
    return _late(trial, torch.cuda.Stream(), nullcontext(), "on another stream")  # type: ignore[no-untyped-call]


def _late(trial: Trial, stream: torch.cuda.Stream, during: AbstractContextManager[object], where: str) -> Finding:
    """Run while a stream of the tensors' device is still writing what the kernel reads, if that is more than places."""
    call, mutated = duplicate(trial.call), trial.facts.operation.schema.mutated
    late = {name for name in [_data(trial, mutated)] if name}
    arguments = {**call.arguments, **{name: torch.zeros_like(call.arguments[name]) for name in late}}
    truth = trial.truth()
    trial.plan()
    torch.cuda.synchronize()

    def run(**given: Any) -> Any:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # cycles: about 30 ms, long compared with a launch
            for name in late:
                arguments[name].copy_(call.arguments[name])
            with during:
                result = trial.run(**given)
        stream.synchronize()
        return result

    return _compared(run, RandomCall(call.function, arguments, call.name), truth, late, where)


def _data(trial: Trial, mutated: Sequence[str]) -> str:
    """A tensor whose values may come late: floating where there is one, no places, not written into."""
    places = {each.name for each in trial.facts.operation.schema.inputs if each.is_index}
    able = {name: each for name, each in tensors(trial.call).items() if name not in {*mutated, *places}}
    return next((name for name, each in able.items() if each.is_floating_point()), next(iter(able), ""))


def other_device(trial: Trial) -> Finding:
    """The kernel waits for its tensors' stream while another device is the current one."""
    if (count := torch.cuda.device_count()) < 2:
        return Finding("not tried", "one device")
    here = trial.facts.device.index
    stream = torch.cuda.default_stream(here)  # a launch by number alone, 0, means the current device's
    return _late(trial, stream, torch.cuda.device((here + 1) % count), "with another device current")


def captured(trial: Trial) -> Finding:
    """A captured call waits for nothing, and gives right results when it is replayed with other values in its memory.

    Three replays: with other values, with these again, for what a replay leaves behind, and with those of the capture.
    """
    call, second = _with_handles(trial), other_values(trial.call)
    fixed = {name: trial.call.arguments[name] for name in _packed(trial, call)}
    second = RandomCall(second.function, {**second.arguments, **fixed}, second.name)
    replays = [second, second, trial.call]
    truths = [compare.for_kernel(compare.expected(each), trial.kernel) for each in replays[1:]]
    watched = attempt(trial.kernel, trial.facts.operation, call)
    if watched is None or watched.reasons:
        return Finding("refused", watched.codes if watched else "no call with fixed buffers")
    plan = watched.plan()
    bound = trial.function.bind((), call.arguments)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        try:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_RUNS):
                    plan.run(**bound)
            torch.cuda.synchronize()
            before = _allocations(trial)
            with capturing(graph, capture_error_mode="global"), _waiting_for_nothing():  # nothing else runs
                result = _run_in_capture(watched, call, bound)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
            return Finding("wrong", f"under graph capture it {raised(error)}")
        if strange := [each for each, count in _allocations(trial).items() if each and count != before[each]]:
            return Finding("wrong", f"under graph capture it allocated on another device: {strange}")
        left = []
        for number, (given, truth) in enumerate(zip(replays, [truths[0], *truths], strict=True), 1):
            for name in tensors(given).keys() - fixed.keys():
                call.arguments[name].copy_(given.arguments[name])
            if not fixed:
                _refresh(trial, call)
            torch.cuda.synchronize()
            before = _allocations(trial)
            graph.replay()
            torch.cuda.synchronize()
            if _allocations(trial) != before:
                return Finding("wrong", f"replay {number} allocated memory of torch")
            left.append(torch.cuda.mem_get_info()[0] if trial.facts.device.torch_type == "cuda" else 0)
            problems = compare.problems(result, call.arguments, truth)
            if problems:
                return Finding("wrong", f"replay {number}: {'; '.join(problems)}")
    grown = left[0] - left[-1]  # the first replay makes room for the graph itself
    return Finding("passed", f"two replays took {grown / 2**20:.1f} MiB more" if grown > GROWN_BYTES else "")


@contextmanager
def _waiting_for_nothing() -> Iterator[None]:
    """Let torch say what waits for the device, before CUDA says that the capture is lost."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not find everything: what is left breaks the capture
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _allocations(trial: Trial) -> dict[str, int]:
    """How often torch has allocated on each device; the call's own has no name."""
    own, counted = trial.facts.device.index, "allocation.all.allocated"
    devices = range(torch.cuda.device_count())
    return {"" if each == own else f"cuda:{each}": torch.cuda.memory_stats(each).get(counted, 0) for each in devices}


def _run_in_capture(trial: Trial, call: RandomCall, bound: Mapping[str, Any]) -> Any:
    """Run the plan; where a capture may not use it, the one that is made in the capture, as the engine does.

    Raises: RuntimeError if the kernel refuses the capture although it has run this call before.
    """
    try:
        return trial.plan().run(**bound)
    except PlanUnusableError:
        inside = attempt(trial.kernel, trial.facts.operation, call)
        if inside is None or inside.reasons:
            codes = inside.codes if inside else "no call"
            raise RuntimeError(f"refused a call that it ran before the capture: {codes}") from None
        return inside.plan().run(**bound)


def _with_handles(trial: Trial) -> RandomCall:
    """The call in memory of its own, with the handles whose buffers a captured graph needs to stay where they are."""
    call = duplicate(trial.call)
    made = {each.name: each.make(call.arguments, True) for each in _made_of_tensors(trial) if each.make is not None}
    return RandomCall(call.function, {**call.arguments, **made}, call.name)


def _packed(trial: Trial, call: RandomCall) -> set[str]:
    """The tensors whose packed forms the kernel computes with: a graph holds those forms, whatever is written later."""
    params = [each for each in _made_of_tensors(trial) if each.name in trial.kernel.accepts]
    packed = [each for each in params if isinstance(call.arguments.get(each.name), PackedWeight)]
    return {name for each in packed for name in each.made_of if isinstance(call.arguments.get(name), Tensor)}


def _made_of_tensors(trial: Trial) -> list[Param]:
    """The handles that hold what follows from tensors, and so advance with them; a generator goes on by itself."""
    params = [trial.function.param(name) for name in trial.function.handles]
    return [each for each in params if each is not None and not each.changes_result]


def _compared(
    run: Callable[..., Any], call: RandomCall, truth: compare.Expected, written: set[str], where: str
) -> Finding:
    try:
        problems = compare.check(call, run, truth)
    except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
        problems = [raised(error)]
    problems = [each for each in problems if each.partition(":")[0] not in written]
    return Finding("wrong", f"{where}: {'; '.join(problems)}") if problems else Finding("passed")

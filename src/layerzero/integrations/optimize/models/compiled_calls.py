"""Which calls of a model are compiled, and which of them stay: those that are faster than the model as it is then."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module
from torch.utils import _pytree as pytree

from layerzero.core.errors import in_short
from layerzero.integrations.optimize.attention.transformers import Search, outermost
from layerzero.integrations.optimize.models import compiled
from layerzero.integrations.optimize.models.compilers import COMPILERS, Compiler, Flat
from layerzero.integrations.optimize.swaps.candidate import agrees, distance, quiet, refusal, watching
from layerzero.integrations.optimize.swaps.reads import READS, Listening
from layerzero.integrations.optimize.swaps.stamp import Stamp
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import Left, Optimized, Replaced, Timed, switch_all
from layerzero.integrations.optimize.times.timing import LEAST, agree, gain, in_fastest, race
from layerzero.integrations.optimize.times.workload import RUN, SHORTEST_S, TimeLeft, Workload

KIND = "compiled"

MOST = 4
"""Shapes of one model that are compiled, those that are called most often."""

SHARE = 0.5
"""Of the time that is left, what compiling may take: kernels are measured and the whole is timed afterwards."""


@dataclass
class Call:
    """A call of the caller's inputs.

    Attributes:
        others, named: what it was made with.
        inference: whether in inference mode.
        times: how often.
        engines: what was compiled for it and gives stock's values.
    """

    others: tuple[Any, ...]
    named: dict[str, Any]
    inference: bool
    times: int = 1
    engines: list[compiled.Engine] = field(default_factory=list)


@dataclass
class Target:
    """A model of which calls were compiled."""

    path: str
    module: Module
    state: compiled.Compiled
    calls: dict[compiled.Key, Call]


def bytes_of(target: Target) -> int:
    """Memory of all that was compiled for a model."""
    return target.state.copy_bytes * sum(len(each.engines) for each in target.calls.values())


def compile_calls(search: Search, report: Optimized, watched: CallsOfInputs) -> list[Target]:
    """Compile the calls of a run, while the model is stock, and compare what they give with it."""
    compilers = [each for each in COMPILERS if not compiled.is_denied(each.name) and not each.missing]
    found: list[Target] = []
    for path, module in watched.models if compilers else ():
        cls = type(module).__name__
        first = next(module.parameters(), None)
        if first is None or first.device.type != "cpu":
            continue
        calls = refusal(module) or _sparse(module) or watched.calls_of(module)
        if isinstance(calls, str):
            report.left.append(Left(path, cls, f"compiled: {calls}"))
            continue
        target = Target(path, module, compiled.Compiled(module), calls)
        until_s = report.time.deadline.left_s * (1 - SHARE)
        for compiler in compilers:
            for call in calls.values():
                search.tell(_step(compiler), 0, 1)
                why = _added(call, target, compiler, report, until_s, sum(map(bytes_of, (*found, target))))
                if why:
                    report.left.append(Left(path, cls, f"compiled by {compiler.name}: {why}"))
                    break
        if any(each.engines for each in calls.values()):
            found.append(target)
    return found


def _sparse(module: Module) -> str:
    """Which buffer is sparse: torch tells no bytes of it. One of openai-whisper is (alignment_heads)."""
    return next((f"{name} is sparse" for name, each in module.named_buffers() if each.layout is not torch.strided), "")


class CallsOfInputs:
    """The calls of the models within a module, in a run of the caller's inputs.

    Attributes:
        models: with their paths.
    """

    def __init__(self, root: Module) -> None:
        self.models = list(outermost(root, "transformers", "PreTrainedModel")) or [("", root)]
        self._calls: dict[int, dict[compiled.Key, Call]] = {}
        self._strange: dict[int, str] = {}

    def keep(self, module: Module, others: tuple[Any, ...], named: dict[str, Any]) -> None:
        told, calls = compiled.described(others, named), self._calls.setdefault(id(module), {})
        if told is None:
            known = (*compiled.PLAIN, Tensor)
            kinds = [type(each).__name__ for each in (*others, *named.values()) if not isinstance(each, known)]
            self._strange[id(module)] = ", ".join(kinds) or "no tensor"
        elif told[0] in calls:
            calls[told[0]].times += 1
        else:
            calls[told[0]] = Call(others, dict(named), torch.is_inference_mode_enabled())

    def calls_of(self, module: Module) -> dict[compiled.Key, Call] | str:
        """The most frequent calls of a model by what they look like; or why there are none."""
        if strange := self._strange.get(id(module)):
            return f"it is called with {strange}, and only tensors and plain values are compiled"
        calls = self._calls.get(id(module))
        if not calls:
            return "the inputs do not call it"
        often = sorted(calls, key=lambda key: -calls[key].times)[:MOST]
        return {key: calls[key] for key in often}


def _added(call: Call, target: Target, compiler: Compiler, report: Optimized, until_s: float, taken: int) -> str:
    """Compile a call, compare it, and keep it there; or say why not."""
    time, module, size = report.time, target.module, target.state.copy_bytes
    if report.memory_limit is not None and taken + size > report.memory_limit:
        return f"its copy of the weights takes {size / 1e6:.0f} MB, for which memory_limit leaves no room"
    needed = time.expected_s(_step(compiler)) or _guess_s(compiler, module, time)
    needed += 2 * (len(OTHERS) + 1) * time.expected_s(RUN)  # it is compared with the model on as many inputs
    if time.budget_s is not None and needed > time.deadline.left_s - until_s:
        time.leave(f"{_step(compiler)}, which may take half of the time", "", 0.0)
        time.left_out[-1].needed_s = needed
        return "no time was left for it (budget_s)"
    try:
        with time.taking(_step(compiler)):
            engine = _engine(call, module, compiler, time.deadline.passed)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a compiler raises, or its import
        return in_short(error)
    if isinstance(engine, str):
        return engine
    call.engines.append(engine)
    return ""


def _step(compiler: Compiler) -> str:
    return f"compiling by {compiler.name}"


def _guess_s(compiler: Compiler, module: Module, time: TimeLeft) -> float:
    """What a first compilation is likely to take: as another compiler's did, in units of what that was expected to."""
    count = len(list(module.modules()))
    known = [
        took / (each.least_s + each.each_s * count) for each in COMPILERS if (took := time.expected_s(_step(each)))
    ]
    return (compiler.least_s + compiler.each_s * count) * min(known, default=1.0)


def _engine(
    call: Call, module: Module, compiler: Compiler, passed: Callable[[], bool] = lambda: False
) -> compiled.Engine | str:
    """A compiled call that gives stock's values, on its own tensors and on others of their kinds; or why not."""
    twin = copy.deepcopy(module, {id(each): each for each in module.parameters()}).eval()
    names = [*range(len(call.others)), *call.named]
    values = [*call.others, *call.named.values()]
    places = [number for number, each in enumerate(values) if type(each) is Tensor]

    def rebuild(tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        given = list(values)
        for place, each in zip(places, tensors, strict=True):
            given[place] = each
        count = len(call.others)
        return given[:count], dict(zip(names[count:], given[count:], strict=True))

    tables: dict[int, int] = {}

    def keep(table: Module, given: tuple[Any, ...], _: dict[str, Any]) -> None:
        if given and isinstance(table, Embedding):
            tables[given[0].data_ptr()] = table.num_embeddings

    tensors = [values[place] for place in places]
    with quiet(twin), torch.inference_mode(call.inference):
        with torch.inference_mode(False):  # whose writes are counted
            stamp, written = Stamp(twin), [each.clone() for each in tensors]
        others, named = rebuild(written)
        with watching([each for each in twin.modules() if isinstance(each, Embedding)], before=keep):
            leaves, spec = pytree.tree_flatten(twin(*others, **named))
        if any(each._version for each in written) or not stamp.last.same:
            return "it writes into its input, its buffers or its attributes"
        with Listening() as reads:
            twin(*call.others, **call.named)
        if reads.seen and all(each.is_floating_point() for each in tensors):  # masks are tried below
            return READS
        with torch.random.fork_rng(devices=[]):  # an export draws from it
            run = compiler.compile(Flat(twin, rebuild, _tensors_of).eval(), tensors)
        if isinstance(run, str):
            return run
        kept = tuple(compiled.TENSOR if isinstance(each, Tensor) else each for each in leaves)
        worst, found = 0.0, leaves
        for given in (tensors, *_others(tensors)):
            if passed():
                return "no time was left to compare it (budget_s)"
            if given is not tensors:
                others, named = rebuild(given)
                try:
                    found = pytree.tree_flatten(twin(*others, **named))[0]
                except Exception:  # noqa: BLE001, S112  # numbers that the model itself refuses say nothing
                    continue
            if tuple(compiled.TENSOR if isinstance(each, Tensor) else each for each in found) != kept:
                return "it gives numbers that are no tensors and follow from the input's"
            expected = [each for each in found if isinstance(each, Tensor)]
            if given is not tensors and not all(each.isfinite().all() for each in expected):
                continue
            got = run(given)
            if len(got) != len(expected):
                return f"it gave {len(got)} tensors, the model {len(expected)}"
            for one, two in zip(got, expected, strict=True):
                error = distance(one, two)
                if one.dtype != two.dtype or not agrees(error, two.dtype):
                    return f"it was off by {error:.2g} of the largest value"
                worst = max(worst, error)
    bounds = tuple(_bound(each, tables.get(other.data_ptr())) for each, other in zip(tensors, written, strict=True))
    return compiled.Engine(run, kept, spec, compiler.text, worst, compiler.name, bounds)


def _bound(tensor: Tensor, entries: int | None) -> compiled.Bound:
    """What a tensor's whole numbers may be: those of the table that they index, or those of the caller's, 0 and 1."""
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return compiled.Bound()
    if entries is not None:
        return compiled.Bound(0, entries - 1)
    full = tensor.ndim > 1 and bool(tensor.any(-1).all())
    return compiled.Bound(min(0, int(tensor.min())), max(1, int(tensor.max())), full)


def _tensors_of(result: Any) -> list[Tensor]:
    return [each for each in pytree.tree_flatten(result)[0] if isinstance(each, Tensor)]


OTHERS = ((0.7, 0.1, "end"), (8.0, 0.0, "none"), (0.1, -0.5, "most"), (-1.0, 0.0, "second"))
"""What floating numbers are multiplied with and moved by, and what masks hide."""


def _others(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Other tensors of their kinds, since a trace holds what one input decided: its branches, how many were chosen.

    Other numbers, larger and smaller ones, another order of words, and masks that hide the last token, none, all but
    the first, and every second one.
    """
    for scale, shift, mask in OTHERS:
        yield [_other(each, scale, shift, mask) for each in tensors]


def _other(tensor: Tensor, scale: float, shift: float, mask: str) -> Tensor:
    if tensor.is_floating_point():
        return tensor * scale + shift
    if tensor.ndim == 0 or tensor.numel() < 2:
        return tensor
    if tensor.dtype is not torch.bool and tensor.max() > 1:
        return tensor.roll(1, -1)
    other = torch.ones_like(tensor) if mask != "end" else tensor.clone()
    other[
        ..., {"end": slice(-1, None), "none": slice(0), "most": slice(1, None), "second": slice(1, None, 2)}[mask]
    ] = 0
    return other


def timing_s(targets: Sequence[Target], workload: Workload, rounds: int) -> float:
    """What :func:`keep_faster` is likely to take."""
    run_s = workload.time.expected_s(RUN)
    engines = sum(len(call.engines) + 1 for target in targets for call in target.calls.values() if call.engines)
    return engines * (2 * rounds + 2) * run_s + bool(engines) * 3 * (rounds + 2) * max(run_s, 1.5 * SHORTEST_S)


def keep_faster(targets: Sequence[Target], report: Optimized, workload: Workload, rounds: int) -> None:
    """Put on what is faster than the model as it now is, call by call, and time the whole again."""
    put: list[Replaced] = []
    for target in targets:
        state, cls = target.state, type(target.module).__name__
        swap = compiled.Over(target.module, compiled.forward, state)
        for key, call in target.calls.items():
            if not call.engines:  # no library took this shape; why is in the report
                continue
            best = _best(call, target.module, report, rounds)
            if isinstance(best, compiled.Engine):
                state.engines[key] = best
            else:
                names = " and ".join(each.name for each in call.engines)
                report.left.append(Left(target.path, cls, f"compiled by {names}: {best}"))
        if state.engines:
            engines = list(state.engines.values())
            names = ", ".join(dict.fromkeys(each.name for each in engines))
            found = Replaced(
                target.path, cls, KIND, f"{len(engines)} shapes", names, max(e.error for e in engines), swap
            )
            put.append(found)
    if not put:
        return
    everything = list(report.replaced)
    for each in put:
        report.put_on(each)

    def timed_as(way: str) -> float:
        switch_all(put, on=False)  # what lies over another comes off first
        switch_all(everything, on=way != "stock")
        switch_all(put if way == "compiled" else (), on=True)
        return workload.sample()

    ways = ("stock", "as it is", "compiled")
    needed = in_fastest([timed_as(way) for way in ways])  # stock may take many times as long
    times = race(ways, timed_as, lambda _, turn: ways if turn < rounds and workload.fits(needed) else ())
    timed_as("as it is")
    if not times["stock"]:
        report.time.leave("timing what was compiled, without which it does not stay", RUN, workload.samples(len(ways)))
        report.take_out(put, f"{KIND}: no time was left to time it (budget_s)")
        return
    more = gain(list(zip(times["as it is"], times["compiled"], strict=True)))
    if more < LEAST:
        report.take_out(put, f"{KIND}: end to end it gained {more:+.1%}, less than 1 %")
        return
    switch_all(put, on=True)
    whole = [each.error or 0.0 for each in put if not each.path]  # the model's outputs were compared without these
    report.error = max([report.error or 0.0, *whole])
    pairs = list(zip(times["stock"], times["compiled"], strict=True))
    before = report.timed or Timed(0.0, 0.0)
    report.timed = replace(
        before,
        stock_s=statistics.median(times["stock"]),
        after_s=statistics.median(times["compiled"]),
        rounds=len(pairs),
        speedup=1 + gain(pairs),
        gains={**before.gains, KIND: more},
    )


def _best(call: Call, module: Module, report: Optimized, rounds: int) -> compiled.Engine | str:
    """The engine that is fastest on a call, if it is faster than the module as it is now."""
    tensors = [each for each in (*call.others, *call.named.values()) if type(each) is Tensor]
    runs: dict[int, Callable[[], Any]] = {
        number: functools.partial(each, tensors) for number, each in enumerate(call.engines)
    }
    runs[-1] = functools.partial(module, *call.others, **call.named)
    time = report.time

    def sample(number: int) -> float:
        began = timing.WALL()
        runs[number]()
        return timing.WALL() - began

    def undecided(_: Mapping[int, Sequence[float]], turn: int) -> Sequence[int]:
        return list(runs) if turn < 2 * rounds and time.fits(RUN, len(runs)) else ()

    with quiet(module), torch.inference_mode(call.inference):
        for each in runs:
            sample(each)
        times = race(list(runs), sample, undecided)
    if not times[-1]:
        return "no time was left to time it (budget_s)"
    best = min(range(len(call.engines)), key=lambda number: statistics.median(times[number]))
    pairs = list(zip(times[-1], times[best], strict=True))
    faster = [one / other - 1 >= LEAST for one, other in pairs]
    if gain(pairs) < LEAST or not agree(faster, 2.0):
        sure = "" if gain(pairs) < LEAST else f", of which {len(pairs)} rounds are not sure"
        return f"it takes {1 / (1 + gain(pairs)):.2f} of the time on this call's shapes{sure}"
    return call.engines[best]

"""What stays: what is faster on the caller's inputs or, without any, on random rows; the rest is taken out."""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.core import emulation
from layerzero.core.device import Device
from layerzero.core.errors import in_short
from layerzero.inspection.trace import traced
from layerzero.integrations.optimize.attention.transformers import AttentionSwap, Search
from layerzero.integrations.optimize.layers import layer_timing
from layerzero.integrations.optimize.layers.layer_timing import Around, among_weights, around, attention_costs
from layerzero.integrations.optimize.layers.whole_steps import Settled, keep_what_steps_gain
from layerzero.integrations.optimize.models.padding import noted, without_padding
from layerzero.integrations.optimize.modules import find as modules
from layerzero.integrations.optimize.swaps.candidate import TOLERANCE, distance
from layerzero.integrations.optimize.swaps.trial import as_served
from layerzero.integrations.optimize.times.module_times import ROUNDS, Spent, spent
from layerzero.integrations.optimize.times.report import BY_CALL, Optimized, Replaced, Timed, switch_all
from layerzero.integrations.optimize.times.timing import (
    LEAST,
    TIMED,
    Paced,
    Pair,
    Sizes,
    Untimed,
    decided,
    gain,
    in_fastest,
    race,
    sure,
)
from layerzero.integrations.optimize.times.workload import RUN, Workload
from layerzero.serving.warmup import Progress
from layerzero.tuning.measurement.loop import Step
from layerzero.tuning.storage.archive import refused

WHOLE = 5  # runs at least: one compared, and of both ways one that warms up and one timed
INSTEAD = "instead of which random rows decide, as without inputs"


def time_inputs(search: Search, report: Optimized, before: list[Tensor]) -> None:
    """Measure the calls that the inputs make, compare the outputs, and take out what does not pay.

    Kernels are measured in the time that runs of the model leave, or half of what there is. Where there is no time to
    time the whole, what is known without inputs decides: modules are timed on random rows.
    """
    time, workload = report.time, search.workload
    assert workload is not None
    stock_s = time.expected_s(RUN)
    by_kind: dict[str, list[Replaced]] = defaultdict(list)
    for each in (one for one in report.replaced if not one.mends):
        by_kind[each.kind].append(each)
    if not _has_time(report, stock_s) and time.fits(RUN):
        workload.run()  # it may take a part of stock's time now: products that the CPU emulated
    if _has_time(report, stock_s) and time.allows("measuring kernels on the inputs' calls", RUN, WHOLE + 1):
        reserved_s = min(time.expected_s(RUN, _runs(len(by_kind), search.rounds)), time.deadline.left_s / 2)
        deadline = time.deadline.sooner(max(reserved_s, _whole_s(report, stock_s)))
        told = functools.partial(_told, tell=search.tell)
        tuned = report.tuned = workload.tune(deadline=deadline, isolate=search.isolate, progress=told)
        report.refused = refused({each.report.operation for each in tuned.contests}, workload.device)
        if tuned.left:
            said = "calls were not measured within the budget; call again with more, or lz.tune"
            report.tune.append(f"{tuned.left} {said}")
    if not _has_time(report, stock_s):
        runs = _whole_s(report, stock_s) / (time.expected_s(RUN) or 1.0)
        time.leave(f"comparing and timing the whole, {INSTEAD}", RUN, runs)
        time_random_rows(search, report)
        return
    pairs = _outputs(workload, before)
    if "padding" in by_kind and _largest(pairs) > 1:
        switch_all(by_kind["padding"], on=False)
        without = _outputs(workload, before)
        if _largest(without) < _largest(pairs) / 2:
            report.take_out(by_kind.pop("padding"), "padding: the output on these inputs depends on padded positions")
            pairs = without
        else:
            switch_all(by_kind["padding"], on=True)
    errors = [distance(*pair) for pair in pairs]
    report.error = max(errors, key=lambda each: math.inf if math.isnan(each) else each, default=None)
    report.compare(pairs, workload)
    if by_kind and not _keep_what_gains(search, report, by_kind):
        time_random_rows(search, report)
    report._forget()
    if time.allows("naming the kernels of each module", RUN, 2):
        workload.run()  # packs what these inputs' kernels want, and nothing that was only tried
        _name_kernels(search.root, report, workload)
    slower = max(stock_s / (time.expected_s(RUN) or stock_s or 1.0), 1.0)
    if time.allows("the time of each kind of modules", RUN, ROUNDS * (slower + bool(report.replaced))):
        report.spent = _spent(search.root, report, workload)


def _outputs(workload: Workload, before: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """What a run gives now and gave before, with zeros at positions for which nothing is promised."""
    with noted() as padded:
        after = workload.run()
    return [without_padding(padded, *pair) for pair in zip(after, before, strict=False)]


def _largest(pairs: list[tuple[Tensor, ...]]) -> float:
    """The largest difference in units of its tolerance."""
    return max((distance(*pair) / TOLERANCE.get(pair[0].dtype, math.inf) for pair in pairs), default=0.0)


def _has_time(report: Optimized, stock_s: float) -> bool:
    """Whether what is put on can be compared and timed against stock, a run of which takes so long."""
    return max(_whole_s(report, stock_s), 1e-9) <= report.time.deadline.left_s


def _whole_s(report: Optimized, stock_s: float) -> float:
    return report.time.expected_s(RUN, WHOLE - 2) + 2 * stock_s  # a run that warms up, and one that is timed


def _runs(kinds: int, rounds: int) -> int:
    """How many runs of the model follow the measuring of kernels: one compared, two named, the others timed."""
    return 3 + (kinds + 4) * (rounds + 1) + 2 * ROUNDS


def _keep_what_gains(search: Search, report: Optimized, by_kind: Mapping[str, list[Replaced]]) -> bool:
    """Time the model as a whole, and take out what does not pay; whether there was time for it."""
    workload, rounds, left_s = search.workload, search.rounds, report.time.deadline.left_s
    assert workload is not None
    switches = {kind: functools.partial(switch_all, found) for kind, found in by_kind.items()}
    tell = functools.partial(search.tell, "timing kinds of modules")
    captured = {"step"} if workload.device is not None and workload.device.type == "cuda" else set()
    timed = report.timed = time_kinds(switches, workload.sample, rounds, tell, workload.fits, captured)
    if timed is None:
        report.time.leave(f"timing the whole, {INSTEAD}", RUN, workload.samples(WHOLE - 1), left_s)
        switch_all(report.replaced, on=True)
        return False
    timed.core_share = workload.core_share
    if timed.together:
        count = (len(switches) + 2) * workload.samples(rounds + 1)
        report.time.leave("timing kinds of modules apart", RUN, count, left_s)

    def why(told: Replaced) -> str:
        gain = timed.gains[told.kind]
        if gain >= LEAST:  # the whole decided
            return f"{told.kind}: it gained {gain:+.1%} in its turn, but all that gained less than 1 % together"
        return f"{told.kind}: end to end it gained {gain:+.1%}, less than 1 %"

    report.take_out([each for kind in timed.dropped for each in by_kind[kind]], why)
    return True


def _told(step: Step, tell: Progress) -> None:
    left = "" if step.left_s is None else f", {step.left_s:.0f} s left"
    tell(f"measuring {step.job.name}{left}", step.number, step.total)


def _spent(root: Module, report: Optimized, workload: Workload) -> Spent:
    """Time by modules; a captured step runs none of them, so it is off meanwhile."""
    steps = [each for each in report.replaced if each.kind == "step"]
    others = [each for each in report.replaced if each.kind != "step"]
    kinds = {each.path: each.kind for each in report.replaced if each.kind not in {"attention", "padding", "step"}}
    switch_all(steps, on=False)
    try:
        switch = functools.partial(switch_all, others) if others else None
        found = spent(root, kinds, workload.call, switch, workload.device)
        found.steps_off = bool(steps)
        return found
    finally:
        switch_all(steps, on=True)


def _name_kernels(root: Module, report: Optimized, workload: Workload) -> None:
    """Say which kernels the inputs' calls get: a prompt and a token of one module may have kernels of their own."""
    ran: dict[str, dict[str, None]] = defaultdict(dict)
    paths = {each.path for each in report.replaced if each.kernel != BY_CALL}
    with torch.no_grad():
        found = traced(root, workload.call)
    for row in found.rows:
        ran[row.layer if row.layer in paths else BY_CALL][row.kernel] = None
    for each in report.replaced:
        kernels = ran.get(BY_CALL if each.kernel == BY_CALL else each.path)
        if kernels:
            each.kernel = ", ".join(kernels)


MOST_ROUNDS = 4
"""Rounds at most, in those that were wanted, where ratios lie on both sides of :data:`LEAST`."""

NEEDS: Mapping[str, str] = {"step": "attention"}
"""Kinds that do nothing without another one. Without the attention no step was captured, and the steps stayed on: a
token of an 8B Llama then took 74 ms where it takes 5 (H200, 2026-11-27)."""


def time_kinds(
    switches: Mapping[str, Callable[[bool], None]],
    sample: Callable[[], float],
    rounds: int,
    tell: Callable[[int, int], None] = lambda *_: None,
    fits: Callable[[int], bool] = lambda _: True,
    captured: Collection[str] = (),
) -> Timed | None:
    """Time stock, everything, and everything without each kind, in turn; leave on what gains, if anything.

    Rounds go on, to :data:`MOST_ROUNDS` times ``rounds``, while ratios lie on both sides of :data:`LEAST`.

    Args:
        switches: put the modules of one kind on or off.
        sample: runs the model once, as it is now, and returns the seconds.
        tell: gets the number of each round, and of how many at least.
        fits: whether there is time for so many samples of the fastest variant. No round begins without. Where there is
            none for ``rounds`` of each kind, kinds are timed together. None, and everything off, without one round.
        captured: kinds whose first run after a switch captures graphs, and does not count.
    """
    warms = any(kind in captured for kind in switches)
    has_time = (lambda count: fits(2 * count)) if warms else fits

    def set_on(kinds: Sequence[str]) -> None:
        for kind, switch in switches.items():
            switch(kind in kinds)

    def pairs_of(variants: Mapping[str, Sequence[str]], against: Sequence[str]) -> dict[str, list[Pair]]:
        """Of each variant and of what it is compared with; the first runs, which choose and pack, do not count."""

        def timed_as(name: str | None) -> float:
            on = against if name is None else variants[name]
            set_on(on)
            if any(kind in captured for kind in on):
                sample()
            return sample()

        def undecided(times: Mapping[str | None, Sequence[float]], turn: int) -> list[str | None]:
            names = [name for name in variants if turn < rounds or not _is_on_one_side(times[name], times[None])]
            running: list[str | None] = [*names, None]
            if turn == rounds * MOST_ROUNDS or not names or not has_time(in_fastest([costs[each] for each in running])):
                return []
            tell(turn, max(rounds, turn + 1))
            return running

        costs = dict(known)
        for name in [each for each in (*variants, None) if each not in costs]:
            if not has_time(1):
                return {name: [] for name in variants}
            costs[name] = timed_as(name)
        times = race([*variants, None], timed_as, undecided)
        return {name: list(zip(times[name], times[None], strict=False)) for name in variants}

    everything = list(switches)
    if not has_time(4):
        set_on([])
        return None
    known: dict[str | None, float] = {}
    for name, on in (("", []), (None, everything)):
        set_on(on)
        known[name] = sample()
    variants: dict[str, list[str]] = {"": []}
    several = len(everything) > 1
    slowest = in_fastest([max(known.values()), min(known.values())]) - 1
    together = several and not has_time((len(everything) + 2) * (rounds + 1) * slowest)
    if several and not together:
        variants |= {kind: [each for each in everything if kind not in (each, NEEDS.get(each))] for kind in everything}
    pairs = pairs_of(variants, everything)
    whole = pairs[""]
    if not whole:
        set_on([])
        return None
    gains = {kind: gain(pairs.get(kind, whole)) for kind in everything}
    gaining = {kind for kind in everything if gains[kind] >= LEAST}
    gaining |= {NEEDS[kind] for kind in gaining if kind in NEEDS}
    kept = [kind for kind in everything if kind in gaining]
    if kept and len(kept) < len(everything):
        del known[None]
        whole = pairs_of({"": []}, kept)[""]
        if not whole:  # nothing is kept that was not timed as a whole
            whole, kept = pairs[""], everything
    if gain(whole) < LEAST:
        kept = []
    dropped = [kind for kind in everything if kind not in kept]
    set_on(kept)
    stock_s, after_s = (statistics.median(each) for each in zip(*whole, strict=True))
    if not kept:
        return Timed(stock_s, stock_s, gains, dropped, len(whole), together=together)
    return Timed(stock_s, after_s, gains, dropped, len(whole), 1 + gain(whole), together)


def _is_on_one_side(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether ratios lie on one side of :data:`LEAST` more often than a coin does, by two standard deviations."""
    return sure([one / other - 1 >= LEAST for one, other in zip(before, after, strict=False)], 2.0)


def time_random_rows(search: Search, report: Optimized) -> None:
    """Take out what is slower than the model's own code at one of a few sizes, or raises there; say what each takes.

    Attention goes where layers that are not kept are slower with it. What is kept then is timed again without it.
    Where steps are taken from the layers, these, and the attention, stay.
    """
    beside: Around | None = None
    decoders: list[tuple[AttentionSwap, list[Replaced], set[int], list[Settled]]] = []
    untimed: dict[str, list[str]] = {}
    passed = report.time.deadline.passed
    for _, exchange, ours in search.models:
        mine = {id(each) for each in exchange.model.modules()}
        layers = [each for each in report.replaced if each.kind == "layer" and id(each.swap.module) in mine]
        if not layers or next(layers[0].swap.module.parameters()).device.type not in TIMED:
            continue
        search.tell("timing layers", 0, 1)
        found = _settled_layers(layers, exchange, report, ours=ours, stays=search.graph)
        costs = attention_costs([each for each, _ in found])
        if costs and ours and not exchange.chosen and not search.graph:
            report.take_out([each for each in report.replaced if each.exchange is exchange], f"attention: {costs}")
            again = [one for each, group in found if isinstance(each, Paced) and each.kept for one in group]
            found = [(each, group) for each, group in found if not isinstance(each, Paced) or not each.kept]
            found += _settled_layers(again, exchange, report, ours=False)  # it was on in what they took
        for each, _ in found:
            _tell(each, report, untimed, stays=search.graph)
        decoders.append((exchange, layers, mine, [(each, some) for each, some in found if isinstance(each, Paced)]))
        if search.graph or passed() or not any(isinstance(each, Paced) for each, _ in found):
            continue
        try:
            beside = beside or around(layers, exchange)
        except Exception as error:  # noqa: BLE001  # what a model raises on arguments that were made for another
            report.tune.append(f"modules were timed alone, not behind a layer of the model ({in_short(error)})")
    before = beside or among_weights(search.root)
    alike: dict[Hashable, list[Replaced]] = defaultdict(list)
    for one in report.replaced:
        if one.candidate is not None and one.candidate.example.device.type in TIMED:
            alike[modules.shape_of(one.candidate), before.about].append(one)
    search.tell("timing modules", 0, 1)
    with as_served(before.model):
        for each, _ in _settled(alike, functools.partial(modules.measured, before.run, passed), report):
            _tell(each, report, untimed)
    for each_of in [] if search.graph else decoders:
        keep_what_steps_gain(*each_of, report)
    step = "pass inputs= to measure" if search.workload is None else "a larger budget_s gives time for it"
    for why, names in untimed.items():
        report.tune.append(f"{', '.join(dict.fromkeys(names))}: not timed against the model's own code ({why}); {step}")


_Found = list[tuple[Paced | Untimed, list[Replaced]]]


def _settled_layers(
    whole: list[Replaced], exchange: AttentionSwap, report: Optimized, *, ours: bool, stays: bool = False
) -> _Found:
    def measure(group: list[Replaced]) -> Sizes | None:
        return layer_timing.measured(group, whole, exchange, report.time.deadline.passed, ours=ours)

    found = _settled(layer_timing.shapes_of(whole, exchange, ours=ours), measure, report, stays=stays)
    layer_timing.cut(whole)
    return found


def _settled(
    alike: Mapping[Hashable, list[Replaced]],
    measure: Callable[[list[Replaced]], Sizes | None],
    report: Optimized,
    *,
    stays: bool = False,
) -> _Found:
    """Time what is put on by shapes, set which way it computes at which size, and take out what gains nowhere."""
    found = []
    for about, group in alike.items():
        paths, kind = [each.path for each in group], group[0].kind
        weights = [each for each in group[0].swap.module.parameters() if each.ndim > 1]  # of products
        each = decided(
            about,
            group[0].module,
            paths,
            functools.partial(measure, group),
            report.time.deadline.passed,
            emulated=any(emulation.emulates(Device.detect(each.device), each.dtype) for each in weights),
        )
        if isinstance(each, Paced):
            for one in group:
                one.swap.state.take(each.ways, each.sizes.many(each.ways))
        if not stays and isinstance(each, Paced) and not each.kept:
            report.take_out(group, f"{kind}: no gain on random rows, in units of its own time: {each.text}")
        if isinstance(each, Untimed) and each.late:
            step = f"timing {each.module} on random rows"
            report.time.leave(step, step)
        if not stays and isinstance(each, Untimed) and not each.stays:
            report.take_out(group, f"{kind}: {each.why}")
        found.append((each, group))
    return found


def _tell(found: Paced | Untimed, report: Optimized, untimed: dict[str, list[str]], *, stays: bool = False) -> None:
    """Say what was timed, and what stays that was not."""
    if isinstance(found, Paced):
        report.paced.append(found)
    elif stays or found.stays:
        untimed.setdefault(found.why, []).append(found.module)

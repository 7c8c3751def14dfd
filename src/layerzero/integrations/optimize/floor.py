"""Without a caller's inputs: time what was put on beside what was there, and take out what is slower."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from layerzero.integrations.optimize.attending import AttentionSwap
from layerzero.integrations.optimize.candidate import Candidate, quiet
from layerzero.integrations.optimize.layer_pace import Around, around, attention_costs, pace_layers
from layerzero.integrations.optimize.layers import Found
from layerzero.integrations.optimize.module_pace import pace_modules
from layerzero.integrations.optimize.pace import Paced, Untimed
from layerzero.integrations.optimize.report import Optimized
from layerzero.integrations.optimize.swapping import Swap
from layerzero.serving.warmup import Progress

TIMED = frozenset({"cpu"})
"""Devices on which this is done: on others a first run may build kernels for minutes."""


def set_floor(
    attention: Sequence[tuple[str, AttentionSwap, float | None, bool]],
    whole: Sequence[Found],
    found: Sequence[tuple[str, Candidate]],
    report: Optimized,
    tell: Progress,
    *,
    graph: bool,
) -> None:
    """Take out what is slower than the model's own code at one of a few sizes, or raises there; say what each takes.

    Attention goes where layers that are not kept are slower with it. What is kept then is timed again without it.

    Args:
        attention: models of Transformers with their exchanges; whole: layers; found: modules. All that is kept is on.
        graph: whether steps are taken from the layers: then these, and the attention, stay.
    """
    beside: Around | None = None
    untimed: dict[str, list[str]] = {}
    for _, exchange, _, ours in attention:
        mine = {id(each) for each in exchange.model.modules()}
        layers = [each for each in whole if id(each.module) in mine]
        if not layers or next(layers[0].module.parameters()).device.type not in TIMED:
            continue
        tell("timing layers", 0, 1)
        found_out = _settled(layers, exchange, report, ours=ours, graph=graph)
        costs = attention_costs([each for each, _ in found_out])
        if costs and ours and not exchange.chosen and not graph:
            report.take_out([exchange], f"attention: {costs}")
            again = [one for each, group in found_out if isinstance(each, Paced) and each.kept for one in group]
            found_out = [(each, group) for each, group in found_out if not isinstance(each, Paced) or not each.kept]
            found_out += _settled(again, exchange, report, ours=False, graph=False)  # it was on in what they took
        for each, _ in found_out:
            _tell(each, report, untimed, stays=graph)
        if graph or report.time.deadline.passed() or not any(isinstance(each, Paced) for each, _ in found_out):
            continue
        try:
            beside = beside or around(layers, exchange)
        except Exception as error:  # noqa: BLE001  # what a model raises on arguments that were made for another
            said = f"{type(error).__name__}: {str(error)[:80]}"
            report.tune.append(f"modules were timed alone, not behind a layer of the model ({said})")
    here = [(path, each) for path, each in found if each.example.device.type in TIMED]
    tell("timing modules", 0, 1)
    with nullcontext() if beside is None else quiet(beside.model):
        paced_modules = list(pace_modules(here, beside, report.time))
    for each, candidates in paced_modules:
        _tell(each, report, untimed)
        _take_out([one.swap for one in candidates], candidates[0].kind, each, report)
    for why, names in untimed.items():
        told = ", ".join(dict.fromkeys(names))
        report.tune.append(f"{told}: not timed beside the model's own code ({why}); pass inputs= to measure")


def _settled(
    layers: Sequence[Found], exchange: AttentionSwap, report: Optimized, *, ours: bool, graph: bool
) -> list[tuple[Paced | Untimed, list[Found]]]:
    """Time layers, and take out those of each shape that are slower or were not timed."""
    found_out = []
    for each, group in pace_layers(layers, exchange, report.time, ours=ours):
        if not graph:
            _take_out([one.swap for one in group if one.swap is not None], "layer", each, report)
        found_out.append((each, group))
    return found_out


def _tell(found_out: Paced | Untimed, report: Optimized, untimed: dict[str, list[str]], *, stays: bool = False) -> None:
    """Say what was timed, and what stays that was not."""
    if isinstance(found_out, Paced):
        report.paced.append(found_out)
    elif stays or found_out.stays:
        untimed.setdefault(found_out.why, []).append(found_out.module)


def _take_out(swaps: Sequence[Swap], kind: str, found_out: Paced | Untimed, report: Optimized) -> None:
    if isinstance(found_out, Untimed):
        if not found_out.stays:
            report.take_out(swaps, f"{kind}: {found_out.why}")
    elif not found_out.kept:
        report.take_out(swaps, f"{kind}: no gain on random rows, in units of its own time: {found_out.text}")

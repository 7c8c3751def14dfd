"""Without a caller's inputs: time what was put on beside what was there, and take out what is slower."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from layerzero.integrations.optimize.attending import AttentionSwap
from layerzero.integrations.optimize.candidate import Candidate, quiet
from layerzero.integrations.optimize.layer_pace import Around, around, attention_costs, pace_layers
from layerzero.integrations.optimize.layers import Found
from layerzero.integrations.optimize.module_pace import pace_modules
from layerzero.integrations.optimize.pace import Paced
from layerzero.integrations.optimize.report import Optimized
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
    """Take out what is slower than the model's own code at one of a few sizes, and say what each takes.

    Args:
        attention: models of Transformers with their exchanges; whole: layers; found: modules. All that is kept is on.
        graph: whether steps are taken from the layers: then these, and the attention, stay.
    """
    beside: Around | None = None
    for _, exchange, _, ours in attention:
        mine = {id(each) for each in exchange.model.modules()}
        layers = [each for each in whole if id(each.module) in mine]
        if not layers or next(layers[0].module.parameters()).device.type not in TIMED:
            continue
        tell("timing layers", 0, 1)
        try:
            groups = list(pace_layers(layers, exchange, report.time, ours=ours))
        except Exception as error:  # noqa: BLE001  # what a model raises on arguments that were made for another
            why = f"{type(error).__name__}: {str(error)[:80]}"
            report.tune.append(f"layers were not timed beside the model's own ({why}); pass inputs= to measure")
            continue
        paced = [(each, group) for each, group in groups if each is not None]
        report.paced += [each for each, _ in paced]
        if graph:
            continue
        for each, group in groups:
            if each is None or not each.kept:
                report.take_out([one.swap for one in group if one.swap is not None], _why("layer", each))
        costs = attention_costs([each for each, _ in paced])
        if costs and ours and not exchange.chosen and not any(each.kept for each, _ in paced):
            report.take_out([exchange], f"attention: {costs}")
        if not report.time.deadline.passed():
            beside = beside or around(layers, exchange)
    here = [(path, each) for path, each in found if each.example.device.type in TIMED]
    tell("timing modules", 0, 1)
    with nullcontext() if beside is None else quiet(beside.model):
        paced_modules = list(pace_modules(here, beside, report.time))
    for each, candidates in paced_modules:
        report.paced += [each] if each is not None else []
        if each is None or not each.kept:
            report.take_out([one.swap for one in candidates], _why(candidates[0].kind, each))


def _why(kind: str, paced: Paced | None) -> str:
    if paced is None:
        return f"{kind}: no time was left to time it beside the model's own code (budget_s)"
    return f"{kind}: no gain on random rows, in units of its own time: {paced.text}"

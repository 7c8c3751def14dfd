"""Without a caller's inputs: time what was put on beside what was there, and take out what is slower."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from layerzero.integrations.exchange import Exchange
from layerzero.integrations.optimize.attending import AttentionSwap
from layerzero.integrations.optimize.candidate import Candidate, quiet
from layerzero.integrations.optimize.layer_pace import Around, around, attention_costs, pace_layers
from layerzero.integrations.optimize.layers import Found
from layerzero.integrations.optimize.module_pace import pace_modules
from layerzero.integrations.optimize.pace import Paced
from layerzero.integrations.optimize.report import Left, Optimized
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
            paced = list(pace_layers(layers, exchange, ours=ours))
        except Exception as error:  # noqa: BLE001  # what a model raises on arguments that were made for another
            why = f"{type(error).__name__}: {str(error)[:80]}"
            report.tune.append(f"layers were not timed beside the model's own ({why}); pass inputs= to measure")
            continue
        report.paced += [each for each, _ in paced]
        if graph:
            continue
        for each, group in paced:
            if not each.kept:
                _take_out(report, [one.swap for one in group if one.swap is not None], _why("layer", each))
        costs = attention_costs([each for each, _ in paced])
        if costs and ours and not exchange.chosen and not any(each.kept for each, _ in paced):
            _take_out(report, [exchange], f"attention: {costs}")
        beside = beside or around(layers, exchange)
    here = [(path, each) for path, each in found if each.example.device.type in TIMED]
    tell("timing modules", 0, 1)
    with nullcontext() if beside is None else quiet(beside.model):
        paced_modules = list(pace_modules(here, beside))
    for each, candidates in paced_modules:
        report.paced.append(each)
        if not each.kept:
            _take_out(report, [one.swap for one in candidates], _why(candidates[0].kind, each))


def _why(kind: str, paced: Paced) -> str:
    return f"{kind}: no gain on random rows, in units of its own time: {paced.text}"


def _take_out(report: Optimized, exchanges: Sequence[Exchange], why: str) -> None:
    """Give modules their own code back, and say why."""
    for exchange in exchanges:
        at = next(number for number, each in enumerate(report._exchanges) if each is exchange)
        exchange.off()
        del report._exchanges[at]
        told = report.replaced.pop(at)
        report.left.append(Left(told.path, told.module, why))

"""Random calls of sampling: rows that are peaked, flat, tied or padded, shares and counts for all rows or for each.

Calls on logits before and after a draw have places that were said twice, not at all, or are none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.draw import Draw

_VOCAB = (1, 2, 3, 7, 16, 32, 33, 64, 100, 257, 1000)
_SHARES = (0.05, 0.3, 0.5, 0.9, 0.95, 1.0, 1)
_COUNTS = (1, 2, 3, 5, 40, 2000)
_TEMPERATURES = (0.3, 1.0, 1.5, 2)


def logits_of(draw: Draw) -> Tensor:
    """Logits in float32: usual, peaked, flat, tied or padded."""
    rows = tuple(draw.of((1, 2, 3, 5, 17)) for _ in range(draw.of((0, 1, 2, 3), (1, 6, 3, 1))))
    rows = (0, *rows) if draw.chance(0.02) else rows
    shape = (*rows, draw.of(_VOCAB))
    kind = draw.of(("usual", "peaked", "flat", "tied", "padded"), (4, 2, 1, 2, 2))
    logits: Tensor = draw.normal(shape, torch.float32) * draw.of((1.0, 3.0))
    if kind == "peaked":
        logits[..., draw.stream.randrange(shape[-1])] += 20.0
    elif kind == "flat":
        logits.zero_()
    elif kind == "tied":
        logits = logits.round()
    elif kind == "padded":
        logits[..., shape[-1] - shape[-1] // 3 :] = -torch.inf
    return logits


def _source(draw: Draw, dtype: torch.dtype, name: str) -> dict[str, Any]:
    logits = logits_of(draw)
    values = logits if name == "logits" else logits.softmax(-1)
    return {name: draw.laid_out(values.to(dtype), expand=name == "logits")}  # one place so often adds up to anything


def _shares(name: str, draw: Draw, rows: tuple[int, ...]) -> dict[str, Any]:
    if draw.chance(0.3):
        return {f"{name}_by_row": draw.laid_out(draw.uniform(rows, torch.float32) * 1.2)}
    return {name: draw.of(_SHARES)}


def _counts(draw: Draw, rows: tuple[int, ...]) -> dict[str, Any]:
    if draw.chance(0.3):
        dtype = draw.of((torch.int32, torch.int64))
        return {"top_k_by_row": draw.laid_out(draw.integers(rows, draw.of((4, 300)), dtype) + 1)}
    return {"top_k": draw.of(_COUNTS)}


def temperatures(draw: Draw, rows: tuple[int, ...]) -> Tensor:
    """A temperature for each row."""
    return draw.laid_out(draw.uniform(rows, torch.float32) * 2 + 0.25)


def _randomness(draw: Draw, name: str, rows: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if name == "logits" and draw.chance(0.4):
        of_rows = draw.chance(0.3)
        found = {"temperature_by_row": temperatures(draw, rows)} if of_rows else {"temperature": draw.of(_TEMPERATURES)}
    kind = draw.of(("", "seed", "generator"), (3, 2, 1))
    if kind == "seed":
        found["seed"] = draw.of((0, 1, 2**63 - 1))
    elif kind == "generator":
        found["generator"] = torch.Generator(draw.device).manual_seed(draw.of((1, 2, 3)))
    return found


def _drawn(name: str, more: Sequence[Callable[..., dict[str, Any]]], draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    arguments = _source(draw, dtype, name)
    rows = tuple(arguments[name].shape[:-1])
    for each in more:
        arguments |= each(draw, rows)
    random = _randomness(draw, name, rows)
    if "seed_by_row" in arguments:  # which takes the place of both
        random = {name: value for name, value in random.items() if name not in ("seed", "generator")}
    return arguments | random


def _any_of_three(draw: Draw, rows: tuple[int, ...]) -> dict[str, Any]:
    """Often none, and then any of top-k, top-p and min-p."""
    found: dict[str, Any] = {}
    for each in (_counts, functools.partial(_shares, "top_p"), functools.partial(_shares, "min_p")):
        found |= each(draw, rows) if draw.chance(0.4) else {}
    found |= draw.maybe(0.3, seed_by_row=lambda: draw.laid_out(draw.integers(rows, 2**40, torch.int64)))
    return found


def drawing(kind: str, name: str) -> Callable[..., dict[str, Any]]:
    """What draws calls of a function, by the kind of its operation and the name of its first tensor."""
    if kind == "categorical":
        return functools.partial(_drawn, name, (_any_of_three,))
    counts = (_counts,) if kind.startswith("topk") else ()
    shares = (functools.partial(_shares, "min_p" if kind == "minp" else "top_p"),) if kind.endswith("p") else ()
    return functools.partial(_drawn, name, (*counts, *shares))


def greedy(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.greedy``."""
    arguments = _source(draw, dtype, "logits")
    return draw.poison(arguments, ("logits",))


_LENGTHS = (0, 1, 2, 7, 40)
_NUMBERS = {"repetition": (0.8, 1.0, 1.3, 2), "presence": (-0.5, 0.0, 0.7, 1), "frequency": (-0.25, 0.0, 0.3, 1)}


def _places(draw: Draw, rows: tuple[int, ...], vocab: int) -> Tensor:
    """Some twice, and some that are none."""
    shape = (*rows, draw.of(_LENGTHS))
    kind = draw.of((torch.int64, torch.int32))
    places = draw.integers(shape, vocab - 1, kind)
    if draw.chance(0.4):
        places = places.masked_fill(draw.uniform(shape, torch.float32) < 0.3, -1)
    return draw.laid_out(places, expand=False)


def apply_penalties(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.apply_penalties``."""
    logits = logits_of(draw)
    rows, vocab = tuple(logits.shape[:-1]), logits.shape[-1]
    arguments: dict[str, Any] = {"logits": draw.laid_out(logits.to(dtype))}
    if draw.chance(0.6):
        arguments["output_ids"] = _places(draw, rows, vocab)
        arguments |= draw.maybe(0.6, prompt_ids=lambda: _places(draw, rows, vocab))
    else:
        counts = draw.integers(logits.shape, 6, draw.of((torch.int32, torch.int64))) - 3
        arguments["output_counts"] = draw.laid_out(counts.clamp(min=0))
        arguments |= draw.maybe(0.6, prompt_mask=lambda: draw.laid_out(draw.uniform(logits.shape, torch.float32) < 0.3))
    for name, numbers in _NUMBERS.items():
        form = draw.of(("none", "one", "rows"))
        if form == "one":
            arguments[name] = draw.of(numbers)
        elif form == "rows":
            arguments[f"{name}_by_row"] = draw.laid_out(draw.uniform(rows, torch.float32) + 0.5)
    return arguments


def add_logit_bias(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.add_logit_bias``."""
    logits = logits_of(draw)
    places = _places(draw, tuple(logits.shape[:-1]), logits.shape[-1])
    bias = draw.normal(places.shape, torch.float32)
    if draw.chance(0.2) and bias.numel():
        bias[..., 0] = -torch.inf
    return {"logits": draw.laid_out(logits.to(dtype)), "bias_ids": places, "bias": draw.laid_out(bias)}


def chosen_logprobs(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.chosen_logprobs``."""
    logits = logits_of(draw)
    rows = tuple(logits.shape[:-1])
    ids = draw.integers(rows, logits.shape[-1] - 1, draw.of((torch.int64, torch.int32)))
    arguments = {"logits": draw.laid_out(logits.to(dtype)), "ids": draw.laid_out(ids)}
    if draw.chance(0.4):
        of_rows = draw.chance(0.5)
        arguments |= {"temperature_by_row": temperatures(draw, rows)} if of_rows else {"temperature": draw.of((0.5, 2))}
    return arguments

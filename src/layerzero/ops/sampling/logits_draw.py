"""Random calls on logits before and after a draw: places that were said twice, not at all, or are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops.draw import Draw
from layerzero.ops.sampling.draw import logits_of, temperatures

_LENGTHS = (0, 1, 2, 7, 40)
_NUMBERS = {"repetition": (0.8, 1.0, 1.3, 2), "presence": (-0.5, 0.0, 0.7, 1), "frequency": (-0.25, 0.0, 0.3, 1)}


def _places(draw: Draw, rows: tuple[int, ...], vocab: int, *, holes: bool = True) -> Tensor:
    """Some twice, and some that are none."""
    shape = (*rows, draw.of(_LENGTHS))
    kind = draw.of((torch.int64, torch.int32))
    places = draw.integers(shape, vocab - 1, kind)
    if holes and draw.chance(0.4):
        places = places.masked_fill(draw.uniform(shape, torch.float32) < 0.3, -1)
    return draw.laid_out(places, expand=False)


def apply_penalties(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.apply_penalties``."""
    logits = logits_of(draw)
    rows, vocab = tuple(logits.shape[:-1]), logits.shape[-1]
    arguments: dict[str, Any] = {"logits": draw.laid_out(logits.to(dtype))}
    if draw.chance(0.6):
        arguments["output_ids"] = _places(draw, rows, vocab)
        if draw.chance(0.6):
            arguments["prompt_ids"] = _places(draw, rows, vocab)
    else:
        counts = draw.integers(logits.shape, 6, draw.of((torch.int32, torch.int64))) - 3
        arguments["output_counts"] = draw.laid_out(counts.clamp(min=0))
        if draw.chance(0.6):
            arguments["prompt_mask"] = draw.laid_out(draw.uniform(logits.shape, torch.float32) < 0.3)
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

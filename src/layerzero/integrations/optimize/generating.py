"""One step of generation for loops of one's own: the model, its cache, and the next tokens drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.cache_argument import name_of
from layerzero.integrations.optimize.drawing import DRAWING, Drawing
from layerzero.ops.sampling.declare import LEAST, MOST_SEED
from layerzero.ops.sampling.formulas import TEMPERATURES


def generate_step(
    model: Any,
    cache: Any,
    tokens: Tensor,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    **more: Any,
) -> Tensor:
    """Run a decoder on the last tokens, and draw the next one of each sequence; the likeliest by default.

        cache = transformers.DynamicCache(config=model.config)
        tokens = lz.generate_step(model, cache, prompt)              # (B, S): the whole prompt
        for _ in range(63):
            tokens = lz.generate_step(model, cache, tokens)          # (B, 1): one token each

    After ``lz.optimize(model, graph=True)`` a step of one token is a graph that ends with the draw: one launch, and
    no logits travel. Anything else is run as the model runs it, and drawn by the same functions. It neither stops at
    an end token nor keeps what was drawn: a loop of one's own does.

    Shapes: tokens (B, S) → (B, 1) int64
    Args:
        model: a causal language model of Transformers.
        cache: its cache, as ``DynamicCache(config=model.config)``; gets S tokens more.
        tokens: what the cache does not have yet.
        temperature: what logits are divided by; 0 takes the likeliest token, None is 1.
        top_k: how many of the likeliest tokens may come, from 1.
        top_p: the share that the tokens which may come have together, of those that ``top_k`` leaves.
        min_p: how likely a token must be, in parts of the likeliest one. It is applied first.
        seed: the same seed at the same length of the cache gives the same draw by the same kernel; None draws from
            torch's generator of the device. Sequences of one call draw apart.
        more: passed to the model, as ``attention_mask``, ``position_ids``.
    Raises: InvalidCallError for numbers out of range; whatever the model raises.
    """
    _check(cache, tokens, more, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    drawing = Drawing(temperature, top_k, top_p, min_p, seed)
    token = DRAWING.set(drawing)
    before = cache.get_seq_length()
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=True, **{name_of(model): cache}, **more).logits
    finally:
        DRAWING.reset(token)
    if drawing.ids is None:
        with torch.no_grad():
            drawing.draw(logits[:, -1], int(before) + tokens.shape[1] - 1)
    assert drawing.ids is not None
    return drawing.ids.view(-1, 1)


OWN = ("input_ids", "past_key_values", "cache", "use_cache", "return_dict")
"""Arguments of the model that a step gives itself."""


def _check(cache: Any, tokens: Tensor, more: Mapping[str, Any], **given: float | None) -> None:
    """Raise for what does not fit, each with what was wanted and got."""
    problems = [f"{name}: wanted none, a step gives it itself; got one" for name in OWN if name in more]
    if not hasattr(cache, "get_seq_length"):
        wanted = "a cache of Transformers, as DynamicCache(config=model.config)"
        problems.append(f"cache: wanted {wanted}, got {type(cache).__name__}")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or 0 in tokens.shape:
        got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        problems.append(f"tokens: wanted a tensor (B, S) with at least one token each, got {got}")
    bounds: dict[str, tuple[float, float]] = {
        "top_k": (1, 2**31 - 1),
        "top_p": (LEAST, 1.0),
        "min_p": (LEAST, 1.0),
        "seed": (0, MOST_SEED),
    }
    for name, (first, last) in bounds.items():
        value = given[name]
        whole = name in {"top_k", "seed"}
        fits = isinstance(value, int) or (isinstance(value, float) and not whole)
        if value is not None and (isinstance(value, bool) or not fits or not first <= value <= last):
            kind = "a whole number" if whole else "a number"
            problems.append(f"{name}: wanted {kind} from {first:g} to {last:g} or None, got {value!r}")
    temperature, (coldest, hottest) = given["temperature"], TEMPERATURES
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if temperature is not None and not (number and (temperature == 0 or coldest <= temperature <= hottest)):
        problems.append(f"temperature: wanted 0, {coldest:g} to {hottest:g} or None, got {temperature!r}")
    if problems:
        raise InvalidCallError("generate_step", problems)

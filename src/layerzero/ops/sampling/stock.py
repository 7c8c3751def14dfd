"""What somebody without LayerZero writes: filter sorted probabilities, and torch.multinomial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.sampling.formulas import count_of, generator_of, of_row

Run = Callable[[], Tensor]


def greedy(logits: Tensor) -> Run:
    """``torch.argmax``."""
    return lambda: logits.argmax(-1)


def stock(kind: str, *, logits: bool) -> Callable[..., Run]:
    """The expression for an operation's arguments."""

    def make(*tensors: Tensor, seed: int | None = None, generator: torch.Generator | None = None, **given: Any) -> Run:
        tensor = tensors[0] if tensors else given.pop("logits" if logits else "probs")
        temperature = given.pop("temperature", None)

        def run() -> Tensor:
            weights = tensor.float()
            if logits:
                weights = (weights if temperature is None else weights / temperature).softmax(-1)
            own = generator_of(seed, generator, tensor.device)
            vocab = weights.shape[-1]
            flat = weights.reshape(-1, vocab)
            rows = {name: None if value is None else _flat(value) for name, value in given.items()}
            values, order = _filtered(kind, flat, **rows)
            place = torch.multinomial(values, 1, generator=own)
            place = place if order is None else order.gather(-1, place)
            return place.reshape(weights.shape[:-1])

        return run

    return make


def _flat(value: Any) -> Any:
    return value.reshape(-1) if isinstance(value, Tensor) else value


def _filtered(
    kind: str,
    weights: Tensor,
    k: int | None = None,
    row_k: Tensor | None = None,
    p: float | None = None,
    row_p: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if kind == "categorical":
        return weights, None
    if kind == "minp":
        bound = weights.amax(-1, keepdim=True) * of_row(p, row_p)
        return weights.masked_fill(weights < bound, 0.0), None
    if kind == "topk" and row_k is None:
        return weights.topk(count_of(k, row_k, weights.shape[-1]))
    values, order = weights.sort(-1, descending=True)
    if kind != "topp":
        places = torch.arange(values.shape[-1], device=values.device)
        values = values.masked_fill(places >= count_of(k, row_k, values.shape[-1]), 0.0)
    if kind != "topk":
        values = values / values.sum(-1, keepdim=True)
        before = values.cumsum(-1) - values
        drop = before >= of_row(p, row_p)
        drop[..., 0] = False
        values = values.masked_fill(drop, 0.0)
    return values, order

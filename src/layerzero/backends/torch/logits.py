"""Penalties, biases and log-probabilities as torch expressions that touch no more of a row than they change or need.

``torch.penalties`` copies the logits and works out new values for the places that were said alone, where the expression
of engines, ``torch.penalties_whole``, makes four passes over whole rows in fewer launches: 207 us for 276 at one row of
128256 places, 997 for 392 at 256 (H200, torch 2.11, 2026-11-22). ``torch.logprobs`` needs the sum of a row and one
number, and writes none of the others.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import TORCH
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.sampling.formulas import counts_of, of_row, penalised, tempered
from layerzero.ops.sampling.logits import BIAS, COUNTED, PENALTIES_BY

_NUMBERS = tuple(each.name for each in PENALTIES_BY)
_BY = (*_NUMBERS, *(f"{name}_by_row" for name in _NUMBERS))
_FLOATS = limit.dtype("float32", "float64", "float16", "bfloat16")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _values(given: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(of_row(given.get(name), given.get(f"{name}_by_row")) for name in _NUMBERS)


def _load_penalties(facts: Facts) -> Callable[..., Any]:
    def run(logits: Tensor, output_ids: Tensor, *, prompt_ids: Tensor | None = None, **given: Any) -> Tensor:
        vocab = logits.shape[-1]
        counts = seen = counts_of(output_ids, vocab)
        places = output_ids.clamp(min=0).long()
        if prompt_ids is not None:
            seen = seen + counts_of(prompt_ids, vocab)
            places = torch.cat((places, prompt_ids.clamp(min=0).long()), -1)
        own = _wide(logits.gather(-1, places))
        less = penalised(own, seen.gather(-1, places) > 0, counts.gather(-1, places), *_values(given))
        # a place that is named twice gets one value twice, and the place 0 of what is none that which it should have
        return logits.scatter(-1, places, less.to(logits.dtype))

    return run


def _load_whole_rows(facts: Facts) -> Callable[..., Any]:
    def run(logits: Tensor, output_ids: Tensor, *, prompt_ids: Tensor | None = None, **given: Any) -> Tensor:
        counts = counts_of(output_ids, logits.shape[-1])
        seen = counts > 0 if prompt_ids is None else (counts > 0) | (counts_of(prompt_ids, logits.shape[-1]) > 0)
        return penalised(_wide(logits), seen, counts, *_values(given)).to(logits.dtype, copy=True)

    return run


def _load_logprobs(facts: Facts) -> Callable[..., Any]:
    def run(
        logits: Tensor, ids: Tensor, *, temperature: float | None = None, temperature_by_row: Tensor | None = None
    ) -> Tensor:
        wide = tempered(_wide(logits), temperature, temperature_by_row)
        own = wide.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)
        return (own - wide.logsumexp(-1)).float()

    return run


_MADE = tuple(
    Kernel(
        id=name,
        operations=(operation,),
        backend=TORCH,
        load=load,
        accepts=accepts,
        limits=(_FLOATS,),
        grad=name != "torch.penalties",  # torch adds up the gradient of a place once for each time it is named
        handles_negated=True,
        priority=30 if name == "torch.penalties_whole" else 40,
    )
    for name, operation, load, accepts in (
        ("torch.penalties", "sampling.penalties", _load_penalties, ("prompt_ids", *_BY)),
        ("torch.penalties_whole", "sampling.penalties", _load_whole_rows, ("prompt_ids", *_BY)),
        ("torch.logprobs", "sampling.logprobs", _load_logprobs, ("temperature", "temperature_by_row")),
    )
)
_EXPRESSED: dict[str, Any] = {"backend": TORCH, "limits": (_FLOATS,), "handles_negated": True, "priority": 40}
KERNELS = (
    *_MADE,
    Kernel.of_expression(COUNTED, id="torch.penalties_counted", accepts=("prompt_mask", *_BY), **_EXPRESSED),
    Kernel.of_expression(BIAS, id="torch.logit_bias", **_EXPRESSED),
)

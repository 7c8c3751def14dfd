"""Places that a grammar allows, as one bit each: what xgrammar and llguidance fill, laid upon logits.

sampling.bitmask    minus infinity where the bit of a place is 0
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis
from layerzero.core.judge import Exact
from layerzero.core.operation import Case
from layerzero.ops.declaration import function, operation, tensor
from layerzero.ops.draw import Draw
from layerzero.ops.sampling.declare import AXES
from layerzero.ops.sampling.draw import logits_of
from layerzero.ops.sampling.logits import row_problems

BITS = 32
"""Places of a word."""


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Forbid the places whose bit is 0: their logits become minus infinity. NaN stays NaN.

    Place ``i`` is bit ``i % 32`` of the word ``i // 32``, the lowest bit first, as in xgrammar's
    ``allocate_token_bitmask`` and in llguidance. A row of -1 allows everything; bits behind the vocabulary are not
    read.

    Shapes: logits (*, V), bitmask (*, W), W at least V / 32 → (*, V)
    Dtype: logits floating, bitmask int32; returns logits.dtype.
    Raises: InvalidCallError for what does not fit.
    Source: xgrammar, arXiv:2411.15100.
    """
    # by a table of bytes, since torch fills by a mask of bool at 0.2 places a ns: 575 us for 128256 places, by this 72
    # (one thread of an AMD EPYC, torch 2.13.0, 2026-11-26)
    octets = torch.arange(256, device=logits.device).unsqueeze(-1) >> torch.arange(8, device=logits.device)
    bounds = torch.where((octets & 1).bool(), torch.inf, -torch.inf).to(logits.dtype)
    places = (
        bitmask.clone(memory_format=torch.contiguous_format).view(torch.uint8).int()
    )  # one word may have any stride
    return torch.minimum(logits, torch.nn.functional.embedding(places, bounds).flatten(-2)[..., : logits.shape[-1]])


def _examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Any]:
    """Every other place allowed, about."""
    shape = (case.sizes["rows"], case.sizes["mask_words"])
    if device.type == "meta":
        return {}
    where = device if generator is None else generator.device
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, device=where)
    return {"bitmask": words.to(device, torch.int32)}


_SIZES = {"small": (33, 32), "odd": (5, 1003), "llama2_batch": (8, 32000), "llama3_decode": (1, 128256)}

BITMASK = operation(
    "sampling.bitmask",
    "Minus infinity where the bit of a place is 0",
    apply_token_bitmask,
    inputs=(
        "logits: ... vocab",
        tensor("bitmask: ... mask_words", frozenset({torch.int32}), same_dtype=False),
    ),
    outputs=("output: ... vocab",),
    axes=(*AXES, Axis("mask_words", scales=True)),
    cases=tuple(
        Case(name, {"rows": rows, "vocab": vocab, "mask_words": -(-vocab // BITS)})
        for name, (rows, vocab) in _SIZES.items()
    ),
    judge=Exact("it picks numbers and computes none"),
    examples=_examples,
)


def _problems(arguments: dict[str, Any]) -> list[str]:
    problems = row_problems(BITMASK)(arguments)
    vocab, words = arguments["logits"].shape[-1], arguments["bitmask"].shape[-1]
    if words * BITS < vocab:
        problems.append(f"bitmask: wanted {-(-vocab // BITS)} words of 32 places for {vocab}, got {words}")
    return problems


def _drawn(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    logits = logits_of(draw)
    shape = (*logits.shape[:-1], -(-logits.shape[-1] // BITS) + draw.of((0, 0, 1)))
    words = draw.integers(shape, 2**32 - 1, torch.int64) - 2**31
    return {"logits": draw.laid_out(logits.to(dtype)), "bitmask": draw.laid_out(words.to(torch.int32))}


OPERATIONS = (BITMASK,)
FUNCTIONS = (function("apply_token_bitmask", BITMASK, varies=("...",), fits=_problems, draw=_drawn, weight=1),)

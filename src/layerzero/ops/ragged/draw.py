"""Random arguments of ragged attention: sequences of any length, empty ones among them, and what hides keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops.draw import Draw
from layerzero.ops.ragged.step import RaggedMetadata

HEAD_DIMS = (1, 7, 8, 16, 32, 33, 64, 96, 128)
HEAD_DIM_WEIGHTS = (1, 2, 3, 4, 4, 2, 4, 1, 2)
_LENGTHS = (0, 1, 2, 3, 5, 8, 16, 17, 33, 64)
_LENGTH_WEIGHTS = (2, 4, 3, 3, 3, 3, 3, 3, 2, 2)


def ragged_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.ragged_attention``."""
    sequences = draw.of((0, 1, 2, 3, 6), (1, 6, 12, 12, 6))
    kv_heads = draw.of((1, 2, 3, 4))
    heads = kv_heads * draw.of((1, 2, 3, 4), (6, 2, 1, 1))
    head_dim = draw.of(HEAD_DIMS, HEAD_DIM_WEIGHTS)
    value_dim = draw.of(HEAD_DIMS, HEAD_DIM_WEIGHTS) if draw.chance(0.1) else head_dim
    queries = [draw.of(_LENGTHS, _LENGTH_WEIGHTS) for _ in range(sequences)]
    same = draw.chance(0.5)
    keys = queries if same else [draw.of(_LENGTHS, _LENGTH_WEIGHTS) for _ in range(sequences)]
    starts_q = starts_of(draw, queries)
    starts_k = starts_q if same and draw.chance(0.5) else starts_of(draw, keys)
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((sum(queries), heads, head_dim), dtype)),
        "key": draw.laid_out(draw.normal((sum(keys), kv_heads, head_dim), dtype)),
        "value": draw.laid_out(draw.normal((sum(keys), kv_heads, value_dim), dtype)),
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
    }
    arguments |= scores(draw, head_dim)
    if draw.chance(0.7):
        arguments["causal"] = draw.chance(0.6)
    if draw.chance(0.6):
        for name, lengths in (("max_seqlen_q", queries), ("max_seqlen_k", keys)):
            arguments[name] = max(*lengths, 1, 1) + draw.of((0, 3), (4, 1))
    if draw.chance(0.1):
        arguments["sinks"] = draw.laid_out(draw.normal((heads,), draw.of((dtype, torch.float32))))
    if draw.chance(0.1):
        slopes = (heads,) if draw.chance(0.6) else (sequences, heads)
        arguments["alibi_slopes"] = draw.laid_out(draw.uniform(slopes, draw.of((dtype, torch.float32))) / 2)
    if draw.chance(0.3):
        arguments["step"] = RaggedMetadata(starts_q, starts_k, capturable=draw.chance(0.5))
    # A NaN reaches what sees it; of a query that sees no key nothing is defined.
    if "window" not in arguments and all(rows <= columns for rows, columns in zip(queries, keys, strict=True)):
        draw.poison(arguments, ("query",))
    return arguments


def starts_of(draw: Draw, lengths: list[int]) -> Tensor:
    """Where sequences of these lengths begin, on the device of the draw."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return torch.tensor(ends, dtype=torch.int32, device=draw.device)


def scores(draw: Draw, head_dim: int) -> dict[str, Any]:
    """What acts on scores by number alone."""
    arguments: dict[str, Any] = {}
    if draw.chance(0.15):
        unit = head_dim**-0.5
        arguments["scale"] = draw.of((unit, 0.25 * unit, 3.0 * unit))
    if draw.chance(0.12):
        arguments["window"] = (draw.of((-1, 0, 1, 4, 40)), draw.of((-1, 0, 3)))
    if draw.chance(0.08):
        arguments["softcap"] = draw.of((0.5, 5.0, 30.0))
    if draw.chance(0.15):
        arguments["return_lse"] = True
    return arguments

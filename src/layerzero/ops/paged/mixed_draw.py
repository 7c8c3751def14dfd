"""Random calls of several queries a sequence over a paged cache: chunks, whole prefills, decodes, and none at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops.draw import Draw
from layerzero.ops.paged import draw as pages
from layerzero.ops.paged.step import StepMetadata
from layerzero.ops.ragged.draw import starts_of


def paged_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.paged_attention`` with ``cu_seqlens_q``, over the cache of a decode's call.

    How many queries a sequence has is no data: the same call with other data has as many. So a whole prefill is a
    sequence that is at most as long as its queries, rather than one whose queries are as many as its tokens.
    """
    decodes, lengths = 0, list[int]()

    def most(batch: int, longest: int) -> list[int]:
        nonlocal decodes
        decodes = draw.stream.randint(1, batch) if batch and draw.chance(0.5) else 0
        tokens = [longest] * batch
        for number in range(batch):
            queries = 1 if number < decodes else draw.of((0, 1, 2, 5, None), (2, 3, 3, 3, 5))
            if queries is None:
                tokens[number] = queries = draw.stream.randint(1, longest)
            lengths.append(queries)
        return tokens

    arguments = pages.paged_attention(draw, dtype, most)
    table, lens, query = arguments["block_tables"], arguments["context_lens"], arguments["query"]
    starts = starts_of(draw, lengths)
    arguments |= {
        "query": draw.laid_out(draw.normal((sum(lengths), *query.shape[2:]), dtype)),
        "cu_seqlens_q": starts,
        "causal": draw.chance(0.7),
    }
    if decodes:
        arguments["decodes"] = decodes
    if draw.chance(0.6):
        arguments["max_seqlen_q"] = max(*lengths, 1, 1) + draw.of((0, 3), (4, 1))
    heads = query.shape[-2]
    if draw.chance(0.08):
        arguments["sinks"] = draw.laid_out(draw.normal((heads,), draw.of((dtype, torch.float32))))
    if draw.chance(0.12):
        slopes = (heads,) if draw.chance(0.6) else (len(lengths), heads)
        arguments["alibi_slopes"] = draw.laid_out(draw.uniform(slopes, draw.of((dtype, torch.float32))) / 2)
    if draw.chance(0.15):
        arguments |= {"causal": True, "tree_mask": _trees(draw, lengths)}
    if "step" in arguments:
        bound = arguments.get("max_context_len")
        capturable = draw.chance(0.5)
        arguments["step"] = StepMetadata(table, lens, cu_seqlens_q=starts, max_context_len=bound, capturable=capturable)
    return arguments


def _trees(draw: Draw, lengths: list[int]) -> Tensor:
    """Drafts whose parents are any earlier token or none; what lies beyond a sequence's own columns is garbage."""
    columns = draw.of((0, 3, max([*lengths, 1])), (1, 3, 3))
    mask = torch.full((sum(lengths), columns), draw.chance(0.5))
    first = 0
    for count in lengths:
        if count <= columns:
            mask[first : first + count, :count] = False
        for place in range(count if count <= columns else 0):
            parent = draw.stream.randint(-1, place - 1)
            if parent >= 0:
                mask[first + place] = mask[first + parent]
            mask[first + place, place] = True
        first += count
    return mask.to(draw.device)

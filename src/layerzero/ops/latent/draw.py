"""Random latent decodes: planes apart or in one tensor, NaN wherever nothing may be read."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.ops.draw import Draw
from layerzero.ops.paged.draw import fill, tables
from layerzero.ops.paged.step import StepMetadata

_WIDTHS = ((512, 64), (128, 64), (256, 64), (16, 8), (7, 3))
"""Latent and rotated; kernels know the first, the third is what few models have."""


def mla_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.mla_attention``."""
    batch, seq_q = draw.of((0, 1, 2, 3, 5), (1, 8, 12, 8, 3)), draw.of((1, 2, 4), (4, 1, 1))
    heads, (latent, rope) = draw.of((1, 3, 8, 16, 128), (2, 1, 4, 4, 1)), draw.of(_WIDTHS, (8, 2, 1, 2, 1))
    page_size, blocks = draw.of((16, 64, 3, 32), (5, 5, 1, 2)), draw.of((1, 2, 3, 7), (2, 3, 3, 1))
    capacity, least = blocks * page_size, 0 if draw.chance(0.15) else 1
    bound = draw.of((None, capacity, draw.stream.randint(1, capacity)), (7, 1, 1))
    longest = capacity if bound is None else bound
    lens = draw.integers((batch,), longest - least, torch.int32) + least
    table, pages = tables(draw, lens, blocks, page_size)
    widths, nan = (latent, rope), float("nan")
    form = draw.of(("joined", "apart", "padded"), (3, 2, 1))
    if form == "apart":
        planes = [torch.full((pages, page_size, width), nan, dtype=dtype, device=draw.device) for width in widths]
    else:
        extra = 8 if form == "padded" else 0
        both = torch.full((pages, page_size, latent + rope + extra), nan, dtype=dtype, device=draw.device)
        planes = [both[..., :latent], both[..., latent : latent + rope]]
    fill(draw, planes, table, lens, dtype)
    q_nope, q_pe = (draw.normal((batch, seq_q, heads, width), dtype) for width in widths)
    if draw.chance(0.3):
        q_nope, q_pe = torch.split(torch.cat((q_nope, q_pe), -1), [latent, rope], -1)
    else:
        q_nope, q_pe = draw.laid_out(q_nope), draw.laid_out(q_pe)
    arguments: dict[str, Any] = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "ckv_cache": planes[0],
        "kpe_cache": planes[1],
        "block_tables": table,
        "context_lens": lens,
        "scale": draw.of((1.0, 0.5, 1.7)) * (latent + rope) ** -0.5,
    }
    if draw.chance(0.3):
        arguments["return_lse"] = True
    if bound is not None:
        arguments["max_context_len"] = bound
    if draw.chance(0.5):
        arguments["step"] = StepMetadata(table, lens, max_context_len=bound, capturable=draw.chance(0.5))
    return arguments

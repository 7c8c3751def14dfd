"""What a rotation is, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """What a rotation is computed in: float32, or what is wider of the tensors."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def rows_of(cos: Tensor, sin: Tensor, positions: Tensor | None, seq: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token, with an axis of one for the heads: (..., S, 1, R/2)."""
    if positions is None:
        return cos[:seq].unsqueeze(-2), sin[:seq].unsqueeze(-2)
    places = positions.long()
    return cos[places].unsqueeze(-2), sin[places].unsqueeze(-2)


def rotated(tensor: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, wide: torch.dtype) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` entries of each head; the rest passes through.

    Shapes: tensor (..., S, H, D), cos and sin (..., S, 1, R/2) → tensor's
    """
    width = 2 * cos.shape[-1]
    turned, rest = tensor[..., :width].to(wide), tensor[..., width:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined.to(tensor.dtype), rest), -1)


def rope_reference(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of entries of each head: ``(x cos - y sin, y cos + x sin)``.

    A pair is (i, i + R/2), or (2i, 2i + 1) if interleaved; entries from R on pass through.

    Shapes: query (..., S, H, D), key (..., S, K, D), cos and sin (P, R/2), positions (..., S) or (S,), 0 to S-1 without
    → (..., S, H, D), (..., S, K, D)
    Dtype: computes in float32 or what is wider of the tensors; returns that of query and key. cos and sin as they are.
    Units: positions in rows of the table.
    Source: RoFormer, arXiv:2104.09864; half-split as GPT-NeoX has it, interleaved as GPT-J and GGUF files do.
    """
    wide = wide_dtype(query, cos, sin)
    rows = [each.to(wide) for each in rows_of(cos, sin, positions, query.shape[-3])]
    query, key = (rotated(each, *rows, interleaved=interleaved, wide=wide) for each in (query, key))
    return query, key


def rope_inplace_reference(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """``posenc.rope``, written over query and key; entries from R on are not touched.

    Shapes, dtypes, units and source as of ``posenc.rope``. Mutates query and key; returns nothing.
    """
    results = rope_reference(query, key, cos, sin, positions=positions, interleaved=interleaved)
    width = 2 * cos.shape[-1]
    for tensor, result in zip((query, key), results, strict=True):
        tensor[..., :width] = result[..., :width]


def rope_fake(query: Tensor, key: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Results of the shapes of query and key."""
    return query.new_empty(query.shape), key.new_empty(key.shape)


def rope_inplace_fake(*_: object, **__: object) -> None:
    """Nothing: query and key are written over."""
    return

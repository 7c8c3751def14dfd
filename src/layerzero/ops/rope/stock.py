"""Rotation as Transformers' models do it, with the arguments of ours; the tables are gathered once a step there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rows_of(cos: Tensor, sin: Tensor, positions: Tensor | None, seq: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token, with an axis of one for the heads: (..., S, 1, R/2)."""
    if positions is None:
        return cos[:seq].unsqueeze(-2), sin[:seq].unsqueeze(-2)
    places = positions.long()
    return cos[places].unsqueeze(-2), sin[places].unsqueeze(-2)


def parts(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views (..., S, H, D) of a joined product (..., S, (H + 2 K) * D)."""
    count = heads + 2 * kv_heads
    each = qkv.view(*qkv.shape[:-1], count, qkv.shape[-1] // count)
    return (each.narrow(-2, 0, heads), each.narrow(-2, heads, kv_heads), each.narrow(-2, heads + kv_heads, kv_heads))


def rope(query: Tensor, key: Tensor, *table: Any, **given: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """``x * cos + rotate_half(x) * sin`` in the dtype of the query, on cosines and sines of full width."""
    turn = _turning(query, *table, **given)
    return lambda: (turn(query), turn(key))


def rope_one(input: Tensor, *table: Any, **given: Any) -> Callable[[], Tensor]:
    """The same of one tensor."""
    turn = _turning(input, *table, **given)
    return lambda: turn(input)


def _turning(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    layout: str | None = None,
) -> Callable[[Tensor], Tensor]:
    heads_first = query.ndim == 4 and layout == "BHSD"
    width, seq = 2 * cos.shape[-1], query.shape[-2 if heads_first else -3]
    pair = [each.to(query.dtype) for each in rows_of(cos, sin, positions, seq)]
    if heads_first:
        pair = [each.transpose(-2, -3) for each in pair]
    full = [each.repeat_interleave(2, -1) if interleaved else torch.cat((each, each), -1) for each in pair]

    def half_turn(tensor: Tensor) -> Tensor:
        if interleaved:
            return torch.stack((-tensor[..., 1::2], tensor[..., 0::2]), -1).flatten(-2)
        return torch.cat((-tensor[..., width // 2 :], tensor[..., : width // 2]), -1)

    def turn(tensor: Tensor) -> Tensor:
        turned, rest = tensor[..., :width], tensor[..., width:]
        turned = turned * full[0] + half_turn(turned) * full[1]
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    return turn


def rope_(query: Tensor, key: Tensor, *table: Any, **given: Any) -> Callable[[], None]:
    """The same, copied over query and key."""
    turn = rope(query, key, *table, **given)

    def run() -> None:
        for tensor, result in zip((query, key), turn(), strict=True):
            tensor.copy_(result)

    return run


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *table: Any,
    eps: float = 1e-6,
    plus_one: bool = False,
    **given: Any,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """``torch.nn.functional.rms_norm`` of each head, then the rotation."""
    turn = _turning(query, *table, **given)
    return lambda: (turn(_normed(query, q_weight, eps, plus_one)), turn(_normed(key, k_weight, eps, plus_one)))


def _normed(tensor: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """As Qwen's models do; as Gemma's in float32 where one is added to the weight."""
    if not plus_one:
        return functional.rms_norm(tensor, weight.shape, weight, eps)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return functional.rms_norm(tensor.to(wide), weight.shape, 1.0 + weight.to(wide), eps).to(tensor.dtype)


def split_qkv_norm_rope(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    *table: Any,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    **given: Any,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Views of the product, the norms, the rotation; the values stay a view."""
    query, key, value = parts(qkv, heads, kv_heads)
    turn = _turning(query, *table, **given)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        if q_weight is None or k_weight is None:
            return turn(query), turn(key), value
        return turn(_normed(query, q_weight, eps, plus_one)), turn(_normed(key, k_weight, eps, plus_one)), value

    return run

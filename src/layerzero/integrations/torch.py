"""torch's own attention function, served by LayerZero: the same signature, the same defaults, the same results."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import has_torch_function

import layerzero as lz
from layerzero.core.errors import InvalidCallError

_torch_function = functional.scaled_dot_product_attention
"""torch's, as it was when this was imported: whoever puts ours in its place must not call himself."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as ``torch.nn.functional.scaled_dot_product_attention`` does, with the fastest kernel that is valid.

    Beside :func:`layerzero.attention`: **not causal unless asked**, causality aligned top-left where the lengths
    differ, heads before the sequence, ``is_causal`` for ``causal``. What ``lz.attention`` does not compute goes to
    torch's function: tensors of other than four axes, axes to broadcast, nested and other special tensors, more causal
    queries than keys, and whatever torch refuses, so that its errors stay its own.

    Shapes: query (B, H, S_q, D), key (B, K, S_k, D), value (B, K, S_k, D_v) → (B, H, S_q, D_v); K is H, or with
        enable_gqa a divisor of it.
    Dtype: all three the same floating dtype; the output has it too; under autocast that of autocast.
    Args:
        attn_mask: broadcastable to (B, H, S_q, S_k); bool, True attends; or float, added to scores.
        dropout_p: probability of dropping an attention weight, whether or not somebody trains.
        is_causal: a query sees the keys up to its own position, counted from the first.
        scale: factor on the scores, 1/sqrt(D) by default.
        enable_gqa: whether several queries' heads may share one of keys and values.
    Raises: what torch's raises.
    """
    if is_causal and attn_mask is None and query.ndim == key.ndim == value.ndim == 4:
        queries = query.shape[2]
        if queries < key.shape[2]:  # from the top left, no query sees more keys than there are queries
            key, value = key[:, :, :queries], value[:, :, :queries]
    if not _expressible(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa):
        return _torch_function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    kind = query.device.type
    tensors = query, key, value
    if torch.is_autocast_enabled(kind) and query.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        tensors = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    try:
        return lz.attention(*tensors, is_causal, scale, layout="BHSD", attn_mask=attn_mask, dropout_p=dropout_p)
    except InvalidCallError:  # torch's function says in its own words what is wrong, or knows what to do
        return _torch_function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _expressible(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether both functions mean the same by these tensors."""
    tensors = query, key, value
    if has_torch_function(tensors) or any(each.is_nested or each.ndim != 4 for each in tensors):
        return False
    if mask is not None and (is_causal or has_torch_function((mask,))):
        return False
    (batch, heads, queries, _), (_, kv_heads, keys, _) = query.shape, key.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or 0 in (*query.shape, *key.shape, *value.shape):
        return False
    if heads != kv_heads and not (enable_gqa and heads % kv_heads == 0):
        return False
    return not is_causal or queries == keys

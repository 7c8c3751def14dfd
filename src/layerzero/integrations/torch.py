"""torch's own attention function, served by LayerZero: the same signature, the same defaults, the same results."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.ops.attention.layout import LAYOUT, as_attention

_torch_function = functional.scaled_dot_product_attention
"""torch's, as it was when this was imported: code that puts ours in its place must not call itself."""


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

    Other than :func:`layerzero.attention`: **not causal by default**, causality aligned top-left where the lengths
    differ, heads before the sequence, ``is_causal`` for ``causal``. torch's function gets what ``lz.attention`` does
    not compute: other than four axes, axes to broadcast, nested and other special tensors, more causal queries than
    keys. It also gets whatever torch refuses, so that its errors stay its own. ``lz.explain`` takes this function and
    says which kernel runs, or why torch's does.

    Shapes: query (B, H, S_q, D), key (B, K, S_k, D), value (B, K, S_k, D_v) → (B, H, S_q, D_v); K is H, or with
        enable_gqa a divisor of it.
    Dtype: all three the same floating dtype; the output has it too; under autocast that of autocast.
    Args:
        attn_mask: broadcastable to (B, H, S_q, S_k); bool, True attends; or float, added to scores.
        dropout_p: probability of dropping an attention weight, in training or not.
        is_causal: a query sees the keys up to its own position, counted from the first.
        scale: factor on the scores, 1/sqrt(D) by default.
        enable_gqa: whether several queries' heads may share one of keys and values.
    Raises: what torch's raises.
    """
    made = as_attention(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    if not isinstance(made, str):
        try:
            return lz.attention(*made[:3], is_causal, scale, layout=LAYOUT, attn_mask=made[3], dropout_p=dropout_p)
        except InvalidCallError:  # torch's function says in its own words what is wrong, or knows what to do
            pass
    return _torch_function(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )

"""The mathematics of attention over sequences that lie one after the other, and the shapes of its results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.ragged.starts import lengths_of, longest_of, one_after_the_other, to_the_left, to_the_right


def ragged_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Pad the sequences to rows of equal length, attend by definition, and take the padding away.

    Queries stand at the right end of their rows and keys at the left of theirs, with their lengths beside: so the last
    query of a sequence meets its last key. No sequence reads another one's tokens.

    Shapes: query (T, H, D), key (T_k, K, D), value (T_k, K, D_v), cu_seqlens_q and cu_seqlens_k (B + 1,), sinks (H,),
    alibi_slopes (H,) or (B, H) → (T, H, D_v); log-sum-exp (H, T). A query that sees no key gives 0 and -inf.
    Dtype: computes in float32, or float64 for float64; returns query.dtype; log-sum-exp float32, natural logarithm.
    Units: max_seqlen_q and max_seqlen_k in tokens; without them a device's rows are as long as all tokens together.
    """
    tokens, kv_tokens = query.shape[0], key.shape[0]
    longest_q = longest_of(cu_seqlens_q, tokens, max_seqlen_q)
    longest_k = longest_of(cu_seqlens_k, kv_tokens, max_seqlen_k)
    result = attention_reference(
        to_the_right(query, cu_seqlens_q, longest_q),
        to_the_left(key, cu_seqlens_k, longest_k),
        to_the_left(value, cu_seqlens_k, longest_k),
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        kv_lens=lengths_of(cu_seqlens_k),
        return_lse=return_lse,
    )
    found: Tensor | tuple[Tensor, Tensor] = without_padding(result, cu_seqlens_q, tokens)
    return found


def without_padding(result: Any, starts: Tensor, tokens: int) -> Any:
    """Results of rows, as results of tokens: (B, S, H, D_v) to (T, H, D_v), a log-sum-exp (B, H, S) to (H, T)."""
    if not isinstance(result, tuple):
        return one_after_the_other(result, starts, tokens)
    output, lse = result
    lse = one_after_the_other(lse.transpose(1, 2), starts, tokens).t().contiguous()
    return one_after_the_other(output, starts, tokens), lse


def ragged_fake(
    query: Tensor, key: Tensor, value: Tensor, *_: object, return_lse: bool = False, **__: object
) -> Tensor | tuple[Tensor, Tensor]:
    """Results of the right shape and dtype, nothing computed: the value's head dim decides the output's."""
    tokens, heads, _dim = query.shape
    output = query.new_empty((tokens, heads, value.shape[-1]))
    return (output, query.new_empty((heads, tokens), dtype=torch.float32)) if return_lse else output

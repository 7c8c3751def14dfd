"""What somebody with ragged sequences calls in torch: its varlen attention on a GPU, a loop on a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = True,
    scale: float | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    step: object = None,
    **others: Any,
) -> Callable[[], Tensor] | None:
    """Torch's own way; None for what it has no argument for. The lengths of a caller are known on the host."""
    if any(each is not None and each is not False for each in others.values()):
        return None
    if query.is_cuda:
        longest = max_seqlen_q or len(query), max_seqlen_k or len(key)
        return _varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, *longest, causal=causal, scale=scale)
    pairs = [list(pairwise(each.tolist())) for each in (cu_seqlens_q, cu_seqlens_k)]
    square = pairs[0] == pairs[1]
    if (causal and not square) or query.device.type != "cpu":  # torch aligns a causal mask top-left
        return None
    grouped = query.shape[1] != key.shape[1]

    def run() -> Tensor:
        found = []
        for (first, last), (first_k, last_k) in zip(*pairs, strict=True):
            rows = (query[first:last], key[first_k:last_k], value[first_k:last_k])
            q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in rows)
            output = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
            found.append(output[0].transpose(0, 1))
        return torch.cat(found) if found else query.new_empty((0, query.shape[1], value.shape[2]))

    return run


def _varlen(*tensors: Any, causal: bool, scale: float | None) -> Callable[[], Any] | None:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters  # they differ between torch 2.10 and 2.13
    arguments: dict[str, Any] = {}
    if scale is not None:
        arguments["scale"] = scale
    if "window_size" in known:
        arguments["window_size"] = (-1, 0) if causal else (-1, -1)
    else:
        arguments["is_causal"] = causal
    if "enable_gqa" in known:
        arguments["enable_gqa"] = tensors[0].shape[1] != tensors[1].shape[1]
    return (lambda: varlen_attn(*tensors, **arguments)) if arguments.keys() <= known.keys() else None

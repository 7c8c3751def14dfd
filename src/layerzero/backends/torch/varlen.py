"""PyTorch's attention over sequences of unlike lengths: one after the other on a CPU, its varlen operator on NVIDIA.

On a CPU each sequence is a call of the operator behind ``F.scaled_dot_product_attention``; nothing is padded. Elsewhere
each is a call of that function, which waits once for the device to say where sequences begin. On CUDA torch's
FlashAttention 2 takes the starts as they lie on the device (``torch.nn.attention.varlen`` calls the same
operator); its causal mask is aligned at the end of each sequence. Pages are gathered first, each sequence as long as
its table, and ``seqused_k`` says how far it is read.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import (
    FLOATS,
    POSITIVE_WITH_CAUSAL,
    UNLISTED,
    blanked,
    gives_no_lse,
    kernel,
    lse_seen,
    mask_of_few,
    sdpa_operator,
)
from layerzero.backends.torch.cpu_half import Attend, attended, attends, in_float32
from layerzero.backends.torch.cuda_attention import aligned_rows
from layerzero.backends.torch.softcap import with_sinks
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.attention.limits import LseWithoutGradient, SdpaEnabled
from layerzero.ops.attention.reference import attention_bias, with_lse
from layerzero.ops.ragged import declare as ragged

Slice = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries (S, H, D), keys (S_k, K, D), values (S_k, K, D) and slopes (H,) of one sequence."""


def attend_each(
    sequences: Iterable[Slice],
    like: Tensor,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    masks: Iterable[Tensor | None] = repeat(None),
    attend: Attend | None = None,
    **scores: Any,
) -> Any:
    """Attention of one sequence after the other: (T, H, D), and (H, T) of the log-sum-exp; ``like`` is all queries.

    ``masks`` (S, S_k), True where a key is seen, come one with each sequence. There is a log-sum-exp, and there are
    sinks, on a CPU alone. ``attend`` is what runs there, torch's operator by default.
    """
    operator = (attend or sdpa_operator("flash_attention_for_cpu")) if like.device.type == "cpu" else _function
    outputs: list[Tensor] = []
    sums: list[Any] = []
    for (query, key, value, slopes), mask in zip(sequences, masks, strict=False):
        if len(query) == 0:
            continue
        if len(key) == 0:
            outputs.append(query.new_zeros((*query.shape[:2], value.shape[2])))
            sums.append(query.new_full((query.shape[1], len(query)), -torch.inf, dtype=torch.float32))
            continue
        output, lse = _attend(operator, query, key, value, slopes, mask, **scores)
        outputs.append(output)
        sums.append(lse)
    output = torch.cat(outputs) if outputs else torch.zeros_like(like)
    if not return_lse and sinks is None:
        return output
    lse = torch.cat(sums, 1) if sums else like.new_empty((like.shape[1], 0), dtype=torch.float32)
    if sinks is None:
        return output, lse
    summed = with_sinks(output.transpose(0, 1), lse, sinks, return_lse=return_lse)
    return (output, summed[1]) if return_lse else output


def _attend(
    operator: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    seen: Tensor | None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    queries, heads, width = query.shape
    keys, kv_heads = key.shape[:2]
    square, mask = queries == keys, None
    causal = causal and queries > 1  # one query stands at the end: nothing is in its future
    if window is not None or slopes is not None or seen is not None or (causal and not square):
        dense = query.unsqueeze(0), key.unsqueeze(0)
        mask = attention_bias(*dense, causal=causal, window=window, alibi_slopes=slopes, attn_mask=seen)
        causal = False
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    if mask is None and query.is_cpu and (few := mask_of_few(q, k, scale, causal=causal)) is not None:
        mask, causal = few, False
    if queries == 1 and heads != kv_heads and (mask is None or mask.ndim == 2 or mask.shape[1] == 1):
        q = query.view(1, kv_heads, -1, width)  # heads of a group as so many queries: each key is read once for them
        mask = None if mask is None else mask.expand(*mask.shape[:-2], heads // kv_heads, keys)
        output, lse = operator(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        return output.reshape(1, heads, -1), None if lse is None else lse_seen(lse, mask).reshape(heads, 1)
    output, lse = operator(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return output[0].transpose(0, 1), None if lse is None else lse_seen(lse, mask)[0]


def _function(
    query: Tensor, key: Tensor, value: Tensor, _: float, causal: bool, *, attn_mask: Tensor | None, scale: float | None
) -> tuple[Tensor, None]:
    """``F.scaled_dot_product_attention`` in place of the CPU's operator, without a log-sum-exp."""
    query, key, value = (aligned_rows(each) for each in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return (output if attn_mask is None else blanked(output, attn_mask)), None


def _load_ragged(facts: Facts, attend: Attend | None = None) -> Callable[..., Any]:
    by_sequence = facts["alibi_slopes"] != "none" and len(facts.tensors["alibi_slopes"].shape) == 2

    def run(*tensors: Tensor, alibi_slopes: Tensor | None = None, **scores: Any) -> Any:
        query, key, value, cu_seqlens_q, cu_seqlens_k = tensors
        pairs = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
        sequences = (
            (
                query[first:last],
                key[first_k:last_k],
                value[first_k:last_k],
                alibi_slopes[number] if by_sequence and alibi_slopes is not None else alibi_slopes,
            )
            for number, ((first, last), (first_k, last_k)) in enumerate(pairs)
        )
        return attend_each(sequences, query, attend=attend, **scores)

    return run


def longest_of_v2(longest_q: int, longest_k: int, causal: bool, window: tuple[int, int] | None) -> int:
    """The bound of keys for FlashAttention 2: a window that is open to the right, or longer than that, ends there.

    With more queries than keys the first ones lost keys that way (torch 2.11, H200, 2026-12-01).
    """
    return longest_k if causal or window in (None, (-1, -1)) else longest_k + longest_q


def longest_or(promised: int | None, tokens: int) -> int:
    """What a launch is sized by: the promised length, or that of all tokens in one sequence; at least 1."""
    return max(tokens if promised is None else min(promised, tokens), 1)


def longest_queries(promised: int | None, tokens: int, sequences: int) -> int:
    """The same of queries for FlashAttention 2: at least 2 where a sequence has none.

    For a longest of 1 it lays the heads of a group in place of queries and takes it that every sequence has one:
    "shape is invalid" for 1 token of 3 sequences (vllm 0.20, H200, 2026-11-22).
    """
    longest = longest_or(promised, tokens)
    return longest if longest > 1 or tokens == sequences else 2


def load_cuda_ragged(
    facts: Facts, queries: Callable[[int | None, int, int], int] = longest_queries
) -> Callable[..., Any]:
    """FlashAttention 2 of torch over tokens; ``queries`` gives the longest sequence of queries to say."""

    def run(*tensors: Tensor, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **scores: Any) -> Any:
        query, key, value, cu_seqlens_q, cu_seqlens_k = tensors
        longest = queries(max_seqlen_q, len(query), len(cu_seqlens_q) - 1), longest_or(max_seqlen_k, len(key))
        return flash(query, key, value, cu_seqlens_q, cu_seqlens_k, *longest, **scores)

    return run


_FLASH = torch.ops.aten._flash_attention_forward.default


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    lens: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """FlashAttention 2 of torch over tokens: (T, H, D), and (H, T) of the log-sum-exp.

    Keys of a sequence are read as far as ``lens`` (B,) int32 says, or to where the next one starts.
    """
    left, right = window or (-1, -1)
    longest_k = longest_of_v2(longest_q, longest_k, causal, window)
    output, lse, *_ = _FLASH(
        *(query, key, value, starts_q, starts_k, longest_q, longest_k, 0.0, causal, False),
        scale=scale,
        window_size_left=left,
        window_size_right=0 if causal else right,
        seqused_k=lens,
    )
    return with_lse(output, lse) if return_lse else output


def _square(facts: Facts) -> bool:
    """Whether a loop over ``F.scaled_dot_product_attention`` gives it: it aligns a causal mask top-left."""
    alike = facts["tokens"] == facts["kv_tokens"] or facts["causal"] is not True
    return alike and not facts["return_lse"] and facts["window"] is None and not facts.tensors.keys() & _BIASES


_BIASES = {"alibi_slopes", "sinks"}


FLASH = (
    limit.platform("cuda"),
    limit.arch(min=(8, 0)),
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", max=256, multiple=8),
    limit.equal("value_dim", "head_dim"),
    limit.positive("scale"),
    SdpaEnabled("flash"),
)
"""What torch's FlashAttention 2 takes."""

EACH = (limit.platform("cuda", *UNLISTED), FLOATS, limit.positive("scale"), SdpaEnabled("math"))
"""What torch's function takes of one sequence after the other; it has a kernel for each while math may run."""


_RAGGED = kernel(
    "torch.ragged_sdpa",
    ragged.RAGGED,
    _load_ragged,
    limit.platform("cpu"),
    FLOATS,
    limit.equal("value_dim", "head_dim"),
    limit.one_of("bias_grad", False),
    POSITIVE_WITH_CAUSAL,
    LseWithoutGradient(),
    # they act on a log-sum-exp, which has no gradient here
    limit.rule(
        "sinks: none with gradients",
        lambda facts: facts["sinks"] == "none" or not facts["requires_grad"],
        "GRAD_UNSUPPORTED",
    ),
    SdpaEnabled("flash"),
    limit.last_stride_one("query", "key", "value"),
    accepts=("causal", "scale", "window", "sinks", "alibi_slopes", "return_lse"),
    grad=True,
    graph_safe=False,
    priority=50,
    stock=_square,
)

KERNELS = (
    _RAGGED,
    in_float32(_RAGGED, attends, lambda facts: _load_ragged(facts, attended(sdpa_operator("flash_attention_for_cpu")))),
    kernel(
        "torch.ragged_each",
        ragged.RAGGED,
        _load_ragged,
        *EACH,
        accepts=("causal", "scale", "window"),
        grad=True,
        deterministic=False,
        graph_safe=False,
        priority=30,
        stock=_square,
    ),
    kernel(
        "torch.varlen",
        ragged.RAGGED,
        load_cuda_ragged,
        *FLASH,
        limit.last_stride_one("query", "key", "value"),
        limit.aligned(16, "query", "key", "value"),
        limit.contiguous("cu_seqlens_q", "cu_seqlens_k"),
        accepts=("causal", "scale", "window", "return_lse", "max_seqlen_q", "max_seqlen_k"),
        deterministic=False,
        priority=60,
        stock=gives_no_lse,
    ),
)

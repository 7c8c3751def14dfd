"""The mathematics of attention over sequences that lie one after the other, proofs by it, and torch's own way.

A reference pads queries to the longest sequence: 64 decodes with 8 chunks of 512 at 4096 keys wanted 58 GB (H200,
2026-11-23). A call that is too large for float64 is proved in pieces: queries end where their keys do, so that the last
ones of a sequence are a call of their own.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.facts import Facts
from layerzero.core.operation import Part
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.ragged.starts import (
    RaggedMetadata,
    lengths_of,
    longest_of,
    one_after_the_other,
    to_the_left,
    to_the_right,
)


def ragged_attention(
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
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    step: RaggedMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within sequences of unlike lengths that lie one after the other, without padding between them.

    Shapes: query (T, H, D), key (T_k, K, D), value (T_k, K, D_v), H a multiple of K; cu_seqlens_q and cu_seqlens_k
        (B + 1,) → (T, H, D_v).
    Dtype: query, key and value the same floating dtype; starts int32, on the same device.
    Args:
        cu_seqlens_q: where each sequence's queries begin: 0, then the end of each. Sequences may be empty.
        cu_seqlens_k: the same of its keys; the same tensor where both are of one length.
        causal: hide keys in the future; the last query of a sequence is aligned with its last key.
        scale: factor on the scores, 1/sqrt(D) by default.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths that the caller knows; all tokens together if None.
            Kernels size their work by them. A longer sequence is the caller's mistake: found in debug mode.
        window: (left, right) keys around the query's own position that it sees, as in ``lz.attention``.
        softcap: ``c * tanh(score / c)`` on the scores.
        sinks: (H,), one extra logit a head.
        alibi_slopes: (H,) or (B, H).
        return_lse: also return the log-sum-exp of the scores, float32 (H, T), natural logarithm.
        step: the :class:`layerzero.RaggedMetadata` of these starts, so that kernels that plan on the host do so once
            for all layers.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf (with sinks, the sink).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; on a
        CPU and in debug mode for starts that do not begin at 0, decrease, or end elsewhere than the tokens.
        NoKernelFoundError if policy leaves no kernel.
    Source: flash_attn_varlen_func of FlashAttention, arXiv:2205.14135.
    """
    # Sequences are padded to rows of equal length: queries stand at the right end of theirs, keys at the left. So the
    # last query of a sequence meets its last key, and no sequence reads another one's tokens. Without bounds a device's
    # rows are as long as all tokens together.
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


def stock(
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


MOST_SCORES = 2**24
"""Of a piece: 0.13 GB of scores in float64, of which a reference makes several."""


def parts_of_pages(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part]:
    """Pieces of a call over pages."""
    keys = arguments["context_lens"].tolist()
    return [
        _piece(arguments, row, first, end, {name: arguments[name][row : row + 1] for name in _OF_PAGES})
        for row, first, end in _chosen(arguments, keys, facts.size("heads"))
    ]


def parts_of_keys(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part]:
    """Pieces of a call whose keys lie one after the other."""
    starts = arguments["cu_seqlens_k"].tolist()
    keys = [after - before for before, after in itertools.pairwise(starts)]
    found = []
    for row, first, end in _chosen(arguments, keys, facts.size("heads")):
        rows = slice(starts[row], starts[row + 1])
        cut = {"key": arguments["key"][rows], "value": arguments["value"][rows]}
        cut["cu_seqlens_k"] = _starts(keys[row], arguments["cu_seqlens_k"])
        found.append(_piece(arguments, row, first, end, cut))
    return found


_OF_PAGES = ("block_tables", "context_lens")


def _chosen(arguments: Mapping[str, Any], keys: Sequence[int], heads: int) -> Iterator[tuple[int, int, int]]:
    """Sequences with queries, first and last and the first behind the decodes, each with its last queries: from, to."""
    starts = arguments["cu_seqlens_q"].tolist()
    rows = [row for row, count in enumerate(keys) if starts[row + 1] > starts[row]]
    behind = [row for row in rows if row >= (arguments.get("decodes") or 0)]
    for row in sorted({*rows[:1], *behind[:1], *rows[-1:]}):
        count = starts[row + 1] - starts[row]
        if arguments.get("tree_mask") is None:  # whose columns are all new tokens of a sequence
            count = min(count, max(MOST_SCORES // (heads * max(keys[row], 1)), 1))
        yield row, starts[row + 1] - count, starts[row + 1]


def _piece(arguments: Mapping[str, Any], row: int, first: int, end: int, cut: dict[str, Any]) -> Part:
    promises = dict.fromkeys(("step", "decodes") & arguments.keys())
    made = {**arguments, **cut, **promises, "query": arguments["query"][first:end]}
    made["cu_seqlens_q"] = _starts(end - first, arguments["cu_seqlens_q"])
    if arguments.get("max_seqlen_q") is not None:
        made["max_seqlen_q"] = end - first
    slopes, tree_mask = arguments.get("alibi_slopes"), arguments.get("tree_mask")
    if slopes is not None and slopes.ndim == 2:
        made["alibi_slopes"] = slopes[row : row + 1]
    if tree_mask is not None:
        made["tree_mask"] = tree_mask[first:end]

    def place(result: torch.Tensor) -> torch.Tensor:
        return result[first:end] if result.ndim == 3 else result[:, first:end]  # log-sum-exps are (H, T)

    return Part(f"queries {first} to {end - 1} of sequence {row}", made, place)


def _starts(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, count], dtype=like.dtype, device=like.device)

"""Attention whose bits depend neither on the batch nor on how a prompt was cut: torch's own kernel on tiles of queries.

On a CPU 16 queries are computed at once, those whose positions lie between two multiples of 16, with the keys up to the
next multiple of 64, filled up with zeros and hidden by a mask. So a query meets the same call, and has the same place
in it, in a prompt, in any part of it, and as the one token of a step; and each sequence and head is a task of its own.
Its price: a copy of keys and values, and 16 queries for one.

On CUDA torch's FlashAttention 2 shares out keys among more blocks where a batch is small, and adds up what they give.
Its way for sequences of unlike lengths does so for one query each alone, so that calls say two. The one query of a step
is causal there, for kernels with causality and without have other blocks of keys on some devices.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import BY_ITSELF, CPU_FLASH, FOLDED, SDPA_ARGUMENTS, cpu_attend, kernel
from layerzero.backends.torch.varlen import FLASH, load_cuda_ragged
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.attention import declare as attention
from layerzero.ops.paged import declare as paged
from layerzero.ops.paged import mixed
from layerzero.ops.paged.pages import tokens_of
from layerzero.ops.ragged import declare as ragged

QUERIES, KEYS = 16, 64
"""Of a tile; keys are filled up to a multiple."""

Attend = Callable[..., Tensor]


def tiles(facts: Facts) -> Attend:
    """Attention of a batch (B, H, S, D) by tiles of queries."""
    operator = cpu_attend(facts)
    # float16 rounds what a mask adds: results were 24 times the tolerance off, with float32 0.4 (AMD EPYC, 2026-11-27)
    exact = torch.float64 if facts["dtype"] is torch.float64 else torch.float32

    def attend(*tensors: Tensor, causal: bool, scale: float | None = None, attn_mask: Tensor | None = None) -> Tensor:
        query, key, value = tensors
        batch, heads, queries, width = query.shape
        kv_heads, keys = key.shape[1:3]
        group = heads // kv_heads
        beyond = -keys % KEYS
        key, value = (functional.pad(each, (0, 0, 0, beyond)).contiguous() for each in (key, value))
        grouped = query.reshape(batch, kv_heads, group, queries, width)
        columns = torch.arange(keys + beyond)
        found = query.new_empty((batch, kv_heads, group, queries, value.shape[3]))
        first = keys - queries  # the position of the first query, which may lie before the first key
        for start in range(first - first % QUERIES, keys, QUERIES):
            rows = slice(max(start, first) - first, min(start + QUERIES, keys) - first)
            before, behind = max(first - start, 0), max(start + QUERIES - keys, 0)
            tile = functional.pad(grouped[..., rows, :], (0, 0, before, behind))
            seen = keys + beyond if not causal else max(start + QUERIES + -(start + QUERIES) % KEYS, KEYS)
            last = torch.arange(start, start + QUERIES).unsqueeze(1)
            hidden = (
                (columns[:seen] > last) | (columns[:seen] >= keys)
                if causal
                else (columns[:seen] >= keys).expand(QUERIES, -1)
            )
            mask = torch.zeros(hidden.shape, dtype=exact).masked_fill_(hidden, -torch.inf)
            if attn_mask is not None:
                own = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
                if own.shape[-2] != 1:
                    own = functional.pad(own, (0, 0, before, behind))
                own = own if own.shape[-1] == 1 else functional.pad(own, (0, beyond))[..., :seen]
                mask = mask + own
            if group > 1:
                mask = _by_group(mask, kv_heads, group)
            tile = tile.reshape(batch, kv_heads, group * QUERIES, width).contiguous()
            output, _ = operator(tile, key[:, :, :seen], value[:, :, :seen], 0.0, False, attn_mask=mask, scale=scale)
            output = output.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)  # it sees no key
            output = output.reshape(batch, kv_heads, group, QUERIES, -1)
            found[..., rows, :] = output[..., before : QUERIES - behind, :]
        return found.reshape(batch, heads, queries, -1)

    return attend


def _by_group(mask: Tensor, kv_heads: int, group: int) -> Tensor:
    """The mask of a tile whose heads of a group are further queries: (..., H or 1, Q, S) to (..., K or 1, G * Q, S)."""
    if mask.ndim > 2 and mask.shape[-3] == kv_heads * group:
        return mask.reshape(*mask.shape[:-3], kv_heads, group * mask.shape[-2], mask.shape[-1])
    return mask.repeat(*(1,) * (mask.ndim - 2), group, 1)


def _load_dense(facts: Facts) -> Callable[..., Any]:
    attend, decodes = tiles(facts), facts["operation"] in attention.DECODE

    def run(*tensors: Tensor, causal: bool = False, **scores: Any) -> Tensor:
        return attend(*tensors, causal=causal or decodes, **scores)

    return run


def _one(attend: Attend, query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
    if not len(query) or not len(key):
        return query.new_zeros((*query.shape[:2], value.shape[2]))
    output = attend(*(each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)), **named)
    return output[0].transpose(0, 1)


def _load_ragged(facts: Facts) -> Callable[..., Any]:
    attend = tiles(facts)

    def run(*tensors: Tensor, causal: bool = False, **scores: Any) -> Tensor:
        query, key, value, cu_seqlens_q, cu_seqlens_k = tensors
        pairs = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
        found = [
            _one(attend, query[first:last], key[start:end], value[start:end], causal=causal, **scores)
            for (first, last), (start, end) in pairs
        ]
        return torch.cat(found) if found else query.new_zeros((0, query.shape[1], value.shape[2]))

    return run


def _load_paged(facts: Facts) -> Callable[..., Any]:
    attend, page_size, several = tiles(facts), facts.size("page_size"), "cu_seqlens_q" in facts.tensors

    def run(query: Tensor, *pages: Tensor, causal: bool = True, **scores: Any) -> Tensor:
        key_cache, value_cache, block_tables, context_lens, *of_several = pages
        tokens = query if several else query.flatten(0, 1)
        starts = of_several[0].tolist() if several else [*range(len(tokens) + 1)]
        found = []
        for row, ((first, last), length) in enumerate(zip(pairwise(starts), context_lens.tolist(), strict=True)):
            own = block_tables[row, : -(-length // page_size)]
            keys, values = (tokens_of(cache, own, length) for cache in (key_cache, value_cache))
            found.append(_one(attend, tokens[first:last], keys, values, causal=causal, **scores))
        output = torch.cat(found) if found else tokens.new_zeros((0, tokens.shape[1], value_cache.shape[-1]))
        return output if several else output.unsqueeze(1)

    return run


def _two_at_least(promised: int | None, tokens: int, _sequences: int) -> int:
    """Of one query each FlashAttention 2 shares out the keys."""
    return max(promised or tokens, 2)


def _load_unsplit_ragged(facts: Facts) -> Callable[..., Any]:
    return load_cuda_ragged(facts, _two_at_least)


def starts_of_one_length(facts: Facts) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    """Where queries and keys of so many sequences of one length begin, int32: the layers of a step ask for the same.

    What one stream made another one may not read yet. A captured graph may not read what goes with the next call, and
    what it made itself lies in its own memory: a capture keeps nothing here.
    """
    where, capturing = torch.device("cuda", facts.device.index), bool(facts["capturing"])
    last: tuple[Any, Any] = (None, None)

    def starts(batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        nonlocal last
        asked = batch, queries, keys, torch._C._cuda_getCurrentRawStream(where.index)
        known = last  # once: another thread may write it
        if known[0] != asked:
            rows = torch.arange(batch + 1, dtype=torch.int32, device=where)
            known = asked, (rows * queries, rows * keys)
            if not capturing:
                last = known
        found: tuple[Tensor, Tensor] = known[1]
        return found

    return starts


def _load_unsplit(facts: Facts) -> Callable[..., Any]:
    attend, starts = _load_unsplit_ragged(facts), starts_of_one_length(facts)
    decodes = facts["operation"] in attention.DECODE

    def run(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, **scores: Any) -> Tensor:
        batch, queries, keys = len(query), query.shape[1], key.shape[1]
        output: Tensor = attend(
            *(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), *starts(batch, queries, keys)),
            max_seqlen_q=queries,
            max_seqlen_k=keys,
            causal=causal or decodes,
            **scores,
        )
        return output.view(batch, queries, *output.shape[1:])

    return run


_DENSE = ("query", "key", "value")
_CPU: tuple[tuple[str, tuple[str, ...], Callable[..., Any], tuple[str, ...], dict[str, Any]], ...] = (
    ("sdpa.tiled", attention.PREFILL, _load_dense, (*SDPA_ARGUMENTS, "attn_mask"), {"layout": "BHSD", "folds": FOLDED}),
    (
        *("sdpa.tiled_decode", attention.DECODE, _load_dense, ("scale", "attn_mask")),
        {"layout": "BHSD", "folds": tuple(each for each in FOLDED if each != "causal")},
    ),
    ("ragged_tiled", ragged.RAGGED, _load_ragged, SDPA_ARGUMENTS, {}),
    ("paged_tiled", (*paged.DECODE_PAGED, *mixed.ALL), _load_paged, SDPA_ARGUMENTS, {"layout": "NHD"}),
)
_CUDA = (
    ("sdpa.unsplit", attention.PREFILL, _load_unsplit, (*SDPA_ARGUMENTS, "window"), "BSHD"),
    ("sdpa.unsplit_decode", attention.DECODE, _load_unsplit, ("scale", "window"), "BSHD"),
    (
        *("varlen_unsplit", ragged.RAGGED, _load_unsplit_ragged),
        *((*SDPA_ARGUMENTS, "window", "max_seqlen_q", "max_seqlen_k"), None),
    ),
)

KERNELS = (
    *(
        kernel(
            f"torch.{name}",
            operations,
            load,
            *CPU_FLASH,
            *((limit.one_of("attn_mask", "none", "float", foldable=True),) if "attn_mask" in accepts else ()),
            accepts=accepts,
            **BY_ITSELF,
            asked_for=True,
            graph_safe=False,
            priority=3,
            **more,
        )
        for name, operations, load, accepts, more in _CPU
    ),
    *(
        kernel(
            f"torch.{name}",
            operations,
            load,
            *FLASH,
            limit.contiguous(*_DENSE) if layout else limit.last_stride_one(*_DENSE),
            limit.aligned(16, *_DENSE),
            *(() if layout else (limit.contiguous("cu_seqlens_q", "cu_seqlens_k"),)),
            layout=layout,
            accepts=accepts,
            **BY_ITSELF,
            asked_for=True,
            priority=3,
        )
        for name, operations, load, accepts, layout in _CUDA
    ),
)

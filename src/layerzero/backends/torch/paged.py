"""PyTorch's own ways with a paged cache: gather the pages and attend with SDPA, copy new tokens by index.

Gathering moves every key and value once more than a kernel that follows the block table does (434 us against 143 for 64
sequences of 2048 tokens, bfloat16, H200, torch 2.11, 2026-11-21); it is what is left where no such kernel is.

Several queries a sequence: one sequence after the other, so that nothing is padded; a device is waited for once. On
NVIDIA from sm 8.0 on all pages of the table at once for torch's FlashAttention 2, which reads each sequence as far as
its length says. Both move every key and value once more than a kernel that follows the block table does.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import CPU_FLASH, FLOATS, always, cpu_attend, kernel, mask_of_few, no_atomics
from layerzero.backends.torch.softcap import CAPPED, FITTING_CAP, load_softcap
from layerzero.backends.torch.varlen import EACH, FLASH, Slice, attend_each, flash, longest_queries
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.attention.limits import SdpaEnabled
from layerzero.ops.cascade import FLAT
from layerzero.ops.paged import declare as paged
from layerzero.ops.paged import mixed
from layerzero.ops.paged.append import append_paged_kv_
from layerzero.ops.paged.pages import CacheList, converted_dtype, gathered, has_numbers, tokens_of
from layerzero.ops.paged.tree import of_sequence, scored

_SMALL = 2**17
"""Bytes of a sequence's keys up to which all sequences are gathered at once on a CPU.

8 sequences of 8 heads on 2 of 64, one after the other to all at once: 2.2 of its time at 32 tokens in float32, 1.0 at
256 (which is this), 0.26 at 512 (EPYC Zen 5, torch 2.13.0, one thread, 2026-11-26).
"""


def load_gather(facts: Facts) -> Callable[..., Any]:
    """What gathers the pages of each sequence and attends with SDPA; on a CPU it reads their lengths."""
    at_once = _load_at_once(facts)
    if facts.device.platform != "cpu":
        return at_once
    sdpa = torch.nn.functional.scaled_dot_product_attention
    page_size, kv_heads, group = (facts.size(name) for name in ("page_size", "kv_heads", "group"))

    def gather(
        query: Tensor,
        *given: Tensor,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        max_context_len: int | None = None,
    ) -> Tensor:
        (key_cache, value_cache, block_tables, context_lens), caches = given, given[:2]
        if not has_numbers(context_lens) or not len(query):
            found: Tensor = at_once(query, *given, scale=scale, window=window)
            return found
        lengths = context_lens.tolist()
        heads = query.reshape(len(query), kv_heads, group, -1)  # those that read the same keys are rows of one product
        blocks = -(-max(lengths) // page_size)
        if blocks * page_size * kv_heads * key_cache.shape[-1] * key_cache.itemsize <= _SMALL:
            positions, ends = torch.arange(blocks * page_size), context_lens.unsqueeze(1)
            pages = block_tables[:, :blocks].masked_fill(positions[::page_size] >= ends, 0)
            keys, values = (cache[pages].flatten(1, 2).transpose(1, 2) for cache in caches)
            visible = positions < ends
            if window is not None:
                visible &= positions >= ends - 1 - window[0]
            found = sdpa(heads, keys, values, attn_mask=visible[:, None, None], scale=scale)
            if math.isfinite(found.sum()):  # what lies beyond a sequence may be NaN, which no mask hides
                return found.reshape(len(query), 1, kv_heads * group, -1)
        rows, width = [], value_cache.shape[-1]
        nothing = query.new_zeros((1, kv_heads, group, width))
        for row, length in enumerate(lengths):
            begin = 0 if window is None else max(length - 1 - window[0], 0)
            first = begin // page_size
            pages, last = block_tables[row, first : -(-length // page_size)], length - first * page_size
            keys, values = (
                tokens_of(cache, pages, last)[begin - first * page_size :].transpose(0, 1).unsqueeze(0)
                for cache in caches
            )
            asked = heads[row : row + 1]
            mask = mask_of_few(asked, keys, scale, causal=False)
            rows.append(sdpa(asked, keys, values, attn_mask=mask, scale=scale) if length else nothing)
        return torch.cat(rows).reshape(len(query), 1, kv_heads * group, width)

    return gather


def _load_at_once(facts: Facts) -> Callable[..., Any]:
    """All sequences together, nothing read on the host."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    group = facts.size("group")
    on_gpu = facts.device.platform != "cpu"

    def gather(
        query: Tensor, *pages: Tensor, scale: float | None = None, window: tuple[int, int] | None = None, **bound: Any
    ) -> Tensor:
        key_cache, value_cache, block_tables, context_lens = pages
        caches = gathered(key_cache, value_cache, block_tables, context_lens, **bound)
        keys, values = (each.transpose(1, 2) for each in caches)
        positions, lengths = torch.arange(keys.shape[2], device=query.device), context_lens.unsqueeze(1)
        if not on_gpu:
            beyond = (positions >= lengths)[:, None, :, None]  # what lies there may be NaN, which no mask hides
            keys, values = keys.masked_fill(beyond, 0.0), values.masked_fill(beyond, 0.0)
        visible = positions < lengths
        if window is not None:
            visible &= positions >= lengths - 1 - window[0]
        mask = visible[:, None, None, :]
        if on_gpu:  # the kernel that takes a mask loads 16 bytes at a time, whatever the address
            query = query.clone(memory_format=torch.contiguous_format)
        output = sdpa(query.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=group != 1)
        return output.transpose(1, 2).masked_fill(context_lens.view(-1, 1, 1, 1) == 0, 0.0)

    return gather


def _gathered_bytes(facts: Facts) -> int:
    """Keys and values of every sequence."""
    tokens = facts.size("batch") * facts.size("context_bound")
    width = facts.size("kv_heads") * (facts.size("head_dim") + facts.size("value_dim"))
    return tokens * width * facts.tensors["query"].dtype.itemsize


def load_append(facts: Facts) -> Callable[..., Any]:
    """What writes new tokens into the slots of a cache in NHD."""
    on_cpu = facts.device.platform == "cpu"
    if facts["requires_grad"] and not on_cpu:
        return append_paged_kv_  # a token that stands for another would have its gradient, too

    def append(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        page_size = key_cache.shape[1]
        valid = slot_mapping >= 0
        if on_cpu:  # here a value costs nothing to read
            if not valid.all():
                key, value, slot_mapping = key[valid], value[valid], slot_mapping[valid]
        else:  # a token without a slot repeats the first that has one
            source = torch.where(valid, torch.arange(len(valid), device=valid.device), valid.long().argmax())
            key, value, slot_mapping = key[source], value[source], slot_mapping[source].clamp(min=0)
            page, offset = slot_mapping // page_size, slot_mapping % page_size
            held = key_cache[page, offset], value_cache[page, offset]  # what stays where no token has a slot
            key, value = (torch.where(valid.any(), new, old) for new, old in zip((key, value), held, strict=True))
        page, offset = slot_mapping // page_size, slot_mapping % page_size
        key_cache[page, offset] = key
        value_cache[page, offset] = value

    return append


def _dense(tokens: Tensor) -> Tensor:
    """Tokens whose numbers lie side by side: gathering keeps the order of a cache's axes."""
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def load_each(facts: Facts) -> Callable[..., Any]:
    """Sequence by sequence, each with its own pages."""
    page_size, slopes = facts.size("page_size"), facts.tensors.get("alibi_slopes")
    by_sequence = slopes is not None and len(slopes.shape) == 2
    attend = cpu_attend(facts)

    def run(
        query: Tensor,
        *pages: Tensor,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        alibi_slopes: Tensor | None = None,
        tree_mask: Tensor | None = None,
        **scores: Any,
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens, cu_seqlens_q = pages
        lengths = [*zip(pairwise(cu_seqlens_q.tolist()), context_lens.tolist(), strict=True)]
        by_depth = tree_mask is not None and (window is not None or alibi_slopes is not None)
        each = [*alibi_slopes] if by_sequence and alibi_slopes is not None else [alibi_slopes] * len(lengths)

        def sequences() -> Iterator[Slice]:
            for row, ((first, last), length) in enumerate(lengths):
                pages = block_tables[row, : -(-length // page_size)]
                keys, values = (_dense(tokens_of(cache, pages, length)) for cache in (key_cache, value_cache))
                yield query[first:last], keys, values, None if by_depth else each[row]

        def masks() -> Iterator[Tensor | None]:
            wide = torch.promote_types(query.dtype, torch.float32)
            for row, ((first, last), length) in enumerate(lengths):
                if tree_mask is None or not by_depth:
                    yield of_sequence(tree_mask, first, last, length)
                else:
                    here = cu_seqlens_q.new_tensor([0, last - first]), context_lens[row : row + 1], last - first, length
                    yield scored(tree_mask[first:last], *here, window, each[row], wide)[0]

        scores["window"] = None if by_depth else window
        return attend_each(sequences(), query, causal=causal, masks=masks(), attend=attend, **scores)

    return run


def load_listed(facts: Facts) -> Callable[..., Any]:
    """Request by request, each with a contiguous cache of its own; lengths are read on the host."""
    attend = cpu_attend(facts)

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        kv_lens: Tensor,
        *,
        cache_list: CacheList | None = None,
        return_lse: bool = False,
        **scores: Any,
    ) -> Any:
        kv_lens = kv_lens.cpu()
        if cache_list is not None:
            cache_list.refuse_beyond("batched_attention", "kv_lens", kv_lens)
        rows = zip(key_cache, value_cache, strict=True) if cache_list is None else cache_list.rows
        wide = converted_dtype(query, key_cache)
        tokens, lengths = query.squeeze(1).to(wide), kv_lens.tolist()

        def sequences() -> Iterator[Slice]:
            for row, (length, held) in enumerate(zip(lengths, rows, strict=True)):
                keys, values = (_dense(each[:length].to(wide)) for each in held)
                yield tokens[row : row + 1], keys, values, None

        found = attend_each(sequences(), tokens, attend=attend, return_lse=return_lse, **scores)
        output, lse = found if return_lse else (found, None)
        output = output.unsqueeze(1).to(query.dtype)
        return output if lse is None else (output, lse.t().unsqueeze(2))

    return run


def load_softcapped(facts: Facts) -> Callable[..., Any]:
    """Sequence by sequence with a softcap, one query or several each."""
    attend, page_size, several = load_softcap(facts), facts.size("page_size"), "cu_seqlens_q" in facts.tensors

    def run(
        query: Tensor,
        *given: Tensor,
        softcap: float,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
    ) -> Tensor:
        key_cache, value_cache, block_tables, context_lens, *of_several = given
        tokens = query if several else query.squeeze(1)
        starts = of_several[0].tolist() if several else [*range(len(tokens) + 1)]
        left, right = window or (-1, -1)
        found = tokens.new_zeros((*tokens.shape[:2], value_cache.shape[-1]))
        for row, ((first, last), length) in enumerate(zip(pairwise(starts), context_lens.tolist(), strict=True)):
            if first == last or not length:
                continue
            pages, seen = block_tables[row, : -(-length // page_size)], None
            if window is not None:
                ahead = torch.arange(length) - torch.arange(length - last + first, length).unsqueeze(1)
                least, most = -left if left >= 0 else -math.inf, 0 if causal else right if right >= 0 else math.inf
                hidden = (ahead < least) | (ahead > most)
                seen = torch.zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -math.inf)
            each = [tokens[first:last], *(tokens_of(cache, pages, length) for cache in (key_cache, value_cache))]
            output = attend(
                *(tensor.transpose(0, 1).unsqueeze(0) for tensor in each),
                softcap=softcap,
                scale=scale,
                causal=causal and seen is None,
                attn_mask=seen,
            )
            found[first:last] = output[0].transpose(0, 1)
        return found if several else found.unsqueeze(1)

    return run


def flash_over_gathered(
    query: Tensor,
    *pages: Tensor,
    causal: bool = True,
    max_context_len: int | None = None,
    max_seqlen_q: int | None = None,
    **scores: Any,
) -> Any:
    """All sequences in one call, over gathered pages."""
    key_cache, value_cache, block_tables, context_lens, cu_seqlens_q = pages
    keys, values = gathered(key_cache, value_cache, block_tables, context_lens, max_context_len)
    batch, capacity = keys.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * capacity
    longest = longest_queries(max_seqlen_q, len(query), batch), capacity
    tokens = query, keys.flatten(0, 1), values.flatten(0, 1)
    return flash(*tokens, cu_seqlens_q, starts, *longest, causal=causal, lens=context_lens, **scores)


_over_pages = functools.partial(kernel, layout="NHD")

KERNELS = (
    _over_pages(
        "torch.paged_gather",
        FLAT,
        load_gather,
        limits=(FLOATS, limit.positive("scale"), SdpaEnabled("math")),
        accepts=("scale", "window", "max_context_len"),
        # torch's own dispatch obeys the caller's sdpa_kernel context; it has a kernel for this while math may run
        workspace_bytes=lambda facts: 2 * _gathered_bytes(facts),  # they are blanked in new memory
        deterministic=no_atomics,
        priority=20,
    ),
    _over_pages(
        "torch.paged_append",
        "kv.append.paged",
        load_append,
        FLOATS,
        batch_invariant=True,
        tp_invariant=True,
        priority=20,
    ),
    _over_pages(
        "torch.paged_sdpa",
        mixed.ALL,
        load_each,
        limits=(*CPU_FLASH, limit.last_stride_one("query")),
        accepts=("causal", "scale", "window", "return_lse", "sinks", "alibi_slopes", "tree_mask"),
        graph_safe=False,
        priority=50,
    ),
    *(
        _over_pages(
            name,
            paged.GQA_DECODE_BATCHED.name,
            load_listed,
            limits=(*CPU_FLASH, limit.last_stride_one("query"), limit.one_of("converted", converted)),
            accepts=("scale", "window", "return_lse", "cache_list"),
            graph_safe=False,
            priority=priority,
        )
        for name, converted, priority in (("torch.batched_sdpa", False, 50), ("torch.batched_converted", True, 20))
    ),
    _over_pages(
        "torch.batched_each",
        paged.GQA_DECODE_BATCHED.name,
        load_listed,
        *EACH,
        limit.one_of("converted", False),
        accepts=("scale", "window", "cache_list"),
        deterministic=False,
        graph_safe=False,
        priority=15,
    ),
    _over_pages(
        "torch.paged_each",
        mixed.ALL,
        load_each,
        *EACH,
        accepts=("causal", "scale", "window", "tree_mask"),
        deterministic=False,
        graph_safe=False,
        priority=15,
    ),
    _over_pages(
        "torch.paged_softcap",
        (*paged.DECODE_PAGED, *mixed.ALL),
        load_softcapped,
        limits=(limit.platform("cpu"), limit.dtype("float32", "float16", "bfloat16"), CAPPED, FITTING_CAP),
        accepts=("causal", "scale", "window", "softcap"),
        graph_safe=False,
        priority=40,
    ),
    _over_pages(
        "torch.paged_varlen",
        mixed.ALL,
        always(flash_over_gathered),
        *FLASH,
        # gathering keeps the order of a cache's axes (seen with torch 2.11: "must have contiguous last dimension")
        limit.last_stride_one("query", "key_cache", "value_cache"),
        limit.aligned(16, "query"),
        limit.contiguous("context_lens", "cu_seqlens_q"),
        accepts=("causal", "scale", "window", "return_lse", "max_context_len", "max_seqlen_q"),
        workspace_bytes=_gathered_bytes,
        deterministic=False,
        priority=20,
    ),
)

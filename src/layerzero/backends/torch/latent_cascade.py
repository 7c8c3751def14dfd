"""Latent attention in torch, and what merges parts of attention.

Pages are gathered, then all heads of a sequence are so many queries to one key head. A latent vector is the key of
every head and its value, so that (S * H, C + R) times the keys is one product, and no key is repeated for a head. The
expression adds up in float32, whatever the dtype. On a CPU torch's attention operator takes one sequence after the
other, where the keys stand for the values, too: their rotated columns are cut off.

Parts of attention are merged by a torch expression; on a CPU a decode reads a shared prefix once.

Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import FLOATS, POSITIVE_WITH_CAUSAL, always, cpu_attend, kernel
from layerzero.backends.torch.varlen import Slice, attend_each
from layerzero.core import limits as limit
from layerzero.core.errors import refuse
from layerzero.core.facts import Facts
from layerzero.ops.attention.limits import SdpaEnabled
from layerzero.ops.cascade import CASCADE, MERGE_STATES, shared_problems
from layerzero.ops.latent import NAME, joined
from layerzero.ops.paged.pages import gathered, tokens_of
from layerzero.ops.ragged import declare as ragged


def merge(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Both parts by the second one's share: (T, H, D) and (H, T)."""
    share = torch.sigmoid(lse_b - lse_a)
    share = share.masked_fill(lse_b == -torch.inf, 0.0).t().unsqueeze(-1)  # both -inf: their difference is NaN
    wide = torch.promote_types(output_a.dtype, torch.float32)
    output = torch.lerp(output_a.to(wide), output_b.to(wide), share.to(wide)).to(output_a.dtype)
    return output, torch.logaddexp(lse_a, lse_b)


def weighted(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> Tensor:
    """The output alone, where every query saw a key of the first part."""
    share = torch.sigmoid(lse_b - lse_a).t().unsqueeze(-1)
    return torch.lerp(output_a.float(), output_b.float(), share).to(output_a.dtype)


def as_decode(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """From (B, H, D) and (H, B) to (B, 1, H, D) and (B, H, 1)."""
    return output.unsqueeze(1), lse.t().unsqueeze(-1)


def _load_cascade(facts: Facts) -> Callable[..., Any]:
    page_size = facts.size("page_size")
    attend = cpu_attend(facts)

    def run(
        query: Tensor, *pages: Tensor, shared_blocks: int, scale: float | None = None, return_lse: bool = False
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens = pages
        refuse("cascade_attention", shared_problems(block_tables, context_lens, shared_blocks, page_size))
        tokens, caches, shared = query.squeeze(1), (key_cache, value_cache), shared_blocks * page_size

        def prefix() -> Iterator[Slice]:
            keys, values = (cache[block_tables[0, :shared_blocks]].flatten(0, 1) for cache in caches)
            yield tokens, keys, values, None

        def rest() -> Iterator[Slice]:
            for row, length in enumerate(context_lens.tolist()):
                pages = block_tables[row, shared_blocks : -(-length // page_size)]
                keys, values = (tokens_of(cache, pages, length - shared) for cache in caches)
                yield tokens[row : row + 1], keys, values, None

        parts = [attend_each(each, tokens, scale=scale, return_lse=True, attend=attend) for each in (prefix(), rest())]
        output, lse = as_decode(*merge(*parts[0], *parts[1]))
        return (output, lse) if return_lse else output

    return run


def _keys(*pages: Tensor, max_context_len: int | None = None) -> tuple[Tensor, Tensor]:
    """Keys (B, L, C + R) with zeros beyond each sequence, and where those are: (B, L)."""
    ckv_cache, kpe_cache, block_tables, context_lens = pages
    planes = ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)
    keys = torch.cat([each.squeeze(2) for each in gathered(*planes, block_tables, context_lens, max_context_len)], -1)
    beyond = torch.arange(keys.shape[1], device=keys.device) >= context_lens.unsqueeze(1)
    return keys.masked_fill(beyond.unsqueeze(-1), 0.0), beyond


def _hidden(beyond: Tensor, context_lens: Tensor, queries: int) -> Tensor:
    """Keys that each query does not see: (B, S, 1, L), the last query at the end of its sequence."""
    if queries == 1:
        return beyond[:, None, None]
    last = context_lens.unsqueeze(1) - queries + torch.arange(queries, device=beyond.device)
    return torch.arange(beyond.shape[1], device=beyond.device) > last[:, :, None, None]


def _load_expression(facts: Facts) -> Callable[..., Any]:
    latent = facts.size("latent_dim")

    def run(q_nope: Tensor, q_pe: Tensor, *pages: Tensor, scale: float, return_lse: bool = False, **bound: Any) -> Any:
        batch, queries, heads, _ = q_nope.shape
        wide = torch.promote_types(q_nope.dtype, torch.float32)
        keys, beyond = _keys(*pages, **bound)
        keys = keys.to(wide)
        query = torch.cat((q_nope, q_pe), -1).to(wide).flatten(1, 2)
        scores = torch.bmm(query, keys.transpose(1, 2)).mul_(scale).view(batch, queries, heads, -1)
        scores = scores.masked_fill_(_hidden(beyond, pages[-1], queries), -torch.inf)
        lse = scores.logsumexp(-1)
        blind = (lse == -torch.inf).unsqueeze(-1)
        weights = (scores - lse.unsqueeze(-1)).exp_().masked_fill_(blind, 0.0)
        output = torch.bmm(weights.flatten(1, 2), keys[..., :latent]).view(batch, queries, heads, latent)
        output = output.to(q_nope.dtype)
        return (output, lse.transpose(1, 2).float().contiguous()) if return_lse else output

    return run


def _load_cpu(facts: Facts) -> Callable[..., Any]:
    page_size, latent = facts.size("page_size"), facts.size("latent_dim")
    attend = cpu_attend(facts)

    def run(q_nope: Tensor, q_pe: Tensor, *pages: Tensor, scale: float, return_lse: bool = False) -> Any:
        ckv_cache, kpe_cache, block_tables, context_lens = pages
        query, cache = joined(q_nope, q_pe), (ckv_cache, kpe_cache)
        batch, queries = query.shape[:2]

        def sequences() -> Iterator[Slice]:
            for row, length in enumerate(context_lens.tolist()):
                pages = block_tables[row, : -(-length // page_size)]
                keys = torch.cat([tokens_of(plane, pages, length) for plane in cache], -1).unsqueeze(1)
                yield query[row], keys, keys, None

        tokens = query.flatten(0, 1)
        found = attend_each(sequences(), tokens, causal=True, scale=scale, return_lse=return_lse, attend=attend)
        output = (found[0] if return_lse else found)[..., :latent].unflatten(0, (batch, queries)).contiguous()
        return (output, found[1].unflatten(1, (batch, queries)).transpose(0, 1).contiguous()) if return_lse else output

    return run


def _load_cuda(facts: Facts) -> Callable[..., Any]:
    latent = facts.size("latent_dim")

    def run(q_nope: Tensor, q_pe: Tensor, *pages: Tensor, scale: float, **bound: Any) -> Tensor:
        batch, queries, heads, _ = q_nope.shape
        keys, beyond = _keys(*pages, **bound)
        hidden = _hidden(beyond, pages[-1], queries)
        query = joined(q_nope, q_pe).flatten(1, 2).unsqueeze(1)
        mask = ~hidden.expand(-1, -1, heads, -1).flatten(1, 2).unsqueeze(1)
        keys = keys.unsqueeze(1)
        output = functional.scaled_dot_product_attention(query, keys, keys[..., :latent], attn_mask=mask, scale=scale)
        output = output.view(batch, queries, heads, latent)
        return output.masked_fill(hidden.all(-1, keepdim=True), 0.0)

    return run


def _load_narrow_values(facts: Facts) -> Callable[..., Any]:
    value_dim = facts.size("value_dim")
    lacking = facts.size("head_dim") - value_dim
    attend = cpu_attend(facts)

    def run(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **scores: Any
    ) -> Any:
        wide = functional.pad(value, (0, lacking))
        pairs = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
        sequences = ((query[a:b], key[c:d], wide[c:d], None) for (a, b), (c, d) in pairs)
        found = attend_each(sequences, query, attend=attend, **scores)
        if isinstance(found, Tensor):
            return found[..., :value_dim].contiguous()
        return found[0][..., :value_dim].contiguous(), found[1]

    return run


def _gathered_bytes(facts: Facts) -> int:
    """The keys of every sequence twice, and their scores."""
    width = facts.size("latent_dim") + facts.size("rope_dim")
    keys = facts.size("batch") * facts.size("context_bound")
    itemsize = facts.tensors["q_nope"].dtype.itemsize
    return keys * (2 * width * itemsize + 8 * facts.size("heads") * facts.size("seq_q") + 4 * width)


KERNELS = (
    kernel(
        "torch.ragged_narrow_values",  # prefill with projected keys of 192 and values of 128
        ragged.RAGGED,
        _load_narrow_values,
        limit.platform("cpu"),
        FLOATS,
        limit.rule(
            "value_dim: below head_dim", lambda facts: facts["value_dim"] < facts["head_dim"], "HEAD_DIM_INVALID"
        ),
        POSITIVE_WITH_CAUSAL,
        SdpaEnabled("flash"),
        limit.last_stride_one("query", "key"),
        accepts=("causal", "scale", "return_lse"),
        graph_safe=False,
        priority=45,
    ),
    kernel(
        "torch.mla_gather",
        NAME,
        _load_expression,
        FLOATS,
        accepts=("scale", "return_lse", "max_context_len"),
        workspace_bytes=_gathered_bytes,
        priority=20,
    ),
    kernel(
        "torch.mla_sdpa_cpu",
        NAME,
        _load_cpu,
        limits=(limit.platform("cpu"), FLOATS, limit.positive("scale"), SdpaEnabled("flash")),
        accepts=("scale", "return_lse"),
        graph_safe=False,
        priority=40,
    ),
    kernel(
        "torch.mla_sdpa",
        NAME,
        _load_cuda,
        limit.platform("cuda"),
        limit.dtype("float32", "float16", "bfloat16"),
        limit.positive("scale"),
        SdpaEnabled("efficient"),
        accepts=("scale", "max_context_len"),
        workspace_bytes=_gathered_bytes,
        deterministic=False,
        priority=25,
    ),
    kernel("torch.merge_states", MERGE_STATES.name, always(merge), FLOATS, priority=40),
    kernel(
        "torch.cascade_sdpa",
        CASCADE.name,
        _load_cascade,
        limit.platform("cpu"),
        FLOATS,
        limit.equal("value_dim", "head_dim"),
        SdpaEnabled("flash"),
        limit.last_stride_one("query", "key_cache", "value_cache"),
        layout="NHD",
        accepts=("scale", "return_lse", "shared_blocks"),
        graph_safe=False,
        priority=60,
    ),
)

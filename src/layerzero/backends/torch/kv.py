"""Torch's own ways of moving tokens between caches, by index.

vLLM's ``copy_blocks`` copies pages side by side, so that one which is read and written would be wrong, and its gather
takes caches of latent attention alone.

Rotation and append as torch expressions: the rotation of torch/rope.py, then the new rows by index.

Attention over a cache of float8 or int8 as a torch expression: the pages of a call are gathered, then multiplied.

Only pages that a sequence has are read and widened; what attends then are the expressions for caches of floats.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.norm_limits import BoundsSizes
from layerzero.backends.torch.attention import BY_ITSELF, CPU_FLASH, FLOATS, always, kernel, no_atomics
from layerzero.backends.torch.norm import FINITE, rows_below
from layerzero.backends.torch.paged import flash_over_gathered, load_append, load_each, load_gather
from layerzero.backends.torch.rope import load_rope, load_split
from layerzero.backends.torch.varlen import EACH, FLASH
from layerzero.core import limits as limit
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Tolerance
from layerzero.ops.attention.declare import TOLERANCE
from layerzero.ops.attention.limits import SdpaEnabled
from layerzero.ops.paged import tiles
from layerzero.ops.paged.pages import converted_dtype, gathered
from layerzero.ops.paged.quantized import CONVERTED_DECODE, CONVERTED_PREFILL, DECODE, PREFILL, dequantized, quantized
from layerzero.ops.rope_append.declare import write_rows
from layerzero.ops.rope_append.packed_steps import Append, rotate_then_append, split_then_append


def _load_gather(facts: Facts) -> Callable[..., Any]:
    on_cpu = facts.device.platform == "cpu"

    def gather(key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        page_size, none = key_cache.shape[1], slot_mapping < 0
        slots = slot_mapping.clamp(min=0)
        page, offset = slots // page_size, slots % page_size
        keys, values = key_cache[page, offset], value_cache[page, offset]
        if not on_cpu or bool(none.any()):  # here a value costs nothing to read
            hidden = none.view(-1, 1, 1)
            keys, values = keys.masked_fill_(hidden, 0.0), values.masked_fill_(hidden, 0.0)
        return keys, values

    return gather


def _copy(key_cache: Tensor, value_cache: Tensor, from_pages: Tensor, to_pages: Tensor) -> None:
    for cache in (key_cache, value_cache):
        cache.index_copy_(0, to_pages, cache.index_select(0, from_pages))


def load_quantized(facts: Facts) -> Callable[..., None]:
    """What writes new tokens as codes into the slots of a cache in NHD."""
    on_cpu = facts.device.platform == "cpu"

    def append(key: Tensor, value: Tensor, *pages: Tensor) -> None:
        key_cache, value_cache, slot_mapping, key_scale, value_scale = pages
        page_size, there = key_cache.shape[1], slot_mapping >= 0
        every = torch.arange(len(there), device=there.device)
        # on a CPU a value costs nothing to read; elsewhere a token without a slot repeats the first that has one
        source = every[there] if on_cpu else torch.where(there, every, there.long().argmax())
        slots = slot_mapping[source].clamp(min=0)
        page, offset = slots // page_size, slots % page_size
        for cache, new, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
            factor = (scale[page, offset] if scale.ndim == 3 else scale).unsqueeze(-1)
            codes, held = quantized(new[source], factor, cache.dtype).view(torch.uint8), cache.view(torch.uint8)
            held[page, offset] = codes if on_cpu else torch.where(there.any(), codes, held[page, offset])

    return append


_of_cache = functools.partial(kernel, layout="NHD", priority=20)


def _kernel(
    name: str, operation: str, load: Callable[[Facts], Callable[..., Any]], *, graph_safe: bool = True
) -> Kernel:
    return _of_cache(f"torch.{name}", operation, load, FLOATS, **BY_ITSELF, graph_safe=graph_safe)


def appending(facts: Facts) -> Append:
    """Torch's own way of writing tokens into the cache of a call, in NHD."""
    if facts["operation"] == "kv.rope_append.quantized":
        return load_quantized(facts)
    return load_append(facts) if str(facts["operation"]).endswith(".paged") else write_rows


def _load(facts: Facts) -> Callable[..., Any]:
    return rotate_then_append(load_rope(facts), appending(facts), in_place=False)


def _over_gathered(facts: Facts, load: Callable[[Facts], Callable[..., Any]]) -> Callable[..., Any]:
    attend = load(facts)
    page_size = facts.size("page_size")

    def run(query: Tensor, *pages: Tensor, narrow_query: bool = False, **arguments: Any) -> Any:  # allowed, not done
        key_cache, value_cache, block_tables, context_lens, *starts, key_scale, value_scale = pages
        tables = block_tables, context_lens
        codes = gathered(key_cache.view(torch.uint8), value_cache.view(torch.uint8), *tables)
        scales = key_scale, value_scale
        if 3 in (key_scale.ndim, value_scale.ndim):
            lead = key_cache.shape[:3]
            scales = gathered(key_scale.expand(lead), value_scale.expand(lead), *tables)
        held = [
            dequantized(each.view(key_cache.dtype), scale, query.dtype)
            for each, scale in zip(codes, scales, strict=True)
        ]
        return attend(query, *_as_pages(held, page_size), context_lens, *starts, **arguments)

    return run


def _as_pages(held: Sequence[Tensor], page_size: int) -> tuple[Tensor, ...]:
    """Gathered tokens (B, blocks * N, ...) as pages (B * blocks, N, ...), and a table (B, blocks) of them."""
    batch, blocks = len(held[0]), held[0].shape[1] // page_size
    caches = [each.view(batch * blocks, page_size, *each.shape[2:]) for each in held]
    table = torch.arange(batch * blocks, dtype=torch.int32, device=held[0].device).view(batch, blocks)
    return *caches, table


def _converting(facts: Facts, load: Callable[[Facts], Callable[..., Any]]) -> Callable[..., Any]:
    attend, page_size = load(facts), facts.size("page_size")

    def run(query: Tensor, *pages: Tensor, **arguments: Any) -> Any:
        key_cache, value_cache, block_tables, context_lens, *starts = pages
        wide, tables = converted_dtype(query, key_cache), (block_tables, context_lens)
        held = [each.to(wide) for each in gathered(key_cache, value_cache, *tables)]
        found = attend(query.to(wide), *_as_pages(held, page_size), context_lens, *starts, **arguments)
        return (found[0].to(query.dtype), found[1]) if isinstance(found, tuple) else found.to(query.dtype)

    return run


def _load_tiles(facts: Facts) -> Callable[..., Any]:
    attend, page_size = load_each(facts), facts.size("page_size")

    def run(query: Tensor, *pages: Tensor, **arguments: Any) -> Any:
        key_cache, value_cache, block_tables, context_lens, starts = pages
        used = -(-int(context_lens.max()) // page_size) if len(context_lens) else 0
        return attend(
            query, *tiles.in_order(key_cache, value_cache, block_tables[:, :used]), context_lens, starts, **arguments
        )

    return run


def _gathered_numbers(facts: Facts) -> int:
    """Those in the pages of every sequence."""
    tokens = facts.size("batch") * facts.size("max_blocks") * facts.size("page_size")
    return tokens * facts.size("kv_heads") * (facts.size("head_dim") + facts.size("value_dim"))


def _gathered_bytes(facts: Facts) -> int:
    """Pages of every sequence as they are, in float32, and in the queries' dtype."""
    return _gathered_numbers(facts) * (5 + 3 * facts.tensors["query"].dtype.itemsize)


def _converted_bytes(facts: Facts) -> int:
    """Pages of every sequence as they are, and in the dtype that is computed in."""
    query, held = facts.tensors["query"], facts.tensors["key_cache"]
    return _gathered_numbers(facts) * (held.dtype.itemsize + 3 * converted_dtype(query, held).itemsize)


_ACCEPTS = ("causal", "scale", "window", "return_lse", "narrow_query")
_ROUNDED = {name: Tolerance(3 * each.rtol, 3 * each.atol) for name, each in TOLERANCE.items()}
"""Keys, values and weights are each rounded once more: 2.02 times the operation's own was the farthest of 30,000 random
calls (float16, codes of float8_e5m2 with a scale for each token, 2026-11-24)."""

_COMMON: dict[str, Any] = {
    "tolerance": {dtype_name(dtype): each for dtype, each in _ROUNDED.items()},
    "tolerance_reason": "products of codes and scales are rounded to the queries' dtype before they are attended to",
    "workspace_bytes": _gathered_bytes,
}
_CODES = limit.last_stride_one("key_cache", "value_cache")
_GATHER, _EACH, _VARLEN = (
    functools.partial(_over_gathered, load=load) for load in (load_gather, load_each, always(flash_over_gathered))
)


@dataclass(frozen=True, slots=True)
class _Rows(BoundsSizes):
    """That torch's norm reaches all rows, of tokens or of sequences."""

    def check(self, facts: Facts) -> limit.Findings:
        sizes = ("tokens",) if str(facts["operation"]).endswith(".paged") else ("batch", "seq")
        return rows_below(*sizes, "features").check(facts)

    def describe(self) -> str:
        return f"rows of qkv * features < {2**32} on cuda, rocm"


KERNELS = (
    _kernel("append_rows", "kv.append.contiguous", always(write_rows)),
    _of_cache(
        "torch.append_each", "kv.append.batched", always(write_rows), FLOATS, accepts=("cache_list",), **BY_ITSELF
    ),
    _kernel("gather_slots", "kv.gather.paged", _load_gather),
    _kernel("copy_pages", "kv.copy_blocks", always(_copy)),
    _kernel(
        "append_codes", "kv.append.quantized", load_quantized, graph_safe=False
    ),  # broke captures (H200, 2026-11-22)
    _of_cache(
        "torch.rope_append",
        ("kv.rope_append", "kv.rope_append.paged"),
        _load,
        FLOATS,
        accepts=("interleaved",),
        grad=True,
        **BY_ITSELF,
    ),
    _of_cache(
        "torch.rope_append_codes", "kv.rope_append.quantized", _load, FLOATS, accepts=("interleaved",), graph_safe=False
    ),
    _of_cache(
        "torch.split_qkv_norm_rope_append",
        ("kv.split_qkv_norm_rope_append", "kv.split_qkv_norm_rope_append.paged"),
        lambda facts: split_then_append(
            load_split(facts), appending(facts), facts.size("heads"), facts.size("kv_heads")
        ),
        limits=(FLOATS, FINITE, _Rows()),
        accepts=("q_weight", "k_weight", "interleaved", "eps", "plus_one"),
        grad=True,
        **BY_ITSELF,
    ),
    _of_cache(
        "torch.converted_gather",
        CONVERTED_DECODE.name,
        functools.partial(_converting, load=load_gather),
        limits=(FLOATS, limit.positive("scale"), SdpaEnabled("math")),
        accepts=("scale", "window"),
        workspace_bytes=_converted_bytes,
        deterministic=no_atomics,
    ),
    _of_cache(
        "torch.converted_sdpa",
        CONVERTED_PREFILL.name,
        functools.partial(_converting, load=load_each),
        limits=(*CPU_FLASH, limit.last_stride_one("query")),
        accepts=("causal", "scale", "window", "return_lse", "sinks", "alibi_slopes", "tree_mask"),
        workspace_bytes=_converted_bytes,
        graph_safe=False,
    ),
    _of_cache(
        "torch.converted_each",
        CONVERTED_PREFILL.name,
        functools.partial(_converting, load=load_each),
        limits=EACH,
        accepts=("causal", "scale", "window", "tree_mask"),
        workspace_bytes=_converted_bytes,
        deterministic=False,
        graph_safe=False,
        priority=15,
    ),
    *(
        kernel(
            f"torch.tiles_{name}",
            tiles.ATTENTION.name,
            _load_tiles,
            limits=limits,
            accepts=accepts,
            workspace_bytes=_converted_bytes,
            deterministic=deterministic,
            graph_safe=False,
            priority=priority,
        )
        for name, limits, accepts, deterministic, priority in (
            (
                "sdpa",
                (*CPU_FLASH, limit.last_stride_one("query")),
                ("causal", "scale", "window", "return_lse", "sinks", "alibi_slopes"),
                True,
                20,
            ),
            ("each", EACH, ("causal", "scale", "window"), False, 15),
        )
    ),
    kernel(
        "torch.append_tiles",
        "kv.append.tiled",
        always(tiles.append_tiles_),
        FLOATS,
        **BY_ITSELF,
        graph_safe=False,
        priority=20,
    ),
    _of_cache(
        "torch.quantized_gather",
        DECODE.name,
        _GATHER,
        limits=(FLOATS, limit.positive("scale"), SdpaEnabled("math"), _CODES),
        accepts=("scale", "window", "narrow_query"),
        deterministic=no_atomics,
        **_COMMON,
    ),
    _of_cache(
        "torch.quantized_sdpa",
        PREFILL.name,
        _EACH,
        limits=(*CPU_FLASH, limit.last_stride_one("query"), _CODES),
        accepts=(*_ACCEPTS, "sinks", "alibi_slopes", "tree_mask"),
        graph_safe=False,
        **_COMMON,
    ),
    _of_cache(
        "torch.quantized_each",
        PREFILL.name,
        _EACH,
        limits=(*EACH, _CODES),
        accepts=("causal", "scale", "window", "narrow_query", "tree_mask"),
        deterministic=False,
        graph_safe=False,
        priority=15,
        **_COMMON,
    ),
    _of_cache(
        "torch.quantized_varlen",
        PREFILL.name,
        _VARLEN,
        *FLASH,
        limit.last_stride_one("query"),
        limit.aligned(16, "query"),
        limit.contiguous("context_lens", "cu_seqlens_q"),
        _CODES,
        accepts=(*_ACCEPTS, "max_context_len", "max_seqlen_q"),
        deterministic=False,
        **_COMMON,
    ),
)

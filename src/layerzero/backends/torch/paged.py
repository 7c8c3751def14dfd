"""PyTorch's own ways with a paged cache: gather the pages and attend with SDPA, copy new tokens by index.

Gathering moves every key and value once more than a kernel that follows the block table does (434 us against 143 for
64 sequences of 2048 tokens, bfloat16, H200, torch 2.11, 2026-11-21); it is what is left where no such kernel is.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import TORCH
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.attention.limits import SdpaEnabled
from layerzero.ops.cascade.declare import FLAT
from layerzero.ops.paged.pages import blocks_of

_FLOATS = ("float32", "float64", "float16", "bfloat16")


def load_gather(facts: Facts) -> Callable[..., Any]:
    """What gathers the pages of each sequence and attends with SDPA."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    page_size, group = facts.size("page_size"), facts.size("group")
    on_gpu = facts.device.platform != "cpu"

    def gather(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        max_context_len: int | None = None,
    ) -> Tensor:
        blocks = blocks_of(block_tables, context_lens, page_size, max_context_len)
        positions = torch.arange(blocks * page_size, device=query.device)
        lengths = context_lens.unsqueeze(1)
        pages = block_tables[:, :blocks].masked_fill(positions[::page_size] >= lengths, 0)
        beyond = (positions >= lengths)[:, None, :, None]  # what lies there may be NaN, which no mask hides
        keys, values = (
            cache[pages].flatten(1, 2).transpose(1, 2).masked_fill(beyond, 0.0) for cache in (key_cache, value_cache)
        )
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
    """Keys and values of every sequence, gathered and then blanked."""
    tokens = facts.size("batch") * facts.size("context_bound")
    width = facts.size("kv_heads") * (facts.size("head_dim") + facts.size("value_dim"))
    return 2 * tokens * width * facts.tensors["query"].dtype.itemsize


def load_append(facts: Facts) -> Callable[..., Any]:
    """What writes new tokens into the slots of a cache in NHD."""
    on_cpu = facts.device.platform == "cpu"

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


KERNELS = (
    Kernel(
        id="torch.paged_gather",
        operations=FLAT,
        backend=TORCH,
        load=load_gather,
        layout="NHD",
        accepts=("scale", "window", "max_context_len"),
        # torch's own dispatch obeys the caller's sdpa_kernel context; it has a kernel for this while math may run
        limits=(limit.dtype(*_FLOATS), limit.positive("scale"), SdpaEnabled("math")),
        workspace_bytes=_gathered_bytes,
        deterministic=False,
        priority=20,
    ),
    Kernel(
        id="torch.paged_append",
        operations=("kv.append.paged",),
        backend=TORCH,
        load=load_append,
        layout="NHD",
        limits=(limit.dtype(*_FLOATS),),
        priority=20,
    ),
)

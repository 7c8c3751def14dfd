"""A paged cache of keys and values that knows its layout: what is written in one is not read in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import out_of_range, told
from layerzero.core.bundle import MISSING, Bundle
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.reasons import ReasonCode
from layerzero.ops.paged import layout_record
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.quantized import QUANTIZED, scale_problems
from layerzero.ops.paged.step import StepMetadata


class PagedCache(Bundle):
    """The pages of one layer.

        cache = lz.PagedCache.allocate(pages=4096, page_size=16, kv_heads=8, head_dim=128, device="cuda")
        lz.append_paged_kv_(k, v, cache, slot_mapping=step.slot_mapping(cache.page_size))
        lz.paged_attention(q, cache, step=step)

    Calls take it in place of ``key_cache``, or its tensors and ``layout=cache.layout``, which costs less.

    While it lives, calls on its memory that name another layout raise, those that were chosen before too. That costs a
    call nothing while all caches have one layout. With both layouts in use, each call checks its memory (1 us).

    Attributes:
        keys, values: (P, N, K, D) and (P, N, K, D_v) in ``NHD``; (P, K, N, D) and (P, K, N, D_v) in ``HND``.
        layout: ``NHD`` or ``HND``, the order of tokens and heads in a page.
        key_scale, value_scale: of a cache of float8 or int8, what its numbers are multiples of; see
            ``lz.paged_attention``. None for others.
    Raises: InvalidCallError for tensors that are no cache together, and for memory that another one says is written
        otherwise (KV_CACHE_LAYOUT_MISMATCH).
    """

    __slots__ = ("__weakref__", "key_scale", "keys", "layout", "value_scale", "values")

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        layout: str = "NHD",
        *,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> None:
        problems = []
        if layout not in CACHE_LAYOUTS:
            problems.append(f"layout: wanted {' or '.join(CACHE_LAYOUTS)}, got {told(layout)}")
        for name, tensor in (("keys", keys), ("values", values)):
            if not isinstance(tensor, Tensor) or tensor.ndim != 4 or not _is_number(tensor.dtype):
                got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                problems.append(f"{name}: wanted a floating tensor of pages, tokens, heads and head dim, got {got}")
        if not problems and (keys.shape[:3] != values.shape[:3] or keys.device != values.device):
            wanted = f"{tuple(keys.shape[:3])} on {keys.device} as keys"
            problems.append(f"values: wanted {wanted}, got {tuple(values.shape[:3])} on {values.device}")
        refuse("PagedCache", problems)
        if not problems and (keys.dtype in QUANTIZED or key_scale is not None or value_scale is not None):
            given = {"key_cache": keys, "value_cache": values, "key_scale": key_scale, "value_scale": value_scale}
            problems += scale_problems(given, layout)
        refuse("PagedCache", problems)
        self.keys, self.values, self.layout = keys, values, layout
        self.key_scale, self.value_scale = key_scale, value_scale
        layout_record.declare(self, {"keys": keys, "values": values}, layout)

    @classmethod
    def allocate(
        cls,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layout: str = "NHD",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        scales: str | None = None,
    ) -> PagedCache:
        """Make one of zeros.

        Args:
            value_dim: ``head_dim`` if None.
            layout: ``NHD``, ``HND``, or ``VLLM_CPU`` for what vLLM's kernels for CPUs read: ``HND`` in calls, with keys
                that lie transposed in memory. Caches split as vLLM's first kernels read them, and latent ones, are
                layers of :class:`layerzero.KVCache`.
            scales: of a cache of float8 or int8, for the ``tensor`` or for a ``head``: ones, to be filled; or for each
                ``token`` and head.
        Raises: InvalidCallError for what is no size, layout or scale.
        """
        sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes |= {} if value_dim is None else {"value_dim": value_dim}
        problems = [
            f"{name}: wanted a number of at least 0, got {told(size)}"
            for name, size in sizes.items()
            if type(size) is not int or size < 0 or out_of_range(size)
        ]
        if not isinstance(layout, str) or layout not in (*CACHE_LAYOUTS, "VLLM_CPU"):
            problems.append(f"layout: wanted {', '.join(CACHE_LAYOUTS)} or VLLM_CPU, got {told(layout)}")
        shapes: dict[object, tuple[int, ...]]
        shapes = {"tensor": (), "head": (kv_heads,), "token": (pages, page_size, kv_heads)}
        wanted = "tensor, head or token" if dtype in QUANTIZED else "None"
        if (scales is None) == (dtype in QUANTIZED) or (scales is not None and scales not in shapes):
            problems.append(f"scales: wanted {wanted} for a cache of {dtype_name(dtype)}, got {told(scales)}")
        refuse("PagedCache.allocate", problems)
        inner = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
        keys = torch.zeros(pages, *inner, head_dim, dtype=dtype, device=device)
        if layout == "VLLM_CPU":
            keys = torch.zeros(pages, kv_heads, head_dim, page_size, dtype=dtype, device=device).transpose(2, 3)
        values = torch.zeros(pages, *inner, head_dim if value_dim is None else value_dim, dtype=dtype, device=device)
        given = {}
        if scales is not None:
            like: Any = {"dtype": torch.float32, "device": device}
            given = {name: torch.ones(shapes[scales], **like) for name in ("key_scale", "value_scale")}
        return cls(keys, values, "NHD" if layout == "NHD" else "HND", **given)

    @classmethod
    def of_joined(cls, joined: Tensor, axis: int, layout: str = "NHD") -> PagedCache:
        """Make one of a tensor that holds keys and values side by side; it stays the memory of both.

        Shapes: joined (2, P, N, K, D) with axis 0, as vLLM has it for FlashAttention; (P, 2, N, K, D) with axis 1, as
            for FlashInfer; in HND with tokens and heads swapped.
        Raises: InvalidCallError for a tensor that has no two parts there.
        """
        if not isinstance(joined, Tensor) or joined.ndim != 5 or axis not in (0, 1) or joined.shape[axis] != 2:
            got = f"{tuple(joined.shape)} and {told(axis)}" if isinstance(joined, Tensor) else told(joined)
            wanted = "joined: wanted a tensor of 5 axes with 2 parts along axis 0 or 1"
            raise InvalidCallError("PagedCache.of_joined", [f"{wanted}, got {got}"])
        keys, values = joined.unbind(axis)
        return cls(keys, values, layout)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.keys.shape[1 + self.layout.index("N")])

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return int(self.keys.shape[1 + self.layout.index("H")])

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its tensors and its layout, with tables, lengths and starts of the step where the call names none.

        Raises: InvalidCallError where it stands for anything but a cache, with the tensors of another one, or in
            another layout (KV_CACHE_LAYOUT_MISMATCH).
        """
        mine: dict[str, Any] = {"key_cache": self.keys, "value_cache": self.values}
        if function == "append_paged_kv_" and self.keys.dtype in QUANTIZED:
            wanted = f"a cache of floating numbers, got one of {dtype_name(self.keys.dtype)}"
            raise InvalidCallError(function, [f"{parameter}: wanted {wanted}; lz.append_quantized_kv_ writes codes"])
        problems = [] if parameter in mine else [f"{parameter}: wanted a tensor, got a {type(self).__name__}"]
        for name, tensor in mine.items():
            if given.get(name) is not MISSING and given.get(name) is not self and given.get(name) is not tensor:
                problems.append(f"{name}: wanted that of the same cache, or nothing with it, got another")
        for name, scale in (("key_scale", self.key_scale), ("value_scale", self.value_scale)):
            if name in given and scale is not None:
                if given[name] is not None and given[name] is not MISSING and given[name] is not scale:
                    problems.append(f"{name}: wanted that of the cache, or nothing with it, got another")
                mine[name] = scale
        refuse(function, problems)
        named = given.get("layout")
        if named not in (CACHE_LAYOUTS[0], self.layout):  # the first is what a call has that names none
            problem = f"layout: wanted {self.layout!r}, which the cache is written in, got {told(named)}"
            raise InvalidCallError(function, [problem], ReasonCode.KV_CACHE_LAYOUT_MISMATCH)
        if given.get("cache_dtype", 0) is None:  # its dtype was named where it was made
            mine["cache_dtype"] = self.keys.dtype
        return mine | {"layout": self.layout} | of_step(given)

    def hint(self, missing: Sequence[str]) -> str:
        return hint_of_step(missing)

    def __repr__(self) -> str:
        shape, dtype = tuple(self.keys.shape), self.keys.dtype
        return f"PagedCache({shape[0]} pages of {self.page_size} tokens, {self.kv_heads} heads, {self.layout}, {dtype})"


def _is_number(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype in QUANTIZED


def of_step(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tables, lengths and starts of the step of a call, where the call itself names none."""
    step = given.get("step")
    if not isinstance(step, StepMetadata):
        return {}
    known = {"block_tables": step.block_tables, "context_lens": step.context_lens, "cu_seqlens_q": step.cu_seqlens_q}
    return {name: value for name, value in known.items() if given.get(name, 0) is None or given.get(name) is MISSING}


def hint_of_step(missing: Sequence[str]) -> str:
    """What a call with a cache lacks where it lacks tables or lengths."""
    brought = [name for name in missing if name in ("block_tables", "context_lens")]
    if not brought:
        return ""
    return f"a step brings {' and '.join(brought)}: pass step=, of KVCache.writing() or lz.StepMetadata"

"""One layer of a cache: its tensors in one layout, which calls take in place of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero.core import indices
from layerzero.core.arguments import told
from layerzero.core.bundle import MISSING, Bundle
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.reasons import ReasonCode
from layerzero.ops.kv.form import GONE, KVCacheError, KVCacheStrategy
from layerzero.ops.kv.step import CacheStep
from layerzero.ops.paged import layout_record
from layerzero.ops.paged.append import append_paged_kv_
from layerzero.ops.paged.cache import PagedCache, hint_of_step, of_step
from layerzero.ops.paged.quantized import QUANTIZED
from layerzero.ops.paged.step import StepMetadata

if TYPE_CHECKING:
    from layerzero.ops.kv.cache import KVCache
    from layerzero.ops.kv.sequences import CachedSequences


_OF_ONE_HEAD = "NHD"
"""The layout of planes without heads, as what moves tokens sees them."""


def _write(kind: str, slot_mapping: Tensor, **pairs: tuple[Tensor, Tensor]) -> None:
    """Write tokens into the slots of caches (P, N, ...), after a look at their shapes, and at slots that lie on a CPU.

    Raises: InvalidCallError for tokens that are not as the cache's, and for slots that are none, before any is written.
    """
    _check_slots(kind, slot_mapping, next(iter(pairs.values()))[1], written=True)
    tokens, problems = len(slot_mapping), []
    for name, (new, cache) in pairs.items():
        wanted = (tokens, *cache.shape[2:])
        if tuple(new.shape) != wanted or new.dtype is not cache.dtype:
            got = f"{dtype_name(new.dtype)} {tuple(new.shape)}"
            problems.append(f"{name}: wanted {dtype_name(cache.dtype)} {wanted}, got {got}")
    refuse(kind, problems)
    (first, key_cache), (second, value_cache) = pairs.values()
    layout_record.look(kind, key_cache, slot_mapping=slot_mapping)
    append_paged_kv_(first, second, key_cache, value_cache, slot_mapping)


def _check_slots(kind: str, slots: object, cache: Tensor, *, written: bool) -> None:
    """Look at the slots of a cache (P, N, ...), on a CPU at their values, too. Raises: InvalidCallError."""
    problems, count = [], cache.shape[0] * cache.shape[1]
    if not isinstance(slots, Tensor) or slots.ndim != 1 or slots.dtype not in (torch.int64, torch.int32):
        problems.append(f"slot_mapping: wanted an int64 tensor (T,), got {told(slots)}")
    elif slots.is_cpu and not torch.compiler.is_compiling():
        if not indices.within(slots, -1, count):
            place, slot = next((at, each) for at, each in enumerate(slots.tolist()) if not -1 <= each < count)
            problems.append(f"slot_mapping[{place}]: wanted -1 to {count - 1}, got {slot}")
        elif written and not indices.distinct(slots):
            problems.append("slot_mapping: wanted each place once, got one for two tokens")
    refuse(kind, problems)


def _check_step(owner: CachedSequences | None, step: object) -> None:
    """Refuse a step of another cache, and one whose places may be another sequence's. Raises: KVCacheError.

    An eager call asks the step again for its kind; code of torch.compile asks nothing but this.
    """
    if owner is not None:
        owner.check_moved(step)
    elif isinstance(step, CacheStep):  # it keeps its own cache, so this is of another
        raise KVCacheError("wanted a step of this cache, got one of another: that of the layer is gone; make another")


def _check_whole(owner: CachedSequences | None, function: str) -> None:
    """Refuse to copy rows of a virtual cache, whose memory is there in part. Raises: KVCacheError."""
    if function == "copy_kv_blocks_" and owner is not None and owner.strategy is KVCacheStrategy.VIRTUAL:
        problem = (
            "wanted a cache whose memory is there, got a virtual one; fork(), compact() and defragment() copy rows"
        )
        raise KVCacheError(problem, ReasonCode.KV_STRATEGY_UNSUPPORTED)


class CacheLayer(PagedCache):
    """Keys and values of one layer of a :class:`layerzero.KVCache`; gone once that is closed."""

    __slots__ = ("_owner", "number")

    def __init__(self, owner: CachedSequences, number: int, planes: Mapping[str, Tensor], layout: str) -> None:
        self._owner, self.number = weakref.ref(owner), number
        scales = {name: planes.get(name) for name in ("key_scale", "value_scale")}
        super().__init__(planes["keys"], planes["values"], layout, **scales)

    def __getattr__(self, name: str) -> Any:  # for what a closed cache has no more
        raise KVCacheError(GONE) if name in ("keys", "values", "key_scale", "value_scale") else AttributeError(name)

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except KVCacheError:  # nothing that shows an object may raise
            return f"CacheLayer({self.number}, closed)"

    def forget(self) -> None:
        """Have no memory any more."""
        layout_record.withdraw(self, {"keys": self.keys, "values": self.values})
        del self.keys, self.values, self.key_scale, self.value_scale

    def fit_scales(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Give each slot the scales that its new token needs, so that the largest number of a head is the largest code.

        Shapes: key (T, K, D), value (T, K, D_v), slot_mapping (T,). Raises: KVCacheError without scales a token.
        """
        dtype, pairs = self.keys.dtype, {}
        most = torch.finfo(dtype).max if dtype.is_floating_point else 127.0
        for name, scale, new in (("key", self.key_scale, key), ("value", self.value_scale, value)):
            if scale is None or scale.ndim != 3:
                raise KVCacheError("wanted a cache with scales='token', got one without; set its scales by yourself")
            largest = new.float().abs().amax(-1)
            pairs[name] = (largest / most).clamp(min=torch.finfo(torch.float32).tiny), scale
        _write("CacheLayer.fit_scales", slot_mapping, **pairs)

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its tensors, layout and step; see :meth:`layerzero.ops.paged.cache.PagedCache.arguments_of`."""
        _check_step(self._owner(), given.get("step"))
        _check_whole(self._owner(), function)
        return super().arguments_of(function, parameter, given)


class _Planes(Bundle):
    """Tensors of a layer that no kernel takes as keys and values with heads; gone once the cache is closed."""

    __slots__ = ("__weakref__", "_planes", "layout")

    def __init__(self, planes: Mapping[str, Tensor], layout: str, written_as: str) -> None:
        self.layout, self._planes = layout, dict(planes)
        layout_record.declare(self, self._planes, written_as)

    def _plane(self, name: str) -> Tensor:
        if not self._planes:
            raise KVCacheError(GONE)
        return self._planes[name]

    def forget(self) -> None:
        layout_record.withdraw(self, self._planes)
        self._planes = {}


class SplitLayer(_Planes):
    """A layer as vLLM's first kernels read it: keys (P, K, D/x, N, x) of 16 bytes each, values (P, K, D_v, N).

    No kernel here attends over it: it is written, read and converted, so that a cache of such an engine can be had in
    another layout. Its memory is refused wherever a call names one.
    """

    __slots__ = ()

    def __init__(self, planes: Mapping[str, Tensor]) -> None:
        super().__init__(planes, "VLLM", "VLLM")

    @property
    def keys(self) -> Tensor:
        """(P, K, D/x, N, x)."""
        return self._plane("keys")

    @property
    def values(self) -> Tensor:
        """(P, K, D_v, N)."""
        return self._plane("values")

    @property
    def page_size(self) -> int:
        return int(self.keys.shape[3])

    def append(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write tokens (T, K, D) and (T, K, D_v) into their slots; -1 writes nothing."""
        keys, values = self.keys.permute(0, 3, 1, 2, 4), self.values.permute(0, 3, 1, 2)
        if key.shape[1:] == (keys.shape[2], keys.shape[3] * keys.shape[4]):
            key = key.reshape(len(key), *keys.shape[2:])
        _write("SplitLayer.append", slot_mapping, key=(key, keys), value=(value, values))

    def gather(self, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of slots, (T, K, D) and (T, K, D_v); -1 gives zeros. Raises: InvalidCallError for other slots."""
        _check_slots("SplitLayer.gather", slot_mapping, self.values.transpose(1, 3), written=False)
        none, slots = (slot_mapping < 0).view(-1, 1, 1), slot_mapping.clamp(min=0)
        page, offset = slots // self.page_size, slots % self.page_size
        keys, values = self.keys[page, :, :, offset].flatten(-2), self.values[page, :, :, offset]
        return keys.masked_fill(none, 0.0), values.masked_fill(none, 0.0)

    def converted(self, layout: str = "NHD", pages: Tensor | StepMetadata | None = None) -> PagedCache:
        """A copy in a layout that kernels attend over, of all pages or of those that a table names, in its order.

        A step copies what it reads: ``layer.converted(pages=step)``, the columns of its tables that some sequence uses
        where its lengths are on the host, else all. Of a tensor all entries are copied. Tables of the copy are the
        numbers from 0 on, in int32 and ``view(len(table), -1)``. Each entry is a page of the copy: padding names any,
        and a page that sequences share is copied for each.
        Raises: InvalidCallError for another layout, and for pages that are no step and no int32 or int64 tensor.
        """
        keys, values = self.keys.movedim(3, 2 if layout == "HND" else 1), self.values.transpose(2, 3)
        values = values if layout == "HND" else values.transpose(1, 2)
        if isinstance(pages, StepMetadata):
            longest = max(pages.host_lens.tolist(), default=0) if pages.has_host else None
            pages = pages.block_tables[:, : None if longest is None else -(-longest // self.page_size)]
        if pages is None:
            keys, values = (each.clone(memory_format=torch.contiguous_format) for each in (keys, values))
        elif isinstance(pages, Tensor) and pages.dtype in (torch.int32, torch.int64):
            chosen = pages.flatten().clamp(0, len(keys) - 1)
            keys, values = keys.index_select(0, chosen), values.index_select(0, chosen)  # dense, unlike keys[chosen]
        else:
            problem = f"pages: wanted a step, or an int32 or int64 tensor such as block_tables, got {told(pages)}"
            raise InvalidCallError("SplitLayer.converted", [problem])
        return PagedCache(keys.flatten(-2), values, layout)

    def arguments_of(self, function: str, parameter: str, _given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse. Raises: InvalidCallError with KV_CACHE_LAYOUT_MISMATCH."""
        problem = f"{parameter}: wanted a cache in NHD or HND, got one in VLLM; {layout_record.WAYS_OUT[self.layout]}"
        raise InvalidCallError(function, [problem], ReasonCode.KV_CACHE_LAYOUT_MISMATCH)


_MOVING = ("append_paged_kv_", "gather_paged_kv", "copy_kv_blocks_")


class LatentLayer(_Planes):
    """A layer of multi-head latent attention: ``ckv_cache`` (P, N, 512) and ``kpe_cache`` (P, N, 64).

    What moves tokens takes it as keys and values of one head: ``lz.append_paged_kv_(ckv[:, None], kpe[:, None], layer,
    slot_mapping=step.slots)``.
    """

    __slots__ = ("_owner",)

    def __init__(self, owner: CachedSequences, planes: Mapping[str, Tensor]) -> None:
        self._owner = weakref.ref(owner)
        super().__init__(planes, "MLA", _OF_ONE_HEAD)

    @property
    def ckv_cache(self) -> Tensor:
        """(P, N, 512): what keys and values are made of."""
        return self._plane("ckv")

    @property
    def kpe_cache(self) -> Tensor:
        """(P, N, 64): the part of the keys that is rotated."""
        return self._plane("kpe")

    @property
    def page_size(self) -> int:
        return int(self.ckv_cache.shape[1])

    def append(self, ckv: Tensor, kpe: Tensor, slot_mapping: Tensor) -> None:
        """Write tokens (T, 512) and (T, 64) into their slots; -1 writes nothing."""
        _write("LatentLayer.append", slot_mapping, ckv=(ckv, self.ckv_cache), kpe=(kpe, self.kpe_cache))

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Both planes, and tables and lengths of the step. Raises: InvalidCallError for another argument."""
        if function in _MOVING and parameter == "key_cache":
            return self._moved(function, given)
        if parameter not in ("ckv_cache", "kpe_cache"):
            problem = f"{parameter}: wanted a cache of keys and values, got one of latent attention"
            raise InvalidCallError(function, [problem], ReasonCode.KV_CACHE_LAYOUT_MISMATCH)
        _check_step(self._owner(), given.get("step"))
        found: dict[str, Any] = {"ckv_cache": self.ckv_cache, "kpe_cache": self.kpe_cache}
        return found | of_step(given)

    def hint(self, missing: Sequence[str]) -> str:
        return hint_of_step(missing)

    def _moved(self, function: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Both planes with an axis for their one head, of a call that has neither another cache nor another layout."""
        problems = []
        if given["value_cache"] is not MISSING:
            problems.append("value_cache: wanted nothing with a cache of latent attention, got one")
        if given["layout"] != _OF_ONE_HEAD:
            problems.append(f"layout: wanted {_OF_ONE_HEAD!r} or nothing, got {told(given['layout'])}")
        if problems:
            raise InvalidCallError(function, problems, ReasonCode.KV_CACHE_LAYOUT_MISMATCH)
        _check_whole(self._owner(), function)
        found = {"key_cache": self.ckv_cache.unsqueeze(2), "value_cache": self.kpe_cache.unsqueeze(2)}
        return found | ({"cache_dtype": self.ckv_cache.dtype} if given.get("cache_dtype", 0) is None else {})


Call = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""


def attention_over(
    cache: KVCache,
    heads: int,
    batch: int,
    tokens: int,
    *,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
    tree: bool = False,
) -> Call | None:
    """The call of ``batch`` sequences with so many new tokens each over one page that is like the cache's.

    Args:
        heads: of the queries.
        layout, dtype: of the page; those of the cache if None.
        tree: whether new tokens see each other by a mask.
    Returns: None where no function attends over such a cache, or none with a mask.
    """
    layout, dtype = layout or cache.layout, dtype or cache.dtype
    like: dict[str, Any] = {"dtype": torch.bfloat16 if dtype in QUANTIZED else dtype, "device": cache.device}
    given: dict[str, Any] = {
        "block_tables": torch.zeros((batch, 16), dtype=torch.int32, device=cache.device),
        "context_lens": torch.full((batch,), tokens, dtype=torch.int32, device=cache.device),
    }
    if layout == "MLA":
        widths = [each.inner[-1] for each in cache._planes]
        queries = (torch.empty(batch, tokens, heads, width, **like) for width in widths)
        whole = torch.empty(1, max(cache.page_size, tokens), sum(widths), **like)
        planes = torch.split(whole, widths, -1)
        named = zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), (*queries, *planes), strict=True)
        return None if tree else ("mla_attention", {**dict(named), **given, "scale": 1.0})
    if layout not in ("NHD", "HND") or (tree and dtype in QUANTIZED):
        return None
    kv_heads, head_dim, value_dim = cache.head_sizes
    inner = (cache.page_size, kv_heads) if layout == "NHD" else (kv_heads, cache.page_size)
    for name, width in (("key_cache", head_dim), ("value_cache", value_dim)):
        given[name] = torch.empty((1, *inner, width), dtype=dtype, device=cache.device)
    if layout == "HND" and cache._planes[0].transposed:
        given["key_cache"] = given["key_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    if dtype in QUANTIZED:
        ones = torch.ones((), dtype=torch.float32, device=cache.device)
        given |= {"key_scale": ones, "value_scale": ones}
    given["query"] = torch.empty(batch, 1, heads, head_dim, **like)
    if tokens > 1 or tree:
        given["query"] = torch.empty(batch * tokens, heads, head_dim, **like)
        starts = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=cache.device)
        given |= {"cu_seqlens_q": starts, "max_seqlen_q": tokens}
    if tree:
        given["tree_mask"] = torch.ones(tokens, tokens, dtype=torch.bool, device=cache.device).tril().repeat(batch, 1)
    return "paged_attention", {**given, "layout": layout}

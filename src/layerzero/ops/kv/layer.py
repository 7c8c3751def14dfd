"""One layer of a cache: its tensors in one layout, which calls take in place of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero.core.bundle import Bundle
from layerzero.core.errors import InvalidCallError
from layerzero.core.reasons import ReasonCode
from layerzero.ops.kv.errors import KVCacheError
from layerzero.ops.kv.step import CacheStep
from layerzero.ops.paged import written
from layerzero.ops.paged.cache import PagedCache, of_step

if TYPE_CHECKING:
    from layerzero.ops.kv.sequences import CachedSequences

_FREED = "wanted a cache that is there, got one that was closed; make another"


def _check_step(owner: CachedSequences | None, step: object) -> None:
    """Refuse a step of another cache, and one whose places may be another sequence's. Raises: KVCacheError."""
    if owner is not None:
        owner.check_moved(step)
    elif isinstance(step, CacheStep):  # it keeps its own cache, so this is of another
        raise KVCacheError("wanted a step of this cache, got one of another: that of the layer is gone")


class CacheLayer(PagedCache):
    """Keys and values of one layer of a :class:`layerzero.KVCache`; gone once that is closed."""

    __slots__ = ("_owner", "number")

    def __init__(self, owner: CachedSequences, number: int, planes: Mapping[str, Tensor], layout: str) -> None:
        self._owner, self.number = weakref.ref(owner), number
        scales = {name: planes.get(name) for name in ("key_scale", "value_scale")}
        super().__init__(planes["keys"], planes["values"], layout, **scales)

    def __getattr__(self, name: str) -> Any:  # asked for what a closed cache has no more
        raise KVCacheError(_FREED) if name in ("keys", "values", "key_scale", "value_scale") else AttributeError(name)

    def forget(self) -> None:
        """Have no memory any more."""
        written.withdraw(self, {"keys": self.keys, "values": self.values})
        del self.keys, self.values, self.key_scale, self.value_scale

    def fit_scales(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Give each slot the scales that its new token needs, so that the largest number of a head is the largest code.

        Shapes: key (T, K, D), value (T, K, D_v), slot_mapping (T,). Raises: KVCacheError without scales a token.
        """
        pairs = (self.key_scale, key), (self.value_scale, value)
        there = slot_mapping >= 0
        slots, size = slot_mapping[there], self.page_size
        for scale, new in pairs:
            if scale is None or scale.ndim != 3:
                raise KVCacheError("wanted a cache with scales='token', got one without; set its scales by yourself")
            dtype = self.keys.dtype
            most = torch.finfo(dtype).max if dtype.is_floating_point else 127.0
            largest = new[there].float().abs().amax(-1)
            scale[slots // size, slots % size] = (largest / most).clamp(min=torch.finfo(torch.float32).tiny)

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its tensors, layout and step; see :meth:`layerzero.ops.paged.cache.PagedCache.arguments_of`."""
        _check_step(self._owner(), given.get("step"))
        return super().arguments_of(function, parameter, given)


class SplitLayer(Bundle):
    """A layer as vLLM's first kernels read it: keys (P, K, D/x, N, x) of 16 bytes each, values (P, K, D_v, N).

    No kernel here attends over it: it is written, read and converted, so that a cache of such an engine can be had in
    another layout. Its memory is refused wherever a call names one.
    """

    __slots__ = ("__weakref__", "_planes", "layout")

    def __init__(self, planes: Mapping[str, Tensor]) -> None:
        self.layout = "VLLM"
        self._planes = dict(planes)
        written.declare(self, self._planes, self.layout)

    @property
    def keys(self) -> Tensor:
        """(P, K, D/x, N, x)."""
        return self._plane("keys")

    @property
    def values(self) -> Tensor:
        """(P, K, D_v, N)."""
        return self._plane("values")

    def _plane(self, name: str) -> Tensor:
        if not self._planes:
            raise KVCacheError(_FREED)
        return self._planes[name]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.keys.shape[3])

    def forget(self) -> None:
        """Have no memory any more."""
        written.withdraw(self, self._planes)
        self._planes = {}

    def append(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write tokens (T, K, D) and (T, K, D_v) into their slots; -1 writes nothing."""
        there = slot_mapping >= 0
        slots = slot_mapping[there]
        page, offset = slots // self.page_size, slots % self.page_size
        self.keys[page, :, :, offset] = key[there].reshape(len(slots), *self.keys.shape[1:3], self.keys.shape[-1])
        self.values[page, :, :, offset] = value[there]

    def gather(self, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of slots, (T, K, D) and (T, K, D_v)."""
        page, offset = slot_mapping // self.page_size, slot_mapping % self.page_size
        return self.keys[page, :, :, offset].flatten(-2), self.values[page, :, :, offset]

    def converted(self, layout: str = "NHD") -> PagedCache:
        """A copy in a layout that kernels attend over. Raises: InvalidCallError for another."""
        keys, values = self.keys.permute(0, 3, 1, 2, 4).flatten(-2), self.values.permute(0, 3, 1, 2)
        if layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        dense = torch.contiguous_format
        return PagedCache(keys.clone(memory_format=dense), values.clone(memory_format=dense), layout)

    def arguments_of(self, function: str, parameter: str, _given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse. Raises: InvalidCallError with KV_CACHE_LAYOUT_MISMATCH."""
        problem = (
            f"{parameter}: wanted a cache in NHD or HND, got one in VLLM; converted() gives a copy in another layout"
        )
        raise InvalidCallError(function, [problem], ReasonCode.KV_CACHE_LAYOUT_MISMATCH)


class LatentLayer(Bundle):
    """A layer of multi-head latent attention: ``ckv_cache`` (P, N, 512) and ``kpe_cache`` (P, N, 64)."""

    __slots__ = ("__weakref__", "_owner", "_planes", "layout")

    def __init__(self, owner: CachedSequences, planes: Mapping[str, Tensor]) -> None:
        self._owner = weakref.ref(owner)
        self.layout = "MLA"
        self._planes = dict(planes)
        written.declare(self, self._planes, self.layout)

    @property
    def ckv_cache(self) -> Tensor:
        """(P, N, 512): what keys and values are made of."""
        return self._plane("ckv")

    @property
    def kpe_cache(self) -> Tensor:
        """(P, N, 64): the part of the keys that is rotated."""
        return self._plane("kpe")

    def _plane(self, name: str) -> Tensor:
        if not self._planes:
            raise KVCacheError(_FREED)
        return self._planes[name]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.ckv_cache.shape[1])

    def forget(self) -> None:
        """Have no memory any more."""
        written.withdraw(self, self._planes)
        self._planes = {}

    def append(self, ckv: Tensor, kpe: Tensor, slot_mapping: Tensor) -> None:
        """Write tokens (T, 512) and (T, 64) into their slots; -1 writes nothing."""
        there = slot_mapping >= 0
        slots = slot_mapping[there]
        for plane, new in ((self.ckv_cache, ckv), (self.kpe_cache, kpe)):
            plane[slots // self.page_size, slots % self.page_size] = new[there]

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Both planes, and tables and lengths of the step. Raises: InvalidCallError for another argument."""
        if parameter not in ("ckv_cache", "kpe_cache"):
            problem = f"{parameter}: wanted a cache of keys and values, got one of latent attention"
            raise InvalidCallError(function, [problem], ReasonCode.KV_CACHE_LAYOUT_MISMATCH)
        _check_step(self._owner(), given.get("step"))
        found: dict[str, Any] = {"ckv_cache": self.ckv_cache, "kpe_cache": self.kpe_cache}
        return found | of_step(given)

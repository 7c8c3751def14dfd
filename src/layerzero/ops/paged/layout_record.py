"""In which layout caches are written: what an object says of its memory while it lives, and what calls wrote.

A cache of ``(pages, 16, 16, 128)`` reads as well in the other layout, and gives other numbers. An object that keeps a
cache knows its layout. Of plain tensors the first call of each plan that writes is noted, so that hits cost nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from layerzero.core.errors import InvalidCallError
from layerzero.core.plan import outdate
from layerzero.core.reasons import ReasonCode
from layerzero.core.system import forking
from layerzero.ops.paged import lazy_cache

_LAYOUTS: dict[int, dict[int, str]] = {}
"""By the address of a storage, and by what recorded it."""


class _Noted(NamedTuple):
    """How a call wrote a plain tensor: a view of other sizes or strides may read the same memory in another layout."""

    storage: StorageWeakRef
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    layout: str


_WRITTEN: dict[int, _Noted] = {}
"""By the address of a plain tensor's first element."""

_DECLARED: set[str] = set()
"""Every layout that was ever declared or written: a call in the only one of them needs no look at its memory."""

_UNGUARDED: set[str] = set()
"""Layouts of plans that do not look at memory."""

WAYS_OUT = {"VLLM": "layer.append writes it, layer.gather reads it, layer.converted() copies it into another layout"}
"""What to do with memory of layouts that no call names; of others the call has to name them."""

_lock = forking.rlock()


def declare(owner: object, tensors: Mapping[str, Tensor], layout: str) -> None:
    """Say that memory is written in a layout while an object lives.

    Raises: InvalidCallError where another object that lives says otherwise.
    """
    for name, tensor in tensors.items():
        check("PagedCache", {name: tensor}, layout)
    for address in {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}:
        with _lock:
            _LAYOUTS.setdefault(address, {})[id(owner)] = layout
        weakref.finalize(owner, _forget, address, id(owner))
    _add(layout)


def note(arguments: Mapping[str, Any], layout: str | None) -> None:
    """Note what a call wrote: the caches among its arguments, for as long as their memory lives."""
    if layout is None:
        return
    for name in ("key_cache", "value_cache"):
        tensor = arguments[name]
        if _has_none(tensor):
            continue
        try:
            storage = tensor.untyped_storage()
            whole = storage.data_ptr()
        except (NotImplementedError, RuntimeError):  # one of a transform: no memory to speak of
            continue
        if whole in _LAYOUTS:  # an object tells, until it gives the memory back
            continue
        with _lock:
            for gone in [each for each, noted in _WRITTEN.items() if _is_gone(noted)]:
                del _WRITTEN[gone]
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            _WRITTEN[_start(tensor, whole)] = _Noted(weak, tuple(tensor.shape), tensor.stride(), layout)
        _add(layout)


def _add(layout: str) -> None:
    if layout not in _DECLARED:
        _DECLARED.add(layout)
        if _UNGUARDED - {layout}:
            _UNGUARDED.clear()
            outdate()  # plans of the other layout look from now on


def withdraw(owner: object, tensors: Mapping[str, Tensor]) -> None:
    """Say nothing more of memory that the object gives back while it lives on."""
    for tensor in tensors.values():
        _forget(tensor.untyped_storage().data_ptr(), id(owner))


def guard(function: str, layout: str | None) -> Callable[..., None] | None:
    """What refuses caches that somebody says are written in another layout, and places that have no memory yet.

    None where all caches say this layout and are there from the beginning.
    """
    if layout is None:
        return None
    _UNGUARDED.add(layout)  # before the look at what is declared: another thread may declare now
    if not (_DECLARED - {layout} or lazy_cache.on_cpu()):
        return None

    def look(key_cache: Tensor, value_cache: Tensor, **tensors: Tensor) -> None:
        if _LAYOUTS or _WRITTEN:
            check(function, {"key_cache": key_cache, "value_cache": value_cache}, layout)
        lazy_cache.look(function, key_cache, **tensors)

    return look


def _forget(address: int, owner: int) -> None:
    with _lock:
        said = _LAYOUTS.get(address, {})
        said.pop(owner, None)
        if not said:
            _LAYOUTS.pop(address, None)


def check(function: str, tensors: Mapping[str, Tensor], layout: str) -> None:
    """Refuse a layout that memory is not written in. Raises: InvalidCallError with KV_CACHE_LAYOUT_MISMATCH."""
    for problem in problems(tensors, layout):
        raise InvalidCallError(function, [problem], ReasonCode.KV_CACHE_LAYOUT_MISMATCH)


def problems(tensors: Mapping[str, Tensor], layout: str) -> list[str]:
    """What is wrong with reading or writing memory in a layout; nothing where nothing tells which it has."""
    if (not _LAYOUTS and not _WRITTEN) or torch.compiler.is_dynamo_compiling():  # which traces no address
        return []
    found = []
    for name, tensor in tensors.items():
        if _has_none(tensor):
            continue
        try:
            whole = tensor.untyped_storage().data_ptr()
            said = [*_LAYOUTS.get(whole, {}).values(), *_noted(tensor, whole)]
        except (NotImplementedError, RuntimeError):  # one of a transform: no memory to speak of
            continue
        other = next((each for each in said if each != layout), None)
        if other is not None:
            way_out = WAYS_OUT.get(other, f"pass layout={other!r}, or other memory")
            wanted = f"{name}: wanted layout={other!r}, which its memory is written in"
            found.append(f"{wanted}, got {layout!r}; {way_out}")
    return found


def _has_none(tensor: Tensor) -> bool:
    """Whether a tensor has no memory; a fake one warns where its address is read."""
    return tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel()


def _is_gone(noted: _Noted) -> bool:
    """Whether the memory was given back: another tensor may have its address."""
    return bool(noted.storage.expired())  # type: ignore[no-untyped-call]


def _start(tensor: Tensor, whole: int) -> int:
    """The address of a tensor's first element; asking the tensor itself would copy one that is to be copied lazily."""
    return whole + int(tensor.storage_offset()) * tensor.itemsize


def _noted(tensor: Tensor, whole: int) -> tuple[str, ...]:
    """The layout that a call wrote this very view in; none where its memory was given back meanwhile."""
    noted = _WRITTEN.get(_start(tensor, whole))
    if noted is None or noted.sizes != tuple(tensor.shape) or noted.strides != tensor.stride():
        return ()
    return () if _is_gone(noted) else (noted.layout,)

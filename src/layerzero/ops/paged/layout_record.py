"""In which layout caches are written: what an object says of its memory while it lives, and what calls wrote.

A cache of ``(pages, 16, 16, 128)`` reads as well in the other layout, and gives other numbers. An object that keeps a
cache knows its layout. Of plain tensors the first call of each plan that writes is noted, so that hits cost nothing.

Here, too, caches whose memory comes as their tokens do: plain tensors of one name places that have none yet. A write to
such a place ends the process on a CPU, and the context on a GPU. So calls that name places look whether there is
memory: on a CPU each call over such a cache, elsewhere those in debug mode.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from layerzero.core import values
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.plan import outdate
from layerzero.core.reasons import ReasonCode
from layerzero.core.system import forking
from layerzero.core.values import Check

_IN_USE, _WHOLE = "page with memory for its tokens", "page with memory for all tokens that it can have"
_ROOM = "KVCache.writing() makes room, and its step names the places"


class Mapped(NamedTuple):
    """What of a range of addresses has memory, in tokens of its pages, which all layers have alike.

    Attributes:
        rooms: tokens that each page has memory for, from its first; written where memory is mapped.
        page_elements, token_elements: from one page to the next, and from one token.
        is_cpu: whether it is memory of a CPU, where every call looks.
    """

    rooms: list[int]
    page_elements: int
    token_elements: int
    is_cpu: bool

    def seen_in(self, cache: Tensor) -> list[int] | None:
        """The rooms of the pages of a view (pages, tokens, ...); None for a view of another kind."""
        if cache.stride(0) != self.page_elements or cache.stride(1) != self.token_elements:
            return None
        place, inside = divmod(int(cache.storage_offset()), self.page_elements)
        first, skipped = place % len(self.rooms), inside // self.token_elements
        return [max(room - skipped, 0) for room in self.rooms[first : first + len(cache)]]


_CACHES: dict[int, Mapped] = {}
"""By the address of a storage."""

_lazy_cache_lock = forking.rlock()


def declare_mapped(keeper: object, tensor: Tensor, mapped: Mapped) -> None:
    """Say what of a tensor's storage has memory, while the object lives that its views keep alive."""
    address = tensor.untyped_storage().data_ptr()
    with _lazy_cache_lock:
        is_first = mapped.is_cpu and not on_cpu()
        _CACHES[address] = mapped
    weakref.finalize(keeper, _lazy_cache_forget, address, mapped)
    if is_first:
        outdate()  # plans look at places from now on


def _lazy_cache_forget(address: int, mapped: Mapped) -> None:
    with _lazy_cache_lock:
        if _CACHES.get(address) is mapped:
            del _CACHES[address]


def on_cpu() -> bool:
    """Whether there is any such cache on a CPU."""
    return any(each.is_cpu for each in list(_CACHES.values()))


def look(function: str, key_cache: Tensor, **tensors: Tensor) -> None:
    """Refuse places without memory in calls over caches on a CPU. Raises: InvalidCallError."""
    if not _CACHES or not key_cache.is_cpu or torch.compiler.is_compiling():
        return
    mapped = _mapped_of(key_cache)
    if mapped is not None and mapped.seen_in(key_cache) is None:
        problem = "key_cache: wanted a cache whose memory grows as it is, or some of its pages one after the other"
        raise InvalidCallError(function, [f"{problem}, got another view, whose places may lack memory; {_ROOM}"])
    problems = values.problems_on_host(checks(key_cache, **{name: tensors[name] for name in _PLACES & tensors.keys()}))
    refuse(function, problems)


def checks(
    key_cache: Tensor,
    slot_mapping: Tensor | None = None,
    positions: Tensor | None = None,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
    from_pages: Tensor | None = None,
    to_pages: Tensor | None = None,
    **_: object,
) -> list[Check]:
    """Values on the device, besides places and counts: places that have memory, of those within the cache."""
    rooms = _rooms_of(key_cache)
    if not rooms:
        return []
    room, size = torch.tensor(rooms, device=key_cache.device), key_cache.shape[1]
    found = []
    if slot_mapping is not None:
        page, offset = slot_mapping // size, slot_mapping % size
        known = (slot_mapping >= 0) & (page < len(room))
        found.append(_check("slot_mapping", slot_mapping, known & (offset >= _of(room, page))))
    elif positions is not None:  # of rows that follow each other
        rows = room if positions.ndim == 2 and len(positions) > 1 else room.amin(0, keepdim=True)
        known = (positions >= 0) & (positions < size)
        found.append(_check("positions", positions, known & (positions >= rows.view(-1, *[1] * (positions.ndim - 1)))))
    if block_tables is not None and context_lens is not None:
        before = torch.arange(block_tables.shape[1], device=room.device) * size
        used = (context_lens.unsqueeze(1) - before).clamp(0, size)
        found.append(_check("block_tables", block_tables, used > _of(room, block_tables), _IN_USE))
    for name, pages in (("from_pages", from_pages), ("to_pages", to_pages)):
        if pages is not None:  # whole ones are copied
            found.append(_check(name, pages, _of(room, pages) < size, _WHOLE))
    return found


_PLACES = frozenset({"slot_mapping", "positions", "from_pages", "to_pages"})
"""What a CPU looks at: block tables are read by, and what has no memory yet reads as zeros there."""


def _mapped_of(cache: Tensor) -> Mapped | None:
    """What of a cache's memory is there; None for one that is there from the beginning."""
    if not _CACHES or cache.is_meta or cache.ndim < 2:
        return None
    try:
        return _CACHES.get(cache.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # a fake tensor, or one of a transform: no memory to speak of
        return None


def _rooms_of(cache: Tensor) -> list[int] | None:
    """Tokens that each page has memory for; None where that is unknown, or all of it is there."""
    mapped = _mapped_of(cache)
    return None if mapped is None else mapped.seen_in(cache)


def _of(room: Tensor, pages: Tensor) -> Tensor:
    """The rooms of pages; those that do not exist are reported elsewhere."""
    return room[pages.long().clamp(0, len(room) - 1)]


def _check(name: str, named: Tensor, wrong: Tensor, what: str = "place with memory") -> Check:
    return Check(wrong, named.unsqueeze(-1), functools.partial(_say, name, what))


def _say(name: str, what: str, place: tuple[int, ...], got: tuple[int, ...]) -> str:
    where = ", ".join(map(str, place))
    return f"{name}[{where}]: wanted a {what}, got {got[0]}, which lacks it; {_ROOM}"


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
    """What refuses caches that a caller says are written in another layout, and places that have no memory yet.

    None where all caches say this layout and are there from the beginning.
    """
    if layout is None:
        return None
    _UNGUARDED.add(layout)  # before the look at what is declared: another thread may declare now
    if not (_DECLARED - {layout} or on_cpu()):
        return None

    def refuse_misfits(key_cache: Tensor, value_cache: Tensor, **tensors: Tensor) -> None:
        if _LAYOUTS or _WRITTEN:
            check(function, {"key_cache": key_cache, "value_cache": value_cache}, layout)
        look(function, key_cache, **tensors)

    return refuse_misfits


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

"""Caches whose memory comes as their tokens do: plain tensors of one name places that have none yet.

A write to such a place ends the process on a CPU, and the context on a GPU. So calls that name places look whether
there is memory: on a CPU each call over such a cache, elsewhere those in debug mode.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.plan import outdate
from layerzero.core.system import forking
from layerzero.core.values import Check, Say

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

_lock = forking.rlock()


def declare(keeper: object, tensor: Tensor, mapped: Mapped) -> None:
    """Say what of a tensor's storage has memory, while the object lives that its views keep alive."""
    address = tensor.untyped_storage().data_ptr()
    with _lock:
        is_first = mapped.is_cpu and not on_cpu()
        _CACHES[address] = mapped
    weakref.finalize(keeper, _forget, address, mapped)
    if is_first:
        outdate()  # plans look at places from now on


def _forget(address: int, mapped: Mapped) -> None:
    with _lock:
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
    return Check(wrong, named.unsqueeze(-1), _say(name, what))


def _say(name: str, what: str) -> Say:
    def say(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        where = ", ".join(map(str, place))
        return f"{name}[{where}]: wanted a {what}, got {got[0]}, which lacks it; {_ROOM}"

    return say

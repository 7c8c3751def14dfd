"""Where the memory of a cache comes from, and how tokens move in it.

It comes all at once, in memory that both sides share, or as it is needed. Tokens move between pages and to the host:
whole pages by one index, rows as far as they are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context

import torch
from torch import Tensor

from layerzero.core.reasons import ReasonCode
from layerzero.core.system import forking
from layerzero.ops.kv.form import KVCacheError, Plane, are_columns
from layerzero.ops.kv.page_table import Book
from layerzero.ops.kv.ranges import AddressRange, managed_zeros, reserve
from layerzero.ops.paged import layout_record

OVERREAD = 256
"""Tokens behind a sequence's last that a kernel may load with its tile, so that they are there, too."""

Layers = list[dict[str, Tensor]]


class Fixed:
    """Memory that is there from the beginning, of every page.

    Args:
        shared: whether CPU and GPU share it. That of a CPU always is.
    """

    def __init__(
        self, planes: Sequence[Plane], layers: int, pages: int, device: torch.device, *, shared: bool = False
    ) -> None:
        make = managed_zeros if shared and device.type == "cuda" else torch.zeros
        joined = are_columns(planes)
        self.layers: Layers = []
        for _ in range(layers):
            if joined:
                widths = [each.inner[1] for each in planes]
                shape = pages, planes[0].inner[0], sum(widths)
                parts = list(torch.split(make(shape, dtype=planes[0].dtype, device=device), widths, -1))
            else:
                parts = [each.made(make, pages, device) for each in planes]
                for each, part in zip(planes, parts, strict=True):
                    if each.empty:
                        part.fill_(each.empty)
            self.layers.append({each.name: part for each, part in zip(planes, parts, strict=True)})
        self.reserved_bytes = sum(tensor.nbytes for layer in self.layers for tensor in layer.values())
        self.growths = self.waited_growths = 0
        self.growth_us = 0.0

    @property
    def committed_bytes(self) -> int:
        """All of it."""
        return self.reserved_bytes

    grows = False
    """Whether :meth:`ensure` and :meth:`soon` do anything."""

    def ensure(self, page: int, tokens: int) -> None:
        """Nothing to do: every page is there."""

    def soon(self, page: int, tokens: int) -> None:
        """Nothing to do."""

    def trim(self, free: Iterable[int]) -> None:
        """Nothing can be given back."""

    def close(self) -> None:
        """Give the memory back once no view of it is left."""
        self.layers = []


class Virtual(Fixed):
    """One range of addresses for all layers and pages, whose memory comes as the tokens do.

    The planes of a layer lie side by side in each token, so that a token of a layer takes one place. What a page has is
    kept when its sequence ends, for the next one, until :meth:`trim` or until memory is short.

    Args:
        limit_bytes: the most memory that is taken; None for what the device has.
    """

    grows = True

    def __init__(
        self, planes: Sequence[Plane], layers: int, pages: int, device: torch.device, limit_bytes: int | None = None
    ) -> None:
        dtype = planes[0].dtype
        self._planes, self._pages = planes, pages
        self._token_bytes = sum(each.bytes_of_token for each in planes)
        self._length = planes[0].inner[0]
        self._range: AddressRange
        self._range = reserve(device, lambda grain: layers * pages * self._row(grain))
        grain = self._range.granularity
        self._row_bytes, self._count = self._row(grain), layers
        if limit_bytes is not None and layers * grain > limit_bytes:
            self._range.close()
            problem = (
                f"wanted {layers * grain} bytes to begin with, a piece a layer, got a limit of {limit_bytes}; raise it"
            )
            raise KVCacheError(problem, ReasonCode.VIRTUAL_MEMORY_EXHAUSTED)
        self._limit = limit_bytes
        self._has, self._room = [0] * pages, [0] * pages
        width = dtype.itemsize
        self._mapped = layout_record.Mapped(
            [0] * pages, self._row_bytes // width, self._token_bytes // width, device.type == "cpu"
        )
        self._lock = forking.rlock()
        self._worker: ThreadPoolExecutor | None = None
        self._coming: dict[int, Future[bool]] = {}
        self.reserved_bytes = layers * pages * self._row_bytes
        self.growths = self.waited_growths = 0
        self.growth_us = 0.0
        for layer in range(layers):  # torch asks the driver whose memory an address is: the first one must be there
            self._range.commit(layer * pages * self._row_bytes, grain)
        self._holds(0, grain)
        flat = self._range.tensor(dtype)
        layout_record.declare_mapped(self._range.keeper, flat, self._mapped)
        self.layers = [self._views(flat, layer) for layer in range(layers)]

    def _holds(self, page: int, size: int) -> None:
        """Note how many bytes a page has, and up to how many tokens nothing is to be done for it."""
        self._has[page] = size
        self._room[page] = self._length if size == self._row_bytes else max(size // self._token_bytes - OVERREAD, 0)
        self._mapped.rooms[page] = self.has_tokens(page)

    def _row(self, grain: int) -> int:
        return -(-self._length * self._token_bytes // grain) * grain

    def _views(self, flat: Tensor, layer: int) -> dict[str, Tensor]:
        size = flat.element_size()
        row, token = self._row_bytes // size, self._token_bytes // size
        first, found = layer * self._pages * row, {}
        for plane in self._planes:
            inner = plane.inner[1:]
            strides = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
            shape = self._pages, self._length, *inner
            found[plane.name] = flat.as_strided(shape, (row, token, *strides), first)
            first += math.prod(inner)
        return found

    @property
    def committed_bytes(self) -> int:
        return self._range.committed_bytes

    def has_tokens(self, page: int) -> int:
        """Tokens that a page has memory for."""
        return self._length if self._has[page] == self._row_bytes else self._has[page] // self._token_bytes

    def ensure(self, page: int, tokens: int) -> None:
        """Map what the first so many tokens of a page need; waits for a growth of it that is under way.

        Raises: KVCacheError with VIRTUAL_MEMORY_EXHAUSTED; what was mapped for it is unmapped then.
        """
        if tokens <= self._room[page] and page not in self._coming:  # almost always
            return
        coming = self._coming.pop(page, None)
        if coming is not None and self._wanted(tokens) > self._has[page]:
            coming.exception()  # one that failed is tried again here, where the caller hears of it
        if self._grow(page, tokens):
            self.waited_growths += 1

    def soon(self, page: int, tokens: int) -> None:
        """Have the next piece mapped by a thread, where the tokens come near its end."""
        ahead = min(tokens + self._range.granularity // (2 * self._token_bytes), self._length)
        if ahead <= self._room[page] or page in self._coming:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "layerzero-cache-growth")
        # its thread would keep the context of the first of these, without a GIL
        self._coming[page] = Context().run(self._worker.submit, self._grow, page, ahead)

    def _wanted(self, tokens: int) -> int:
        grain = self._range.granularity
        needed = min(tokens + OVERREAD, self._length) * self._token_bytes
        return min(-(-needed // grain) * grain, self._row_bytes)

    def _grow(self, page: int, tokens: int) -> bool:
        with self._lock:
            wanted, had = self._wanted(tokens), self._has[page]
            if wanted <= had:
                return False
            started = time.perf_counter()
            places = [(layer * self._pages + page) * self._row_bytes for layer in range(self._count)]
            total = (wanted - had) * self._count
            if self._limit is not None and self.committed_bytes + total > self._limit:
                raise self._exhausted(total, f"{self.committed_bytes} of {self._limit} bytes taken")
            done = []
            try:
                for place in places:
                    self._range.commit(place + had, wanted - had)
                    done.append(place)
            except MemoryError as error:
                for place in done:
                    self._range.release(place + had, wanted - had)
                raise self._exhausted(total, str(error)) from error
            self._holds(page, wanted)
            self.growths += 1
            self.growth_us += (time.perf_counter() - started) * 1e6
            return True

    def _exhausted(self, wanted: int, got: str) -> KVCacheError:
        problem = f"wanted {wanted} bytes more, got {got}; nothing was written: free a sequence and trim(), or swap_out"
        return KVCacheError(problem, ReasonCode.VIRTUAL_MEMORY_EXHAUSTED)

    def trim(self, free: Iterable[int]) -> None:
        """Unmap the memory of free pages, after the device is done with them."""
        for page in list(self._coming):
            self._coming.pop(page).exception()
        with self._lock:
            self._range.settle()
            for page in free:
                keep = self._range.granularity if page == 0 else 0  # what was there at first
                for layer in range(self._count if self._has[page] > keep else 0):
                    place = (layer * self._pages + page) * self._row_bytes
                    self._range.release(place + keep, self._has[page] - keep)
                self._holds(page, min(self._has[page], keep))

    def close(self) -> None:
        """Wait for the device, then give back memory and addresses. Views of it must be gone."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self.layers = []
        self._mapped.rooms[:] = [0] * self._pages  # views of it that were kept lead nowhere
        self._range.close()


Kept = list[dict[str, list[Tensor]]]
"""By layer and plane: the used tokens of each page, on the host."""


def copy_pages(
    layers: Sequence[Mapping[str, Tensor]], planes: Sequence[Plane], pairs: Sequence[tuple[int, int]], tokens: int
) -> None:
    """Copy the first tokens of pages into others, all at once, so that a page may be left and filled in one go."""
    if not pairs:
        return
    device = next(iter(layers[0].values())).device
    sources, targets = torch.tensor(pairs, device=device).unbind(1)
    for layer in layers:
        for plane in planes:
            tensor = layer[plane.name].narrow(plane.token_axis, 0, tokens)
            tensor[targets] = tensor[sources]


def to_host(
    layers: Sequence[Mapping[str, Tensor]], planes: Sequence[Plane], pages: Sequence[int], length: int, page_size: int
) -> Kept:
    """The tokens of a sequence's pages, copied to the host."""
    return [
        {
            plane.name: [
                layer[plane.name][page]
                .narrow(plane.token_axis - 1, 0, min(length - number * page_size, page_size))
                .to("cpu", copy=True)
                for number, page in enumerate(pages)
            ]
            for plane in planes
        }
        for layer in layers
    ]


def from_host(
    layers: Sequence[Mapping[str, Tensor]], planes: Sequence[Plane], pages: Sequence[int], kept: Kept
) -> None:
    """Put tokens back, into other pages."""
    for layer, mine in zip(layers, kept, strict=True):
        for plane in planes:
            for page, tokens in zip(pages, mine[plane.name], strict=True):
                axis = plane.token_axis - 1
                layer[plane.name][page].narrow(axis, 0, tokens.shape[axis]).copy_(tokens)


def bytes_of(kept: Kept) -> int:
    """What lies on the host."""
    return sum(each.nbytes for layer in kept for tokens in layer.values() for each in tokens)


def to_the_front(book: Book) -> dict[int, int]:
    """The fewest moves that leave the used pages before the free ones: the last used page into the first free one."""
    used = sorted(book.held())
    holes = [page for page in book.free if page < len(used)]
    return dict(zip(used[len(used) - len(holes) :], holes, strict=True))


def in_order(book: Book) -> dict[int, int]:
    """Moves that leave the pages of each sequence next to each other, sequence by sequence."""
    order = dict.fromkeys(page for entry in book.entries.values() for page in entry.pages)
    return {page: place for place, page in enumerate(order) if page != place}

"""Moving tokens between pages and to the host: whole pages by one index, rows as far as they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerzero.ops.kv.book import Book
from layerzero.ops.kv.planes import Plane

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
                .narrow(plane.token_axis - 1, 0, _used(number, length, page_size))
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


def _used(number: int, length: int, page_size: int) -> int:
    return min(length - number * page_size, page_size)


def to_the_front(book: Book) -> dict[int, int]:
    """The fewest moves that leave the used pages before the free ones: the last used page into the first free one."""
    used = sorted(book.held())
    holes = [page for page in book.free if page < len(used)]
    return dict(zip(used[len(used) - len(holes) :], holes, strict=True))


def in_order(book: Book) -> dict[int, int]:
    """Moves that leave the pages of each sequence next to each other, sequence by sequence."""
    order = dict.fromkeys(page for entry in book.entries.values() for page in entry.pages)
    return {page: place for place, page in enumerate(order) if page != place}

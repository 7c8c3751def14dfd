"""A look at a weight's memory, to see writes that torch does not count.

``weight.data += delta`` writes into a weight and counts for nothing: adapters are merged so (peft), and a form that was
packed before would go on giving what the weight gave then. Each look compares a few words of the memory: a write that
changes most of a weight is seen at once. Of what has a form, every :data:`EVERY`-th look compares the checksum of one
part in turn, too, so that any write is seen within :data:`LOOKS` looks. That reads a 1024th of the weight a look.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from array import array
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from layerzero.core.indices import IN_C

WORDS = 8
"""Of eight bytes each: 32 elements of bfloat16."""

EVERY = 16
"""Looks of which one compares a part."""

PARTS, LEAST_BYTES = 64, 4096
"""Parts of a weight at most, and how large one is at least."""

LOOKS = EVERY * PARTS
"""After so many looks, every write was seen."""

_WORD = 8
_GOLDEN = 0.6180339887498949
"""Multiples of it lie spread between 0 and 1 however many there are, and on no power of 2."""

_PLAIN = frozenset({Tensor, Parameter})


class Glance:
    """What stood in a weight's memory when this was made.

    It keeps that memory: who exchanges a weight's (``weight.data = other``) has the old one back once somebody looked
    again and found it elsewhere. Memory that was given back below a weight (``untyped_storage().resize_(0)``) is not
    looked into.

    Attributes:
        late: whether a part differed, where the words that each look compares did not: calls before may have missed it.
    """

    __slots__ = ("_at", "_bytes", "_left", "_memory", "_part", "_stands", "_storage", "_sums", "late")

    def __init__(self, weight: Tensor) -> None:
        self.late = False
        self._memory: Any = None
        self._sums: list[int] = []
        words = _words_of(weight)
        if words < WORDS:
            return
        storage = weight.untyped_storage()
        offset = int(weight.storage_offset()) * weight.element_size()
        self._storage, self._at, self._bytes = storage, storage.data_ptr(), storage.nbytes()
        if offset + words * _WORD > self._bytes:  # it was exchanged in between
            return
        self._memory = (ctypes.c_uint64 * words).from_address(self._at + offset)
        places = [int(words * (number * _GOLDEN % 1.0)) for number in range(1, WORDS + 1)]
        self._stands = _stands(self._memory, places)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's weight lies elsewhere: whoever keeps its glance looks anew."""

    @property
    def differs(self) -> bool:
        """Whether something else stands there now; never where memory cannot be looked into."""
        if not self._is_there():
            return False
        return not self._stands() or (bool(self._sums) and self._part_differs())

    def _is_there(self) -> bool:
        if self._memory is None:
            return False
        return bool(self._storage.data_ptr() == self._at and self._storage.nbytes() == self._bytes)

    def sum_up(self) -> None:
        """Note the checksums of all parts, once something was made of the weight."""
        if self._sums or not self._is_there():
            return
        size = ctypes.sizeof(self._memory)
        self._part = max(LEAST_BYTES, -(-size // PARTS))
        self._left = EVERY * -(-size // self._part)
        self._sums = [self._sum(start) for start in range(0, size, self._part)]

    def _sum(self, start: int) -> int:
        size = min(self._part, ctypes.sizeof(self._memory) - start)
        address = ctypes.addressof(self._memory) + start
        in_c = IN_C.get("checksum")
        found: int = in_c(address, size) if in_c else zlib.crc32((ctypes.c_char * size).from_address(address))
        return found

    def _part_differs(self) -> bool:
        self._left = left = (self._left or EVERY * len(self._sums)) - 1
        if not self.late and left % EVERY == 0:
            number = left // EVERY
            self.late = self._sum(number * self._part) != self._sums[number]
        return self.late


def _stands(memory: Any, places: list[int]) -> Callable[[], bool]:
    """Whether some words of memory are still those of now: in C in a fifth of the time."""
    pick: Callable[[Any], tuple[int, ...]] = itemgetter(*places)
    found, in_c = pick(memory), IN_C.get("stands")
    if in_c is None:
        return lambda: pick(memory) == found
    return functools.partial(in_c, ctypes.addressof(memory), array("q", places).tobytes(), array("Q", found).tobytes())


def _words_of(weight: Tensor) -> int:
    """How many words of memory are the weight's alone and may be read; 0 where a host cannot read them."""
    if type(weight) not in _PLAIN or weight.device.type != "cpu" or weight.layout is not torch.strided:
        return 0
    dense = weight.is_contiguous() or (weight.ndim > 1 and weight.mT.is_contiguous())
    return weight.nbytes // _WORD if dense else 0

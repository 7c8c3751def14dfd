"""Look at a weight's memory, so that a write is seen that torch does not count.

``weight.data += delta`` writes into a weight and counts for nothing: adapters are merged so (peft), and a form that was
packed before would go on giving what the weight gave then. Each look compares a few words of the memory: a write that
changes most of a weight is seen at once. Of what has a form, every :data:`EVERY`-th look compares the checksum of one
part in turn, too, so that any write is seen within :data:`LOOKS` looks. That reads a 1024th of the weight a look.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import zlib
from array import array
from collections.abc import Callable, Iterable
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

    It keeps that memory: where a weight's was exchanged (``weight.data = other``), the old one is free after the next
    look. Memory that was given back below a weight (``untyped_storage().resize_(0)``) is not looked into.

    Attributes:
        late: whether a part differed, where the words that each look compares did not: calls before may have missed it.
    """

    __slots__ = (
        "_at",
        "_bytes",
        "_left",
        "_memory",
        "_part",
        "_places",
        "_size",
        "_stands",
        "_storage",
        "_sums",
        "late",
    )

    def __init__(self, weight: Tensor) -> None:
        self.late = False
        self._memory: Any = None
        self._sums: list[int] = []
        if not _can_be_read(weight):
            return
        storage = weight.untyped_storage()
        offset = int(weight.storage_offset()) * weight.element_size()
        self._storage, self._at, self._bytes = storage, storage.data_ptr(), storage.nbytes()
        self._size = weight.nbytes
        if offset + self._size > self._bytes:  # it was exchanged in between
            return
        unit = ctypes.c_uint64 if self._size >= _WORD else ctypes.c_uint8  # nvfp4 has a scale of 4 bytes
        words = self._size // ctypes.sizeof(unit)
        self._memory = (unit * words).from_address(self._at + offset)
        spread = (int(words * (number * _GOLDEN % 1.0)) for number in range(1, WORDS + 1))
        self._places = list(spread) if words > WORDS else [number % words for number in range(WORDS)]
        self._stands = _stands(self._memory, self._places)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's weight lies elsewhere: its glance is taken anew."""

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
        size = self._size
        self._part = max(LEAST_BYTES, -(-size // PARTS))
        self._left = EVERY * -(-size // self._part)
        self._sums = [self._sum(start) for start in range(0, size, self._part)]

    def _sum(self, start: int) -> int:
        size = min(self._part, self._size - start)
        address = ctypes.addressof(self._memory) + start
        in_c = IN_C.get("checksum")
        return in_c(address, size) if in_c else zlib.crc32((ctypes.c_char * size).from_address(address))

    def _part_differs(self) -> bool:
        self._left = left = (self._left or EVERY * len(self._sums)) - 1
        if not self.late and left % EVERY == 0:
            number = left // EVERY
            self.late = self._sum(number * self._part) != self._sums[number]
        return self.late


class Glances:
    """What stood in the memory of all weights of a model, compared in one go: in C in a quarter of the time.

    The caller sees first that each weight is where it was. So many parts are compared at each look that any write is
    seen within :data:`LOOKS`.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._each = [each for each in map(Glance, weights) if each._is_there()]
        for each in self._each:
            each.sum_up()
        self._parts = [
            (each, start, total)
            for each in self._each
            for start, total in zip(range(0, each._size, each._part), each._sums, strict=True)
        ]
        self._some, self._next, self._late = -(-len(self._parts) // LOOKS), 0, False
        words = {
            ctypes.addressof(each._memory) + _WORD * at: each._memory[at]
            for each in self._each
            if each._size >= _WORD  # of a smaller one its part is compared
            for at in each._places
        }
        in_c, self._stands = IN_C.get("stands"), None
        if in_c is not None and not any(each % _WORD for each in words):
            places = array("q", [each // _WORD for each in words])
            self._stands = functools.partial(in_c, 0, places.tobytes(), array("Q", words.values()).tobytes())

    @property
    def differ(self) -> bool:
        """Whether something else stands anywhere now."""
        if self._late or not (self._stands() if self._stands else all(each._stands() for each in self._each)):
            return True
        first, self._next = self._next, self._next + self._some
        looked_at = self._parts[first : self._next]
        if self._next >= len(self._parts):
            self._next = 0
        self._late = any(each._sum(start) != total for each, start, total in looked_at)
        return self._late


def _stands(memory: Any, places: list[int]) -> Callable[[], bool]:
    """Whether some words of memory are still those of now: in C in a fifth of the time."""
    pick: Callable[[Any], tuple[int, ...]] = itemgetter(*places)
    found, in_c = pick(memory), IN_C.get("stands") if memory._type_ is ctypes.c_uint64 else None
    if in_c is None:
        return lambda: pick(memory) == found
    return functools.partial(in_c, ctypes.addressof(memory), array("q", places).tobytes(), array("Q", found).tobytes())


def _can_be_read(weight: Tensor) -> bool:
    """Whether memory is the weight's alone and a host can read it."""
    if type(weight) not in _PLAIN or weight.device.type != "cpu" or weight.layout is not torch.strided:
        return False
    return weight.nbytes > 0 and bool(torch.ops.aten.is_non_overlapping_and_dense.default(weight))


_SAMPLE = 1 << 16
"""Numbers of a weight that are hashed, spread over all of its columns; sums stand for the others."""


def mark_of(weight: Tensor) -> str:
    """What tells the numbers of a weight from others: a sample of their bits, and sums of all and of their squares.

    Sums of whole numbers, modulo 2^64, are the same in any order and by any number of threads.
    """
    bits = weight.contiguous().view(_BITS[weight.element_size()]).flatten()
    step = max(len(bits) // _SAMPLE, 1)
    while math.gcd(step, len(bits)) > 1:  # else some columns are never looked at
        step += 1
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _AT_ONCE):
        wide = bits[start : start + _AT_ONCE].long()
        sums += torch.stack([wide.sum(), wide.square().sum()])
    sample = bits[::step].contiguous().view(torch.uint8).tolist()
    return hashlib.blake2b(bytes(sample) + repr(sums.tolist()).encode(), digest_size=16).hexdigest()


_AT_ONCE = 1 << 18
"""Numbers that are summed together. 4096 x 4096 take 0.13 s so, and 0.5 s by 2^22 (AMD EPYC Zen 4, 2026-11-27)."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""

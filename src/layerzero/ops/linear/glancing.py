"""A few words of a weight's memory, to see writes that torch does not count.

``weight.data += delta`` writes into a weight and counts for nothing: adapters are merged so (peft), and a form that was
packed before would go on giving what the weight gave then. Such a write is seen where it changes one of the words; of
a merged adapter, which changes all of a weight, hardly any is missed. Looking costs 0.3 us on a host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

WORDS = 8
"""Of eight bytes each: 32 elements of bfloat16."""

_WORD = 8
_GOLDEN = 0.6180339887498949
"""Multiples of it lie spread between 0 and 1 however many there are, and on no power of 2."""

_PLAIN = frozenset({Tensor, Parameter})


class Glance:
    """What stood in a weight's memory when this was made.

    It keeps that memory: who exchanges a weight's (``weight.data = other``) has the old one back once somebody looked
    again and found it elsewhere. Memory that was given back below a weight (``untyped_storage().resize_(0)``) is not
    looked into.
    """

    __slots__ = ("_at", "_bytes", "_found", "_memory", "_pick", "_storage")

    def __init__(self, weight: Tensor) -> None:
        self._memory: Any = None
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
        self._pick: Callable[[Any], tuple[int, ...]] = itemgetter(*places)
        self._found = self._pick(self._memory)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's weight lies elsewhere: whoever keeps its glance looks anew."""

    @property
    def differs(self) -> bool:
        """Whether something else stands there now; never where memory cannot be looked into."""
        if self._memory is None or self._storage.data_ptr() != self._at or self._storage.nbytes() != self._bytes:
            return False
        return bool(self._pick(self._memory) != self._found)


def _words_of(weight: Tensor) -> int:
    """How many words of memory are the weight's alone and may be read; 0 where a host cannot read them."""
    if type(weight) not in _PLAIN or weight.device.type != "cpu" or weight.layout is not torch.strided:
        return 0
    dense = weight.is_contiguous() or (weight.ndim > 1 and weight.mT.is_contiguous())
    return weight.nbytes // _WORD if dense else 0

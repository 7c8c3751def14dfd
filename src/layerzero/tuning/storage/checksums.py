"""Checksums of what the database of times holds: what a disk or a hand has changed differs from what was written.

A checksum is written next to values that passed :func:`layerzero.tuning.storage.rows.check` only, so what holds on
reading is what was allowed on writing. CRC-32 finds every single bit, and misses one in four billion of other damage. A
time has two in one number, since a call reads only what decides: the lower 32 bits are of that, the others of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import msgspec

_encode = msgspec.msgpack.Encoder().encode

DECIDING = (
    *("kernel", "environment", "condition", "source", "median_us", "noise", "samples", "variance_us2", "written_at"),
    *("adapts", "device_us", "host_us", "origin"),
)
"""Columns of a time behind its work and graph that decide what it is worth, in the order in which they are summed.

The first are the fields of :class:`layerzero.tuning.prediction.fitting.Time`: nothing has to be sorted on a miss.
"""

COLUMNS = (*DECIDING, "p95_us", "first_call_us", "device_uuid", "layerzero")
"""All columns behind work and graph."""

NUMBERS = (
    *("median_us", "p95_us", "variance_us2", "samples", "noise", "first_call_us", "device_us", "host_us"),
)  # fmt: skip
"""Those that rules bind."""

SELECTED = ", ".join((*DECIDING, "crc"))
"""What has to be selected to know that what decides is as it was written."""

WHOLE = ", ".join(f"times.{name}" for name in (*COLUMNS, "crc"))
"""What has to be selected to know that of all."""

MODEL_COLUMNS = "family, graph, kernel, environment, adapts, format, model"

_COUNT = len(DECIDING)
_LOW = 0xFFFFFFFF


def start_of(work: bytes, graph: int) -> int:
    """Where the checksums of all times of one work begin."""
    return crc32(_encode((work, graph)))


def sound(start: int, found: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Those :data:`SELECTED` columns of one work's times that are as they were written."""
    try:
        return [row for row in found if crc32(_encode(row[:-1]), start) == row[-1] & _LOW]
    except (TypeError, ValueError, OverflowError):
        return [row for row in found if holds(start, row)]


def holds(start: int, found: Sequence[Any]) -> bool:
    """Whether :data:`SELECTED` columns are as they were written."""
    try:
        return bool(crc32(_encode(found[:-1]), start) == found[-1] & _LOW)
    except (TypeError, ValueError, OverflowError):  # text that is none, numbers that no file of ours has
        return False


def holds_whole(start: int, found: Sequence[Any]) -> bool:
    """Whether :data:`WHOLE` columns are as they were written."""
    try:
        return bool(crc_of(start, found[:-1]) == found[-1])
    except (TypeError, ValueError, OverflowError):
        return False


def crc_of(start: int, values: Sequence[Any]) -> int:
    """The checksum of a time's :data:`COLUMNS`."""
    deciding = crc32(_encode(tuple(values[:_COUNT])), start)
    return deciding | (crc32(_encode(tuple(values[_COUNT:])), deciding) >> 1) << 32  # positive in SQLite's 64 bits


def model_crc(*values: Any) -> int:
    """The checksum of a model's :data:`MODEL_COLUMNS`."""
    *subject, model = values
    return crc32(model, crc32(_encode(subject)))


def model_holds(found: Sequence[Any]) -> bool:
    """Whether :data:`MODEL_COLUMNS`, with the checksum behind them, are as they were written."""
    try:
        return bool(model_crc(*found[:-1]) == found[-1])
    except (TypeError, ValueError, OverflowError):
        return False

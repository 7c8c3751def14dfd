"""Slots of new tokens computed on the host, where tables and lengths are there, too.

An engine that schedules has its tables on the host. A launch costs 20 to 40 us of host time on a slow host (H200,
2026-11-22), whatever its size; the ten that slots take on the device are one copy then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.indices import IN_C
from layerzero.ops.ragged.step import is_readable


def slots_on_host(
    tables: Tensor, lens: Tensor, starts: Tensor | None, tokens: int, page_size: int, pages: int
) -> tuple[Tensor, int] | None:
    """The slot of each new token, how many lie beyond their table or on a page that does not exist.

    None without both extension and numpy; the first call of an operation loads the extension. 4160 tokens of 72
    sequences take the first 4 us, the second 17 (2 CPU cores, 2026-11-23).
    Tokens before a sequence's first have -1 and count for nothing.
    Shapes: tables (B, max_blocks), lens (B,), starts (B + 1,) or None for ``tokens`` of each, all int32 on the CPU
    → (T,) int64 on the CPU, tokens that are lost
    Raises: InvalidCallError for starts that do not begin with 0, or decrease.
    """
    if (fill := IN_C.get("slots")) is not None:
        total = len(lens) * tokens if starts is None else max(int(starts[-1]), 0)
        slots = torch.empty(total, dtype=torch.int64, device="cpu")  # wherever torch makes others
        lost = fill(tables, lens, starts, tokens, page_size, pages, slots)
        if lost is not None and lost >= 0:
            return slots, lost
    np = numpy_here()
    if np is None:  # torch's own launches do without
        return None
    table: Any = tables.numpy()
    ends: Any = lens.numpy().astype(np.int64)  # differences of int32 wrap around
    begins: Any
    if starts is None:
        begins, counts = None if tokens == 1 else np.arange(len(ends) + 1) * tokens, tokens
    else:
        begins = starts.numpy().astype(np.int64)
        counts = begins[1:] - begins[:-1]
        if begins[0] or (len(counts) and counts[counts.argmin()] < 0):
            raise_for_starts(begins.tolist())
    found = slots_of_rows(np, table, ends, begins, counts, page_size, pages)
    made, lost = (found, 0) if found is not None else _with_holes(np, table, ends, begins, counts, page_size, pages)
    return torch.from_numpy(made), lost


def numpy_here() -> Any:
    """The module numpy, or None: torch runs without it."""
    try:
        import numpy as np
    except ImportError:
        return None
    return np


def slots_of_rows(np: Any, table: Any, ends: Any, begins: Any, counts: Any, page_size: int, pages: int) -> Any:
    """The slots where each token has one; None else.

    As one sum: if all tables were one row of pages, each would begin at a page. So what says that a token has a place
    is asked of sequences, and one look at all pages says that they exist: negative ones are large without a sign.
    """
    capacity = table.shape[1] * page_size
    if not len(ends) or not capacity:
        return None
    first = ends - counts
    if first[first.argmin()] < 0 or ends[ends.argmax()] > capacity:  # a tenth of what min and max take (numpy 2.4)
        return None
    first += np.arange(0, len(ends) * capacity, capacity)
    if begins is None:
        places = first
    else:
        first -= begins[:-1]
        places = np.arange(begins[-1])
        places += np.repeat(first, counts)
    bits = page_size.bit_length() - 1
    whole = page_size == 1 << bits
    if whole:
        entries = places >> bits
        places &= page_size - 1
    else:
        entries, places = np.divmod(places, page_size)
    named = table.reshape(-1).take(entries)
    if len(named):
        numbers = named.view(np.uint32)
        if numbers[numbers.argmax()] >= pages:
            return None
    slots = named.astype(np.int64)
    if whole:
        slots <<= bits
    else:
        slots *= page_size
    slots += places
    return slots


def _with_holes(
    np: Any, table: Any, ends: Any, begins: Any, counts: Any, page_size: int, pages: int
) -> tuple[Any, int]:
    """The slots where some tokens have none, and how many of these are lost."""
    if begins is None:
        rows, places = np.arange(len(ends)), ends - 1
    else:
        rows = np.repeat(np.arange(len(ends)), counts)
        places = np.arange(len(rows)) + np.repeat(ends - begins[1:], counts)
    columns, offsets = np.divmod(places, page_size)
    early = places < 0
    inside = ~(early | (columns >= table.shape[1]))
    named = np.full(len(rows), -1, dtype=np.int64)
    named[inside] = table[rows[inside], columns[inside]]
    none = (named < 0) | (named >= pages)
    slots = named * page_size + offsets
    slots[none] = -1
    return slots, int((none & ~early).sum())


def check_starts(starts: Tensor) -> None:
    """Raise InvalidCallError for starts (B + 1,) on the CPU that do not begin with 0, or decrease."""
    if int(starts[0]) != 0 or bool((starts.long().diff() < 0).any()):
        raise_for_starts(starts.tolist())


def raise_for_starts(starts: list[int]) -> None:
    """Say what starts were wanted."""
    got = f"{str(starts[:8])[:-1]}{', ...' if len(starts) > 8 else ''}]"
    problem = f"cu_seqlens_q: wanted starts that begin with 0 and do not decrease, got {got}"
    raise InvalidCallError("StepMetadata", [problem])


def host_table_problems(tables: object, like: Tensor) -> list[str]:
    """What is wrong with tables that a caller has on the host beside those on the device."""
    if tables is None:
        return []
    if isinstance(tables, Tensor) and tables.device.type == "cpu" and tables.dtype is torch.int32:
        if tables.shape != like.shape:
            got = f"shape {tuple(tables.shape)}"
        elif tables is like or not is_readable(like) or torch.equal(tables, like):
            return []
        else:
            row, column = (tables != like).nonzero()[0].tolist()
            pages = f"{int(like[row, column])}, got {int(tables[row, column])}"
            return [f"host_tables[{row}, {column}]: wanted the page that it stands for, {pages}"]
    else:
        got = told(tables) if not isinstance(tables, Tensor) else f"{tables.dtype} on {tables.device}"
    return [f"host_tables: wanted an int32 tensor on the CPU of shape {tuple(like.shape)} or None, got {got}"]

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


def slots_on_host(
    tables: Tensor, lens: Tensor, starts: Tensor | None, tokens: int, page_size: int, pages: int
) -> tuple[Tensor, int] | None:
    """The slot of each new token, how many lie beyond their table or on a page that does not exist; None without numpy.

    Tokens before a sequence's first have -1 and count for nothing.
    Shapes: tables (B, max_blocks), lens (B,), starts (B + 1,) or None for ``tokens`` of each, all int32 on the CPU
    → (T,) int64 on the CPU, tokens that are lost
    Raises: InvalidCallError for starts that do not begin with 0, or decrease.
    """
    try:
        import numpy as np
    except ImportError:  # torch's own launches do without
        return None
    table: Any = tables.numpy()
    ends: Any = lens.numpy().astype(np.int64)
    rows: Any
    places: Any
    found: Any
    if starts is None and tokens == 1:
        rows, places = np.arange(len(ends)), ends - 1
    else:
        begins = np.arange(len(ends) + 1) * tokens if starts is None else starts.numpy()
        counts = np.diff(begins)
        if begins[0] != 0 or (counts < 0).any():
            raise_for_starts(begins.tolist())
        rows = np.repeat(np.arange(len(ends)), counts)
        places = np.arange(len(rows)) + np.repeat(ends - begins[1:], counts)
    columns, offsets = np.divmod(places, page_size)
    early, late = places < 0, columns >= table.shape[1]
    outside = early | late
    if table.shape[1] == 0 or outside.any():
        found = np.full(len(rows), -1, dtype=np.int64)
        inside = ~outside
        found[inside] = table[rows[inside], columns[inside]]
    else:
        found = table[rows, columns].astype(np.int64)
    none = (found < 0) | (found >= pages)
    slots = found * page_size + offsets
    lost = 0
    if none.any():
        slots[none] = -1
        lost = int((none & ~early).sum())
    return torch.from_numpy(slots), lost


def check_starts(starts: Tensor) -> None:
    """Raise InvalidCallError for starts (B + 1,) on the CPU that do not begin with 0, or decrease."""
    if int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
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
        if tables.shape == like.shape:
            return []
        got = f"shape {tuple(tables.shape)}"
    else:
        got = told(tables) if not isinstance(tables, Tensor) else f"{tables.dtype} on {tables.device}"
    return [f"host_tables: wanted an int32 tensor on the CPU of shape {tuple(like.shape)} or None, got {got}"]

"""The norms that are worth measuring where nobody says which: by rows and hidden size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from layerzero.core.operation import Case

_ROWS = {"cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384), "cpu": (1, 4, 16, 64, 256, 1024)}
_HIDDEN = {"cuda": (1024, 2048, 4096, 8192), "cpu": (512, 1024, 4096)}
_MAX_ELEMENTS = {"cuda": 2**27, "cpu": 2**21}


def norm_case(operation: str, rows: int, hidden: int) -> tuple[str, Case]:
    """An operation's name and a case of it."""
    return operation, Case(f"{rows}x{hidden}", {"rows": rows, "hidden": hidden})


def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Every norm of a kind of device; none where sizes of attention are asked for."""
    kind = device if device in _ROWS else "cpu"
    for rows in _ROWS[kind] if not narrow else ():
        for hidden in _HIDDEN[kind]:
            if rows * hidden <= _MAX_ELEMENTS[kind]:
                yield norm_case("", rows, hidden)[1]

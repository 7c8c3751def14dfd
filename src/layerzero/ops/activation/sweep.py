"""The activations that are worth measuring where nobody says which: by rows and features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from layerzero.core.operation import Case

_ROWS = {"cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384), "cpu": (1, 4, 16, 64, 256, 1024)}
_FEATURES = {"cuda": (2816, 5632, 14336), "cpu": (1536, 2816, 8192)}
_MAX_ELEMENTS = {"cuda": 2**27, "cpu": 2**21}


def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Every size of a kind of device; of the sizes that were asked for."""
    kind = device if device in _ROWS else "cpu"
    if not narrow.keys() <= {"rows", "features"}:
        return
    for features in narrow.get("features", _FEATURES[kind]):
        for rows in narrow.get("rows", _ROWS[kind]):
            if narrow or rows * features <= _MAX_ELEMENTS[kind]:
                yield Case(f"{rows}x{features}", {"rows": rows, "features": features})


def joined_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """The same with gate and up in one tensor."""
    for case in sweep(device, narrow):
        yield Case(case.name, {"rows": case.sizes["rows"], "joined": 2 * case.sizes["features"]})

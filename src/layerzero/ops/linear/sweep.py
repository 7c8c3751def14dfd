"""The products that are worth measuring where nobody says which: by rows and by the shapes of models' weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from layerzero.core.operation import Case

_ROWS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096), "cpu": (1, 4, 16, 64, 256, 1024)}
_WEIGHTS = {
    "cuda": ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 6144), (8192, 8192), (1024, 4096)),
    "cpu": ((384, 1536), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096)),
}
"""(in_features, out_features)"""
_MAX_FLOPS = {"cuda": 2.0**43, "cpu": 2.0**33}


_AXES = ("rows", "in_features", "out_features")


def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Every product of a kind of device that does not take seconds; of the sizes that were asked for."""
    kind = device if device in _ROWS else "cpu"
    if not narrow.keys() <= set(_AXES):
        return
    weights = [(inputs, outputs) for inputs, outputs in _WEIGHTS[kind] if not narrow.keys() & set(_AXES[1:])]
    weights += [
        (inputs, outputs)
        for inputs in narrow.get("in_features", narrow.get("out_features", ()))
        for outputs in narrow.get("out_features", (inputs,))
    ]
    for inputs, outputs in weights:
        for rows in narrow.get("rows", _ROWS[kind]):
            if narrow or 2.0 * rows * inputs * outputs <= _MAX_FLOPS[kind]:
                sizes = {"rows": rows, "in_features": inputs, "out_features": outputs}
                yield Case(f"{rows}x{inputs}x{outputs}", sizes)

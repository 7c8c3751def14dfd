"""The products that are worth measuring where nobody says which: by rows and by the shapes of models' weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from layerzero.core.operation import Case

_ROWS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096), "cpu": (1, 4, 16, 64, 256, 1024)}
_WEIGHTS = {
    "cuda": ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 6144), (8192, 8192), (1024, 4096)),
    "cpu": ((384, 1536), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096)),
}
"""(in_features, out_features)"""
_MAX_FLOPS = {"cuda": 2.0**43, "cpu": 2.0**33}


_AXES = ("rows", "in_features", "out_features")
_MLPS = {"cuda": ((4096, 14336), (8192, 28672), (1024, 2816)), "cpu": ((384, 1536), (1024, 2816), (2048, 5632))}
"""(in_features, inner_features)"""

Sweep = Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]


def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Every product of a kind of device that does not take seconds; of the sizes that were asked for."""
    kind = device if device in _ROWS else "cpu"
    if not narrow.keys() <= set(_AXES):
        return
    for inputs, outputs in _pairs(_WEIGHTS[kind], narrow.get("in_features"), narrow.get("out_features")):
        for rows in narrow.get("rows", _ROWS[kind]):
            if narrow or 2.0 * rows * inputs * outputs <= _MAX_FLOPS[kind]:
                sizes = {"rows": rows, "in_features": inputs, "out_features": outputs}
                yield Case(f"{rows}x{inputs}x{outputs}", sizes)


def mlp_sweep(*, joined: bool) -> Sweep:
    """The same of two products with as many outputs as inputs."""

    def every(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        kind = device if device in _ROWS else "cpu"
        if not narrow.keys() <= {"rows", "in_features", "inner_features"}:
            return
        for inputs, inner in _pairs(_MLPS[kind], narrow.get("in_features"), narrow.get("inner_features")):
            for rows in narrow.get("rows", _ROWS[kind]):
                if narrow or 6.0 * rows * inputs * inner <= _MAX_FLOPS[kind]:
                    sizes = {"rows": rows, "in_features": inputs, "inner_features": inner, "out_features": inputs}
                    sizes |= {"joined_features": 2 * inner} if joined else {}
                    yield Case(f"{rows}x{inputs}x{inner}", sizes)

    return every


def _pairs(
    usual: Sequence[tuple[int, int]], first: Sequence[int] | None, second: Sequence[int] | None
) -> Iterator[tuple[int, int]]:
    """The usual pairs of sizes; every pair of those that were asked for, squares where one of the two was."""
    if first is None and second is None:
        yield from usual
    elif first is None or second is None:
        yield from ((each, each) for each in first or second or ())
    else:
        yield from itertools.product(first, second)

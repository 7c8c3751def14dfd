"""Named calls of sampling, what they draw from, and the calls that are worth measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from layerzero.core.operation import Case

_SHAPES = {
    "small": (33, 32),
    "odd": (5, 1003),
    "llama2_batch": (8, 32000),
    "llama3": (2, 128256),
    "llama3_decode": (1, 128256),
}

_ROWS = {"cuda": (1, 4, 16, 64, 256), "cpu": (1, 4, 16)}
_VOCAB = (32000, 128256, 151936)
_MAX_ELEMENTS = {"cuda": 2**26, "cpu": 2**21}

Examples = Callable[[Case, torch.dtype, torch.device, torch.Generator | None], dict[str, Any]]
Sweep = Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]


def cases(small: Mapping[str, object], usual: Mapping[str, object]) -> tuple[Case, ...]:
    """Vocabularies from 32 to 128256; parameters that keep a few of 32 places, and usual ones."""
    return tuple(
        Case(name, {"rows": rows, "vocab": vocab}, small if name == "small" else usual)
        for name, (rows, vocab) in _SHAPES.items()
    )


def sweep(params: Mapping[str, object]) -> Sweep:
    """Every size of a kind of device; of the sizes that were asked for."""

    def sizes(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        kind = device if device in _ROWS else "cpu"
        if not narrow.keys() <= {"rows", "vocab"}:
            return
        for vocab in narrow.get("vocab", _VOCAB):
            for rows in narrow.get("rows", _ROWS[kind]):
                if narrow or rows * vocab <= _MAX_ELEMENTS[kind]:
                    yield Case(f"{rows}x{vocab}", {"rows": rows, "vocab": vocab}, params)

    return sizes


def examples(name: str, usual: Mapping[str, object]) -> Examples:
    """Logits with a spread of 3, as those of models about have, or their probabilities; usual numbers beside them.

    A draw needs its top_k, top_p or min_p: a call that is asked about by the shape of its logits alone has usual ones.
    """

    def made(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict[str, Any]:
        shape = (case.sizes["rows"], case.sizes["vocab"])
        beside = {each: value for each, value in usual.items() if f"{each}_by_row" not in case.given}
        if device.type == "meta":
            return {name: torch.empty(shape, dtype=dtype, device=device), **beside}
        where = device if generator is None else generator.device
        logits = torch.randn(shape, generator=generator, device=where) * 3
        values = logits if name == "logits" else logits.softmax(-1)
        if "temperature_by_row" in case.given:
            beside["temperature_by_row"] = (torch.rand(shape[:1], generator=generator, device=where) + 0.5).to(device)
        return {name: values.to(device, dtype), **beside}

    return made

"""Dtype names as users write them, and the sets that declarations use."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from layerzero.core.errors import did_you_mean

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""What the references of floating-point operations compute."""

INDEX = frozenset({torch.int32, torch.int64})
"""What lengths and ids may be."""


_FIRST = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def ordered(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    """Dtypes in a stable order: those that models compute in, then the others by name."""
    places = {dtype: place for place, dtype in enumerate(_FIRST)}
    return tuple(sorted(dtypes, key=lambda dtype: (places.get(dtype, len(places)), dtype_name(dtype))))


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype the way declarations and reports write it."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def dtype_named(name: str | torch.dtype) -> torch.dtype:
    """Find a dtype by name (``bfloat16``, ``bf16``, ``torch.bfloat16``).

    Raises: ValueError if the name is unknown; the message lists the known ones. TypeError for what is no name.
    """
    if isinstance(name, torch.dtype):
        return name
    if not isinstance(name, str):
        raise TypeError(f"dtype: wanted a dtype or its name, such as 'bfloat16', got {name!r}")
    plain = name.removeprefix("torch.")
    plain = _SHORT.get(plain, plain)
    if plain not in DTYPES:
        known = [*DTYPES, *_SHORT]
        near = did_you_mean(plain, known)
        raise ValueError(f"unknown dtype {name!r}{f'{near} Known' if near else '; known'}: {', '.join(known)}")
    return DTYPES[plain]


def names_of(dtypes: frozenset[torch.dtype] | tuple[torch.dtype, ...]) -> str:
    """Write a set of dtypes for a message, in a stable order."""
    return " or ".join(sorted(dtype_name(dtype) for dtype in dtypes))

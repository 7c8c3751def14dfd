"""Kernels that are wrong in as many ways as there are, for whoever imports this; one of them is right."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections import Counter
from typing import Any

import torch
from _norm import register, right
from torch import Tensor

SEEN = ("raises", "asserts", "recurses", "none", "number", "pair", "list", "dtype", "flat", "longer", "device")
"""What shows in the kind of result, so that another kernel runs in its place."""

WRONG = ("nan", "half", "first_row", "no_weight", "writes")
"""What shows in the values, so that vetting finds it."""

DEADLY = ("segfault", "exits", "aborts")
"""What ends a process, so that the next one goes round it."""

HANGS = ("hangs",)

ALL = (*SEEN, *WRONG, *DEADLY, *HANGS, "right")

RAN: Counter[str] = Counter()
"""How often each ran in this process."""


def but(*kinds: str) -> list[str]:
    """The names of all other kinds, to deny them."""
    return [f"bad.{kind}" for kind in ALL if kind not in kinds]


def act(kind: str, data: Tensor, weight: Tensor, eps: float) -> Any:
    """Be wrong in one way. Raises: what it is named after."""
    RAN[kind] += 1
    result = right(data, weight, eps)
    match kind:
        case "raises":
            raise ValueError("no")
        case "asserts":
            raise AssertionError("no")
        case "recurses":
            return act(kind, data, weight, eps)  # without end
        case "segfault":
            return ctypes.string_at(0)
        case "exits":
            os._exit(3)
        case "aborts":
            os.abort()
        case "hangs":
            time.sleep(3600)
        case "writes":
            return data.copy_(result)
    return {
        "none": lambda: None,
        "number": lambda: 5,
        "pair": lambda: (result, None),
        "list": lambda: [result],
        "dtype": result.double,
        "flat": result.flatten,
        "longer": lambda: torch.cat([result, result]),
        "device": lambda: result.to("meta"),
        "nan": lambda: result * torch.nan,
        "half": lambda: result / 2,
        "first_row": lambda: result[:1].expand(result.shape).clone(),
        "no_weight": lambda: right(data, torch.ones_like(weight), eps),
        "right": lambda: result,
    }[kind]()


for _kind in ALL:
    register(f"bad.{_kind}", functools.partial(act, _kind), 100)

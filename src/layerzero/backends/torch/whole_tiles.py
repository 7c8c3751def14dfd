"""torch's product with a weight where a row's end must not be read with the next row's beginning.

On CPUs with AMX, oneDNN's tiles of 32 bfloat16 read over the end of a row whose length is no multiple of 32: what is no
number there makes this row none. A NaN in row 6 of 33 by 100 numbers made row 5 of ``F.linear`` NaN, and of oneDNN's
packed products (torch 2.11 and 2.13, Intel Xeon with AMX, 2026-11-22). One request's rows must not spoil another's, so
rows are filled up with zeros there, which costs a copy of the weight; kernels that cannot do so refuse such calls.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason, ReasonCode

_TILE = 32
_FEATURES = ("in_features", "hidden", "inner_features")


def has_tiles(facts: Facts) -> bool:
    """Whether oneDNN computes such a call with the tiles of AMX."""
    return facts["dtype"] is torch.bfloat16 and "amx_bf16" in facts.device.instruction_sets


def _first_uneven(facts: Facts) -> str | None:
    """The first length of a row that tiles do not fill; None where nothing reads over an end."""
    if not has_tiles(facts):
        return None
    uneven = (name for name in _FEATURES if facts.get(name) is not None and facts.size(name) % _TILE)
    return next(uneven, None)


def _leaking_rows(facts: Facts) -> Reason | None:
    name = _first_uneven(facts)
    if name is None:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, name, f"a multiple of {_TILE}", facts.size(name))


ROWS_APART = limit.Custom("bfloat16 on a CPU with AMX: multiples of 32 features", _leaking_rows)
"""For kernels that hand rows to oneDNN as they are."""


def linear_for(facts: Facts) -> Callable[..., Tensor]:
    """``F.linear`` itself, or with rows filled up to whole tiles where they would be read over their ends."""
    return functional.linear if _first_uneven(facts) is None else _filled_up


def _filled_up(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    missing = -input.shape[-1] % _TILE
    if missing:
        input, weight = functional.pad(input, (0, missing)), functional.pad(weight, (0, missing))
    return functional.linear(input, weight, bias)

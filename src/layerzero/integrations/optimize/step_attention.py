"""Attention of a step: by the length that the host knows, or by those that only the device knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.held import Held, Memory


def _told(held: Held, key: Tensor, named: Mapping[str, Any]) -> dict[str, Any]:
    """What attention was told, for LayerZero's functions; whose keys these are says which window is meant."""
    window, (slides, own) = named["sliding_window"], held.windows[_number(held.memory, key)]
    if slides and own != window:
        wanted = f"wanted attention that is told its window of {own}, got {window}"
        raise InvalidCallError("lz.optimize(graph=True)", [wanted])
    return {"window": None if window is None else (window - 1, 0), "softcap": named["softcap"]}


def _number(memory: Memory, key: Tensor) -> int:
    """The layer whose keys these are."""
    start = key.data_ptr()
    for number, keys in enumerate(memory.keys):
        if keys.data_ptr() == start:
            return number
    wanted = "wanted attention to the keys that the cache keeps, got others, which are made of them (latent attention)"
    raise InvalidCallError("lz.optimize(graph=True)", [wanted])


def attend_view(
    held: Held, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, named: Mapping[str, Any]
) -> Tensor:
    """(B, 1, H, D) of a query (B, H, 1, D) and the used part of a memory."""
    told = _told(held, key, named)
    if told["window"] is not None and key.shape[2] <= told["window"][0] + 1:
        told["window"] = None
    output = lz.attention(query, key, value, True, scaling, layout="BHSD", sinks=named["s_aux"], **told)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2)


def attend_pages(
    held: Held,
    step: lz.StepMetadata,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    named: Mapping[str, Any],
) -> Tensor:
    """The same by lengths that only the device knows."""
    if named["s_aux"] is not None:
        raise InvalidCallError("lz.optimize(graph=True)", ["wanted attention without sinks, which pages do not serve"])
    memory, number, told = held.memory, _number(held.memory, key), _told(held, key, named)
    keys, values = memory.pages(number)
    output = lz.paged_attention(
        query.transpose(1, 2), keys, values, step.block_tables, step.context_lens, scaling, step=step, **told
    )
    assert isinstance(output, Tensor)
    return output

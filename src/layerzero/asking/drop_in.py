"""Questions about ``lz.scaled_dot_product_attention``: they are about the call of ``lz.attention`` that it makes.

The function itself lies in a room of its own, which asking does not import: it is found where it was imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.binding import misfit
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError
from layerzero.ops.attention.torchs import LAYOUT, NAME, NESTED, as_attention

_HOME = "layerzero.integrations.torch"
ASKS = "attention"
"""The function that it calls."""


def is_it(asked: object) -> bool:
    """Whether this is the function, as itself."""
    home = sys.modules.get(_HOME)
    return home is not None and asked is getattr(home, NAME)


def signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What calls of it pass; torch's own signature."""
    raise AssertionError("the signature only")


def attention_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Device | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of ``lz.attention`` that a call of it becomes, and notes about what is not as it was given.

    ``device`` is the one that is asked about, if that is not where the tensors lie.
    Raises: TypeError for a call that does not fit the signature; InvalidCallError where torch's own function runs.
    """
    parameters = inspect.signature(signature)
    try:
        bound = parameters.bind(*args, **kwargs)
    except TypeError as error:
        raise misfit(NAME, error, kwargs, parameters.parameters) from None
    bound.apply_defaults()
    given = bound.arguments
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = given.values()
    problems = [
        f"{name}: wanted a tensor, got {told(each)}"
        for name, each in given.items()
        if name in ("query", "key", "value") or (name == "attn_mask" and each is not None)
        if not isinstance(each, Tensor)
    ]
    if problems:
        raise InvalidCallError(NAME, problems)
    kind = query.device.type if device is None else device.torch_type
    made = as_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa, kind=kind)
    if isinstance(made, str):  # nested tensors of the newer kind are a class with torch functions of its own, too
        why = NESTED if query.is_nested or key.is_nested or value.is_nested else made
        raise InvalidCallError(NAME, [f"torch's own function runs this call: {why}"])
    notes = []
    if made[1].shape != key.shape:
        seen, there = made[1].shape[2], key.shape[2]
        notes.append(f"{NAME} is causal from the top left: {seen} of {there} keys are seen, the others left out")
    if made[0].dtype != query.dtype:
        dtype = dtype_name(made[0].dtype)
        notes.append(f"{NAME} casts to {dtype} first, as autocast has it")
    query, key, value, mask = made
    arguments = {"query": query, "key": key, "value": value, "causal": is_causal, "scale": scale, "layout": LAYOUT}
    return arguments | {"attn_mask": mask, "dropout_p": dropout_p}, tuple(notes)


def refused(error: InvalidCallError) -> InvalidCallError:
    """The error of a call that ``lz.attention`` does not take: torch's own function answers it, or refuses it too."""
    why = [f"torch's own function runs this call, since lz.{ASKS} does not take it: {each}" for each in error.problems]
    return InvalidCallError(NAME, why, error.code)

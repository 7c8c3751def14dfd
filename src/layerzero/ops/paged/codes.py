"""Writing numbers into a cache of float8 or int8: divided by scales, rounded, within the range of what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Tolerance
from layerzero.core.values import Check, Say, problems_on_host
from layerzero.ops.attention.declare import TOLERANCE
from layerzero.ops.paged import on_demand, written

DERIVED = ("cache_dtype", "scale_axes")
"""Facts of a call that writes codes, which :func:`derive` tells."""


def quantized(new: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers divided by their scales, within the range of a narrower dtype; whole ones are rounded to even.

    An infinity becomes NaN in float8: not every one of its forms has infinities.
    """
    wide = new.to(torch.promote_types(new.dtype, torch.float32)) / scale
    if not dtype.is_floating_point:
        return wide.round().clamp(-127, 127).to(dtype)
    most = torch.finfo(dtype).max
    return wide.masked_fill(wide.isinf(), float("nan")).clamp(-most, most).to(dtype)


def append_quantized_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
) -> None:
    """Divide each token's key and value by the scales of its slot, and write them there; -1 writes nothing.

    Shapes: key (T, K, D), value (T, K, D_v), caches (P, N, K, D) and (P, N, K, D_v), slot_mapping (T,), scales that
    broadcast to (P, N, K). Mutates both caches. Dtype: float8_e4m3fn, float8_e5m2 (clamped to its range) or int8
    (rounded to even, -127 to 127). Source: reshape_and_cache of vLLM 0.20 for float8.
    """
    there = slot_mapping >= 0
    slots, size = slot_mapping[there], key_cache.shape[1]
    page, offset = slots // max(size, 1), slots % max(size, 1)
    shape = key_cache.shape[:3]
    for cache, new, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
        factor = scale.expand(shape)[page, offset].unsqueeze(-1)
        cache[page, offset] = quantized(new[there], factor, cache.dtype)


def divides(scale: Tensor, slot_mapping: Tensor) -> Tensor:
    """Whether new tokens can be divided by their scales: one bool, on the scales' device; -1 has none.

    Of scales a token those of the slots alone count, for others may not have been set yet; NaN is that of a NaN token.
    """
    if scale.ndim < 3 or not scale.numel():
        return (scale > 0).all()
    page_size = scale.shape[1]
    slots = slot_mapping.clamp(0, scale.shape[0] * page_size - 1)
    unset = (scale[slots // page_size, slots % page_size] <= 0) & (slot_mapping >= 0).unsqueeze(1)
    return ~unset.any()


def check_values(key_cache: Tensor, slot_mapping: Tensor, **named: Any) -> list[Check]:
    """Values on the device, beside places: slots that have memory, scales that new tokens can be divided by."""
    return on_demand.checks(key_cache, slot_mapping) + check_scales(slot_mapping, **named)


def check_scales(slot_mapping: Tensor, key_scale: Tensor, value_scale: Tensor, **_: object) -> list[Check]:
    """Scales that new tokens can be divided by."""
    hint = "layer.fit_scales(key, value, slots) sets those of a cache with scales='token'"

    def say(name: str) -> Say:
        return lambda _, __: f"{name}: wanted numbers above 0 for all new tokens, got one that is not; {hint}"

    named = ("key_scale", key_scale), ("value_scale", value_scale)
    return [Check(~divides(scale, slot_mapping), None, say(name)) for name, scale in named]


def guard(function: str, layout: str | None) -> Callable[..., None]:
    """What every call is looked at for: caches that nobody says are written otherwise, on a CPU scales as well."""
    caches = written.guard(function, layout)

    def look(slot_mapping: Tensor, key_scale: Tensor, value_scale: Tensor, **tensors: Tensor) -> None:
        if caches is not None:
            caches(slot_mapping=slot_mapping, **tensors)
        if key_scale.is_cpu and type(key_scale) is Tensor:
            problems = problems_on_host(check_scales(slot_mapping, key_scale, value_scale))
            if problems:
                raise InvalidCallError(function, problems)

    return look


def derive(arguments: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, object]:
    """What the cache holds, and whether scales are one number, one a head, or one a token and head."""
    return {"cache_dtype": dtype_name(arguments["key_cache"].dtype), "scale_axes": arguments["key_scale"].ndim}


ONE_STEP = Elementwise(
    dict.fromkeys(TOLERANCE, Tolerance(0.26, 1.0)), "one step of the cache's dtype, where a quotient lies between two"
)


def examples(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict[str, Any]:
    """One scale a head, so that numbers of a unit normal fill the range of int8, and caches of float8."""
    shape = tuple(case.sizes[name] for name in ("pages", "page_size", "kv_heads"))
    made: dict[str, Any] = {}
    for name, width in (("key", "head_dim"), ("value", "value_dim")):
        made[f"{name}_scale"] = (0.01 + 0.03 * torch.rand(shape[2], generator=generator)).to(device)
        made[f"{name}_cache"] = torch.zeros(*shape, case.sizes[width], device=device).to(torch.float8_e4m3fn)
    return made

"""What a plan may do to attention's arguments: fold what hides keys into one mask, repeat kv heads."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from layerzero.core.adapter import Adapter
from layerzero.core.facts import Facts
from layerzero.core.layouts import moving
from layerzero.ops.attention.layout import CANONICAL, heads_axis, sequence_axis
from layerzero.ops.attention.reference import FOLDABLE, attention_bias


def _blank(tensor: torch.Tensor, lengths: torch.Tensor, axis: int) -> torch.Tensor:
    """Put zeros in place of what lies beyond each sequence's length."""
    columns = torch.arange(tensor.shape[axis], device=tensor.device)
    columns = columns.view([-1 if each == axis else 1 for each in range(4)])
    return tensor.masked_fill(columns >= lengths.view(-1, 1, 1, 1), 0.0)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(mode=False)
def _seen_and_hidden(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What :func:`attention_bias` makes of a bool mask alone, in 2 us where that takes 12 (AMD EPYC, 2026-11-25)."""
    whole = mask if mask.ndim == 4 else mask[(None,) * (4 - mask.ndim)]
    return torch.where(whole, *_seen_and_hidden(dtype))


def _fold(arguments: Sequence[str], facts: Facts, layout: str | None) -> list[str]:
    """One mask that says causal, mask, window, ALiBi and lengths together."""
    layout, schema = layout or CANONICAL, facts.operation.schema
    view = moving(layout, CANONICAL)
    told = []
    for name in FOLDABLE:
        if name in facts.tensors:
            told.append(f"{name}={name}")
        elif name in schema.chosen and facts[name] != schema.neutral.get(name):
            told.append(f"{name}={facts[name]!r}")
    if told == ["attn_mask=attn_mask"] and facts["attn_mask"] == "bool" and facts.device.platform == "cpu":
        return ["attn_mask = added(attn_mask, query.dtype)"]
    lines = [f"attn_mask = fold(query{view}, key{view}, {', '.join(told)})"]
    if "kv_lens" in arguments:  # what lies beyond may be NaN, which no mask hides
        lines += [f"{name} = blank({name}, kv_lens, {sequence_axis(layout)})" for name in ("key", "value")]
    return lines


def _expand(_: Sequence[str], facts: Facts, layout: str | None) -> list[str]:
    axis = heads_axis(layout or CANONICAL)
    return [f"{name} = {name}.repeat_interleave({facts['group']}, {axis})" for name in ("key", "value")]


ADAPTERS = {
    "fold": Adapter(
        text="fold {argument} into the mask",
        write=_fold,
        names={"fold": attention_bias, "added": _added, "blank": _blank},
        absorbs=True,
        absorbed=FOLDABLE,
        gives="attn_mask",
        gives_alone=frozenset(FOLDABLE) - {"kv_lens"},
    ),
    "expand": Adapter(
        text="repeat kv heads to match query heads",
        write=_expand,
        moved=True,
        names_sizes=True,
        writes_anew=("key", "value"),
    ),
}

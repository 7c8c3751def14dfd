"""Axis letters of attention, the rules that decide an unnamed layout, and heads seen as queries.

B batch, S sequence, H heads, D head dim. ``BSHD`` is the layout that attention's schemas are written in.

torch's attention function: its calls as calls of ``lz.attention``, and what calls it with the arguments of ours.

``lz.scaled_dot_product_attention`` makes these calls (:mod:`layerzero.integrations.torch`), and questions about it ask
about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import has_torch_function

from layerzero.core.arguments import told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import DropIn, InvalidCallError, Made, refuse
from layerzero.core.facts import Facts

CANONICAL = "BSHD"
LAYOUTS = ("BSHD", "BHSD")

MAX_PLAUSIBLE_HEADS = 256
"""More heads than any published model has; a larger axis has to be the sequence."""


def _heads_and_sequence(layout: str, shape: Sequence[int]) -> tuple[int, int]:
    return shape[layout.index("H")], shape[layout.index("S")]


def _consistent(layout: str, query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> bool:
    """Whether the three shapes can be attention at all when read in this layout."""
    heads, _ = _heads_and_sequence(layout, query)
    kv_heads, seq_k = _heads_and_sequence(layout, key)
    value_heads, value_seq = _heads_and_sequence(layout, value)
    return kv_heads == value_heads and seq_k == value_seq and kv_heads > 0 and heads % kv_heads == 0


def resolve(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> str:
    """Decide an unnamed layout; empty where both readings fit, since a guess would be wrong in silence.

    What the shapes prove (one reading divides heads, the other does not), then what is plausible (one reading has at
    most 256 heads). The larger of the two axes is never taken for the sequence: for a decode query of shape (B, 1, H,
    D) that would be wrong. Nor do strides decide: a view with swapped axes may have been dense in either layout before.
    Shapes: all four-dimensional. When axes 1 and 2 of query and key are all 1 long, both readings are one computation.
    """
    readings = [layout for layout in LAYOUTS if _consistent(layout, query, key, value)]
    if len(readings) == 1:
        return readings[0]
    plausible = [
        layout
        for layout in (readings or LAYOUTS)
        if _heads_and_sequence(layout, query)[0] <= MAX_PLAUSIBLE_HEADS
        and _heads_and_sequence(layout, key)[0] <= MAX_PLAUSIBLE_HEADS
    ]
    if len(plausible) == 1:
        return plausible[0]
    same = all(shape[1] == 1 and shape[2] == 1 for shape in (query, key))
    return CANONICAL if same or not readings else ""


def both_fit(name: str, shape: Sequence[int]) -> str:
    """The problem of a call whose shapes fit both layouts, with both readings and the next step."""
    first, second = shape[1], shape[2]
    return (
        f"layout: wanted layout='BSHD' or layout='BHSD', got neither, and both fit {name} {tuple(shape)}: BSHD reads "
        f"{first} tokens of {second} heads, BHSD {second} tokens of {first} heads. Pass layout=, or set `layout` in "
        "the configuration"
    )


def by_group(run: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    """A kernel of BHSD tensors as it is; for one query of grouped heads, called with the group in the queries' axis.

    Kernels that take a block of queries at a time then read each key once for the group, and not once a head: torch's
    on a CPU takes 109 us in place of 1008 for bfloat16, 16 heads on 4, 576 keys, and zentorch's 67 in place of 161 at
    2048 (AMD EPYC with AVX512-BF16, one thread, 2026-11-22). Nothing is copied.
    """
    if facts["operation"] != "attention.gqa.decode":
        return run

    def folded(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **others: Any) -> Any:
        batch, heads, _, size = query.shape
        kv_heads = key.shape[1]
        if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] == heads:
            attn_mask = attn_mask.reshape(*attn_mask.shape[:-3], kv_heads, -1, attn_mask.shape[-1])
        grouped = query.reshape(batch, kv_heads, -1, size)
        result = run(grouped, key, value, attn_mask=attn_mask, **others)
        if isinstance(result, tuple):
            output, lse = result
            return output.reshape(batch, heads, 1, -1), lse.reshape(batch, heads, 1)
        return result.reshape(batch, heads, 1, -1)

    return folded


FUNCTION, NAME = "attention", "scaled_dot_product_attention"
LAYOUT = "BHSD"

LISTENING = (
    "a mode listens to torch's functions (a default device, `with torch.device(...)`), or a tensor's class does; "
    "call it outside of that, with plain tensors"
)
OTHERS = "query, key or value is no tensor"
SWITCH = "enable_gqa is neither True nor False"
TRACED = "torch.jit.trace is at work, which sees torch's operators alone"
NESTED = "a tensor is nested; lz.ragged_attention takes sequences of several lengths one after the other"
RANK = "a tensor has other than four axes; pass query, key and value as (B, H, S, D)"
TWO_MASKS = "attn_mask comes with is_causal=True; put the causal part into the mask"
FLAT_MASK = "attn_mask has fewer than two axes; pass attn_mask[None]"
EMPTY = "a tensor has no elements, so that there is nothing to choose"
BROADCAST = "batches, or heads and lengths of key and value, differ; expand them to equal sizes"
HEADS = "key has other heads than query; pass enable_gqa=True, with a multiple of key's heads in query"
QUERIES = "there are more causal queries than keys, counted from the top left; pass attn_mask in place of is_causal"


def as_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, enable_gqa: bool, kind: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | str:
    """The tensors that ``lz.attention`` gets, or why torch's function runs and what would change that.

    From the top left no query sees more keys than there are queries, so that further ones are left out. ``kind`` is the
    type of device whose autocast counts, that of the tensors if empty.
    """
    tensors: tuple[Any, Any, Any] = query, key, value  # whatever a caller gives
    if has_torch_function(tensors) or (mask is not None and has_torch_function((mask,))):
        return LISTENING
    if not (isinstance(tensors[0], Tensor) and isinstance(tensors[1], Tensor) and isinstance(tensors[2], Tensor)):
        return OTHERS
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # what dynamo knows
        return TRACED
    switch: Any = enable_gqa
    if type(switch) is not bool:
        return SWITCH
    if query.is_nested or key.is_nested or value.is_nested:
        return NESTED
    # each shape is read once: torch makes a new value each time, and slices are dear (3.1 us in all before, 2.0 so)
    wanted, keyed, valued = query.shape, key.shape, value.shape
    if not len(wanted) == len(keyed) == len(valued) == 4:
        return RANK
    if mask is not None and is_causal:
        return TWO_MASKS
    if mask is not None and mask.ndim < 2:
        return FLAT_MASK
    if 0 in wanted or 0 in keyed or 0 in valued:
        return EMPTY
    (batch, heads, queries, _), (key_batch, kv_heads, keys, _) = wanted, keyed
    value_batch, value_heads, values, _ = valued
    if not (batch == key_batch == value_batch and kv_heads == value_heads and keys == values):
        return BROADCAST
    if heads != kv_heads and not (enable_gqa and heads % kv_heads == 0):
        return HEADS
    if is_causal and queries != keys:
        if queries > keys:
            return QUERIES
        key, value = key[:, :, :queries], value[:, :, :queries]
    kind = kind or query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and query.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
    return query, key, value, mask


def _call(given: Mapping[str, Any], kind: str) -> Made:
    """The call of ``lz.attention`` that a call of it becomes. Raises: InvalidCallError where torch's own runs."""
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = given.values()
    asked = {"query": query, "key": key, "value": value} | ({} if mask is None else {"attn_mask": mask})
    problems = [
        f"{name}: wanted a tensor, got {told(each)}" for name, each in asked.items() if not isinstance(each, Tensor)
    ]
    refuse(NAME, problems)
    made = as_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa, kind=kind)
    if isinstance(made, str):  # nested tensors of the newer kind are a class with torch functions of its own, too
        why = NESTED if query.is_nested or key.is_nested or value.is_nested else made
        raise InvalidCallError(NAME, [f"torch's own function runs this call: {why}"])
    notes = []
    if made[1].shape != key.shape:
        seen, there = made[1].shape[2], key.shape[2]
        notes.append(f"{NAME} is causal from the top left: {seen} of {there} keys are seen, the others left out")
    if made[0].dtype != query.dtype:
        notes.append(f"{NAME} casts to {dtype_name(made[0].dtype)} first, as autocast has it")
    query, key, value, mask = made
    arguments = {"query": query, "key": key, "value": value, "causal": is_causal, "scale": scale, "layout": LAYOUT}
    return arguments | {"attn_mask": mask, "dropout_p": dropout_p}, tuple(notes)


DROP_IN = DropIn(
    name=NAME,
    function=FUNCTION,
    home="layerzero.integrations.torch",
    library="torch",
    call=_call,
    instead=f'lz.{FUNCTION}, ..., causal=False, layout="{LAYOUT}"',
)


def stock(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool | None = None, **others: Any
) -> Callable[[], torch.Tensor] | None:
    """``torch.nn.functional.scaled_dot_product_attention``; None for what it has no argument for."""
    layout, scale = others.pop("layout", None) or CANONICAL, others.pop("scale", None)
    mask = others.pop("attn_mask", None)
    causal = mask is None if causal is None else causal
    axis = layout.index("S")
    single = query.shape[axis] == 1
    aligned = not causal or single or query.shape[axis] == key.shape[axis]  # torch aligns top-left
    if not aligned or any(not _neutral(each) for each in others.values()):
        return None
    heads = 1 if layout != CANONICAL else 2
    more: dict[str, Any] = {"attn_mask": mask, "is_causal": causal and not single, "scale": scale}
    more["enable_gqa"] = query.shape[heads] != key.shape[heads]

    def run() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, **more)

    def run_transposed() -> torch.Tensor:  # such tensors cost their views in each call
        output = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **more
        )
        return output.transpose(1, 2)

    return run if layout != CANONICAL else run_transposed


def _neutral(value: object) -> bool:
    return value is None or (not isinstance(value, torch.Tensor) and value in (False, 0.0))

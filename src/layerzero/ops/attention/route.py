"""``lz.attention``: its signature, the checks of a call, the route to one of four operations, and random calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.dtypes import FLOATING, dtype_name
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.operation import Function, Operation, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.attention import layout as layouts
from layerzero.ops.attention.declare import GQA_DECODE, GQA_PREFILL, OPERATIONS, STANDARD_DECODE, STANDARD_PREFILL
from layerzero.ops.declaration import check_dense
from layerzero.ops.draw import Draw

_HEAD_DIMS = (1, 7, 8, 16, 32, 33, 64, 96, 128)
_HEAD_DIM_WEIGHTS = (1, 2, 3, 4, 4, 2, 4, 1, 1)
_SEQUENCES = (2, 3, 5, 8, 16, 17, 33, 64)
_LONG = (100, 129, 257, 600)


def draw_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.attention``."""
    batch = draw.of((0, 1, 2, 3), (1, 20, 20, 8))
    kv_heads = draw.of((1, 2, 3, 4))
    heads = kv_heads * draw.of((1, 2, 3, 4), (6, 2, 1, 1))
    head_dim = draw.of(_HEAD_DIMS, _HEAD_DIM_WEIGHTS)
    value_dim = draw.of(_HEAD_DIMS, _HEAD_DIM_WEIGHTS) if draw.chance(0.15) else head_dim
    seq_q, seq_k = _sequences(draw)
    if max(seq_q, seq_k) > 64:
        batch, heads, kv_heads = min(batch, 1), heads // kv_heads, 1
    shapes = ((batch, seq_q, heads, head_dim), (batch, seq_k, kv_heads, head_dim), (batch, seq_k, kv_heads, value_dim))
    layout = draw.of(layouts.LAYOUTS)
    arguments = _masks(draw, dtype, (batch, heads, seq_q, seq_k))
    beyond = _beyond(draw, arguments.get("kv_lens"), seq_k)
    for name, shape in zip(("query", "key", "value"), shapes, strict=True):
        tensor = draw.normal(shape, dtype)
        if beyond is not None and name != "query":
            tensor.masked_fill_(beyond, float("nan"))
        if layout != layouts.CANONICAL:
            tensor = tensor.transpose(1, 2).contiguous()
        arguments[name] = draw.laid_out(tensor, expand=beyond is None)
    if draw.chance(0.15):
        unit = head_dim**-0.5  # scores far from unit normal amplify the rounding of float32 beyond any tolerance
        arguments["scale"] = draw.of((unit, 0.25 * unit, 3.0 * unit, -unit, 0.0, 0, 1 if head_dim < 9 else 0.1))
    arguments |= draw.maybe(0.08, softcap=lambda: draw.of((0.5, 5.0, 30.0, 1e-3, 1e6)))
    arguments |= draw.maybe(0.1, sinks=lambda: draw.laid_out(draw.normal((heads,), draw.of((dtype, torch.float32)))))
    arguments |= draw.maybe(0.15, return_lse=lambda: True)
    arguments |= draw.maybe(0.05, dropout_p=lambda: 0.0)
    # A NaN reaches every result that sees it; whether a hidden one does is not defined.
    if seq_q <= seq_k and not arguments.keys() & {"attn_mask", "window", "kv_lens"}:
        draw.poison(arguments, ("query",) if arguments.get("causal", True) else ("query", "key", "value"))
    _name_layout(draw, arguments, layout)
    return arguments


def _beyond(draw: Draw, kv_lens: Tensor | None, seq_k: int) -> Tensor | None:
    """Where a cache holds unwritten tokens, on half of the calls with lengths; it must not be read."""
    if kv_lens is None or draw.chance(0.5):
        return None
    return torch.arange(seq_k, device=draw.device).view(-1, 1, 1) >= kv_lens.view(-1, 1, 1, 1)


def _sequences(draw: Draw) -> tuple[int, int]:
    """Lengths of queries and keys: decode, square, longer and shorter queries, rarely long or empty ones."""
    seq_k = draw.of(_LONG) if draw.chance(0.06) else draw.of((0, 1, *_SEQUENCES), (1, 4, *[6] * len(_SEQUENCES)))
    kind = draw.of(("decode", "square", "free"), (4, 6, 4))
    seq_q = {"decode": 1, "square": seq_k}.get(kind)
    if seq_q is None:
        seq_q = draw.of((0, 1, *_SEQUENCES), (1, 2, *[6] * len(_SEQUENCES)))
    return seq_q, seq_k


def _masks(draw: Draw, dtype: torch.dtype, target: tuple[int, int, int, int]) -> dict[str, Any]:
    """Everything that hides keys or moves scores by position."""
    batch, heads, _, seq_k = target
    arguments: dict[str, Any] = {}
    if draw.chance(0.3):
        arguments |= {"attn_mask": draw.laid_out(_mask(draw, dtype, target)), "causal": False}
    elif draw.chance(0.7):
        arguments["causal"] = draw.chance(0.5)
    arguments |= draw.maybe(0.12, window=lambda: (draw.of((-1, 0, 1, 4, seq_k)), draw.of((-1, 0, 1, 4))))
    if draw.chance(0.1):
        slopes = (heads,) if draw.chance(0.6) else (batch, heads)
        arguments["alibi_slopes"] = draw.laid_out(draw.uniform(slopes, draw.of((dtype, torch.float32))) / 2)
    if draw.chance(0.12):
        arguments["kv_lens"] = draw.laid_out(draw.integers((batch,), seq_k, draw.of((torch.int32, torch.int64))))
    return arguments


def _mask(draw: Draw, dtype: torch.dtype, target: Sequence[int]) -> Tensor:
    """A mask of any shape that broadcasts to the target; some of its rows see nothing."""
    ndim = draw.of((0, 1, 2, 3, 4), (1, 2, 6, 3, 10))
    shape = [1 if draw.chance(0.2) else size for size in target[4 - ndim :]]
    visible: Tensor = draw.uniform(shape, torch.float32) < draw.of((0.5, 0.9))
    if ndim >= 2:
        visible &= draw.uniform((*shape[:-1], 1), torch.float32) < 0.9
    if draw.chance(0.5):
        return visible
    dtype = draw.of((dtype, torch.float32), (8, 3))
    mask = draw.normal(shape, dtype)
    return mask.masked_fill(~visible, float("-inf")) if draw.chance(0.7) else mask


def _name_layout(draw: Draw, arguments: dict[str, Any], layout: str) -> None:
    """Leave the layout out, now and then, where the tensors prove it."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if draw.chance(0.7) or layouts.resolve(query.shape, key.shape, value.shape) != layout:
        arguments["layout"] = layout


def _is_window(window: object) -> bool:
    sides = isinstance(window, (tuple, list)) and all(type(side) is int and side >= -1 for side in window)
    return sides and len(window) == 2  # type: ignore[arg-type]  # sides is False for what has no length


def score_problems(arguments: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the numbers that act on scores; types are the schema's business."""
    problems = []
    scale, softcap, window = arguments["scale"], arguments.get("softcap"), arguments.get("window")
    if isinstance(scale, (int, float)) and not math.isfinite(scale):
        problems.append(f"scale: wanted a finite number, got {scale}")
    if isinstance(softcap, (int, float)) and not (math.isfinite(softcap) and softcap > 0):
        problems.append(f"softcap: wanted a finite number above 0 or None, got {softcap}")
    if window is not None and not _is_window(window):
        problems.append(f"window: wanted (left, right), each -1 (unbounded) or a count of keys, got {told(window)}")
    return problems


def slope_problems(slopes: object, heads: int, sequences: int) -> list[str]:
    """What is wrong with the shape of ALiBi's slopes, which the schema leaves open."""
    if not isinstance(slopes, Tensor) or tuple(slopes.shape) in ((heads,), (sequences, heads)):
        return []
    return [f"alibi_slopes: wanted shape ({heads},) or ({sequences}, {heads}), got {tuple(slopes.shape)}"]


def check_heads(function: str, query: Sequence[int], key: Sequence[int]) -> None:
    """Refuse counts of heads that mean nothing, of queries (T, H, D) and keys (T, K, D). Raises: InvalidCallError."""
    (_, heads, head_dim), kv_heads = query, key[1]
    if not heads or not kv_heads or not head_dim:
        shapes = f"query {tuple(query)} and key {tuple(key)}"
        raise InvalidCallError(function, [f"wanted heads and head dim above 0, got {shapes}"])
    if heads % kv_heads:
        problem = f"query heads must be a multiple of kv heads: got {heads} query heads and {kv_heads} kv heads"
        shapes = f"query {tuple(query)}, key {tuple(key)}"
        raise InvalidCallError(function, [f"{problem} ({shapes})"], ReasonCode.GQA_HEADS_MISMATCH)


def without_defaults(
    operation: Operation, arguments: Mapping[str, Any], head_dim: int, *, newest: bool = False
) -> dict[str, Any]:
    """The operation's arguments, None for a default that is spelled out: kernels without that argument stay legal.

    Args:
        newest: whether each query is its sequence's newest token, so that nothing lies to the right of its window.
    """
    known = operation.schema.known
    found = {name: value for name, value in arguments.items() if name in known}
    scale, window = found.get("scale"), found.get("window")
    if isinstance(scale, (int, float)) and math.isclose(scale, head_dim**-0.5, rel_tol=1e-7):
        found["scale"] = None
    if window is not None and _is_window(window):
        left, right = window
        if newest:
            found["window"] = None if left < 0 else (left, 0)
        else:
            found["window"] = None if left == right == -1 else (left, right)
    return found


NAME = "attention"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool | None = None,
    scale: float | None = None,
    *,
    layout: str | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from query to key and value with the fastest kernel that is valid for this call.

    Shapes: query (B, S_q, H, D), key (B, S_k, K, D), value (B, S_k, K, D_v) in BSHD, axes 1 and 2 swapped in BHSD; H a
        multiple of K; the output has the query's layout, shape (B, S_q, H, D_v).
    Dtype: floating; key and value the same, as a cache has it. Where query has another one, the plan casts to one that
        holds both, float32 or wider, as explain says, and ``strict_mode`` refuses. The output has the query's.
    Args:
        causal: hide keys in the future; aligned bottom-right when S_q != S_k. None, the default, is True without
            ``attn_mask``, and False with one: a mask alone says everything.
        scale: factor on the scores, 1/sqrt(D) by default.
        layout: ``"BSHD"`` or ``"BHSD"``. Without it the configured default decides, then the shapes, where one reading
            alone has head counts that divide, or that are at most 256. Where both fit, it is an error.
        attn_mask: broadcastable to (B, H, S_q, S_k); bool, True attends; or float, added to scores. ``causal=True``
            with it is an error: put the causal part into the mask.
        dropout_p: probability of dropping an attention weight.
        window: (left, right) keys around the query's own position that it sees, itself excluded from the count; -1 is
            unbounded.
        softcap: ``c * tanh(score / c)`` on the scores.
        sinks: (H,), one extra logit a head.
        alibi_slopes: (H,) or (B, H).
        kv_lens: (B,) on the device, valid keys of each sequence in a longer cache; what lies beyond is not read.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, S_q), natural logarithm.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got;
        NoKernelFoundError if policy leaves no kernel.
    Source: arXiv:1706.03762.
    """
    raise AssertionError("the signature only; the engine makes the callable")


_NESTED = "lz.ragged_attention takes its values() and offsets().int()"


def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    """Check a call and choose the operation by head counts and query length."""
    check_dense(NAME, arguments, _NESTED)
    shapes = _shapes(arguments)
    layout = _layout(arguments, shapes, default_layout)
    query, key, _ = shapes
    heads_axis, seq_axis = layout.index("H"), layout.index("S")
    heads, kv_heads, seq_q, seq_k = query[heads_axis], key[heads_axis], query[seq_axis], key[seq_axis]
    if heads == 0 or kv_heads == 0 or query[-1] == 0:
        raise _invalid(f"wanted at least one head and a head dim above 0, got query {query} and key {key} in {layout}")
    if heads % kv_heads:
        raise _invalid(
            f"query heads must be a multiple of kv heads: got {heads} query heads and {kv_heads} kv heads in {layout} "
            f"(query {query}, key {key}); pass layout= if the axes are the other way round",
            ReasonCode.GQA_HEADS_MISMATCH,
        )
    causal = arguments["attn_mask"] is None if arguments["causal"] is None else arguments["causal"]
    _check_mask(arguments, causal, seq_q, seq_k, query[0], heads)
    _check_values(arguments, causal, query[0], heads)
    casts = _casts(arguments)
    operation = _operation(heads == kv_heads, seq_q == 1)
    canonical = without_defaults(operation, arguments, query[-1])
    if seq_q != 1:  # of one query nothing is in its future: aligned bottom-right, it is the last
        canonical["causal"] = causal
    if invalid := operation.schema.validate(layout=layout, **canonical):
        refuse(NAME, invalid)
    shapes_decide = arguments["layout"] is None and default_layout is None  # which axis is which
    slopes = canonical["alibi_slopes"]
    by_batch = slopes is not None and slopes.ndim == 2  # no condition says that they are as many as the batch
    lengths = ("seq_q", "seq_k") if by_batch else ("batch", "seq_q", "seq_k")
    return Routed(operation, canonical, layout, () if shapes_decide else lengths, casts=casts)


def _casts(arguments: dict[str, Any]) -> Mapping[str, tuple[torch.dtype, torch.dtype]]:
    """Cast queries, and keys and values of another dtype, as caches have it, to one that holds both: float32 or wider.

    Returns: what was cast. The output gets the queries' dtype.
    """
    own, held = (arguments[name].dtype for name in ("query", "key"))
    if own is held or arguments["value"].dtype is not held or not {own, held} <= FLOATING:
        return {}
    wide = functools.reduce(torch.promote_types, (own, held), torch.float32)
    mask = arguments["attn_mask"]
    given = [name for name in ("query", "key", "value") if arguments[name].dtype is not wide]
    given += ["attn_mask"] if isinstance(mask, Tensor) and mask.dtype in FLOATING - {wide} else []
    casts = {name: (arguments[name].dtype, wide) for name in given}
    for name in given:
        arguments[name] = arguments[name].resolve_neg().to(wide, memory_format=torch.contiguous_format)
    return casts if own is wide else {**casts, "": (wide, own)}


def _operation(equal_heads: bool, decode: bool) -> Operation:
    if decode:
        return STANDARD_DECODE if equal_heads else GQA_DECODE
    return STANDARD_PREFILL if equal_heads else GQA_PREFILL


def _invalid(problem: str, code: ReasonCode | None = None) -> InvalidCallError:
    return InvalidCallError(NAME, [problem], code)


def _shapes(arguments: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    problems = []
    for name in ("query", "key", "value"):
        tensor = arguments[name]
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif tensor.ndim != 4:
            problems.append(f"{name}: Expected 4D tensor (BSHD or BHSD), got {tensor.ndim}D {tuple(tensor.shape)}")
    if problems:
        refuse(NAME, problems)
    return tuple(arguments["query"].shape), tuple(arguments["key"].shape), tuple(arguments["value"].shape)


def _layout(arguments: dict[str, Any], shapes: tuple[tuple[int, ...], ...], default_layout: str | None) -> str:
    layout = default_layout if arguments["layout"] is None else arguments["layout"]
    if layout is None:
        found = layouts.resolve(*shapes)
        if not found:
            raise _invalid(layouts.both_fit("query", shapes[0]))
        return found
    if not isinstance(layout, str) or layout not in layouts.LAYOUTS:
        raise _invalid(f"layout: wanted {' or '.join(layouts.LAYOUTS)}, got {told(layout)}")
    return layout


def _check_mask(arguments: dict[str, Any], causal: object, seq_q: int, seq_k: int, batch: int, heads: int) -> None:
    mask = arguments["attn_mask"]
    if mask is None or not isinstance(mask, Tensor):
        return
    if causal is True:
        raise _invalid(
            "attn_mask was given together with causal=True: wanted one of them, got both; pass causal=False and put "
            "the causal part into the mask",
            ReasonCode.ATTN_MASK_INVALID,
        )
    target = (batch, heads, seq_q, seq_k)
    shape = tuple(mask.shape)
    fits = mask.ndim <= 4 and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )
    if not fits:
        of_keys = "; a mask of each sequence's keys is attn_mask[:, None, None, :]" if shape == (batch, seq_k) else ""
        raise _invalid(
            f"attn_mask: wanted a shape broadcastable to (B, H, S_q, S_k) = {target}, got {shape}{of_keys}",
            ReasonCode.ATTN_MASK_INVALID,
        )
    if mask.is_floating_point() and mask.dtype not in (torch.float32, arguments["query"].dtype):
        raise _invalid(
            f"attn_mask: wanted dtype bool, float32 or that of the query, got {dtype_name(mask.dtype)}",
            ReasonCode.ATTN_MASK_INVALID,
        )


def _check_values(arguments: dict[str, Any], causal: object, batch: int, heads: int) -> None:
    problems = score_problems(arguments)
    if problems:
        refuse(NAME, problems)
    dropout_p = arguments["dropout_p"]
    if isinstance(dropout_p, (int, float)) and not 0.0 <= dropout_p < 1.0:
        raise _invalid(f"dropout_p: wanted 0 <= p < 1, got {dropout_p}")
    if not isinstance(causal, bool):  # decode, which has no such argument, would let it pass
        raise _invalid(f"causal: wanted bool, got {told(causal)}")
    problems = slope_problems(arguments["alibi_slopes"], heads, batch)
    if problems:
        refuse(NAME, problems)


ATTENTION = Function(
    name=NAME,
    signature=attention,
    route=route,
    operations=OPERATIONS,
    draw=draw_attention,
    weight=6,
    order=(
        *("query", "key", "value", "scale", "causal", "layout", "attn_mask", "dropout_p"),
        *("window", "softcap", "sinks", "alibi_slopes", "kv_lens"),
    ),
    state=frozenset({"sdpa"}),
)
FUNCTIONS = (ATTENTION,)

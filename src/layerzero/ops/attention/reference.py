"""The mathematics of attention: the additive bias that every argument amounts to, the reference, and proofs by it.

A call that is too large for float64 as a whole is proved in pieces: some queries of two heads are calls of their own,
whose results depend on the keys of their sequence and head only. Dropout, which no single result can prove, is proved
by its mean, by its spread, and by each run dropping others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.core.judge import Given, Property, Tolerance
from layerzero.core.operation import Part
from layerzero.ops.attention.layout import CANONICAL

NEGATIVE_INFINITY = -math.inf

FOLDABLE = ("causal", "attn_mask", "window", "alibi_slopes", "kv_lens")
"""Arguments that change scores by position only, so that :func:`attention_bias` can say them in one mask."""


def attention_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Add up everything that changes scores by position into one float tensor; None if nothing does.

    Query row i stands at key position ``i + L - S_q``, where L is ``kv_lens`` of its batch entry or S_k: all masks are
    aligned bottom-right. A key j is visible if it is below L, not in the future when ``causal``, and within ``window``
    (left, right) of that position, -1 meaning unbounded. ALiBi adds ``-slope * |position - j|``.

    Shapes: query (B, S_q, H, D), key (B, S_k, K, D), attn_mask broadcastable to (B, H, S_q, S_k), alibi_slopes (H,) or
    (B, H), kv_lens (B,) → (1 or B, 1 or H, S_q, S_k)
    Dtype: ``dtype``, or the narrowest that holds a mask of the query's or its own dtype exactly, float32 at least with
    ALiBi. No value is read on the host, so it is safe under graph capture.
    Source: bottom-right alignment as FlashAttention >= 2.1; ALiBi arXiv:2108.12409.
    """
    if dtype is None:
        exact = attn_mask.dtype if attn_mask is not None and attn_mask.is_floating_point() else query.dtype
        dtype = torch.promote_types(query.dtype, torch.float32 if alibi_slopes is not None else exact)
    device = query.device
    seq_q, seq_k = query.shape[1], key.shape[1]
    bias: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    if causal or window is not None or alibi_slopes is not None or kv_lens is not None:
        columns = torch.arange(seq_k, device=device)
        lengths = torch.full((1, 1, 1, 1), seq_k, device=device)
        if kv_lens is not None:
            lengths = kv_lens.view(-1, 1, 1, 1)
            allowed = columns < lengths
        positions = torch.arange(seq_q, device=device).view(-1, 1) + (lengths - seq_q)
        if causal:
            allowed = _and(allowed, columns <= positions)
        if window is not None:
            left, right = window
            if left >= 0:
                allowed = _and(allowed, columns >= positions - left)
            if right >= 0:
                allowed = _and(allowed, columns <= positions + right)
        if alibi_slopes is not None:
            slopes = alibi_slopes.to(torch.promote_types(dtype, torch.float32))
            slopes = slopes.view(-1, slopes.shape[-1], 1, 1)
            bias = -slopes * (positions - columns).abs()
    if attn_mask is not None:
        mask = attn_mask.view((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
        if mask.dtype is torch.bool:
            allowed = _and(allowed, mask)
        else:
            bias = mask if bias is None else bias + mask
    if allowed is not None:
        start = torch.zeros((), dtype=dtype, device=device) if bias is None else bias.to(dtype)
        bias = torch.where(allowed, start, NEGATIVE_INFINITY)
    return None if bias is None else bias.to(dtype)


def _and(left: torch.Tensor | None, right: torch.Tensor) -> torch.Tensor:
    return right if left is None else left & right


def attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(Q K^T * scale) V by definition.

    Order on the scores: scale, softcap ``c * tanh(s / c)``, ALiBi and float mask, then everything that hides a key.
    ``sinks`` is one more logit per head that takes part in the softmax and has no value. A query that sees no key gives
    0 and a log-sum-exp of -inf (with sinks, the sink). Keys beyond ``kv_lens`` are not read: they may hold anything.

    Shapes: query (B, S_q, H, D), key (B, S_k, K, D), value (B, S_k, K, D_v), H a multiple of K → (B, S_q, H, D_v);
    log-sum-exp (B, H, S_q)
    Dtype: computes in float32, or float64 for float64; returns query.dtype; log-sum-exp float32, natural logarithm.
    Source: arXiv:1706.03762; softcap arXiv:2408.00118; sinks as in gpt-oss.
    """
    compute = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[2] // key.shape[2]
    q = query.transpose(1, 2).to(compute)
    k = key.transpose(1, 2).to(compute)
    v = value.transpose(1, 2).to(compute)
    if kv_lens is not None:
        beyond = torch.arange(key.shape[1], device=key.device).view(-1, 1) >= kv_lens.view(-1, 1, 1, 1)
        k, v = k.masked_fill(beyond, 0.0), v.masked_fill(beyond, 0.0)
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    bias = attention_bias(
        query,
        key,
        causal=causal,
        attn_mask=attn_mask,
        window=window,
        alibi_slopes=alibi_slopes,
        kv_lens=kv_lens,
        dtype=compute,
    )
    if bias is not None:
        hidden = bias == NEGATIVE_INFINITY
        scores = (scores + bias.masked_fill(hidden, 0.0)).masked_fill(hidden, NEGATIVE_INFINITY)
    weights, lse = _softmax(scores, sinks)
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    output = (weights @ v).transpose(1, 2).to(query.dtype)
    return (output, lse.float()) if return_lse else output


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last axis and its log-sum-exp; rows without any finite score give zeros and -inf."""
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), -1)
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], NEGATIVE_INFINITY)
    empty = (scores == NEGATIVE_INFINITY).all(-1)
    weights = scores.masked_fill(empty.unsqueeze(-1), 0.0).softmax(-1).masked_fill(empty.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(empty, NEGATIVE_INFINITY)
    return (weights[..., :-1] if sinks is not None else weights), lse


def lse_of_hidden_rows(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Mend a log-sum-exp of FlashAttention: of a query that sees no key it says +inf, of NaN scores either infinity.

    Where a query sees no key, the sinks are all that is summed. Version 3 says so of a query whose tile has keys that
    others see. Of a tile without any it writes -inf (store_zero in hopper/epilogue_fwd.hpp). Of a sink beyond what
    exp can hold it writes +inf, as version 4 does (``Softmax.finalize`` in flash_attn/cute/softmax.py).

    Shapes: output (B, H, S_q, D_v), lse (B, H, S_q), sinks (H,) → (B, H, S_q)
    """
    if sinks is None:
        seen = lse.nan_to_num(torch.nan, NEGATIVE_INFINITY, NEGATIVE_INFINITY)
    else:
        seen = torch.where(lse.isinf(), sinks.to(lse.dtype).unsqueeze(-1), lse)
    return lse_of_spoiled_rows(output, seen)


def lse_of_spoiled_rows(output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Put NaN for NaN scores, of which libraries give an infinity or the sum of the others, and NaN in the output.

    NaN scores spoil a whole row of the output, a NaN among values its column: the first and the last say which. NaN
    in all of a value's row is taken for NaN scores.

    Shapes: output (B, H, S_q, D_v), lse (B, H, S_q) → (B, H, S_q)
    """
    ends = output[..., :: max(output.shape[-1] - 1, 1)]
    return torch.where(ends.isnan().all(-1), torch.nan, lse)


def with_lse(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results of a kernel of FlashAttention, the second one mended.

    Shapes: output (B, S_q, H, D_v) or (T_q, H, D_v), lse (B, H, S_q) or (H, T_q), sinks (H,)
    """
    return output, lse_of_hidden_rows(output.transpose(-3, -2), lse, sinks)


def attention_fake(
    query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: object, return_lse: bool = False, **___: object
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Results of any attention, nothing computed: the third tensor has the output's width, in a cache or with keys.

    Shapes: query (*, S, H, D), value (..., D_v) → (*, S, H, D_v), log-sum-exp (*, H, S)
    """
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    *lead, rows, heads, _width = query.shape
    return (output, query.new_empty((*lead, heads, rows), dtype=torch.float32)) if return_lse else output


QUERIES = 32
_CUT = frozenset({"query", "key", "value", "causal", "scale", "window", "softcap", "layout"})
"""Arguments that can be cut out of a call; any other must be absent."""


def scratch(sizes: Mapping[str, int]) -> int:
    """The larger of the scores and of the keys for every head."""
    return sizes["batch"] * sizes["heads"] * sizes["seq_k"] * max(sizes["seq_q"], sizes["head_dim"])


def parts(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part] | None:
    """The last queries of the first sequence and head, and some in the middle of the last."""
    others = [value for name, value in arguments.items() if name not in _CUT]
    if any(isinstance(value, Tensor) or value for value in others):
        return None
    sizes, layout = facts.sizes(), facts.layout or CANONICAL
    group, queries, keys = sizes["heads"] // sizes["kv_heads"], sizes["seq_q"], sizes["seq_k"]
    causal, windowed = arguments.get("causal") in (True, None), arguments.get("window") is not None
    middle = min(queries, (queries + QUERIES) // 2) if causal or not windowed else queries
    found = []
    for batch, head, last in ((0, 0, queries), (sizes["batch"] - 1, sizes["kv_heads"] - 1, middle)):
        first = max(last - QUERIES, 0)
        hidden = queries - last if causal else 0  # bottom-right: keys in the future of the last of these queries
        heads = slice(head * group, head * group + group)
        place = _place(layout, slice(batch, batch + 1), heads, slice(first, last))
        of_keys = _place(layout, slice(batch, batch + 1), slice(head, head + 1), slice(0, keys - hidden))
        cut = {name: of_keys(arguments[name]) for name in ("key", "value")} | {"query": place(arguments["query"])}
        found.append(Part(f"queries {first} to {last - 1}", {**arguments, **cut, "layout": layout}, place))
    return found


def _place(layout: str, batch: slice, heads: slice, rows: slice) -> Callable[[Tensor], Tensor]:
    index = [batch, rows, heads] if layout.index("H") == 2 else [batch, heads, rows]
    return lambda tensor: tensor[tuple(index)]


RATE = 0.5
RUNS = 64
ALPHA = 1e-9
"""How improbable a right kernel's mean may be before it counts as wrong."""

SPREAD = (0.8, 1.25)
"""What the squared distances from the mean may be of what they should be, all together: 64 runs of the smallest cases
move that by less than 2 % by chance."""


def dropout_keeps_the_mean(tolerance: Mapping[torch.dtype, Tolerance]) -> Property:
    """The property of operations with ``dropout_p``: at 0.5 a weight is 0 or twice itself, each as often.

    The distance of a result from the one without dropout is then a sum of ``±w v`` over keys, whose tails are no wider
    than those of normal numbers of the same variance (Hoeffding, 1963), so that the bound of the mean is a strict one.
    """

    def check(results: Sequence[tuple[Tensor, ...]], truth: tuple[Tensor, ...], given: Given) -> str:
        plain = truth[0]
        allowed = tolerance[given.dtype].beside(given.wider)
        weights, values = _weights(given.basis), given.basis["value"]
        group = plain.shape[2] // values.shape[2]
        values = values.repeat_interleave(group, 2)
        variance = torch.einsum("bqhk,bkhd->bqhd", weights.square(), values.square())
        size = 2 * torch.einsum("bqhk,bkhd->bqhd", weights, values.abs())
        rounding = allowed.atol + allowed.rtol * size
        outputs = [result[0].to(torch.float64) for result in results]
        energy = sum(float((output - plain).square().sum()) for output in outputs) / len(outputs)
        ratio = energy / float(variance.sum())
        if ratio < SPREAD[0] / 4:
            return f"with dropout_p={RATE} the results are those without it: it is ignored"
        for number, (one, other) in enumerate(itertools.pairwise(outputs), 1):
            if torch.equal(one, other):
                return f"with dropout_p={RATE} runs {number} and {number + 1} dropped the same weights"
        off = torch.stack(outputs).mean(0) - plain
        far = math.sqrt(2 * math.log(4 * plain.numel() / ALPHA))
        excess = off.abs() / (far * (variance / len(outputs)).sqrt() + rounding)
        along = torch.einsum("bqhd,bkhd->bqhk", plain, values)
        together = far * math.sqrt(float((weights * along).square().sum()) / len(outputs))
        together += float((plain.abs() * rounding).sum())
        drift = float((plain * off).sum())
        if float(excess.max()) > 1 or abs(drift) > together:
            scale = 1 + drift / float(plain.square().sum())
            return (
                f"with dropout_p={RATE} the mean of {len(outputs)} runs is not the result without it: on the whole it "
                f"is {scale:.3g} times that, and one element is {float(excess.max()):.3g} times too far off"
            )
        if not SPREAD[0] <= ratio <= SPREAD[1]:
            return (
                f"with dropout_p={RATE} results spread {ratio:.3g} times as much as when half the weights are dropped"
            )
        return ""

    runs = ({"dropout_p": RATE},) * RUNS
    return Property("dropout keeps the mean", check, "each weight is dropped or scaled, apart from the others", runs)


def _weights(arguments: Mapping[str, object]) -> Tensor:
    """The attention weights: what comes of values that are 1 for one key and 0 for the others.

    Shapes: → (B, S_q, H, S_k)
    """
    given = {name: value for name, value in arguments.items() if name not in ("dropout_p", "return_lse")}
    key = given["key"]
    assert isinstance(key, Tensor)
    batch, keys, heads, _ = key.shape
    ones = torch.eye(keys, dtype=key.dtype, device=key.device).view(1, keys, 1, keys)
    weights = attention_reference(**{**given, "value": ones.expand(batch, keys, heads, keys)})  # type: ignore[arg-type]
    assert isinstance(weights, Tensor)
    return weights

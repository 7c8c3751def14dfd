"""Attention with a softcap or with sinks on a CPU, where no library has a kernel: torch's operators without copies.

**Sinks** are one more logit in the denominator, so that torch's fused kernel computes them but for a factor a query:
``sigmoid(log-sum-exp - sink)``. No score is ever in memory.

**A softcap** changes each score, so scores are formed, ``ROWS`` queries at a time, and changed in place; of a causal
call only keys that a piece of the queries can see are read. The group's queries are rows of one product with their key
head, where Transformers' eager attention repeats keys and values. Scores are in float32 for 16-bit inputs, too: one of
30 in bfloat16 is off by up to 0.06. For those a sigmoid stands for the tangent: ``c * tanh(x) + c = 2c * sigmoid(2x)``,
and a softmax does not see the constant; the tangent takes float32 2.4 ms for 2^20 scores, twice what it takes bfloat16
(one thread of an AMD EPYC, 2026-11-23). A float32 does see it, as ``c * 2^-23``: a wide cap keeps the tangent.

Attention with a softcap or with sinks on a GPU by torch's operators: with a mask, and where no library is.

What a batch with padding needs of Gemma 2 and GPT-OSS: kernels of FlashAttention and FlashInfer take their softcap or
their sinks, and no mask with it. Scores are formed in float32 (one of 30 in bfloat16 is off by up to 0.06) by a product
of 16-bit tensors, the group's queries as rows of one product with their key head, and changed in place; nothing is
repeated or widened, and nothing is read on the host. Sinks are one more column of the scores.

Compared with what models' own eager attention takes the device of an H200 (bfloat16, masks of bools; torch 2.11,
2026-11-24): 45 us of 218 for a token of 8 sequences of 1024 keys with Gemma 2's heads and softcap, 570 of 713 for 8
prompts of 512, 938 of 1073 for one of 2048; with GPT-OSS's heads and sinks 31 of 244 and 1701 of 2759 (36 and 1444 with
four launches more, of which a step of the model waits for its host). Fewer scores at once are slower: 2^24 take 1295 us
where 2^26 take 1136 (a mask of floats).

Sinks around a kernel that knows none: one more logit a head, which all keys share their sum with.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import (
    FOLDED,
    POSITIVE_WITH_CAUSAL,
    UNLISTED,
    always,
    cpu_attend,
    kernel,
    load_cpu_flash,
)
from layerzero.backends.torch.cpu_half import bmm_for
from layerzero.core import emulation
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SdpaEnabled, SquareCausal

ROWS = 128
"""Queries whose scores are in memory at once."""
WIDE_CAP = 1e3
"""From here on the constant next to a sigmoid costs scores more than 1e-4: 0.04 of a result at 1e6, 0.5 at 1e7."""
LEAST_CAP, MOST_CAP = 1e-6, 1e30
"""Caps whose reciprocal leaves queries in the range of float32; others have no use."""


def _load_sinks(facts: Facts) -> Callable[..., Any]:
    flash = load_cpu_flash(facts, cpu_attend(facts))

    def run(*qkv: Tensor, sinks: Tensor, return_lse: bool = False, **named: Any) -> Any:
        output, lse = flash(*qkv, return_lse=True, **named)
        return with_sinks(output, lse, sinks, return_lse=return_lse)

    return run


def load_softcap(facts: Facts) -> Callable[..., Any]:
    """What attends with a softcap: queries, keys and values (B, H, S, D), a float mask."""
    batch_axes = facts.size("kv_heads"), facts.size("heads") // facts.size("kv_heads")
    emulated, bmm = emulation.emulates(facts.device, facts["dtype"]), bmm_for(facts)

    def softcapped(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        softcap: float,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        kv_heads, group = batch_axes
        batch, heads, seq_q, size = query.shape
        seq_k, value_dim = key.shape[2], value.shape[3]
        tangent = query.dtype == torch.float32 or softcap >= WIDE_CAP
        factor = (size**-0.5 if scale is None else scale) / softcap * (1 if tangent else 2)
        keys = key.to(torch.float32).reshape(batch * kv_heads, seq_k, size).transpose(1, 2)
        values = (value.float() if emulated else value).reshape(batch * kv_heads, seq_k, value_dim)
        queries = query.to(torch.float32).mul(factor).reshape(batch * kv_heads, group, seq_q, size)
        output = query.new_empty((batch, seq_q, heads, value_dim)).transpose(1, 2)
        for first in range(0, seq_q, ROWS):
            last = min(first + ROWS, seq_q)
            rows = last - first
            seen = max(seq_k - seq_q + last, 0) if causal else seq_k  # aligned bottom-right
            piece = queries[:, :, first:last].reshape(batch * kv_heads, group * rows, size)
            scores = torch.bmm(piece, keys[:, :, :seen])
            scores = scores.tanh_().mul_(softcap) if tangent else scores.sigmoid_().mul_(2 * softcap)
            by_head = scores.view(batch, kv_heads, group, rows, seen)
            empty = None
            if attn_mask is not None:
                empty = _add(by_head.view(batch, heads, rows, seen), attn_mask, first, last)
            elif causal:
                empty = _hide_the_future(by_head, seq_k - seq_q + first)
            weights = torch.softmax(scores, -1)
            if empty is not None:
                weights.view(batch, heads, rows, seen).masked_fill_(empty, 0.0)
            found = bmm(weights.to(values.dtype), values[:, :seen])
            output[:, :, first:last] = found.view(batch, heads, rows, value_dim)
        return output

    return softcapped


def mask_of(mask: Tensor, rows: slice) -> Tensor:
    """The part of a mask that is about some queries: all of it, where it is the same for every one."""
    return mask if mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., rows, :]


def _add(scores: Tensor, mask: Tensor, first: int, last: int) -> Tensor | None:
    """Add a float mask to the scores (B, H, rows, S_k) of some queries, in place; which of them see no key, if any."""
    mask = mask_of(mask, slice(first, last))
    hidden = mask == -math.inf
    if not hidden.any():
        scores.add_(mask)
        return None
    # scores of hidden keys may be NaN, which no sum hides
    scores.add_(mask.masked_fill(hidden, 0.0)).masked_fill_(hidden, -math.inf)
    empty = hidden.all(-1, keepdim=True)
    return empty if empty.any() else None


def _hide_the_future(scores: Tensor, place: int) -> Tensor | None:
    """Hide keys behind each query's own in scores (..., rows, seen), in place; the first query stands at ``place``."""
    rows, seen = scores.shape[-2:]
    if rows > 1:
        edge = max(place, 0)
        columns = torch.arange(edge, seen) > torch.arange(place, place + rows).unsqueeze(-1)
        scores[..., edge:].masked_fill_(columns, -math.inf)
    if place >= 0:
        return None
    return (torch.arange(place, place + rows) < 0).unsqueeze(-1)


CAPPED = limit.rule("softcap: given", lambda facts: facts["softcap"] is not None)
"""Without it torch's own kernels are there."""

FITTING_CAP = limit.rule(
    f"softcap: {LEAST_CAP:g} to {MOST_CAP:g}",
    lambda facts: facts["softcap"] is None or LEAST_CAP <= facts["softcap"] <= MOST_CAP,
)
"""The reciprocal of a softcap leaves queries in range."""


def _softcap_workspace(facts: Facts) -> int:
    """Scores and probabilities of some queries, and float32 keys and queries; values, where they do not lie so."""
    batch, heads, seq_k = facts.size("batch"), facts.size("heads"), facts.size("seq_k")
    scores = batch * heads * min(facts.size("seq_q"), ROWS) * seq_k
    dims = facts.size("head_dim") + facts.size("value_dim")
    return 8 * scores + 4 * dims * batch * (facts.size("kv_heads") * seq_k + heads * facts.size("seq_q"))


_FLOATS = limit.dtype("float32", "float16", "bfloat16")
_MASK = limit.one_of("attn_mask", "none", "float", foldable=True)


SCORES = 2**26
"""In memory at once: 256 MiB in float32."""

TAIL = 8
"""Columns behind the scores of a row for the sink, so that rows of a multiple of 8 stay aligned to 16 bytes."""


def scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend by operators of torch.

    Shapes: query (B, H, S_q, D), key (B, K, S_k, D), value (B, K, S_k, D_v), H a multiple of K, a mask of floats
    or bools that is broadcastable to (B, H, S_q, S_k), sinks (H,) → (B, H, S_q, D_v); log-sum-exp (B, H, S_q), float32
    """
    batch, heads, seq_q, size = query.shape
    kv_heads, seq_k, value_dim = key.shape[1], key.shape[2], value.shape[3]
    keys = key.reshape(batch * kv_heads, seq_k, size).transpose(1, 2)
    values = value.reshape(batch * kv_heads, seq_k, value_dim)
    factor = (size**-0.5 if scale is None else scale) / (softcap or 1.0)
    tail = 0 if sinks is None else TAIL
    pieces = _pieces(seq_q, batch * heads * (seq_k + tail))
    if len(pieces) > 1:
        output = query.new_empty((batch, seq_q, heads, value_dim)).transpose(1, 2)
        lse = query.new_empty((batch, heads, seq_q), dtype=torch.float32)
    for rows in pieces:
        count = rows.stop - rows.start
        seen = max(seq_k - seq_q + rows.stop, 1) if causal else seq_k  # aligned bottom-right
        width = seen + tail
        logits = query.new_empty((batch, heads, count, width), dtype=torch.float32)
        scores = logits[..., :seen]
        piece = query[:, :, rows].reshape(batch * kv_heads, -1, size)
        _product(piece, keys[:, :, :seen], factor, logits.view(batch * kv_heads, -1, width)[..., :seen])
        bias, hidden = _masks(attn_mask, rows, seen, seq_k - seq_q if causal else None, query.device)
        if softcap is not None:
            scores.tanh_()
            scores = scores.mul_(softcap) if bias is None else torch.add(bias, scores, alpha=softcap, out=scores)
        elif bias is not None:
            scores.add_(bias)
        if hidden is not None:  # a sum does not hide a score of NaN
            scores.masked_fill_(hidden, -math.inf)
        if sinks is not None:
            logits[..., seen:] = -math.inf
            logits[..., seen] = sinks.view(-1, 1)
        weights = torch.softmax(logits, -1)
        if return_lse:  # a third of what logsumexp reads and writes
            largest = logits.amax(-1)
            sums = torch.where(largest.isinf(), largest, largest - weights.amax(-1).log_())
        shares = weights.to(value.dtype).view(batch * kv_heads, -1, width)[..., :seen]
        found = torch.bmm(shares, values[:, :seen]).view(batch, heads, count, value_dim)
        if hidden is not None:
            found.masked_fill_(hidden.all(-1, keepdim=True), 0.0)
        if len(pieces) > 1:
            output[:, :, rows] = found
            if return_lse:
                lse[:, :, rows] = sums
            del logits, scores, weights, shares, found  # before the next piece makes its own
    if len(pieces) == 1:
        return (found, sums) if return_lse else found
    return (output, lse) if return_lse else output


def _masks(
    mask: Tensor | None, rows: slice, seen: int, past: int | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores of some queries, and which of them are hidden; ``past`` where the future is."""
    bias = hidden = None
    if mask is not None:
        part = mask_of(mask, rows)
        part = part if part.ndim == 0 or part.shape[-1] == 1 else part[..., :seen]
        bias, hidden = (None, ~part) if part.dtype == torch.bool else (part, part == -math.inf)
    if past is not None:
        places = torch.arange(rows.start, rows.stop, device=device) + past
        later = torch.arange(seen, device=device) > places.unsqueeze(-1)
        hidden = later if hidden is None else hidden | later
    return bias, hidden


def _pieces(seq_q: int, of_one: int) -> list[slice]:
    """Ranges of queries whose scores are in memory at once, at least one; ``of_one`` are those of one query."""
    step = max(1, SCORES // max(1, of_one))
    return [slice(first, min(first + step, seq_q)) for first in range(0, max(seq_q, 1), step)]


def _product(rows: Tensor, keys: Tensor, factor: float, out: Tensor) -> None:
    """Products (B, M, D) x (B, D, N), times a factor, in float32: of 16-bit tensors cuBLAS gives them so, and once."""
    if rows.is_cuda and rows.dtype != torch.float32 and torch.version.hip is None:
        torch.baddbmm(out, rows, keys, out_dtype=torch.float32, beta=0.0, alpha=factor, out=out)
    else:
        torch.mul(torch.bmm(rows.float(), keys.float()), factor, out=out)


def _workspace(facts: Facts) -> int:
    """Scores, what softmax makes of them, that in 16 bits, and which are hidden; keys and values that lie otherwise.

    And the queries and the result of a piece, besides those of all.
    """
    batch, seq_k, widths = facts.size("batch"), facts.size("seq_k"), facts.size("head_dim") + facts.size("value_dim")
    of_one = batch * facts.size("heads") * (seq_k + TAIL)
    scores = min(facts.size("seq_q") * of_one, max(SCORES, of_one))
    return 11 * scores + 4 * widths * (scores // (seq_k + TAIL) + batch * seq_k * facts.size("kv_heads"))


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor, *, return_lse: bool) -> Any:
    """Results of a softmax that one more logit a head had taken part in; the output is changed in place.

    Zeros are what a query gives that sees no key where the sink is -inf. A sink of NaN or +inf gives NaN, as a softmax
    over it does.
    Shapes: output (..., H, S, D), lse (..., H, S), sinks (H,) → output, or (output, lse).
    """
    logits = sinks.to(lse.dtype).unsqueeze(-1)
    # -inf as the least number there is: no other key has a share of 0, and any key one of 1
    share = torch.sigmoid(lse - logits.nan_to_num(nan=torch.nan, posinf=torch.nan))
    output.mul_(share.unsqueeze(-1))
    return (output, torch.logaddexp(lse, logits)) if return_lse else output


KERNELS = (
    kernel(
        "torch.sdpa.cpu_flash_sinks",
        attention.ALL,
        _load_sinks,
        limit.platform("cpu"),
        _FLOATS,
        limit.rule("sinks: given", lambda facts: "sinks" in facts.tensors),
        limit.equal("value_dim", "head_dim"),
        SquareCausal(),
        _MASK,
        POSITIVE_WITH_CAUSAL,
        SdpaEnabled("flash"),
        limit.last_stride_one("query", "key", "value"),
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask", "sinks", "return_lse"),
        folds=FOLDED,
        handles_negated=True,
        graph_safe=False,
        priority=50,
    ),
    kernel(
        "torch.cpu.softcap",
        attention.ALL,
        load_softcap,
        limits=(limit.platform("cpu"), _FLOATS, CAPPED, FITTING_CAP, _MASK),
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask", "softcap"),
        folds=FOLDED,
        handles_negated=True,
        workspace_bytes=_softcap_workspace,
        graph_safe=False,
        priority=40,
    ),
    kernel(
        "torch.cuda.scored",
        attention.ALL,
        always(scored),
        limit.platform("cuda", *UNLISTED),
        limit.dtype("float32", "float16", "bfloat16"),
        # without them torch's own kernels are there
        limit.rule("softcap: given, or sinks", lambda facts: facts["softcap"] is not None or "sinks" in facts.tensors),
        FITTING_CAP,
        limit.rule("scale: not 0", lambda facts: facts["scale"] != 0),  # cuBLAS reads nothing then, not a NaN either
        limit.one_of("attn_mask", "none", "float", "bool", foldable=True),
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask", "softcap", "sinks", "return_lse"),
        folds=FOLDED,
        workspace_bytes=_workspace,
        deterministic=False,
        priority=35,
    ),
)

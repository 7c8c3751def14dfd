"""Attention with a softcap or with sinks on a GPU by torch's operators: beside a mask, and where no library is.

What a batch with padding asks for of Gemma 2 and GPT-OSS: kernels of FlashAttention and FlashInfer take their softcap
or their sinks, and no mask beside it. Scores are formed in float32 (one of 30 in bfloat16 is off by up to 0.06) by a
product of 16-bit tensors, the group's queries as rows of one product with their key head, and changed in place; nothing
is repeated or widened, and nothing is read on the host. Sinks are one more column of the scores.

Beside what models' own eager attention takes the device of an H200 (bfloat16, masks of bools; torch 2.11, 2026-11-24):
45 us of 218 for a token of 8 sequences of 1024 keys with Gemma 2's heads and softcap, 570 of 713 for 8 prompts of 512,
938 of 1073 for one of 2048; with GPT-OSS's heads and sinks 31 of 244 and 1701 of 2759 (36 and 1444
with four launches more, of which a step of the model waits for its host). Fewer scores at once are slower: 2^24 take
1295 us where 2^26 take 1136 (a mask of floats).
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FOLDED, TORCH, UNLISTED
from layerzero.backends.torch.scored import LEAST_CAP, MOST_CAP, fitting_cap, mask_of
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention

SCORES = 2**26
"""In memory at once: 256 MiB in float32."""

TAIL = 8
"""Columns behind the scores of a row for the sink, so that rows of a multiple of 8 stay aligned to 16 bytes."""


def _load(_: Facts) -> Callable[..., Any]:
    return scored


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


def _needs_more(facts: Facts) -> Reason | None:
    """Softcap or sinks, without which torch's own kernels are there."""
    if facts["softcap"] is not None or "sinks" in facts.tensors:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "softcap", "given, or sinks", None)


def _workspace(facts: Facts) -> int:
    """Scores, what softmax makes of them, that in 16 bits, and which are hidden; keys and values that lie otherwise.

    And the queries and the result of a piece, beside those of all.
    """
    batch, seq_k, widths = facts.size("batch"), facts.size("seq_k"), facts.size("head_dim") + facts.size("value_dim")
    of_one = batch * facts.size("heads") * (seq_k + TAIL)
    scores = min(facts.size("seq_q") * of_one, max(SCORES, of_one))
    return 11 * scores + 4 * widths * (scores // (seq_k + TAIL) + batch * seq_k * facts.size("kv_heads"))


KERNELS = (
    Kernel(
        id="torch.cuda.scored",
        operations=attention.ALL,
        backend=TORCH,
        load=_load,
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask", "softcap", "sinks", "return_lse"),
        folds=FOLDED,
        limits=(
            limit.platform("cuda", *UNLISTED),
            limit.dtype("float32", "float16", "bfloat16"),
            limit.Custom("softcap or sinks", _needs_more),
            limit.Custom(f"softcap: {LEAST_CAP:g} to {MOST_CAP:g}", fitting_cap),
            limit.one_of("attn_mask", "none", "float", "bool", foldable=True),
        ),
        workspace_bytes=_workspace,
        deterministic=False,
        priority=35,
    ),
)

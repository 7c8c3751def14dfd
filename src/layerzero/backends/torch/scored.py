"""Attention with a softcap or with sinks on a CPU, where no library has a kernel: torch's operators without copies.

**Sinks** are one more logit in the denominator, so that torch's fused kernel computes them but for a factor a query:
``sigmoid(log-sum-exp - sink)``. No score is ever in memory.

**A softcap** changes each score, so scores are formed, ``ROWS`` queries at a time, and changed in place; of a causal
call only keys that a piece of the queries can see are read. The group's queries are rows of one product with their key
head, where Transformers' eager attention repeats keys and values. Scores are in float32 for 16-bit inputs, too: one of
30 in bfloat16 is off by up to 0.06. For those a sigmoid stands for the tangent: ``c * tanh(x) + c = 2c * sigmoid(2x)``,
and a softmax does not see the constant; the tangent takes float32 2.4 ms for 2^20 scores, twice what it takes bfloat16
(one thread of an AMD EPYC, 2026-11-23). A float32 does see it, as ``c * 2^-23``: a wide cap
keeps the tangent.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FOLDED, TORCH, load_cpu_flash, positive_beside_causal
from layerzero.backends.torch.sinks import with_sinks
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SdpaEnabled, SquareCausal

ROWS = 128
"""Queries whose scores are in memory at once."""
WIDE_CAP = 1e3
"""From here on the constant beside a sigmoid costs scores more than 1e-4: 0.04 of a result at 1e6, 0.5 at 1e7."""
LEAST_CAP, MOST_CAP = 1e-6, 1e30
"""Caps whose reciprocal leaves queries in the range of float32; nobody means others."""


def _load_sinks(facts: Facts) -> Callable[..., Any]:
    flash = load_cpu_flash(facts)

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sinks: Tensor,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        output, lse = flash(query, key, value, causal=causal, scale=scale, attn_mask=attn_mask, return_lse=True)
        return with_sinks(output, lse, sinks, return_lse=return_lse)

    return run


def _load_softcap(facts: Facts) -> Callable[..., Any]:
    batch_axes = facts.size("kv_heads"), facts.size("heads") // facts.size("kv_heads")

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
        values = value.reshape(batch * kv_heads, seq_k, value_dim)
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
            found = torch.bmm(weights.to(value.dtype), values[:, :seen])
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


def _needs(name: str) -> Callable[[Facts], Reason | None]:
    """A limit: an argument must be given; without it, torch's own kernels are there."""

    def check(facts: Facts) -> Reason | None:
        given = name in facts.tensors if name == "sinks" else facts[name] is not None
        return None if given else Reason(ReasonCode.CONSTRAINT_FAILED, name, "given", None)

    return check


def fitting_cap(facts: Facts) -> Reason | None:
    """Whether the reciprocal of a softcap leaves queries in range."""
    cap: Any = facts["softcap"]
    if cap is None or LEAST_CAP <= cap <= MOST_CAP:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "softcap", f"{LEAST_CAP:g} to {MOST_CAP:g}", cap)


def _softcap_workspace(facts: Facts) -> int:
    """Scores and probabilities of some queries, and float32 keys and queries; values, where they do not lie so."""
    batch, heads, seq_k = facts.size("batch"), facts.size("heads"), facts.size("seq_k")
    scores = batch * heads * min(facts.size("seq_q"), ROWS) * seq_k
    dims = facts.size("head_dim") + facts.size("value_dim")
    return 8 * scores + 4 * dims * batch * (facts.size("kv_heads") * seq_k + heads * facts.size("seq_q"))


_FLOATS = limit.dtype("float32", "float16", "bfloat16")
_MASK = limit.one_of("attn_mask", "none", "float", foldable=True)

KERNELS = (
    Kernel(
        id="torch.sdpa.cpu_flash_sinks",
        operations=attention.ALL,
        backend=TORCH,
        load=_load_sinks,
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask", "sinks", "return_lse"),
        folds=FOLDED,
        limits=(
            limit.platform("cpu"),
            _FLOATS,
            limit.Custom("sinks", _needs("sinks")),
            limit.equal("value_dim", "head_dim"),
            SquareCausal(),
            _MASK,
            limit.Custom("causal: scale > 0", positive_beside_causal),
            SdpaEnabled("flash"),
            limit.last_stride_one("query", "key", "value"),
        ),
        handles_negated=True,
        graph_safe=False,
        priority=50,
    ),
    Kernel(
        id="torch.cpu.softcap",
        operations=attention.ALL,
        backend=TORCH,
        load=_load_softcap,
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask", "softcap"),
        folds=FOLDED,
        limits=(
            limit.platform("cpu"),
            _FLOATS,
            limit.Custom("softcap", _needs("softcap")),
            limit.Custom(f"softcap: {LEAST_CAP:g} to {MOST_CAP:g}", fitting_cap),
            _MASK,
        ),
        handles_negated=True,
        workspace_bytes=_softcap_workspace,
        graph_safe=False,
        priority=40,
    ),
)

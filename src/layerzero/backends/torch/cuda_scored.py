"""Attention with a softcap or with sinks on a GPU by torch's operators: beside a mask, and where no library is.

What a batch with padding asks for of Gemma 2 and GPT-OSS: kernels of FlashAttention and FlashInfer take their softcap
or their sinks, and no mask beside it. Scores are formed in float32 (one of 30 in bfloat16 is off by up to 0.06) by a
product of 16-bit tensors, the group's queries as rows of one product with their key head, and changed in place; nothing
is repeated or widened, and nothing is read on the host. Sinks are one more logit in the denominator:
``sigmoid(log-sum-exp - sink)`` of the result (:mod:`layerzero.backends.torch.sinks`).
Not run on a GPU yet (tests run it on a CPU): untried until ``layerzero vet`` has proved it.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FOLDED, TORCH
from layerzero.backends.torch.scored import LEAST_CAP, MOST_CAP, fitting_cap, mask_of
from layerzero.backends.torch.sinks import with_sinks
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel, Trust
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention

SCORES = 2**26
"""In memory at once: 256 MiB in float32."""


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

    Shapes: query (B, H, S_q, D), key (B, K, S_k, D), value (B, K, S_k, D_v), H a multiple of K, a float mask that is
    broadcastable to (B, H, S_q, S_k), sinks (H,) → (B, H, S_q, D_v); log-sum-exp (B, H, S_q), float32
    """
    batch, heads, seq_q, size = query.shape
    kv_heads, seq_k, value_dim = key.shape[1], key.shape[2], value.shape[3]
    keys = key.reshape(batch * kv_heads, seq_k, size).transpose(1, 2)
    values = value.reshape(batch * kv_heads, seq_k, value_dim)
    factor = size**-0.5 if scale is None else scale
    output = query.new_empty((batch, seq_q, heads, value_dim)).transpose(1, 2)
    lse = query.new_empty((batch, heads, seq_q), dtype=torch.float32)
    for rows in _pieces(seq_q, batch * heads * seq_k):
        count = rows.stop - rows.start
        seen = max(seq_k - seq_q + rows.stop, 1) if causal else seq_k  # aligned bottom-right
        piece = query[:, :, rows].reshape(batch * kv_heads, -1, size)
        scores = _product(piece, keys[:, :, :seen]).view(batch, heads, count, seen)
        scores = scores.mul_(factor) if softcap is None else scores.mul_(factor / softcap).tanh_().mul_(softcap)
        bias = None if attn_mask is None else mask_of(attn_mask, rows)
        if causal:
            places = torch.arange(rows.start, rows.stop, device=query.device) + (seq_k - seq_q)
            hidden = torch.arange(seen, device=query.device) > places.unsqueeze(-1)
            scores.masked_fill_(hidden, -math.inf)
            bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., :seen]
        if bias is not None:  # a sum would not hide a score of NaN
            scores.add_(bias).masked_fill_(bias == -math.inf, -math.inf)
        if sinks is not None or return_lse:
            lse[:, :, rows] = torch.logsumexp(scores, -1)
        weights = torch._safe_softmax(scores, -1) if causal or bias is not None else torch.softmax(scores, -1)
        found = torch.bmm(weights.to(value.dtype).view(batch * kv_heads, -1, seen), values[:, :seen])
        output[:, :, rows] = found.view(batch, heads, count, value_dim)
        del scores, weights, found  # before the next piece makes its own
    if sinks is not None:
        return with_sinks(output, lse, sinks, return_lse=return_lse)
    return (output, lse) if return_lse else output


def _pieces(seq_q: int, of_one: int) -> Iterator[slice]:
    """Ranges of queries whose scores are in memory at once; ``of_one`` are those of one query."""
    step = max(1, SCORES // max(1, of_one))
    for first in range(0, seq_q, step):
        yield slice(first, min(first + step, seq_q))


def _product(rows: Tensor, keys: Tensor) -> Tensor:
    """Products (B, M, D) x (B, D, N) in float32: of 16-bit tensors, cuBLAS adds up and gives them so without copies."""
    if rows.dtype == torch.float32:
        return torch.bmm(rows, keys)
    if rows.is_cuda:
        return torch.bmm(rows, keys, out_dtype=torch.float32)
    return torch.bmm(rows.float(), keys.float())


def _needs_more(facts: Facts) -> Reason | None:
    """Softcap or sinks, without which torch's own kernels are there."""
    if facts["softcap"] is not None or "sinks" in facts.tensors:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "softcap", "given, or sinks", None)


def _workspace(facts: Facts) -> int:
    """Scores, what softmax makes of them, and that in 16 bits; keys and values, where they do not lie so."""
    batch, seq_k = facts.size("batch"), facts.size("seq_k")
    of_one = batch * facts.size("heads") * seq_k
    scores = min(facts.size("seq_q") * of_one, max(SCORES, of_one))
    return 10 * scores + 4 * batch * seq_k * facts.size("kv_heads") * (facts.size("head_dim") + facts.size("value_dim"))


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
            limit.platform("cuda"),
            limit.dtype("float32", "float16", "bfloat16"),
            limit.Custom("softcap or sinks", _needs_more),
            limit.Custom(f"softcap: {LEAST_CAP:g} to {MOST_CAP:g}", fitting_cap),
            limit.one_of("attn_mask", "none", "float", foldable=True),
        ),
        graph_safe=True,
        device_guard=True,
        workspace_bytes=_workspace,
        trust=Trust.UNTRIED,
        priority=35,
    ),
)

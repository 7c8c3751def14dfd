"""zentorch's attention, an operator of its shared library.

bfloat16 takes a third of torch's time on an AMD EPYC (Zen 5) and up to four times as long on an Intel Xeon with AMX
(2026-11-21), hence a priority below torch's own.
Library: zentorch 2.13.0.2, MIT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.zentorch.library import DTYPES, VECTORS, ZENTORCH, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import WITHIN, Condition, SizedCall, conditions
from layerzero.core.system import forking
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.layout import by_group
from layerzero.ops.attention.limits import SquareCausal
from layerzero.ops.attention.reference import attention_reference

_ONE_AT_A_TIME = forking.lock()
"""zentorch_sdpa sets OpenMP's nesting depth to 1 for the whole process, and back: of two threads in it, one soon spins
for ever in a barrier of its matrix product (float32 and bfloat16, within 100 calls, 2026-11-21)."""


def _load_sdpa(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., tuple[Tensor, Tensor]] = operators().zentorch_sdpa.default
    # Its maximum skips NaN beside -inf, so a broken row passes for hidden; its bfloat16 exponential makes 0 of NaN.
    drops_nan = facts["dtype"] is torch.bfloat16 or facts.get("causal") is True

    def sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        seq_k = key.shape[2]
        if attn_mask is not None and attn_mask.shape[-1] != seq_k:  # raises for a last axis to broadcast; others work
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], seq_k)
        if (drops_nan or attn_mask is not None) and not math.isfinite(query.sum() + key.sum()):
            return _reference(query, key, value, causal=causal, scale=scale, attn_mask=attn_mask)
        with _ONE_AT_A_TIME:
            return operator(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)[0]

    return by_group(sdpa, facts)


def _reference(*tensors: Tensor, **arguments: Any) -> Tensor:
    output = attention_reference(*(tensor.transpose(1, 2) for tensor in tensors), **arguments)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class RowsApart(limit.Limit):
    """Queries, keys and values have dense rows that do not overlap; repairable by a copy.

    Rows closer than head_dim (sliding windows) give arbitrary numbers, a stride of 0 raises, even that of a single row.
    """

    def check(self, facts: Facts) -> limit.Findings:
        found = []
        for name in ("query", "key", "value"):
            tensor = facts.tensors[name]
            heads = tensor.strides[1] if name == "query" else tensor.shape[3]  # a group's heads become its rows
            if tensor.strides[3] != 1 or min(tensor.strides[2], heads) < tensor.shape[3]:
                reason = Reason(ReasonCode.NOT_CONTIGUOUS, name, "rows one after another", f"strides {tensor.strides}")
                found.append(limit.Finding(reason, limit.Repair("copy", name)))
        return tuple(found)

    def describe(self) -> str:
        return "dense rows: query, key, value"


@conditions.register
def _rows_apart(limit: RowsApart, call: SizedCall) -> Iterable[Condition]:
    for name in ("query", "key", "value"):  # that the last stride is 1 is in the coarse key
        (_, heads, rows, _), head_dim = call.kernel_axes(name), call.facts.tensors[name].shape[3]
        yield WITHIN, (call.operand(name, rows, stride=True),), (head_dim, 2**62)
        if name == "query":
            yield WITHIN, (call.operand(name, heads, stride=True),), (head_dim, 2**62)


def _scale(facts: Facts) -> Reason | None:
    """A scale of 0 means the default one to it; a negative one turns the -inf of its causal mask round."""
    scale, causal = facts["scale"], facts.get("causal")
    if not isinstance(scale, (int, float)) or scale > 0 or (scale < 0 and not causal):
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "scale", "above 0" if causal else "not 0", scale)


KERNELS = (
    Kernel(
        id="zentorch.sdpa",
        operations=attention.ALL,
        backend=ZENTORCH,
        load=_load_sdpa,
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask"),  # its second result is not the log-sum-exp but unwritten memory
        folds=("causal", "attn_mask", "window", "alibi_slopes"),
        limits=(
            VECTORS,
            DTYPES,
            limit.equal("value_dim", "head_dim"),
            limit.dim("seq_k", min=16),  # of fewer keys than vector lanes, a row of NaN passes for hidden and gives 0
            SquareCausal(),
            limit.one_of("attn_mask", "none", "float", foldable=True),
            limit.Custom("scale: not 0, above 0 beside causal", _scale),
            RowsApart(),
        ),
        priority=45,
    ),
)

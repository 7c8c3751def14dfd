"""Attention over padded keys by their lengths, without a mask: encoders' batches, and cross attention over them.

On a CPU each sequence is a call of the operator behind ``F.scaled_dot_product_attention`` with the keys that it has; on
NVIDIA torch's FlashAttention 2 reads each sequence as far as its length says. What lies beyond is read by neither.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, cpu_attend, kernel, positive_beside_causal
from layerzero.backends.torch.varlen import FLASH, Slice, attend_each, flash
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SdpaEnabled


def _by_sequence(found: Any, batch: int) -> Any:
    """Tokens one after the other as a batch: (B, S, H, D_v), and (B, H, S) of the log-sum-exp."""
    if isinstance(found, Tensor):
        return torch.unflatten(found, 0, (batch, -1))
    output, lse = found
    return output.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


def _load_cpu(facts: Facts) -> Callable[..., Any]:
    attend = cpu_attend(facts)

    def run(query: Tensor, key: Tensor, value: Tensor, *, kv_lens: Tensor, **scores: Any) -> Any:
        def sequences() -> Iterator[Slice]:
            for row, length in enumerate(kv_lens.tolist()):
                yield query[row], key[row, :length], value[row, :length], None

        found = attend_each(sequences(), query.flatten(0, 1), attend=attend, **scores)
        return _by_sequence(found, len(query))

    return run


def _load_cuda(facts: Facts) -> Callable[..., Any]:
    def run(query: Tensor, key: Tensor, value: Tensor, *, kv_lens: Tensor, **scores: Any) -> Any:
        batch, (queries, keys) = len(query), (query.shape[1], key.shape[1])
        rows = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        tokens = (query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
        lens = kv_lens.to(torch.int32).contiguous()  # one of expanded or sliced rows is refused
        found = flash(*tokens, rows * queries, rows * keys, queries, keys, lens=lens, **scores)
        return _by_sequence(found, batch)

    return run


def _given(facts: Facts) -> Reason | None:
    if "kv_lens" in facts.tensors:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "kv_lens", "the keys of each sequence", "none")


_LENGTHS = limit.Custom("kv_lens: given", _given)
_ARGUMENTS = ("scale", "window", "kv_lens", "return_lse")


def _kernels(name: str, operations: tuple[str, ...], accepts: tuple[str, ...]) -> tuple[Kernel, ...]:
    return (
        kernel(
            f"torch.{name}_lengths_cpu",
            operations,
            _load_cpu,
            limit.platform("cpu"),
            FLOATS,
            limit.equal("value_dim", "head_dim"),
            _LENGTHS,
            limit.Custom("causal: scale > 0", positive_beside_causal),
            SdpaEnabled("flash"),
            limit.last_stride_one("query", "key", "value"),
            layout="BSHD",
            accepts=accepts,
            graph_safe=False,
            priority=52,
        ),
        kernel(
            f"torch.{name}_lengths",
            operations,
            _load_cuda,
            *FLASH,
            _LENGTHS,
            limit.contiguous("query", "key", "value"),
            limit.aligned(16, "query", "key", "value"),
            layout="BSHD",
            accepts=accepts,
            deterministic=False,
            priority=58,
        ),
    )


KERNELS = (
    *_kernels("prefill", attention.PREFILL, ("causal", *_ARGUMENTS)),
    *_kernels("decode", attention.DECODE, _ARGUMENTS),
)

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

from layerzero.backends.torch.attention import FLOATS, TORCH, cpu_attend, positive_beside_causal
from layerzero.backends.torch.varlen import FLASH, Slice, attend_each, lse_of_tokens
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SdpaEnabled


def _by_sequence(found: Any, batch: int, *, return_lse: bool) -> Any:
    """Tokens one after the other as a batch: (B, S, H, D_v), and (B, H, S) of the log-sum-exp."""
    if not return_lse:
        return found.unflatten(0, (batch, -1))
    output, lse = found
    return output.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


def _load_cpu(facts: Facts) -> Callable[..., Any]:
    attend = cpu_attend(facts)

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        kv_lens: Tensor,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        return_lse: bool = False,
    ) -> Any:
        def sequences() -> Iterator[Slice]:
            for row, length in enumerate(kv_lens.tolist()):
                yield query[row], key[row, :length], value[row, :length], None

        found = attend_each(
            sequences(),
            query.flatten(0, 1),
            causal=causal,
            scale=scale,
            window=window,
            return_lse=return_lse,
            attend=attend,
        )
        return _by_sequence(found, len(query), return_lse=return_lse)

    return run


def _load_cuda(facts: Facts) -> Callable[..., Any]:
    operator = torch.ops.aten._flash_attention_forward.default

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        kv_lens: Tensor,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        return_lse: bool = False,
    ) -> Any:
        batch, (queries, keys) = len(query), (query.shape[1], key.shape[1])
        rows = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        left, right = window or (-1, -1)
        output, lse, *_ = operator(
            *(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), rows * queries, rows * keys),
            *(queries, keys, 0.0, causal, False),
            scale=scale,
            window_size_left=left,
            window_size_right=0 if causal else right,
            seqused_k=kv_lens.to(torch.int32).contiguous(),  # one of expanded or sliced rows is refused
        )
        return _by_sequence(
            (output, lse_of_tokens(output, lse)) if return_lse else output, batch, return_lse=return_lse
        )

    return run


def _given(facts: Facts) -> Reason | None:
    if "kv_lens" in facts.tensors:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "kv_lens", "the keys of each sequence", "none")


_LENGTHS = limit.Custom("kv_lens: given", _given)
_ARGUMENTS = ("scale", "window", "kv_lens", "return_lse")


def _kernels(name: str, operations: tuple[str, ...], accepts: tuple[str, ...]) -> tuple[Kernel, ...]:
    return (
        Kernel(
            id=f"torch.{name}_lengths_cpu",
            operations=operations,
            backend=TORCH,
            load=_load_cpu,
            layout="BSHD",
            accepts=accepts,
            limits=(
                limit.platform("cpu"),
                FLOATS,
                limit.equal("value_dim", "head_dim"),
                _LENGTHS,
                limit.Custom("causal: scale > 0", positive_beside_causal),
                SdpaEnabled("flash"),
                limit.last_stride_one("query", "key", "value"),
            ),
            graph_safe=False,
            priority=52,
        ),
        Kernel(
            id=f"torch.{name}_lengths",
            operations=operations,
            backend=TORCH,
            load=_load_cuda,
            layout="BSHD",
            accepts=accepts,
            limits=(
                *FLASH,
                _LENGTHS,
                limit.contiguous("query", "key", "value"),
                limit.aligned(16, "query", "key", "value"),
            ),
            deterministic=False,
            priority=58,
        ),
    )


KERNELS = (
    *_kernels("prefill", attention.PREFILL, ("causal", *_ARGUMENTS)),
    *_kernels("decode", attention.DECODE, _ARGUMENTS),
)

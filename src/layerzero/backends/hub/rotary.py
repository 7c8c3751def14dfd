"""kernels-community/rotary: FlashAttention's rotation of two halves, written over what it is given.

Read: rotary/torch-ext, rotary-cpu and rotary/rotary_cuda.cu of huggingface/kernels-community, commit 40d4194f
(2026-08). Queries and tables have one dtype there, so that half precision needs tables in half precision.
Its CPU code for bfloat16 takes axes (batch, heads, seq, half) and reads tables by their strides, so that they are
expanded here.
Library: BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from layerzero.backends.hub.build import Build
from layerzero.core import limits as limit
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.rope.split import rope


def kernels(build: Build) -> Sequence[Kernel]:
    """Declare the rotation, into new memory and in place."""

    def load(*, in_place: bool) -> Callable[[Facts], Callable[..., Any]]:
        return lambda facts: rope(_rotating(build, facts), in_place=in_place)

    shared: dict[str, Any] = {
        "layout": "BSHD",
        "accepts": ("positions",),
        "limits": (limit.dtype("float32", "float16", "bfloat16"), _ONE_DTYPE),
    }
    return (
        build.kernel("rope", "posenc.rope", load=load(in_place=False), **shared),
        build.kernel("rope_inplace", "posenc.rope.inplace", load=load(in_place=True), **shared),
    )


def _rotating(build: Build, facts: Facts) -> Callable[..., None]:
    compute, half = build.module().apply_rotary, facts.size("rotary_half")

    def run(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
        seq = query.shape[-3]
        batch = query.shape[0] if query.ndim == 4 else 1
        if positions is None:
            tables = [each[:seq].expand(batch, 1, seq, half) for each in (cos, sin)]
        else:
            places = positions.expand(batch, seq)
            tables = [each[places].unsqueeze(1) for each in (cos, sin)]
        for each in (query, key):
            rows = each.view(batch, seq, *each.shape[-2:]).transpose(1, 2)
            first, second = rows[..., :half], rows[..., half : 2 * half]
            compute(first, second, *tables, first, second, False)

    return run


def _same_dtype(facts: Facts) -> Reason | None:
    dtype, table = dtype_name(facts.tensors["query"].dtype), facts["table_dtype"]
    return None if dtype == table else Reason(ReasonCode.DTYPE_UNSUPPORTED, "cos and sin", dtype, table)


_ONE_DTYPE = limit.Custom("cos and sin in the dtype of query", _same_dtype)

"""torch's own copies of numbers that are only moved.

Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from layerzero.backends.torch.attention import TORCH
from layerzero.core import limits as limit
from layerzero.core.kernel import Kernel
from layerzero.ops.tensor.declare import COPY_SLICE, SPLIT_QKV, TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD

_FLOATS = limit.dtype("float32", "float64", "float16", "bfloat16")

KERNELS = tuple(
    Kernel.of_expression(*operations, id=f"torch.{name}", backend=TORCH, limits=(_FLOATS,), priority=40, stock=True)
    for name, operations in (
        ("transpose_copy", (TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD)),
        ("split_qkv", (SPLIT_QKV,)),
        ("copy_slice", (COPY_SLICE,)),
    )
)

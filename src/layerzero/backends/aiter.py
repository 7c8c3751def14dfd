"""AITER's attention on AMD Instinct: declared from its sources, never run by this project.

Read: aiter/ops/mha.py of ROCm/aiter, commit e4048607a5 (2026-11-21). ``flash_attn_func`` takes BSHD, aligns causal
bottom-right, groups query heads, and returns the log-sum-exp (natural, (B, H, S_q)) with the output. Its window has a
third number, sinks at the start of the keys, which is 0 here. It compiles kernels on first use. Of bfloat16 with a
head_dim of 128 it takes a window without keys to either side for none (``swa``), and its kernel then raises: such
windows are refused for all.
Library: amd-aiter, MIT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.reference import with_lse

AITER = Backend(
    name="aiter",
    summary="AMD's AI tensor engine: attention on Instinct GPUs",
    import_name="aiter",
    distribution=("amd-aiter", "aiter"),
    versions=">=0.1,<1",
    platforms=("rocm",),
    install="pip install amd-aiter",
    homepage="https://github.com/ROCm/aiter",
)


def _load(facts: Facts) -> Callable[..., Any]:
    from aiter import flash_attn_func

    def flash(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        return_lse: bool = False,
    ) -> Any:
        left, right = window or (-1, -1)
        result = flash_attn_func(
            query, key, value, softmax_scale=scale, causal=causal, window_size=(left, right, 0), return_lse=return_lse
        )
        if not return_lse:
            return result[0] if isinstance(result, (tuple, list)) else result
        output, lse = result[:2]
        return with_lse(output, lse)

    return flash


_TENSORS = ("query", "key", "value")

KERNELS = (
    AITER.kernel(
        "aiter.flash_attn",
        attention.ALL,
        _load,
        limit.rule(
            "architecture: gfx942 or gfx950",
            lambda facts: facts.device.architecture in ("gfx942", "gfx950"),
            "DEVICE_CAPABILITY_UNSUPPORTED",
            got=lambda facts: facts.device.architecture or "unknown",
        ),
        limit.dtype("float16", "bfloat16"),
        limit.dim("head_dim", max=256, multiple=8),
        limit.equal("value_dim", "head_dim"),
        limit.positive("scale"),
        limit.rule(
            "window: at least one key to one side",
            lambda facts: facts["window"] is None or facts["window"][0] != 0 or facts["window"][1] > 0,
            "WINDOW_UNSUPPORTED",
        ),
        limit.last_stride_one(*_TENSORS),
        limit.aligned(16, *_TENSORS),
        layout="BSHD",
        accepts=("causal", "scale", "window", "return_lse"),
        jit=True,
        priority=90,
    ),
)

"""FlashAttention 2 and 3 through their own Python packages.

Limits follow the packages' documentation and argument checks (hopper/flash_attn_interface.py and
flash_attn/flash_attn_interface.py, read 2026-11-21). Their causal mask is aligned bottom-right, as LayerZero's is. Both
have a backward pass that nobody has compared with the reference yet, so ``grad`` stays False.
FlashAttention 3 uses Hopper's wgmma: sm_90 only, refused before and after (it fails to launch on sm_100 and sm_120).
Library: flash-attn 2.x and flash-attn-3, BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.ops import attention
from layerzero.ops.attention_math import lse_of_hidden_rows

_HOMEPAGE = "https://github.com/Dao-AILab/flash-attention"

FLASH_ATTN_2 = Backend(
    name="flash_attn",
    summary="FlashAttention 2: Ampere and newer",
    import_name="flash_attn",
    distribution="flash-attn",
    versions=">=2.5,<3",
    requires=("cuda>=12.0",),
    platforms=("cuda",),
    install="pip install flash-attn --no-build-isolation",
    homepage=_HOMEPAGE,
)
FLASH_ATTN_3 = Backend(
    name="flash_attn",
    summary="FlashAttention 3: Hopper",
    import_name="flash_attn_interface",
    distribution=("flash-attn-3", "flash_attn_3"),
    versions=">=3.0.0b1,<4",
    requires=("cuda>=12.3",),
    platforms=("cuda",),
    install="build the hopper folder of flash-attention",
    homepage=_HOMEPAGE,
)


def _load_v2(facts: Facts) -> Callable[..., Any]:
    from flash_attn import flash_attn_func

    def v2(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        result = flash_attn_func(
            query,
            key,
            value,
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=causal,
            window_size=window or (-1, -1),
            softcap=softcap or 0.0,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.float(),
            return_attn_probs=return_lse,
        )
        return _with_lse(*result[:2]) if return_lse else result

    return v2


def _load_v3(facts: Facts) -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_func

    def v3(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        result = flash_attn_func(
            query,
            key,
            value,
            softmax_scale=scale,
            causal=causal,
            window_size=window or (-1, -1),
            softcap=softcap or 0.0,
            return_attn_probs=return_lse,
        )
        output, lse = result if isinstance(result, tuple) else (result, None)
        return _with_lse(output, lse) if return_lse else output

    return v3


def _with_lse(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return output, lse_of_hidden_rows(output.transpose(1, 2), lse)


_SHAPES = (
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", max=256, multiple=8),
    limit.equal("value_dim", "head_dim"),
    limit.positive("scale"),  # as torch's build of it was measured to need
    limit.last_stride_one("query", "key", "value"),
    limit.aligned(16, "query", "key", "value"),
)

KERNELS = (
    Kernel(
        id="flash_attn.v3",
        operations=attention.ALL,
        backend=FLASH_ATTN_3,
        load=_load_v3,
        layout="BSHD",
        accepts=("causal", "scale", "window", "softcap", "return_lse"),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(9, 0), max=(9, 9)),
            limit.instruction("wgmma"),
            *_SHAPES,
        ),
        graph_safe=True,
        sizes_bound=(),
        priority=100,
        aliases=("flash_attn.v3.causal",),
    ),
    Kernel(
        id="flash_attn.v2",
        operations=attention.ALL,
        backend=FLASH_ATTN_2,
        load=_load_v2,
        layout="BSHD",
        accepts=("causal", "scale", "dropout_p", "window", "softcap", "alibi_slopes", "return_lse"),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            *_SHAPES,
        ),
        graph_safe=True,
        sizes_bound=(),
        priority=90,
        aliases=("flash_attn.v2.causal",),
    ),
)

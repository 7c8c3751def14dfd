"""xFormers' memory-efficient attention: it chooses among its own kernels and torch's for each call.

Read: xformers 0.0.35 (ops/fmha, _cpp_lib.py, info.py; 2026-11-21). A causal mask is aligned bottom-right
(LowerTriangularFromBottomRightMask); anything else that hides keys becomes one additive bias, expanded to (B, H, S_q,
S_k) on the query's device, since it takes no broadcast one. Key and value heads are repeated: its grouped layout is
experimental. Which of its kernels are there comes from the registry that ``python -m xformers.info`` prints. Torch's
memory-efficient kernel was made of its cutlass form: what is wrong there of heads that are one memory, with a mask, may
be here, so that these get keys of their own as well (:func:`own_heads`; not run on a GPU). Wheels fit one torch and one
CUDA. 0.0.35 imports with another torch, without its operators (H200 host, torch 2.11+cu130, 2026-11-21), and
xformers.ops fails along with flash-attn-4, whose namespace it takes for FlashAttention 2: loading says which. On ROCm
it runs Composable Kernel; that has not been run.
Library: xformers 0.0.35, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.cuda_attention import own_heads, padded_mask
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SameHeads

XFORMERS = Backend(
    name="xformers",
    summary="xFormers' memory-efficient attention",
    import_name="xformers",
    distribution="xformers",
    versions=">=0.0.34,<0.0.36",
    conflicts=(("flash-attn-4", "both own the namespace flash_attn, and xformers.ops takes it for FlashAttention 2"),),
    requires=("torch>=2.10",),
    platforms=("cuda", "rocm"),
    install="pip install xformers (the wheel for this torch and CUDA)",
    homepage="https://github.com/facebookresearch/xformers",
)


def _operators() -> Any:
    """The fmha module, once it is sure that kernels are behind it."""
    from xformers import _cpp_lib

    broken = _cpp_lib._cpp_library_load_exception
    if broken is not None:
        built = getattr(broken, "build_info", None)
        made_for = "unknown versions"
        if built is not None:
            made_for = f"torch {built.torch_version}, CUDA {built.cuda_version}"
        raise ImportError(
            f"its operators do not load: they were built for {made_for}; here is torch {torch.__version__}"
        ) from broken
    try:
        from xformers.ops import fmha
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"xformers.ops does not import: {error} (flash-attn-4 has the name flash_attn, too)"
        ) from error
    available = [operator.NAME for operator in fmha.ALL_FW_OPS if operator.is_available()]
    if not available:
        raise ImportError("none of its kernels is available; python -m xformers.info lists them")
    return fmha


def _load(facts: Facts) -> Callable[..., Any]:
    fmha = _operators()
    forward = fmha.memory_efficient_attention_forward
    bottom_right = fmha.attn_bias.LowerTriangularFromBottomRightMask()

    def memory_efficient(
        *tensors: Tensor, causal: bool = False, scale: float | None = None, attn_mask: Tensor | None = None
    ) -> Any:
        query, key, value = tensors
        bias = bottom_right if causal else None
        if attn_mask is not None:  # BHSD views: the mask's axes are those of scores
            heads = [each.transpose(1, 2) for each in (query, key, value)]
            bias = padded_mask(attn_mask, *heads[:2])
            key = own_heads(*heads[1:]).transpose(1, 2)
        return forward(query, key, value, attn_bias=bias, p=0.0, scale=scale)

    return memory_efficient


_TENSORS = ("query", "key", "value")

KERNELS = (
    XFORMERS.kernel(
        "xformers.memory_efficient",
        attention.ALL,
        _load,
        limit.arch(min=(7, 5), max=(9, 9)),  # its kernel for sm_10 has neither float32 nor a bias
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("head_dim", max=256, multiple=8),
        limit.equal("value_dim", "head_dim"),
        limit.one_of("attn_mask", "none", "float", foldable=True),
        limit.one_of("mask_dtype", "none", "bool", "query"),
        SameHeads(),
        limit.positive("scale"),
        limit.last_stride_one(*_TENSORS),
        limit.aligned(16, *_TENSORS),
        layout="BSHD",
        accepts=("causal", "scale", "attn_mask"),
        folds=("causal", "attn_mask", "window", "kv_lens"),  # a mask in 16 bits is too coarse for ALiBi
        graph_safe=True,
        priority=75,
        aliases=("xformers.memory_efficient_attention", "xformers.causal"),
    ),
)

"""PyTorch's own kernels, called as their aten operators.

``F.scaled_dot_product_attention`` under ``sdpa_kernel`` costs 40 us of host time a call, the operator behind it 15
(H200, torch 2.11, 2026-11-21); the context manager's decision is respected through the limit ``SdpaEnabled``.
Limits were found by probing: on the CPU with torch 2.13.0, on an H200 with torch 2.11.0+cu130 and cuDNN 9.19
(2026-11-21), 360 combinations of dtype, heads, lengths, causal and head dims for each operator. The operators check
less than ``F.scaled_dot_product_attention`` does: cuDNN's is wrong in silence for float32, and once killed the process.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops import attention

TORCH = Backend(
    name="torch",
    summary="PyTorch's own attention and normalisation kernels",
    requires=("torch>=2.10",),
    platforms=("cpu", "cuda", "rocm", "hpu", "xpu"),
    homepage="https://pytorch.org",
)

_FLOATS = ("float32", "float64", "float16", "bfloat16")


def _load_cpu_flash(facts: Facts) -> Callable[..., Any]:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    short = _short_mask(facts) if facts.size("seq_k") < 16 else None

    def flash(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        if short is not None and attn_mask is None:
            causal, attn_mask = False, short
        output, lse = operator(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)
        if not return_lse:
            return output
        if attn_mask is not None:  # the kernel says 0 of a query that sees no key
            lse = lse.masked_fill((attn_mask == -torch.inf).all(-1), -torch.inf)
        return output, lse.float()

    return flash


def _short_mask(facts: Facts) -> Tensor:
    """A mask for fewer keys than a vector has lanes: without one, scores of NaN pass for hidden there and give 0."""
    shape = (facts.size("seq_q"), facts.size("seq_k"))
    mask = torch.zeros(shape, dtype=facts.tensors["query"].dtype)
    return mask.masked_fill_(torch.ones(shape, dtype=torch.bool).triu(1), -torch.inf) if facts.get("causal") else mask


def _scale_above_zero(facts: Facts) -> Reason | None:
    """FlashAttention and cuDNN take the maximum before they scale: a factor of 0 or below ends in NaN (H200)."""
    scale = facts["scale"]
    if scale is None or (isinstance(scale, (int, float)) and scale > 0):
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "scale", "above 0", scale)


def _positive_scale(facts: Facts) -> Reason | None:
    """The kernel hides the future before it scales: 0 * -inf is NaN, and a negative factor makes it +inf."""
    scale = facts["scale"]
    if facts.get("causal") is not True or not isinstance(scale, (int, float)) or scale > 0:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "scale", "above 0 beside causal", scale)


def _readable_mask(facts: Facts) -> Reason | None:
    """The kernel reads a float32 mask beside a float64 query as if it were float64, beyond its end."""
    if facts["dtype"] is not torch.float64 or facts["mask_dtype"] != "float32":
        return None
    return Reason(ReasonCode.ATTN_MASK_UNSUPPORTED, "attn_mask", "float64 like the query", "float32")


def _load_math(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., Any] = torch.ops.aten._scaled_dot_product_attention_math.default
    enable_gqa = facts["group"] != 1

    def math(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Any:
        return operator(query, key, value, attn_mask, dropout_p, causal, scale=scale, enable_gqa=enable_gqa)[0]

    return math


def _load_cuda_flash(facts: Facts) -> Callable[..., Any]:
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default

    def flash(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        output, lse, *_ = operator(query, key, value, dropout_p, causal, False, scale=scale)
        if not return_lse:
            return output
        # The kernel says +inf both of a query that sees no key and of one whose scores are NaN.
        missing = torch.where(output[..., 0].isnan(), torch.nan, -torch.inf)
        return output, torch.where(lse == torch.inf, missing, lse)

    return flash


def _load_cuda_efficient(facts: Facts) -> Callable[..., Any]:
    operator = torch.ops.aten._scaled_dot_product_efficient_attention.default

    def efficient(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Any:
        keep = query.requires_grad or key.requires_grad or value.requires_grad
        if attn_mask is not None:
            attn_mask = _padded_mask(attn_mask, query, key)
        return operator(query, key, value, attn_mask, keep, dropout_p, causal, scale=scale)[0]

    return efficient


def _padded_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Expand a mask to (B, H, S_q, S_k) on dense rows that start at multiples of 16 bytes, as the kernel demands."""
    size, step = key.shape[2], 16 // mask.element_size()
    dense = mask.shape[-1] == size and mask.stride(-1) == 1
    if not dense or mask.data_ptr() % 16 or any(stride % step for stride in mask.stride()[:-1]):
        rows = mask.new_empty((*mask.shape[:-1], size + -size % step))[..., :size]
        mask = rows.copy_(mask)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], size)


def _load_cuda_cudnn(facts: Facts) -> Callable[..., Any]:
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default

    def cudnn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Any:
        keep = query.requires_grad or key.requires_grad or value.requires_grad
        return operator(query, key, value, None, keep, dropout_p, causal, False, scale=scale)[0]

    return cudnn


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    rms_norm = torch.nn.functional.rms_norm
    shape = (facts.size("hidden"),)

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:  # noqa: A002
        return rms_norm(input, shape, weight, eps)

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    layer_norm = torch.nn.functional.layer_norm

    def run(
        input: Tensor,  # noqa: A002
        *,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float,
    ) -> Tensor:
        return layer_norm(input, normalized_shape, weight, bias, eps)

    return run


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    rms_norm = torch.nn.functional.rms_norm
    shape = (facts.size("hidden"),)

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:  # noqa: A002
        residual.add_(input)
        return rms_norm(residual, shape, weight, eps)

    return run


def _math_workspace(facts: Facts) -> int:
    """Scores and probabilities in full, in float32 or the inputs' dtype."""
    scores = facts.size("batch") * facts.size("heads") * facts.size("seq_q") * facts.size("seq_k")
    return scores * 8


_WIDE_FACTS = ("head_dim", "value_dim", "sm", "requires_grad")


def _cudnn_wide_heads(facts: Facts) -> Reason | None:
    """Heads wider than 128 were seen right on Hopper's forward pass; elsewhere cuDNN documents 128 as the bound."""
    widest = max(facts.size("head_dim"), facts.size("value_dim"))
    if widest <= 128 or (facts.device.sm is not None and facts.device.sm >= (9, 0) and not facts["requires_grad"]):
        return None
    return Reason(ReasonCode.HEAD_DIM_TOO_LARGE, "head_dim", "at most 128 on this device or with gradients", widest)


_SCALE = limit.Custom("scale > 0", ("scale",), _scale_above_zero)
_SDPA_ARGUMENTS = ("causal", "scale")
# Not kv_lens: a mask hides a key from the softmax, yet 0 times the NaN of memory nobody wrote is NaN in the output.
_FOLDED = ("causal", "attn_mask", "window", "alibi_slopes")
_CUDA_HEADS = limit.dim("head_dim", multiple=8)
_DENSE = limit.last_stride_one("query", "key", "value")
# A row that starts off a 16 byte boundary ended in "misaligned address", which costs the process its context.
_ALIGNED = limit.aligned(16, "query", "key", "value")

KERNELS = (
    Kernel(
        id="torch.sdpa.cpu_flash",
        operations=attention.ALL,
        backend=TORCH,
        load=_load_cpu_flash,
        layout="BHSD",
        accepts=(*_SDPA_ARGUMENTS, "attn_mask", "return_lse"),
        folds=_FOLDED,
        limits=(
            limit.platform("cpu"),
            limit.dtype(*_FLOATS),
            limit.equal("value_dim", "head_dim"),
            limit.SquareCausal(),
            limit.one_of("attn_mask", "none", "float", foldable=True),
            limit.Custom("float64: a float64 mask", ("dtype", "mask_dtype"), _readable_mask),
            limit.Custom("causal: scale > 0", ("causal", "scale"), _positive_scale),
            limit.SdpaEnabled("flash"),
            _DENSE,
        ),
        grad=True,
        deterministic=True,
        handles_negated=True,
        priority=50,
        aliases=("torch.sdpa.causal", "torch.sdpa"),
    ),
    Kernel(
        id="torch.sdpa.math",
        operations=attention.ALL,
        backend=TORCH,
        load=_load_math,
        layout="BHSD",
        accepts=(*_SDPA_ARGUMENTS, "attn_mask", "dropout_p"),
        folds=_FOLDED,
        limits=(
            limit.dtype(*_FLOATS),
            limit.SquareCausal(),
            limit.one_of("attn_mask", "none", "float", foldable=True),
            limit.SdpaEnabled("math"),
        ),
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        workspace_bytes=_math_workspace,
        priority=20,
    ),
    Kernel(
        id="torch.sdpa.flash",
        operations=attention.ALL,
        backend=TORCH,
        load=_load_cuda_flash,
        layout="BHSD",
        accepts=(*_SDPA_ARGUMENTS, "dropout_p", "return_lse"),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float16", "bfloat16"),
            limit.dim("head_dim", max=256, multiple=8),
            limit.equal("value_dim", "head_dim"),
            limit.SdpaEnabled("flash"),
            _DENSE,
            _SCALE,
            _ALIGNED,
        ),
        grad=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        priority=50,
        aliases=("torch.sdpa.causal", "torch.sdpa"),
    ),
    Kernel(
        id="torch.sdpa.cudnn",
        operations=attention.ALL,
        backend=TORCH,
        load=_load_cuda_cudnn,
        layout="BHSD",
        accepts=(*_SDPA_ARGUMENTS, "dropout_p"),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float16", "bfloat16"),
            limit.dim("head_dim", max=256, multiple=8),
            limit.dim("value_dim", max=256, multiple=8),
            limit.Custom("head_dim > 128 on sm 9.0 and newer, forward only", _WIDE_FACTS, _cudnn_wide_heads),
            limit.SquareCausal(),
            limit.SdpaEnabled("cudnn"),
            _DENSE,
            _SCALE,
            _ALIGNED,
        ),
        grad=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        priority=60,
    ),
    Kernel(
        id="torch.sdpa.efficient",
        operations=attention.ALL,
        backend=TORCH,
        load=_load_cuda_efficient,
        layout="BHSD",
        accepts=(*_SDPA_ARGUMENTS, "attn_mask", "dropout_p"),
        folds=tuple(name for name in _FOLDED if name != "alibi_slopes"),  # a mask in 16 bits is too coarse for it
        limits=(
            limit.platform("cuda"),
            limit.dtype("float32", "float16", "bfloat16"),
            _CUDA_HEADS,
            limit.dim("value_dim", multiple=8),
            limit.SquareCausal(),
            limit.one_of("attn_mask", "none", "float", foldable=True),
            limit.one_of("mask_dtype", "none", "bool", "query"),
            limit.SdpaEnabled("efficient"),
            limit.SameHeads(),
            _DENSE,
            _ALIGNED,
        ),
        grad=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        priority=40,
    ),
    Kernel(
        id="torch.rms_norm",
        operations=("norm.rms",),
        backend=TORCH,
        load=_load_rms_norm,
        accepts=("eps",),
        limits=(limit.dtype(*_FLOATS),),
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        priority=10,
    ),
    Kernel(
        id="torch.layer_norm",
        operations=("norm.layer",),
        backend=TORCH,
        load=_load_layer_norm,
        accepts=("normalized_shape", "weight", "bias", "eps"),
        limits=(limit.dtype(*_FLOATS), limit.dim("hidden", min=2)),  # of one element it returns rounding noise
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        priority=40,
    ),
    Kernel(
        id="torch.add_rms_norm",
        operations=("norm.add_rms",),
        backend=TORCH,
        load=_load_add_rms_norm,
        accepts=("eps",),
        limits=(limit.dtype(*_FLOATS),),
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        priority=10,
    ),
)

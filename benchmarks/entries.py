"""The libraries' own public functions for a small call, as their users write it: what host time is held against.

Each starts from the same tensors as LayerZero's call: what a library wants otherwise (no batch axis, rows of all
sequences) is made within its call. ``add_residual_rms_norm_`` differs in what it keeps: LayerZero's leaves its input as
it was, the libraries' functions write the result there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from layerzero.tuning.measurement.contest import torch_default

Call = Callable[[], Any]


def own_entry(kernel: str, function: str, arguments: Mapping[str, Any]) -> Call | None:
    """A library's public function for the kernel's job; None where it has none. Raises what importing it raises."""
    if kernel in _SDPA:
        return _sdpa(_SDPA[kernel], arguments)
    if kernel.startswith("torch."):
        return torch_default(function, arguments)
    make = _ENTRIES.get(kernel)
    return None if make is None else make(**arguments)


_SDPA = {
    "torch.sdpa.cudnn": "CUDNN_ATTENTION",
    "torch.sdpa.flash": "FLASH_ATTENTION",
    "torch.sdpa.efficient": "EFFICIENT_ATTENTION",
    "torch.sdpa.math": "MATH",
}


def _sdpa(backend: str, arguments: Mapping[str, Any]) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    causal, grouped = arguments.get("causal", False) and query.shape[1] > 1, query.shape[2] != key.shape[2]
    wanted = getattr(SDPBackend, backend)

    def call() -> Any:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        with sdpa_kernel(wanted):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return call


def _flashinfer(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, **_: Any
) -> Call:
    from flashinfer import single_prefill_with_kv_cache

    _one_sequence(query)
    return lambda: single_prefill_with_kv_cache(query[0], key[0], value[0], causal=causal, backend=backend)[None]


def _one_sequence(query: torch.Tensor) -> None:
    if query.shape[0] != 1:
        raise ValueError(f"FlashInfer's functions without a plan take one sequence, got {query.shape[0]}")


def _flashinfer_decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> Call:
    from flashinfer import single_decode_with_kv_cache

    _one_sequence(query)
    return lambda: single_decode_with_kv_cache(query[0, 0], key[0], value[0])[None, None]


def _varlen(
    version: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False, **_: Any
) -> Call:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    batch, seq_q, seq_k = query.shape[0], query.shape[1], key.shape[1]
    starts_q, starts_k = (
        torch.arange(batch + 1, dtype=torch.int32, device=query.device) * seq for seq in (seq_q, seq_k)
    )

    def call() -> Any:
        q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        output = flash_attn_varlen_func(q, k, v, seq_q, starts_q, seq_k, starts_k, causal=causal, fa_version=version)
        return output.view(query.shape)

    return call


def _flash_attn_4(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False, **_: Any) -> Call:
    from flash_attn.cute import flash_attn_func

    return functools.partial(flash_attn_func, query, key, value, causal=causal)


def _flashinfer_rms(input: torch.Tensor, weight: torch.Tensor, **_: Any) -> Call:
    from flashinfer.norm import rmsnorm

    return functools.partial(rmsnorm, input, weight, 1e-6)


def _flashinfer_add(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **_: Any) -> Call:
    from flashinfer.norm import fused_add_rmsnorm

    return functools.partial(fused_add_rmsnorm, input, residual, weight, 1e-6)


def _liger_rms(input: torch.Tensor, weight: torch.Tensor, **_: Any) -> Call:
    from liger_kernel.transformers.functional import liger_rms_norm

    return functools.partial(liger_rms_norm, input, weight, 1e-6)


def _liger_add(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **_: Any) -> Call:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return functools.partial(liger_fused_add_rms_norm, input, residual, weight, 1e-6)


def _liger_layer(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **_: Any) -> Call:
    from liger_kernel.transformers.functional import liger_layer_norm

    return functools.partial(liger_layer_norm, input, weight, bias, 1e-5)


def _quack_rms(input: torch.Tensor, weight: torch.Tensor, **_: Any) -> Call:
    from quack import rmsnorm

    return functools.partial(rmsnorm, input, weight, eps=1e-6)


def _quack_layer(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **_: Any) -> Call:
    from quack.rmsnorm import layernorm_fwd

    return lambda: layernorm_fwd(input, weight.float(), bias.float(), eps=1e-5)


_ENTRIES: dict[str, Callable[..., Call]] = {
    "flashinfer.fa2.prefill": functools.partial(_flashinfer, "fa2"),
    "flashinfer.fa3.prefill": functools.partial(_flashinfer, "fa3"),
    "flashinfer.decode": _flashinfer_decode,
    "vllm.flash_attn.v2": functools.partial(_varlen, 2),
    "vllm.flash_attn.v3": functools.partial(_varlen, 3),
    "flash_attn.v4.sm90": _flash_attn_4,
    "flashinfer.rms_norm": _flashinfer_rms,
    "flashinfer.add_rms_norm": _flashinfer_add,
    "liger.rms_norm": _liger_rms,
    "liger.add_rms_norm": _liger_add,
    "liger.layer_norm": _liger_layer,
    "quack.rms_norm": _quack_rms,
    "quack.layer_norm": _quack_layer,
}

"""FlashInfer over a paged cache of float8: decodes on CUDA cores and on tensor cores, and several queries a sequence.

The kernels widen what they read of the cache to the queries' dtype, which loses nothing; FlashAttention 3 in FlashInfer
would want queries in float8. Its wrappers take a scale as a number of the host (``k_scale``, ``v_scale``), which would
wait for the device. So keys' scales are multiplied into the queries and values' into the output, where each head may
have its own; one a token is refused.
Read: decode.py and prefill.py of flashinfer-python 0.7.2.post1, include/flashinfer/attention/prefill.cuh.
Library: flashinfer-python 0.7.2, Apache-2.0; arXiv:2501.01005.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.backends.flashinfer import varlen
from layerzero.backends.flashinfer.attention import kernel
from layerzero.backends.flashinfer.modules import batches_key, batches_prebuilt, decode_key, decode_prebuilt
from layerzero.backends.flashinfer.paged import WORKSPACE_BYTES, Planned, natural_of_decode, planned_for
from layerzero.core import limits as limit
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.core.operation import Tolerance
from layerzero.ops.attention.declare import TOLERANCE
from layerzero.ops.paged.quantized import DECODE, PREFILL, SCALES_OF_HEADS, by_key_head, of_heads, scales_of_heads
from layerzero.ops.paged.step import StepMetadata


def _told(facts: Facts) -> dict[str, Any]:
    """What a plan takes: of queries in one dtype, and a cache in another."""
    return varlen.arguments_of(facts) | {"kv_data_type": facts.tensors["key_cache"].dtype}


def scaled_query(query: Tensor, key_scale: Tensor, kv_heads: int) -> Tensor:
    """Queries (T, H, D) multiplied by the scale of the keys that each head reads."""
    scale = of_heads(key_scale, kv_heads).view(-1, 1, 1)
    return (by_key_head(query, kv_heads) * scale).to(query.dtype).flatten(1, 2)


def scale_output(output: Tensor, value_scale: Tensor, kv_heads: int) -> Tensor:
    """Multiply outputs (T, H, D_v) by the scale of the values that each head read, in place."""
    by_key_head(output, kv_heads).mul_(of_heads(value_scale, kv_heads).view(-1, 1, 1))
    return output


def _load_decode(facts: Facts, tensor_cores: bool) -> Callable[..., Any]:
    arguments, kv_heads = varlen.of_decode(_told(facts), facts.size("page_size")), facts.size("kv_heads")
    owner = ("flashinfer.quantized_decode", tensor_cores, *arguments.values())

    make = functools.partial(Planned, arguments=arguments, tensor_cores=tensor_cores)

    def decode(
        query: Tensor, *pages: Tensor, return_lse: bool = False, step: StepMetadata | None = None, **_: Any
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens, key_scale, value_scale = pages
        planned = planned_for(step, lambda: StepMetadata(block_tables, context_lens), owner, query, make)
        scaled = scaled_query(query.squeeze(1), key_scale, kv_heads)
        result = planned.run(scaled, (key_cache, value_cache), return_lse=return_lse)
        if not return_lse:
            return scale_output(result, value_scale, kv_heads).unsqueeze(1)
        return natural_of_decode(scale_output(result[0], value_scale, kv_heads), result[1])

    return decode


def _load_tokens(facts: Facts) -> Callable[..., Any]:
    arguments, page_size, kv_heads = _told(facts), facts.size("page_size"), facts.size("kv_heads")
    owner = ("flashinfer.quantized_tokens", page_size, *arguments.values())

    make = functools.partial(varlen.PlannedPages, arguments=arguments, page_size=page_size, backend="fa2")

    def run(query: Tensor, *pages: Tensor, return_lse: bool = False, step: StepMetadata | None = None, **_: Any) -> Any:
        key_cache, value_cache, block_tables, context_lens, cu_seqlens_q, key_scale, value_scale = pages
        if step is not None:
            varlen.check_belongs(step.cu_seqlens_q is cu_seqlens_q, "paged_attention")
        alone = functools.partial(StepMetadata, block_tables, context_lens, cu_seqlens_q=cu_seqlens_q)
        planned = planned_for(step, alone, owner, query, make)
        result = planned.run(scaled_query(query, key_scale, kv_heads), (key_cache, value_cache), return_lse=return_lse)
        if not return_lse:
            return scale_output(result, value_scale, kv_heads)
        return varlen.natural(scale_output(result[0], value_scale, kv_heads), result[1])

    return run


_LIMITS: tuple[Limit, ...] = (
    limit.one_of("cache_dtype", "float8_e4m3", "float8_e5m2"),
    limit.Custom(SCALES_OF_HEADS, scales_of_heads),
    *varlen.OF_PAGES,
)
_COMMON: dict[str, Any] = {
    "layout": "NHD",
    "workspace_bytes": lambda _: WORKSPACE_BYTES,
    "tolerance": {dtype_name(each): Tolerance(2 * of.rtol, 2 * of.atol) for each, of in TOLERANCE.items()},
    "tolerance_reason": "queries are rounded after their scale, and outputs before and after theirs",
}
_SCORES = ("scale", "window", "softcap", "return_lse", "step", "narrow_query")


def _decode(kernel_id: str, tensor_cores: bool, priority: int, *more: Limit) -> Kernel:
    return kernel(
        kernel_id,
        DECODE.name,
        functools.partial(_load_decode, tensor_cores=tensor_cores),
        accepts=_SCORES,
        limits=(*_LIMITS, *more),
        build_key=decode_key(tensor_cores),
        prebuilt=decode_prebuilt(tensor_cores),
        priority=priority,
        **_COMMON,
    )


KERNELS = (
    _decode("flashinfer.quantized_decode_tensor_cores", True, 70),
    _decode("flashinfer.quantized_decode", False, 65, limit.dim("group", one_of=(1, 2, 3, 4, 6, 8, 16))),
    kernel(
        "flashinfer.quantized_tokens",
        PREFILL.name,
        _load_tokens,
        accepts=("causal", *_SCORES),
        limits=(*_LIMITS, *varlen.LEFT_WINDOW),
        build_key=batches_key("fa2"),
        prebuilt=batches_prebuilt("fa2"),
        priority=70,
        **_COMMON,
    ),
)

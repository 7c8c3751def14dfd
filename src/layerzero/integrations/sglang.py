"""SGLang's attention through LayerZero, as a backend of its own registry: each layer's call chooses its kernel.

    import layerzero.integrations.sglang
    layerzero.integrations.sglang.register()
    engine = sglang.Engine(model_path=model, attention_backend="layerzero", disable_cuda_graph=True)

Other processes of an engine register by the entry point ``sglang.srt.plugins`` (``layerzero_engines``), which LayerZero
brings where it is installed. SGLang keeps tokens in one pool by index; with ``page_size`` above 1 the indices of a
request come in whole pages, so that its pool seen as pages is a paged cache, and every ``page_size``-th index names
one. With 1 every token is a page.
Cross attention, speculative drafts, bidirectional decoders, and pools of a sliding window of their own, are refused.
So is every attribute of a layer that is not known here: SGLang's own backends read attributes that models set, as Grok
its temperature. Read: sglang 0.5.23, srt/layers/radix_attention.py, srt/layers/attention/base_attn_backend.py,
attention_registry.py, torch_native_backend.py, flashattention_backend.py and triton_backend.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from layerzero.integrations.paged import PagedStep
from layerzero_engines import register_sglang as register

__all__ = ["LayerZeroAttnBackend", "layer_problems", "register"]

VERSION = "0.5.23"
"""The version of SGLang whose attributes are known here."""

_READ = frozenset({
    *("tp_q_head_num", "tp_k_head_num", "tp_v_head_num", "head_dim", "qk_head_dim", "v_head_dim", "scaling"),
    *("layer_id", "logit_cap", "sliding_window_size", "is_cross_attention", "attn_type", "logit_capping_method"),
    "use_irope",
})  # fmt: skip
"""Attributes of a layer that are read below."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "pos_encoding_mode": ("NONE", None),
    "xai_temperature_len": (-1, 0, None),
    "q_scale_float": (None,),
    "idx_q_scale_float": (None,),
    "idx_k_scale_float": (None,),
    "idx_v_scale_float": (None,),
}
"""Attributes that change the result, and the values at which they do not."""

_OF_NARROW_POOLS = frozenset({"k_scale", "v_scale", "k_scale_float", "v_scale_float", "quant_method"})
"""Attributes that mean something where the pool is narrower than the keys, which is refused as such."""

_OF_CALLS = frozenset({"use_prefill_attention_wrapper"})
"""Attributes that say how SGLang calls its backend, and change no result."""

_KNOWN = _READ | _NEUTRAL.keys() | _OF_NARROW_POOLS | _OF_CALLS | vars(torch.nn.Module()).keys() | {"forward"}


class LayerZeroAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang may be absent where types are checked
    """One worker's attention.

    Args:
        model_runner: SGLang's; its pools and its page size are read here.
    Raises: NotImplementedError for a pool that keeps sliding layers apart, and for a server that wants the same bits
        whatever the batch, or one sequence's keys on several devices.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = int(getattr(model_runner, "page_size", 1) or 1)
        if getattr(self.token_to_kv_pool, "swa_layer_nums", 0):
            problem = "wanted one pool for all layers, got one that keeps sliding layers apart"
            raise NotImplementedError(f"token_to_kv_pool: {problem}; pass disable_hybrid_swa_memory=True")
        wanted = getattr(model_runner, "server_args", None)
        _refuse([
            f"{name}: wanted {most}, got {got!r}"
            for name, most in (("enable_deterministic_inference", False), ("dcp_size", 1), ("attn_cp_size", 1))
            if (got := getattr(wanted, name, most) or most) != most
        ])  # fmt: skip
        self.chunk_size = getattr(model_runner, "attention_chunk_size", None)
        self.step: PagedStep | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the step of a batch: pages of its requests, lengths, and where their new tokens begin.

        Raises: NotImplementedError for drafts, whose keys lie elsewhere and whose masks are trees, for models that
            write blocks of tokens at once, and for keys of an encoder.
        """
        _refuse([
            f"forward_batch.{name}: wanted none, got {_short(got)}"
            for name in ("encoder_lens", "mha_return_lse", "attn_attend_prefix_cache", "attn_cp_metadata")
            if (got := getattr(forward_batch, name, None)) is not None and got is not False
        ])  # fmt: skip
        mode = forward_batch.forward_mode
        if forward_batch.spec_info is not None or mode.is_dllm_extend():
            _refuse(["forward_batch: wanted a prefill or a decode, got drafts or blocks of a diffusion model"])
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
        """Prefills, chunks behind a cached prefix, and decodes, alone or among them.

        Shapes: q (T, H * D) → (T, H * D_v).
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, others)

    forward_decode = forward_extend

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
        problems = [f"{name}: wanted None, got {_short(given)}" for name, given in others.items() if given is not None]
        problems += layer_problems(layer, self.chunk_size)
        if self.step is None:
            problems.append("step: wanted init_forward_metadata before a forward pass, got none")
        _refuse(problems)
        assert self.step is not None
        pool = self.token_to_kv_pool
        keys, values = (
            buffer.unflatten(0, (-1, self.page_size))
            for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        )
        _refuse(_pool_problems(layer, q, keys, values))
        if save and k is not None and v is not None:
            pool.set_kv_buffer(layer, _write_location(forward_batch.out_cache_loc), k, v)
        encoder = _kind(layer) == "encoder_only"
        left = layer.sliding_window_size
        window = (left, 0) if left is not None and left >= 0 else None
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


def layer_problems(layer: Any, chunk_size: int | None = None) -> list[str]:
    """What a layer needs that LayerZero has no argument for, or that was unknown when this was written.

    Args:
        layer: SGLang's ``RadixAttention``.
        chunk_size: the model's ``attention_chunk_size``, within which Llama 4's layers attend.
    """
    problems = []
    for held in (vars(layer), *(getattr(layer, each, {}) for each in ("_parameters", "_buffers", "_modules"))):
        if not _KNOWN.issuperset(held):
            problems += [
                f"layer.{name}: wanted an attribute that sglang {VERSION} has, got one that is not known here"
                for name in sorted(held.keys() - _KNOWN)
            ]
    for name, neutral in _NEUTRAL.items():
        got = getattr(layer, name, None)
        if isinstance(got, Tensor) or got not in neutral:
            problems.append(f"layer.{name}: wanted {neutral[0]!r}, got {_short(got)}")
    kind, window = _kind(layer), layer.sliding_window_size
    if kind not in ("decoder", "encoder_only"):  # its mask is another one in each backend and version of SGLang
        problems.append(f"layer.attn_type: wanted decoder or encoder_only, got {kind}")
    if layer.is_cross_attention:
        problems.append("layer: wanted self-attention, got cross attention")
    if kind == "encoder_only" and window is not None and window >= 0:
        problems.append(f"layer.sliding_window_size: wanted none along with encoder_only, got {window}")
    if getattr(layer, "use_irope", False) and chunk_size:
        problems.append(f"layer.use_irope: wanted False, got chunks of {chunk_size} tokens")
    method = getattr(layer, "logit_capping_method", "tanh")
    if layer.logit_cap and method != "tanh":
        problems.append(f"layer.logit_capping_method: wanted 'tanh', got {method!r}")
    return problems


def _kind(layer: Any) -> str:
    return str(getattr(layer.attn_type, "value", layer.attn_type))


def _pool_problems(layer: Any, query: Tensor, keys: Tensor, values: Tensor) -> list[str]:
    """What a pool keeps in another form than the layer's keys and values: narrower numbers, or a latent of them."""
    problems = []
    for name, got, width in (("key", keys, layer.qk_head_dim), ("value", values, getattr(layer, "v_head_dim", None))):
        if got.dtype != query.dtype:
            problems.append(f"{name} buffer: wanted {query.dtype} as the query, got {got.dtype}")
        heads = getattr(layer, f"tp_{name[0]}_head_num", got.shape[-2])
        wanted = (heads, got.shape[-1] if width is None else width)
        if tuple(got.shape[-2:]) != wanted:
            problems.append(f"{name} buffer: wanted heads and width {wanted}, got {tuple(got.shape[-2:])}")
    return problems


def _short(given: Any) -> str:
    return f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)[:80]


def _refuse(problems: list[str]) -> None:
    """Raises: NotImplementedError that names every problem."""
    if problems:
        raise NotImplementedError(f"{'; '.join(problems)}; use another attention backend of SGLang")


def _write_location(slots: Tensor) -> Any:
    """Where tokens are written, in the form that this version of SGLang's pools takes."""
    from sglang.srt.mem_cache import memory_pool

    made = getattr(memory_pool, "KVWriteLoc", None)
    return slots if made is None else made(slots)

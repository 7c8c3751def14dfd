"""SGLang's attention through LayerZero, as a backend of its own registry: each layer's call chooses its kernel.

    import layerzero.integrations.sglang
    layerzero.integrations.sglang.register()
    engine = sglang.Engine(model_path=model, attention_backend="layerzero")

Other processes of an engine register by the entry point ``sglang.srt.plugins`` (``layerzero_engines``), which LayerZero
brings where it is installed. SGLang keeps tokens in one pool by index; with ``page_size`` above 1 the indices of a
request come in whole pages, so that its pool seen as pages is a paged cache, and every ``page_size``-th index names
one. With 1 every token is a page. Pools of float8 have one scale of keys and one of values a layer.
Drafts are verified here, chains and trees. SGLang has a fixed list of backends that write drafts, so that one of those
has to be named by ``speculative_draft_attention_backend``. A CUDA graph holds decodes and chains in 16 bits: its tables
and lengths stay where they are, and are filled before each replay.
Cross attention, bidirectional decoders, and pools of a sliding window of their own, are refused.
So is every attribute of a layer that is not known here: SGLang's own backends read attributes that models set, as Grok
its temperature. Read: sglang 0.5.23, srt/layers/radix_attention.py, srt/layers/attention/base_attn_backend.py,
attention_registry.py, torch_native_backend.py, flashattention_backend.py and triton_backend.py,
srt/model_executor/runner/decode_cuda_graph_runner.py, srt/speculative/ and srt/mem_cache/memory_pool.py.
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
    *("use_irope", "k_scale", "v_scale"),
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

_SCALES_AGAIN = frozenset({"k_scale_float", "v_scale_float", "quant_method"})
"""Attributes that say again what ``k_scale`` and ``v_scale`` hold, and where those come from."""

_OF_CALLS = frozenset({"use_prefill_attention_wrapper"})
"""Attributes that say how SGLang calls its backend, and change no result."""

_KNOWN = _READ | _NEUTRAL.keys() | _SCALES_AGAIN | _OF_CALLS | vars(torch.nn.Module()).keys() | {"forward"}


_OF_OTHER_MASKS = (
    *("encoder_lens", "mha_return_lse", "attn_attend_prefix_cache", "attn_cp_metadata", "attn_dcp_metadata"),
    *("dcp_kv_mask", "cross_attention_custom_mask", "multi_item_delimiter_indices", "encoder_swa_replay"),
)
"""Attributes of batches whose keys or masks are others than a decoder's."""

_VERIFIED = ("EAGLE_VERIFY", "NGRAM_VERIFY")
"""Kinds of drafts, by SGLang's names, each of which sees its prefix and, by a mask, others of its request."""

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


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
        self.tree: Tensor | None = None
        self.is_captured = False
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._one: Tensor | None = None
        self._captured: dict[tuple[int, int], PagedStep] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the step of a batch: pages of its requests, lengths, and where their new tokens begin.

        Raises: NotImplementedError for drafts of several steps, whose keys lie elsewhere, for models that write blocks
            of tokens at once, and for keys of an encoder.
        """
        self.step, self.tree, self.is_captured = None, None, False
        mode = forward_batch.forward_mode
        if mode.is_idle():  # a rank that has nothing to do while others have
            return
        drafts, lens, on_host = _drafts(forward_batch), forward_batch.seq_lens, forward_batch.seq_lens_cpu
        longest = int((lens if on_host is None else on_host).max()) + drafts if len(lens) else 0
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long(), : max(longest, 1)]
        tables = (rows[:, :: self.page_size] // self.page_size).int()
        if mode.is_decode() or drafts:
            starts = _evenly(len(lens), max(drafts, 1))
        else:
            if forward_batch.extend_seq_lens_cpu is None:
                _refuse(["forward_batch.extend_seq_lens_cpu: wanted the counts of new tokens, got None"])
            counts = torch.tensor([0, *forward_batch.extend_seq_lens_cpu], device="cpu")
            starts = counts.cumsum(0, dtype=torch.int32)
        if drafts > 1 and forward_batch.spec_info.tree_topk != 1:
            self.tree = _tree(forward_batch.spec_info.custom_mask, lens, drafts)
        self.step = PagedStep.of(tables, lens + drafts, starts.to(lens.device), starts, longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:  # noqa: ARG002  # SGLang's signature
        """Allocate tables and lengths that the graphs of all batches of up to ``max_bs`` requests read."""
        pool = self.req_to_token_pool.req_to_token
        pages = -(-pool.shape[1] // self.page_size)
        self._buffers = pool.new_zeros(max_bs, pages, dtype=torch.int32), pool.new_ones(max_bs, dtype=torch.int32)
        self._captured.clear()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: ARG002
        """Fill the tables and lengths that a graph reads, before its capture and before each replay.

        Raises: NotImplementedError for batches that run outside of graphs alone, besides those of
            :meth:`init_forward_metadata`.
        """
        drafts, mode, batch = _drafts(forward_batch), forward_batch.forward_mode, forward_batch.batch_size
        problems = []
        if drafts > 1 and forward_batch.spec_info.tree_topk != 1:
            problems.append("forward_batch.spec_info: wanted a chain of drafts, speculative_eagle_topk=1, got a tree")
        if not (mode.is_decode() or drafts):
            problems.append("forward_batch.forward_mode: wanted a decode or drafts that are verified, got another")
        if self._buffers is None:
            problems.append("init_cuda_graph_state: wanted its call before, got none")
        _refuse([f"{each}, in a CUDA graph; pass disable_cuda_graph=True" for each in problems])
        assert self._buffers is not None
        pool, known = self.req_to_token_pool.req_to_token, forward_batch.seq_lens_cpu
        step = self._captured.get((batch, drafts))
        if step is None:
            tables, lens = (each[:batch] for each in self._buffers)
            starts = _evenly(batch, max(drafts, 1)).to(lens.device)
            step = PagedStep.captured(tables, lens, starts, pool.shape[1], max(drafts, 1))
            self._captured[batch, drafts] = step
        pages = step.tables.shape[1] if known is None else -(-(int(known.max()) + drafts) // self.page_size)
        rows = pool[:, : pages * self.page_size : self.page_size]
        table = step.tables[:, : rows.shape[1]]
        torch.index_select(rows, 0, forward_batch.req_pool_indices, out=table)
        if self.page_size > 1:
            table.floor_divide_(self.page_size)
        step.lens.copy_(forward_batch.seq_lens).add_(drafts)
        # lengths on the host are bounds where drafts are accepted on the device
        step.metadata.advance(host=None if known is None or drafts else (known.to(torch.int32),))
        self.step, self.tree, self.is_captured = step, None, True

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """A padded request has one token."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may run its own Triton kernels around this."""
        return True

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,  # SGLang's signature
        **others: Any,
    ) -> Tensor:
        """Prefills, chunks behind a cached prefix, and decodes, alone or among them.

        Shapes: q (T, H * D) → (T, H * D_v).
        """
        problems = [f"{name}: wanted None, got {_short(given)}" for name, given in others.items() if given is not None]
        problems += layer_problems(layer, self.chunk_size)
        if self.step is None:
            problems.append("step: wanted init_forward_metadata before a forward pass, got none")
        _refuse(problems)
        assert self.step is not None
        pool = self.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        layout = "HND" if getattr(pool, "kv_cache_layout", "nhd") == "hnd" else "NHD"
        if layout == "NHD" and keys.ndim == values.ndim == 3:
            keys, values = (each.unflatten(0, (-1, self.page_size)) for each in (keys, values))
        left, scales = layer.sliding_window_size, dict[str, Tensor]()
        window = (left, 0) if left is not None and left >= 0 else None
        problems = _pool_problems(layer, q, pool, keys, values)
        if keys.dtype in _CODES and not problems:
            scales = {"key_scale": self._scale(layer.k_scale, q), "value_scale": self._scale(layer.v_scale, q)}
        if self.is_captured and (scales or q.dtype is torch.float32):
            got = keys.dtype if scales else q.dtype
            problems.append(f"step: wanted a CUDA graph of 16 bits, got {got}; pass disable_cuda_graph=True")
        _refuse(problems)
        if save_kv_cache and k is not None and v is not None:
            told = (layer.k_scale, layer.v_scale) if scales else ()
            pool.set_kv_buffer(layer, _write_location(forward_batch.out_cache_loc), k, v, *told)
        trees = {} if self.tree is None else {"tree_mask": self.tree}
        output = self.step.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            causal=_kind(layer) != "encoder_only",
            layout=layout,
            scale=layer.scaling,
            window=window,
            softcap=layer.logit_cap or None,
            **scales,
            **trees,
        )
        return output.flatten(1)

    forward_decode = forward_extend

    def _scale(self, given: Tensor | None, query: Tensor) -> Tensor:
        """What numbers of a pool of float8 are multiples of: one number a layer, 1 where the model brings none."""
        if given is not None:
            return given.detach().view(())
        if self._one is None:
            self._one = torch.ones((), dtype=torch.float32, device=query.device)
        return self._one


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


def _drafts(forward_batch: Any) -> int:
    """Drafts of each request that a batch verifies, which its lengths do not count; 0 in a prefill and a decode.

    Raises: NotImplementedError for batches whose keys or masks are others.
    """
    problems = [
        f"forward_batch.{name}: wanted none, got {_short(got)}"
        for name in _OF_OTHER_MASKS
        if (got := getattr(forward_batch, name, None)) is not None and got is not False
    ]
    mode, told, drafts = forward_batch.forward_mode, forward_batch.spec_info, 0
    if mode.is_dllm_extend():
        problems.append("forward_batch: wanted a prefill or a decode, got blocks of a diffusion model")
    if mode.is_decode() and told is not None:
        wanted = "wanted none in a decode, got drafts of several steps"
        problems.append(f"forward_batch.spec_info: {wanted}; pass speculative_draft_attention_backend")
    if mode.is_target_verify():
        kind, drafts = told.spec_input_type.name, int(told.num_tokens_per_req)
        if kind not in _VERIFIED:
            problems.append(f"forward_batch.spec_info: wanted {' or '.join(_VERIFIED)}, got {kind}")
        if told.ragged_verify_layout is not None or drafts < 1:
            problems.append("forward_batch.spec_info: wanted as many drafts of each request, got others")
    _refuse(problems)
    return drafts


def _evenly(batch: int, each: int) -> Tensor:
    """Where queries begin of which each request has as many."""
    return torch.arange(0, batch * each + 1, each, dtype=torch.int32, device="cpu")


def _tree(mask: Tensor | None, lens: Tensor, drafts: int) -> Tensor:
    """Which drafts of its request each draft sees, (T, drafts) bool.

    SGLang's masks lie one request after the other, a row for each draft: over its prefix and the drafts, or over those
    alone. Nothing waits for the device.
    """
    if mask is None or mask.dtype is not torch.bool:
        _refuse([f"spec_info.custom_mask: wanted a bool for each draft that another may see, got {_short(mask)}"])
    assert mask is not None
    batch = len(lens)
    if mask.numel() == batch * drafts * drafts:
        return mask.view(batch * drafts, drafts)
    widths = (lens + drafts).long()
    places = torch.arange(drafts, device=lens.device)
    rows = (drafts * (widths.cumsum(0) - widths)).unsqueeze(1) + places * widths.unsqueeze(1) + lens.unsqueeze(1)
    return mask[(rows.unsqueeze(2) + places).view(batch * drafts, drafts)]


def _pool_problems(layer: Any, query: Tensor, pool: Any, keys: Tensor, values: Tensor) -> list[str]:
    """What a pool keeps in another form than the layer's keys and values: other codes, or a latent of them."""
    problems, taken = [], ("nhd", "hnd")
    if (layout := getattr(pool, "kv_cache_layout", "nhd")) not in taken:
        problems.append(f"token_to_kv_pool.kv_cache_layout: wanted {' or '.join(taken)}, got {layout!r}")
    if getattr(pool, "k_scale_buffer", None) is not None:
        problems.append("token_to_kv_pool.k_scale_buffer: wanted one scale a layer, got blocks of them")
    heads = 1 if layout == "hnd" else 2
    for name, got, width in (("key", keys, layer.qk_head_dim), ("value", values, getattr(layer, "v_head_dim", None))):
        if got.dtype != query.dtype and not (got.dtype in _CODES and keys.dtype == values.dtype):
            problems.append(f"{name} buffer: wanted {query.dtype} as the query, or float8 with scales, got {got.dtype}")
        if got.dtype in _CODES and (scale := getattr(layer, f"{name[0]}_scale")) is not None and scale.numel() != 1:
            problems.append(f"layer.{name[0]}_scale: wanted one number, got {_short(scale)}")
        if got.ndim != 4:
            problems.append(f"{name} buffer: wanted (tokens, heads, width), or pages in hnd, got {tuple(got.shape)}")
            continue
        wanted = getattr(layer, f"tp_{name[0]}_head_num", got.shape[heads]), got.shape[-1] if width is None else width
        if (got.shape[heads], got.shape[-1]) != wanted:
            problems.append(f"{name} buffer: wanted heads and width {wanted}, got {(got.shape[heads], got.shape[-1])}")
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

"""Transformers 5: ``attn_implementation="layerzero"`` sends every attention of a model to ``lz.attention``.

What ``experts_implementation="layerzero"`` does stands in :mod:`layerzero.integrations.transformers_experts`.

The rules are those of Transformers' own ``sdpa`` integration (transformers 5.23, ``integrations/sdpa_attention.py``):
BHSD in, BSHD out; a mask, bool or float, says everything by itself; without one the call is causal if the module is and
there is more than one query. What ``sdpa`` ignores and LayerZero can compute (softcap, sinks, a window without a mask,
sequences in one row by ``cu_seq_lens_q`` and ``cu_seq_lens_k``) is computed; what neither can is an error. Padding
travels in the mask, so the mask function is registered, too: without it Transformers would pass no mask at all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.engine.fusion import written
from layerzero.integrations import transformers_patches
from layerzero.integrations.transformers_experts import is_reserved, register_experts

_UNSERVED = {
    "output_attentions": "no attention weights (fast kernels never form them); use attn_implementation='eager'",
    "indices": "a mask, and keys of it by query, (B, S_q, count); use attn_implementation='eager'",
    "block_indices": "no sparse selection of key blocks along with the mask; use attn_implementation='eager'",
    "sinks": "no sinks for each token, only s_aux for each head; use attn_implementation='eager'",
    "head_mask": "no mask on whole heads; use attn_implementation='eager'",
    "layer_head_mask": "no mask on whole heads; use attn_implementation='eager'",
}
"""Arguments that are known to change the result, each with what is wanted in their place."""

HARMLESS = frozenset({
    # what the model returns and keeps, and how it counts
    *("use_cache", "return_dict", "output_hidden_states", "output_router_logits", "num_items_in_batch", "labels"),
    *("logits_to_keep", "output_attentions"),
    # applied to queries and keys before, part of the mask as well, or honoured
    *("position_ids", "cache_position", "position_embeddings", "token_type_ids", "mm_token_type_ids", "seq_idx"),
    *("past_key_values", "cache", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"),
    *("max_length_q", "max_length_k", "max_seqlen", "deterministic"),
    # what queries, keys and values were made of, and which layers of towers are read
    *("input_ids", "inputs_embeds", "input_features", "pixel_values", "pixel_values_videos", "image_grid_thw"),
    *("video_grid_thw", "image_sizes", "mm_encoder_outputs", "encoder_hidden_states", "encoder_outputs"),
    *("decoder_input_ids", "decoder_inputs_embeds", "decoder_position_ids", "original_sizes", "reshaped_input_sizes"),
    *("interpolate_pos_encoding", "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"),
    *("image_position_ids",),  # DiffusionGemma's decoder gets those of its encoder's pictures
})  # fmt: skip
"""Arguments that Transformers' models (5.24) hand on and that leave the result as it is: models give whatever they do
not know to their attention. All others are errors: one that a later version gives a meaning is not ignored."""

_SERVED = HARMLESS - set(_UNSERVED)
"""What a call may have besides its tensors."""

_IDLE = _SERVED - {"cache", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "deterministic"}
"""What attention does not even look at."""

_UNKNOWN = "no argument whose effect on attention is not known; leave it out, or use attn_implementation='sdpa'"

ONE_TOKEN: ContextVar[Callable[..., Tensor] | None] = ContextVar("layerzero_one_token", default=None)
"""What attends while a model computes one token whose keys and values lie in memory of ours: no mask is made then."""

_COMPILED = frozenset({"cuda"})
"""Devices on which compiled code computes masked attention by torch's function, which the compiler knows."""

EXCHANGED = "_layerzero_setting"
"""An attribute of modules whose attention ``lz.optimize`` exchanged: ours was not requested where it serves no call."""

_registered: set[str] = set()
_checked: set[type] = set()
_float_masked: set[type] = set()
"""Configs of models that do not support ``sdpa``: they add their mask to scores, or take it apart, themselves."""


def register_with_transformers(name: str = "layerzero") -> None:
    """Make ``attn_implementation=name`` known to Transformers, for ``from_pretrained`` and ``set_attn_implementation``.

    From 5.7 on, ``experts_implementation=name`` is known as well. Registers the attention, the mask function and the
    experts; doing it again changes nothing. Models that cannot be served are then refused when they are loaded, with
    the settings that work for them. A model that computes no attention gets a warning. Transformers has no entry points
    for attention (5.23), so this has to be called before a model is loaded.
    Raises: ImportError without a known version; ValueError for a name that Transformers gives a meaning.
    """
    if problem := transformers_patches.version_problem():
        install = f"pip install 'transformers{transformers_patches.VERSIONS}'"
        raise ImportError(f"register_with_transformers: {problem}; {install}")
    from transformers import AttentionInterface, AttentionMaskInterface

    reserved = re.search(r"flash|flex_attention|sdpa|eager|[|/:@]", name)
    taken = name not in _registered and name in AttentionInterface().valid_keys()
    if reserved or taken or is_reserved(name, _registered):
        raise ValueError(f"name: wanted one that means nothing to Transformers, such as 'layerzero', got {name!r}")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    _registered.add(name)
    transformers_patches.check_at_load(
        "_check_and_adjust_attn_implementation", _registered, transformers_patches.check_class, batch, _look
    )
    register_experts(name, _registered)


def batch(model: Any) -> None:
    """Let ``generate_batch`` of a model run under every registered name, whenever it was loaded."""
    if hasattr(model, "generate_batch"):
        transformers_patches.serve_batches(_registered)


def attention_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **call: Any) -> Tensor | None:
    """Make the mask of a forward pass: bool (B, 1, S_q, S_k), True attends; None where causality or nothing hides keys.

    This is Transformers' ``sdpa_mask`` with one difference. For a prompt in an empty static cache it also returns None,
    which its attention reads as "aligned top-left"; a model that cuts queries off afterwards (gemma4 keeping the last
    logits) would then be wrong. Here that mask is made, and marked so that :func:`attention_forward` may skip it. So is
    that of a later part of a prompt: without a mask kernels are faster, and have the bits of the whole.

    Models that do not support ``sdpa`` get the float mask of ``eager`` instead, for they do more with it than hand it
    on: pegasus_x, bigbird_pegasus and nllb-moe say that decoders are not causal, informer adds it to its own scores,
    deepseek_v4 extends it with zeros (transformers 5.23). One that only hides the future is marked, too: models that
    hand it on as it is (Gemma 2, GPT-OSS) are then computed without it.

    Raises: InvalidCallError for a model that computes attention by itself: it would add the bool mask to its scores.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    compiling = torch.compiler.is_compiling()
    if not compiling and ONE_TOKEN.get() is not None:
        if not allow_is_causal_skip:
            problem = "wanted a model that leaves its masks to attention, got one that reads them itself"
            raise InvalidCallError("lz.optimize(graph=True)", [problem])
        transformers_patches.check_only_causal(call["mask_function"], call.get("config"))
        return None
    if not compiling and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # a tensor with a version, so that it can be marked
            return attention_mask(
                q_length=q_length, kv_length=kv_length, allow_is_causal_skip=allow_is_causal_skip, **call
            )
    config = type(call.get("config"))
    if not compiling and config not in _checked:
        _check_model(config)
    sizes = {"q_length": q_length, "kv_length": kv_length}
    if config in _float_masked:
        added: Tensor = eager_mask(**sizes, **call)
        skips = allow_is_causal_skip and not call.get("allow_is_bidirectional_skip") and q_length in (1, kv_length)
        if skips and not compiling and sdpa_mask(**sizes, **call) is None:
            transformers_patches.mark(added, q_length)
        return added
    mask: Tensor | None = sdpa_mask(**sizes, allow_is_causal_skip=allow_is_causal_skip, **call)
    seen = q_length
    if mask is None and allow_is_causal_skip and q_length not in (1, kv_length):
        mask = sdpa_mask(**sizes, allow_is_causal_skip=False, **call)
    elif (
        mask is not None
        and allow_is_causal_skip
        and not compiling
        and transformers_patches.ends_with_its_keys(**sizes, **call)
    ):
        seen = kv_length
    else:
        return mask
    if mask is not None and not compiling:
        transformers_patches.mark(mask, seen)
    return mask


def has_float_mask(config: Any) -> bool:
    """Whether models of this config get the float mask, for they do not support ``sdpa``."""
    if type(config) not in _checked and not torch.compiler.is_compiling():
        _check_model(type(config))
    return type(config) in _float_masked


def _look(model: Any) -> None:
    """Know a class's mask when it is loaded: its first call may be compiled, where nothing can be looked up."""
    if model.config_class is not None:
        _check_model(model.config_class)


def theirs_of(module: torch.nn.Module) -> Callable[..., Any]:
    """The attention function of Transformers for a module: torch's, or the neighbouring one where it has none."""
    if not has_float_mask(getattr(module, "config", None)):
        return transformers_patches.torchs_attention()
    for cls in type(module).__mro__:  # a class that was made from theirs lies in another file
        own: Callable[..., Any] | None = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if own is not None:
            return own
    raise InvalidCallError("attention", [f"wanted eager_attention_forward where {type(module)} comes from, got none"])


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend for a Transformers module; the signature is that of its ``AttentionInterface``.

    Shapes: query (B, H, S_q, D), key and value (B, K, S_k, D), H a multiple of K → (B, S_q, H, D_v)
    Args:
        is_causal: the module's own flag where it is None; no effect with a mask or with one query.
        sliding_window: keys that a query sees, itself included. Not read where a mask says it already, nor where
            ``lz.optimize`` exchanged torch's function, which does not read it; packed rows read it.
        position_bias: added to the scores.
        indices: of the keys that each query selects (B, S_q, count), besides what the mask hides: DeepSeek-V3.2's.
    Returns: the output, and None for the attention weights. Where ``lz.optimize`` exchanged the attention and a call
        asks for weights, has arguments that are not served, records gradients in a model without ``sdpa``, or is
        exported or traced, which others read without LayerZero, Transformers' own function computes it.
    Raises: InvalidCallError for what cannot be honoured, with wanted and got.
    """
    if (
        attention_mask is None
        and not torch.compiler.is_compiling()
        and (query.shape[2] == 1) is True  # a tensor in torch.jit.trace, for programs without LayerZero
        and (sliding_window is None or key.shape[2] <= sliding_window)
        and _IDLE.issuperset(kwargs)
        and not dropout
        and position_bias is None
        and indices is None
        and key.shape[0] == query.shape[0]
        and ONE_TOKEN.get() is None
        and not torch._C._is_any_autocast_enabled()
    ):  # all that follows looks at what such a call has not, which took 13 us of each layer's step (EPYC, 2026-11-27)
        one: Tensor = lz.attention(query, key, value, False, scaling, layout="BHSD", softcap=softcap, sinks=s_aux)
        return one.transpose(1, 2).contiguous(), None
    if "cache" in kwargs and transformers_patches.is_of_a_batch(kwargs):
        key, value = transformers_patches.keys_of(module, key, value, attention_mask, kwargs)
    batched = "write_index" in kwargs and transformers_patches.says_where_rows_begin(key, kwargs)
    strange = () if _SERVED.issuperset(kwargs) else _strange(kwargs, transformers_patches.BATCHED if batched else ())
    trains = query.requires_grad and torch.is_grad_enabled() and has_float_mask(getattr(module, "config", None))
    theirs = strange or written() or trains
    exchanged = vars(module).get(EXCHANGED) is not None  # None where torch.load made the module
    if theirs and exchanged and not batched:
        if indices is not None:
            attention_mask = selected(attention_mask, indices, key.shape[2])
        given = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        given |= {"is_causal": is_causal, "dropout": dropout, "scaling": scaling}
        kwargs |= {name: each for name, each in given.items() if each is not None}
        return theirs_of(module)(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    if batched:
        attention_mask, is_causal = None, True  # the mask of a batch, if any, hides other sequences and later tokens
    beside = attention_mask, position_bias, dropout or None
    packed = transformers_patches.packed_by(query, key, kwargs, *beside) if "cu_seq_lens_k" in kwargs else None
    if batched and packed is None:
        wanted = "wanted generate_batch without dropout, bias and deterministic, at most as many queries as keys"
        got = f"dropout={dropout}, {'no' if position_bias is None else 'a'} bias, deterministic="
        got += f"{kwargs.get('deterministic')}, {query.shape[2]} queries and {key.shape[2]} keys"
        problem = f"{wanted}, got {got}; call model.eval(), or set 'sdpa'"
        raise InvalidCallError("attn_implementation='layerzero'", [problem])
    if strange:
        got = kwargs[strange[0]]
        raise _refused(strange[0], f"shape {tuple(got.shape)}" if isinstance(got, Tensor) else repr(got)[:80])
    if attention_mask is None and ("cu_seq_lens_q" in kwargs or "cu_seqlens" in kwargs):
        transformers_patches.check_unpacked(kwargs)
    if indices is not None:
        attention_mask = selected(attention_mask, indices, key.shape[2])
    q_length = query.shape[2]
    if not torch.compiler.is_compiling() and (one_token := ONE_TOKEN.get()) is not None:
        if attention_mask is not None or position_bias is not None:
            problem = "wanted a model whose attention takes no mask for one token, got a mask or a bias"
            raise InvalidCallError("lz.optimize(graph=True)", [problem])
        told = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return one_token(query, key, value, scaling, told), None
    if packed is None and (exchanged or transformers_patches.exchanges()):  # torch's function reads masks alone
        sliding_window = None
    marked = attention_mask if position_bias is None else None  # a bias needs all of the mask
    seen = 0 if marked is None else transformers_patches.keys_seen(marked, q_length)
    if marked is not None and seen and key.shape[2] <= marked.shape[-1]:  # else it is a mask of other keys: an error
        attention_mask, is_causal = None, True
    else:
        seen = q_length if packed is None else key.shape[2]
        alone = attention_mask is None and packed is None and not batched
        if alone and has_float_mask(getattr(module, "config", None)):
            is_causal = False  # eager reads masks alone: ALIGN's text has none without padding, and says nothing
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = q_length > 1 and attention_mask is None and causal
    if causal and key.shape[2] > seen:  # so does sdpa without a mask, to Mllama's pictures, too (5.24, 2026-11-30)
        key, value = key[:, :, :seen], value[:, :, :seen]
        position_bias = None if position_bias is None else position_bias[..., :seen]
    kv_length = key.shape[2]
    window = None
    if attention_mask is None and sliding_window is not None and kv_length > sliding_window:
        window = (sliding_window - 1, 0 if causal or q_length == 1 else sliding_window - 1)
    if causal and q_length > kv_length:  # sdpa aligns top-left
        attention_mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=query.device).tril()
        if window is not None:
            attention_mask, window = attention_mask.triu(-window[0]), None
        causal = False
    if position_bias is not None:
        from transformers.integrations.sdpa_attention import create_position_bias_mask

        attention_mask = create_position_bias_mask(position_bias, attention_mask, causal, query, key)
        causal = False
    if query.shape[0] != key.shape[0]:  # learned queries, one set for the batch
        query = query.expand(key.shape[0], -1, -1, -1)
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):  # as torch does for its own
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    deterministic = "deterministic" in kwargs and kwargs["deterministic"]
    own = softcap is not None or s_aux is not None or deterministic or window is not None or packed is not None
    masked = attention_mask is not None and _is_the_compilers(module, query, key)
    compiling = torch.compiler.is_compiling()  # draws have gradients there, and ONNX has no operators of LayerZero
    if not own and (masked or (compiling and (dropout or torch.onnx.is_in_onnx_export()))):
        traced: tuple[Tensor, None] = transformers_patches.torchs_attention()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal
        )
        return traced

    named: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": s_aux}
    if packed is not None:
        return packed(query, key, value, causal=causal, scale=scaling, **named), None
    named |= {"layout": "BHSD", "attn_mask": attention_mask, "dropout_p": dropout}
    if deterministic:
        with lz.deterministic():
            output: Tensor = lz.attention(query, key, value, causal, scaling, **named)
    else:
        output = lz.attention(query, key, value, causal, scaling, **named)
    return output.transpose(1, 2).contiguous(), None


ALONE = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""All arguments of :func:`attend_one`."""


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,  # the caller saw that it hides nothing
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """What :func:`attention_forward` gives for a query from which nothing hides keys: (B, 1, H, D) of (B, S, heads, D).

    Tensors as they lie, so that no kernel of this layout needs views: six of them took an H200's host 8 us, and the
    checks of other calls 7 (2026-11-24).
    """
    return lz.attention(query, key, value, False, scaling, layout="BSHD", softcap=softcap, sinks=s_aux)


def _is_the_compilers(module: torch.nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether a masked call is traced as Transformers' own function, for the compiler to see all of it.

    A decode step over a static cache attends to the whole buffer through a mask. With an operator of ours, which is
    opaque to the compiler, a Llama-3-8B-shaped step took 9.70 ms on an H200 where a stock one compiled took 6.8 (torch
    2.11, 2026-11-22). Kernels that read a length take no such mask.
    """
    if not torch.compiler.is_compiling() or query.device.type not in _COMPILED:
        return False
    return query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)


def selected(mask: Tensor | None, indices: Tensor, kv_length: int) -> Tensor:
    """The mask that hides what no query selects as well: what models do themselves for ``eager`` and ``sdpa``."""
    if mask is None or indices.ndim != 3 or mask.ndim != 4 or mask.shape[-1] != kv_length:
        text = f"shape {tuple(indices.shape)} and " + ("no mask" if mask is None else f"a mask {tuple(mask.shape)}")
        raise _refused("indices", text)
    hidden = torch.ones((*indices.shape[:2], kv_length), dtype=torch.bool, device=indices.device)
    hidden = hidden.scatter(-1, indices.long(), False).unsqueeze(1)
    return mask & ~hidden if mask.dtype is torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _strange(kwargs: dict[str, Any], but: Collection[str]) -> list[str]:
    """Arguments that are not served: weights are wanted, or a tokenizer's that Transformers passes over."""
    odd = kwargs.keys() - _SERVED - set(but)
    odd -= transformers_patches.of_generate() - _UNSERVED.keys() if odd else odd
    return [name for name in kwargs if name in odd and kwargs[name] is not None and kwargs[name] is not False]


def _refused(name: str, got: str) -> InvalidCallError:
    problem = f"{name}: wanted {_UNSERVED.get(name, _UNKNOWN)}; got {got}"
    return InvalidCallError("attn_implementation='layerzero'", [problem])


def _check_model(config: type) -> None:
    """Refuse a model whose own attention would get our bool mask; Transformers lets any registered name pass."""
    models = transformers_patches.models_of(config)
    if models and not any(model._can_set_attn_implementation() for model in models):
        problem = (
            f"wanted a model that calls its attention through AttentionInterface, got {models[0].__name__}, which "
            f"computes it by itself; load it with {transformers_patches.settings_of(models[0])}"
        )
        raise InvalidCallError("attn_implementation='layerzero'", [problem])
    if models and not any(model._supports_sdpa for model in models):
        _float_masked.add(config)
    _checked.add(config)

"""Operations and the functions that lead to them: a file or a folder a family, gathered here.

Add an operation: declare it in its family (:mod:`layerzero.ops.declaration`) and name it in the ``OPERATIONS`` there; a
new family is a new file or folder, with ``OPERATIONS``, ``FUNCTIONS`` and, where there are such things,
``ALIASES`` (names of several operations), ``EXPORTS`` (names that users find along with the functions) and ``LIMITS``
(kinds of limits that are its own, by the names that descriptors know them by) and ``DROP_INS`` (functions that stand
for another library's). Operations that take no tensors stand in ``PLAIN_OPERATIONS`` and ``PLAIN_FUNCTIONS``.

``SETS`` are sets of operations: what a kind of model calls, by name, so that one command covers all of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass

from layerzero.core import errors
from layerzero.core.errors import DropIn
from layerzero.core.limits import register_kinds
from layerzero.core.operation import Function, Operation
from layerzero.core.plain import PlainFunction
from layerzero.core.system import warn

OPERATIONS: dict[str, Operation] = {}
FUNCTIONS: dict[str, Function] = {}
OPERATION_ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {}
"""Names for several operations: those that they cover, and the facts that they imply."""

PLAIN_OPERATIONS: dict[str, Operation] = {}
"""Operations without tensors: registered, chosen for and explained like the others, by a way of their own."""

PLAIN_FUNCTIONS: dict[str, PlainFunction] = {}
"""What users call of them."""

EXPORTS: dict[str, str] = {}
"""What families offer users besides their functions (a handle's class): the name and the module that it lives in."""

DROP_INS: dict[str, DropIn] = {}
"""Functions with another library's signature, by name."""


FORMER_NAMES: dict[str, str] = {}
"""Names that functions had before, with those of today."""


def current_name(name: str, stacklevel: int = 2) -> str:
    """The name that a function has today; a DeprecationWarning names it where the function had another one before."""
    if name not in FORMER_NAMES:
        return name
    text = f"lz.{name} is now lz.{FORMER_NAMES[name]}; version 0.2 removes the old name"
    warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
    return FORMER_NAMES[name]


def plain_function_of(name: str) -> PlainFunction | None:
    """The public function of an operation without tensors, by its name or the operation's; None else."""
    for function in PLAIN_FUNCTIONS.values():
        if name == function.name or any(each.name == name for each in function.operations):
            return function
    return None


def function_of(operation: str) -> Function | None:
    """The public function whose calls may be routed to an operation, None where there is none."""
    for function in FUNCTIONS.values():
        if any(each.name == operation for each in function.operations):
            return function
    return None


errors.ELSEWHERE |= {
    "softmax_scale": ("scale",),
    "sm_scale": ("scale",),
    "scaling": ("scale",),
    "is_causal": ("causal",),
    "window_size": ("window",),
    "logits_soft_cap": ("softcap",),
    "soft_cap": ("softcap",),
    "logit_cap": ("softcap",),
    "attn_bias": ("attn_mask",),
    "attention_mask": ("attn_mask",),
    "dropout": ("dropout_p",),
    "p": ("top_p",),
    "k": ("key", "top_k"),
    "q": ("query",),
    "v": ("value",),
    "alibi": ("alibi_slopes",),
    "s_aux": ("sinks",),
    "return_softmax_lse": ("return_lse",),
    "tensor_layout": ("layout",),
    "seqused_k": ("kv_lens",),
    "k_cache": ("key_cache",),
    "v_cache": ("value_cache",),
    "block_table": ("block_tables",),
    "cache_seqlens": ("context_lens",),
    "seq_lens": ("context_lens",),
    "k_scale": ("key_scale",),
    "v_scale": ("value_scale",),
    "epsilon": ("eps",),
    "variance_epsilon": ("eps",),
    "layer_norm_eps": ("eps",),
    "gamma": ("weight",),
    "beta": ("bias",),
    "x": ("input",),
    "hidden_states": ("input",),
    "minp": ("min_p",),
    "topk": ("top_k",),
    "topp": ("top_p",),
    "repetition_penalty": ("repetition",),
    "presence_penalty": ("presence",),
    "frequency_penalty": ("frequency",),
}
"""By a foreign name, ours that mean the same; a function has at most one of them.

A name of another meaning has no place here: the error must lead to the same numbers. Read in the signatures of torch
2.13, flash-attn 2.8, FlashInfer 0.7, xFormers 0.0.35, vLLM 0.33 and Transformers 5.24.
"""

errors.NEEDLESS |= {"enable_gqa": ("key", "leave it out: key and value may have fewer heads than query")}
"""Foreign names for which nothing stands here: an argument of the functions that are meant, and what to do."""


@dataclass(frozen=True, slots=True)
class OperationSet:
    """What a kind of model calls.

    Attributes:
        summary: which models these are.
        operations: names of the operations, in the order of a layer.
    """

    summary: str
    operations: tuple[str, ...]


SETS: Mapping[str, OperationSet] = {
    "decoder": OperationSet(
        "language models that write token after token: Llama, Qwen, Mistral, Gemma",
        (
            *("embedding.lookup", "norm.rms", "norm.add_rms", "norm.add_rms.inplace", "mlp.linear", "mlp.qkv.joined"),
            *("posenc.rope", "posenc.rope.inplace", "posenc.qk_norm_rope", "posenc.split_qkv_norm_rope"),
            *("kv.split_qkv_norm_rope_append", "kv.split_qkv_norm_rope_append.paged"),
            *("kv.rope_append", "kv.rope_append.paged", "attention.gqa.prefill", "attention.gqa.decode"),
            *("attention.gqa.decode.paged", "kv.append.paged"),
            *("mlp.silu_mul", "mlp.silu_mul.joined", "mlp.gelu_mul", "mlp.gelu_mul.joined", "mlp.fused.gated"),
            *("sampling.penalties", "sampling.bias", "sampling.greedy", "sampling.topk", "sampling.topp"),
            *("sampling.topk_topp", "sampling.minp", "sampling.logprobs", "sampling.verify", "sampling.verify.greedy"),
        ),
    ),
    "encoder": OperationSet(
        "models that read a text as a whole: BERT, MiniLM, CLIP, Whisper's first half",
        (
            *("embedding.lookup", "norm.layer", "mlp.linear", "mlp.qkv", "attention.standard.prefill"),
            *("activation.gelu", "mlp.fused"),
            *("elementwise.add_bias", "elementwise.add", "elementwise.softmax"),
        ),
    ),
    "diffusion": OperationSet(
        "diffusion transformers: DiT, Stable Diffusion 3, FLUX",
        (
            *("norm.layer", "norm.rms", "mlp.linear", "posenc.rope", "attention.standard.prefill"),
            *("activation.gelu", "activation.silu", "mlp.fused", "elementwise.scaled_add"),
        ),
    ),
    "embedding": OperationSet(
        "models that give a text one vector, encoders and decoders among them: MiniLM, E5, Qwen3-Embedding",
        (
            *("embedding.lookup", "norm.layer", "norm.rms", "norm.add_rms", "mlp.linear", "posenc.rope"),
            *("attention.standard.prefill", "attention.gqa.prefill", "activation.gelu", "mlp.silu_mul", "mlp.fused"),
            "mlp.fused.gated",
        ),
    ),
    "quantised": OperationSet(
        "models whose weights or caches are codes: GPTQ, AWQ, GGUF, float8, MXFP4",
        (
            *("mlp.linear.quant", "mlp.linear.quant.int8", "mlp.linear.quant.fp8_e4m3", "mlp.linear.quant.group"),
            *("mlp.linear.quant.group.int8", "mlp.linear.quant.block", "mlp.linear.quant.mx"),
            *("mlp.linear.quant.codebook", "mlp.linear.quant.gguf", "mlp.linear.quant.gguf.int8"),
            *("moe.experts.quant", "moe.experts.quant.int8"),
            *("quantize.int8", "quantize.fp8_e4m3", "quantize.mxfp8_e4m3", "quantize.mxfp4", "quantize.nvfp4"),
            *("quantize.mxfp6_e2m3", "quantize.mxfp6_e3m2", "dequantize.mxfp6_e2m3", "dequantize.mxfp6_e3m2"),
            *("dequantize.int8", "dequantize.fp8_e4m3", "dequantize.mxfp8_e4m3", "dequantize.mxfp4"),
            *("dequantize.nvfp4", "kv.append.quantized", "kv.rope_append.quantized"),
            *("attention.quantized.prefill.paged", "attention.quantized.decode.paged"),
        ),
    ),
    "experts": OperationSet(
        "mixtures of experts: Mixtral, Qwen3-MoE, DeepSeek, gpt-oss",
        (
            *("moe.route", "moe.experts", "moe.experts.quant", "moe.experts.quant.int8", "mlp.grouped", "mlp.batched"),
            *("mlp.silu_mul.joined", "mlp.swiglu_oai", "mlp.swiglu_oai.interleaved", "norm.add_rms"),
            "attention.mla.decode.paged",
        ),
    ),
    "serving": OperationSet(
        "engines: mixed batches over a paged cache, known prefixes, draws of a batch, drafts",
        (
            *("attention.standard.mixed.paged", "attention.gqa.mixed.paged", "attention.gqa.prefill.paged"),
            *("attention.gqa.decode.paged", "attention.gqa.prefill.ragged", "attention.cascade.decode.paged"),
            *("attention.merge_states", "attention.mla.decode.paged", "attention.sparse.block"),
            *("kv.append.paged", "kv.append.quantized", "kv.rope_append.paged", "kv.copy_blocks", "kv.gather.paged"),
            *("sampling.penalties.counted", "sampling.bias", "sampling.bitmask", "sampling.filtered"),
            *("sampling.categorical", "sampling.greedy", "sampling.logprobs", "sampling.verify"),
            *("sampling.verify.greedy", "sampling.verify.tree"),
        ),
    ),
}
"""By the word that ``layerzero doctor --for`` takes."""

SET_ALIASES = {"llm": "decoder", "moe": "experts", "quantized": "quantised"}
"""Other words for them."""

for _family in sorted(each.name for each in pkgutil.iter_modules(__path__)):
    _module = importlib.import_module(f"{__name__}.{_family}")
    if not hasattr(_module, "OPERATIONS"):
        continue
    OPERATIONS |= {operation.name: operation for operation in _module.OPERATIONS}
    FUNCTIONS |= {function.name: function for function in _module.FUNCTIONS}
    PLAIN_OPERATIONS |= {operation.name: operation for operation in getattr(_module, "PLAIN_OPERATIONS", ())}
    PLAIN_FUNCTIONS |= {function.name: function for function in getattr(_module, "PLAIN_FUNCTIONS", ())}
    OPERATION_ALIASES |= getattr(_module, "ALIASES", {})
    DROP_INS |= {each.name: each for each in getattr(_module, "DROP_INS", ())}
    EXPORTS |= dict.fromkeys(getattr(_module, "EXPORTS", ()), _module.__name__)
    FORMER_NAMES |= {
        old: new for function in _module.FUNCTIONS for old, new in function.renamed.items() if new == function.name
    }
    register_kinds(getattr(_module, "LIMITS", {}))

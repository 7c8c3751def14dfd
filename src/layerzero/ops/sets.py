"""Sets of operations: what a kind of model calls, by name, so that one command covers all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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

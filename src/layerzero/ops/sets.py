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
}
"""By the word that ``layerzero doctor --for`` takes."""

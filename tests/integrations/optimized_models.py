"""Small models of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
GQA = SIZES | {"num_key_value_heads": 2}
T5 = {
    "vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "dropout_rate": 0.0,
}  # fmt: skip

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GQA)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GQA, head_dim=8)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GQA, head_dim=8, sliding_window=6)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GQA, sliding_window=6)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**GQA)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=96, eos_token_id=None, bos_token_id=1
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "t5": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "t5 gated": lambda: transformers.T5EncoderModel(
        transformers.T5Config(**T5, feed_forward_proj="gated-gelu")
    ),
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval().to(dtype)

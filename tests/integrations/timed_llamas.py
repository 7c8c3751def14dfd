"""Small Llamas whose layers are timed by the test's clock."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def of_layers(each):
    return "DecoderLayer" in each.module

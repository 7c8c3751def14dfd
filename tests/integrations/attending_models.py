"""Small models whose attention is LayerZero's, beside stock's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import GQA, SIZES

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


def bert() -> Any:
    return transformers.BertForMaskedLM, transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0)


def llama() -> Any:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**GQA)


def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    """The same random model with eager attention and with LayerZero's."""
    kind, config = make()
    eager = kind._from_config(config, attn_implementation="eager").eval()
    for name, parameter in eager.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="layerzero").eval()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "layerzero"
    return eager, ours

"""The cache of a call, whatever Transformers calls it."""

from __future__ import annotations

import architectures
import pytest
import torch
from architectures import transformers

from layerzero.integrations.optimize.cache_argument import NAMES, cache_in, name_in, name_of
from layerzero.integrations.transformers import attention_forward


class Old:
    def forward(self, input_ids, past_key_values=None):
        """Before 5.24."""


class New:
    def forward(self, input_ids, cache=None):
        """Since then."""


def test_a_model_is_asked_by_the_name_that_it_has():
    assert name_of(Old()) == "past_key_values"
    assert name_of(New()) == "cache"
    assert name_of(object()) == "past_key_values"
    config = transformers.LlamaConfig(**architectures.GQA)
    model = transformers.LlamaForCausalLM._from_config(config).eval()
    with torch.no_grad():
        first = model(input_ids=torch.tensor([[3, 4]]), use_cache=True)
        cache = getattr(first, name_of(model))
        again = model(input_ids=torch.tensor([[5]]), **{name_of(model): cache})
    assert cache_in(dict(again.items())) is cache


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_call_is_read_by_either_name(name):
    cache = object()
    assert cache_in({name: cache}) is cache
    assert cache_in({"cache": None, "past_key_values": None, name: cache}) is cache
    assert cache_in({}) is None
    assert name_in({name: None}) == name


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_cache_that_a_model_hands_on_to_its_attention_is_not_written_again(name):
    config = transformers.LlamaConfig(**architectures.GQA)
    module = transformers.LlamaForCausalLM._from_config(config).model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    cache = transformers.DynamicCache(config=config)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    wanted = attention_forward(module, query, key, key, mask, scaling=0.5)[0]
    got = attention_forward(module, query, key, key, mask, scaling=0.5, **{name: cache})[0]
    assert torch.equal(got, wanted)
    assert cache.get_seq_length() == 0

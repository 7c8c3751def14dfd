"""vLLM's latent attention through LayerZero: decodes, drafts and prefills beside float64, and what is refused."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from enum import Enum

import pytest
import torch
from engine_steps import PAGE, module

RANK, ROTATED, PLAIN, WIDTH, HEADS = 32, 16, 24, 20, 4


class Impl:
    """Of vLLM's scaffold what is called here; its projection of prefixes is a mark."""

    dcp_world_size = pcp_world_size = 1

    def __init__(self, num_heads, head_size, scale, *given, **latent):
        self.num_heads, self.scale = num_heads, scale
        vars(self).update(latent)

    def forward_mha(self, *given, **more):
        given[6].fill_(7.0)


class Builder:
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata


@pytest.fixture
def latent(monkeypatch):
    """The integration on top of modules that have the names of vLLM."""
    names = "vllm.model_executor.layers.attention.mla_attention", "vllm.v1.attention.backend"
    for parts in (name.split(".") for name in names):
        for length in range(1, len(parts)):
            module(monkeypatch, ".".join(parts[:length]))
    scaffold = {"MLACommonBackend": object, "MLACommonImpl": Impl, "MLACommonMetadataBuilder": Builder}
    module(monkeypatch, names[0], QueryLenSupport=Enum("QueryLenSupport", ["UNIFORM"]), **scaffold)
    module(monkeypatch, names[1], MultipleOf=lambda base: ("multiple of", base))
    monkeypatch.delitem(sys.modules, "layerzero.integrations.vllm_latent", raising=False)
    yield importlib.import_module("layerzero.integrations.vllm_latent")
    sys.modules.pop("layerzero.integrations.vllm_latent", None)


def made(latent, **changes):
    """One layer, its projection of latent vectors to keys and values among it."""
    project = torch.randn(HEADS * (PLAIN + WIDTH), RANK)
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None}
    given |= {"attn_type": "decoder", "kv_sharing_target_layer_name": None, "q_lora_rank": None, "indexer": None}
    given |= {"kv_lora_rank": RANK, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTATED, "v_head_dim": WIDTH}
    given |= {"kv_b_proj": lambda x: (x @ project.T,)} | changes
    return latent.LayerZeroLatentBackend.get_impl_cls()(HEADS, RANK + ROTATED, 0.1, 1, **given)


def attended(query, keys, values):
    """In float64, causal at the end of the keys."""
    query, keys, values = (each.double() for each in (query, keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.1
    hidden = torch.ones(len(query), len(keys), dtype=torch.bool).triu(len(keys) - len(query) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values).float()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [1, 3], ids=["decodes", "drafts"])
def test_newest_tokens_attend_over_latent_vectors_that_were_written(latent, tokens, seed):
    torch.manual_seed(seed)
    lens = torch.randint(tokens, 60, (5,))
    tables = torch.randperm(24)[:20].view(5, 4)
    told = [torch.randn(int(length), RANK + ROTATED) for length in lens]
    cache, impl = torch.zeros(24, PAGE, RANK + ROTATED), made(latent)
    for table, each in zip(tables, told, strict=True):
        places = torch.arange(len(each))
        slots = table[places // PAGE] * PAGE + places % PAGE
        written = torch.cat((each[:, :RANK], torch.ones(1, RANK))), torch.cat((each[:, RANK:], torch.ones(1, ROTATED)))
        impl.do_kv_cache_update(
            written[0], written[1].unsqueeze(1), cache, torch.cat((slots, torch.tensor([-1]))), "auto", None
        )
    assert int(cache.any(-1).sum()) == int(lens.sum()), "a token without a place is nowhere"
    decode = types.SimpleNamespace(block_table=tables, seq_lens=lens)
    metadata = latent.LayerZeroLatentBuilder().build(0, types.SimpleNamespace(decode=decode, max_seq_len=60))
    query = torch.randn(5 * tokens, HEADS, RANK + ROTATED)
    wanted = torch.cat([
        attended(query[row * tokens : (row + 1) * tokens], each.unsqueeze(1).expand(-1, HEADS, -1),
                 each[:, :RANK].unsqueeze(1).expand(-1, HEADS, -1))
        for row, each in enumerate(told)
    ])  # fmt: skip
    for form in (query, query.split((RANK, ROTATED), -1)):
        output, lse = impl.forward_mqa(form, cache, metadata, None)
        assert lse is None
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_prefills_attend_over_projected_keys_and_those_behind_a_prefix_by_vllms_own(latent):
    torch.manual_seed(0)
    impl, starts = made(latent), torch.tensor([0, 5, 6, 17])
    query, vectors, rotated = (
        torch.randn(17, HEADS, PLAIN + ROTATED),
        torch.randn(17, RANK),
        torch.randn(17, 1, ROTATED),
    )
    both = impl.kv_b_proj(vectors)[0].view(17, HEADS, -1)
    keys, values = torch.cat((both[..., :PLAIN], rotated.expand(-1, HEADS, -1)), -1), both[..., PLAIN:]
    parts = [slice(int(begin), int(end)) for begin, end in itertools.pairwise(starts)]
    wanted = torch.cat([attended(query[each], keys[each], values[each]) for each in parts]).flatten(1)
    for context, told in ((None, wanted), (object(), torch.full((17, HEADS * WIDTH), 7.0))):
        prefill = types.SimpleNamespace(chunked_context=context, query_start_loc=starts, max_query_len=11)
        output = torch.zeros(17, HEADS * WIDTH)
        impl.forward_mha(query, vectors, rotated, None, types.SimpleNamespace(prefill=prefill), None, output)
        torch.testing.assert_close(output, told, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "given"), [
    ("kv_cache_dtype", "fp8"), ("sliding_window", 4), ("indexer", "one"), ("attn_type", "encoder_decoder"),
    ("logits_soft_cap", 30.0),
])  # fmt: skip
def test_what_latent_attention_has_no_argument_for_is_refused_by_its_name(latent, name, given):
    with pytest.raises(NotImplementedError, match=f"{name}: wanted .*got {given!r}; use another attention backend of"):
        made(latent, **{name: given})


def test_a_sequence_on_several_devices_is_refused(latent, monkeypatch):
    monkeypatch.setattr(Impl, "dcp_world_size", 2)
    with pytest.raises(NotImplementedError, match="dcp_world_size: wanted the keys of a sequence on one device, got 2"):
        made(latent)


def test_vllm_is_told_which_caches_and_pages_are_taken(latent):
    backend = latent.LayerZeroLatentBackend
    assert (backend.get_name(), backend.get_supported_head_sizes()) == ("CUSTOM", [])
    assert backend.get_supported_kernel_block_sizes() == [("multiple of", 16)]
    assert not {"fp8", "fp8_ds_mla"} & set(backend.supported_kv_cache_dtypes)
    assert backend.get_builder_cls().query_len_support.name == "UNIFORM"

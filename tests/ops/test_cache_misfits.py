"""What calls with a cache, and constructors, say where they do not fit: the next step, by public names."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz


def cache(**given):
    return lz.KVCache(1, pages=4, dtype=torch.float32, **given)


def test_a_layer_without_a_step_says_that_it_needs_one():
    attended = cache(kv_heads=2, head_dim=32)
    with pytest.raises(TypeError, match=r"'block_tables', 'context_lens'; a step brings .*pass step="):
        lz.paged_attention(torch.randn(1, 1, 8, 32), attended.layers[0])
    latent = cache(latent=(512, 64))
    with pytest.raises(TypeError, match="pass step="):
        lz.mla_attention(torch.randn(1, 1, 4, 512), torch.randn(1, 1, 4, 64), latent.layers[0], scale=1.0)


@pytest.mark.parametrize("ask", [lz.paged_attention, lambda *args: lz.explain("paged_attention", *args)])
def test_a_whole_cache_says_that_a_call_is_of_one_layer(ask):
    with pytest.raises(lz.InvalidCallError, match=r"got the whole KVCache; pass cache.layers\[i\] and step="):
        ask(torch.randn(1, 1, 8, 32), cache(kv_heads=2, head_dim=32))


def test_a_lacking_tensor_is_told_without_a_step():
    with pytest.raises(TypeError, match="missing required arguments: 'slot_mapping'") as caught:
        lz.append_paged_kv(torch.randn(1, 2, 32), torch.randn(1, 2, 32), cache(kv_heads=2, head_dim=32).layers[0])
    assert "step" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lz.KVCache(layer=1), "KVCache: got an unexpected keyword argument 'layer'; did you mean 'layers'?"),
        (lambda: lz.KVCache(), "KVCache: missing a required argument: 'layers'"),
        (
            lambda: lz.StepMetadata(cu_seqlen_q=1),
            "StepMetadata: got an unexpected keyword argument 'cu_seqlen_q'; did you mean 'cu_seqlens_q'?",
        ),
        (
            lambda: lz.explain("attention", *[torch.ones(1, 1, 1, 8)] * 3, causl=True),
            "attention: got an unexpected keyword argument 'causl'; did you mean 'causal'?",
        ),
        (
            lambda: lz.explain("tokenize", "x", text=1),
            "tokenize: got an unexpected keyword argument 'text'; did you mean 'texts'?",
        ),
    ],
)
def test_a_misspelt_argument_is_told_with_the_nearest_one(make, message):
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == message


def test_a_type_error_from_within_a_constructor_stays_what_it_is(monkeypatch):
    def fails(*_):
        raise TypeError("from within")

    monkeypatch.setattr("layerzero.ops.kv.sequences.asked", fails)
    with pytest.raises(TypeError, match=r"^from within$"):
        cache(kv_heads=2, head_dim=32)

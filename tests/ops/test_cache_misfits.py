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
        lz.append_paged_kv_(torch.randn(1, 2, 32), torch.randn(1, 2, 32), cache(kv_heads=2, head_dim=32).layers[0])
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

    monkeypatch.setattr("layerzero.ops.kv.sequences.form_of", fails)
    with pytest.raises(TypeError, match=r"^from within$"):
        cache(kv_heads=2, head_dim=32)


def test_what_has_no_rows_behind_each_other_is_told_what_helps():
    cache = lz.KVCache(1, 2, 32, max_sequences=4, max_length=64, dtype=torch.float32, strategy="contiguous")
    first, second, third, empty = (cache.allocate(name) for name in "abcd")
    with cache.writing([first, second, third], 2):
        pass
    forked = cache.fork(first)
    for names, helps in (
        ([first, third], r"got \[0, 2\]; defragment\(\) first"),
        ([first, forked], r"got \[0, 0\]; sequences that share a row part where one of them is written"),
        ([first, empty], r"got \[0, -1\]; name sequences that have tokens"),
        ([], r"got \[\]; name sequences that have tokens"),
    ):
        with pytest.raises(lz.KVCacheError, match=helps):
            cache.rows(names, 0)
    step = cache.writing([first], blocks=1)
    step.commit()
    with pytest.raises(lz.KVCacheError, match=r"truncate or free it, or make a cache of longer rows"):
        cache.writing([first], 64)
    cache.close()
    paged = lz.KVCache(1, 2, 32, pages=4, page_size=2, dtype=torch.float32)
    paged.allocate("a")
    step = paged.writing(["a"], blocks=1)
    step.commit()
    paged.writing(["a"], reuse=step).commit()
    with pytest.raises(lz.InvalidCallError, match="got 1, as the step to reuse has; make one with more blocks="):
        paged.writing(["a"], reuse=step)
    with pytest.raises(lz.KVCacheError, match="its layers are read by paged_attention"):
        paged.rows(["a"], 0)
    paged.close()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_negated_view_of_float8_is_refused_by_name(dtype):
    keys, values = (torch.zeros(2, 4, 2, 8).to(dtype) for _ in range(2))
    one, new = torch.tensor(1.0), torch.randn(1, 2, 8)
    with pytest.raises(lz.InvalidCallError, match="key_cache: wanted no negated view of float8"):
        lz.append_quantized_kv_(new, new, torch._neg_view(keys), values, torch.tensor([3]), one, one)
    with pytest.raises(lz.InvalidCallError, match="quantized: wanted no negated view of float8"):
        lz.dequantize(torch._neg_view(keys), one, dtype="fp8_e4m3" if "e4" in str(dtype) else "fp8_e5m2")

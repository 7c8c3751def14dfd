"""Plain tensors of a cache whose memory comes as its tokens do: places that have none yet end no process."""

from __future__ import annotations

import gc

import pytest
import torch

import layerzero as lz
from layerzero.ops.paged import layout_record

LENGTH = 40_000
LACKS = ", which lacks it; KVCache.writing"


@pytest.fixture
def cache():
    made = lz.KVCache(2, 2, 32, dtype=torch.float32, strategy="virtual", max_sequences=3, max_length=LENGTH)
    with made.writing([made.allocate(), made.allocate()], [300, 10]) as step:
        for layer in made.layers:
            lz.append_paged_kv_(*drawn(310), layer, slot_mapping=step.slots)
    yield made
    made.close()


def drawn(*tokens):
    return [torch.randn(*tokens, 2, 32) for _ in range(2)]


def places(*numbers):
    return torch.tensor(numbers)


def tensors(cache, layer=1):
    return cache.layers[layer].keys, cache.layers[layer].values


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("slot", [LENGTH - 1, 2 * LENGTH + 7])
def test_slots_of_plain_tensors_are_looked_at(cache, layer, slot, debug):
    keys, values = tensors(cache, layer)
    table = lz.rope_table(64, 32)
    wanted = rf"slot_mapping\[1\]: wanted a place with memory, got {slot}{LACKS}"
    with lz.scope(debug=debug):
        for call in (
            lambda slots: lz.append_paged_kv_(*drawn(2), keys, values, slots),
            lambda slots: lz.gather_paged_kv(keys, values, slots),
            lambda slots: lz.rope_append_(torch.randn(2, 4, 32), *drawn(2), *table, keys, values, places(1, 2), slots),
        ):
            call(places(3, -1))
            with pytest.raises(lz.InvalidCallError, match=wanted):
                call(places(3, slot))
    later = keys[1:], values[1:]
    lz.append_paged_kv_(*drawn(1), *later, places(3))
    with pytest.raises(lz.InvalidCallError, match="wanted a place with memory"):
        lz.append_paged_kv_(*drawn(1), *later, places(LENGTH))


def test_rows_are_written_as_far_as_all_of_them_have_memory(cache):
    keys, values = tensors(cache)
    new = drawn(2, 1)
    lz.append_kv_(*new, keys[:2], values[:2], places(9))
    with pytest.raises(lz.InvalidCallError, match=r"positions\[0\]: wanted a place with memory, got 30000"):
        lz.append_kv_(*new, keys[:2], values[:2], places(30_000))
    with pytest.raises(lz.InvalidCallError, match=r"positions\[1, 0\]: wanted a place with memory, got 30000"):
        lz.append_kv_(*new, keys[:2], values[:2], torch.tensor([[300], [30_000]]))


def test_whole_pages_are_copied_where_both_have_their_memory(cache):
    keys, values = tensors(cache)
    with pytest.raises(lz.InvalidCallError, match=r"to_pages\[0\]: wanted a page with memory for all tokens"):
        lz.copy_kv_blocks_(keys, values, places(0), places(2))


def test_debug_mode_looks_at_what_block_tables_lead_to(cache):
    keys, values = tensors(cache)
    tables, lens = torch.tensor([[0], [2]], dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)
    wanted = r"block_tables\[1, 0\]: wanted a page with memory for its tokens, got 2"
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    with lz.scope(debug=True):
        for query, more in ((torch.randn(2, 1, 4, 32), {}), (torch.randn(3, 4, 32), {"cu_seqlens_q": starts})):
            lz.paged_attention(query, keys, values, tables[[0, 0]], lens, **more)
            with pytest.raises(lz.InvalidCallError, match=wanted):
                lz.paged_attention(query, keys, values, tables, lens, **more)


@pytest.mark.parametrize("latent", [True, False])
def test_what_layers_write_themselves_is_looked_at_too(latent):
    form = {"latent": (64, 16)} if latent else {"kv_heads": 2, "head_dim": 32}
    kind = {} if latent else {"scales": "head"}
    dtype = torch.float32 if latent else torch.int8
    cache = lz.KVCache(1, **form, **kind, dtype=dtype, strategy="virtual", max_sequences=3, max_length=LENGTH)
    layer, far = cache.layers[0], places(2 * LENGTH)
    with pytest.raises(lz.InvalidCallError, match=f"wanted a place with memory, got {2 * LENGTH}"):
        if latent:
            layer.append(torch.randn(1, 64), torch.randn(1, 16), far)
        else:
            lz.append_quantized_kv_(*drawn(1), layer.keys, layer.values, far, torch.ones(2), torch.ones(2))
    cache.close()


def test_tensors_that_outlive_their_cache_lead_nowhere(cache):
    keys, values = tensors(cache)
    cache.close()
    with pytest.raises(lz.InvalidCallError, match="wanted a place with memory, got 3"):
        lz.append_paged_kv_(*drawn(1), keys, values, places(3))


def test_nothing_is_kept_of_memory_that_nobody_has(cache):
    gc.collect()
    before = set(layout_record._CACHES)
    other = lz.KVCache(1, 2, 32, dtype=torch.float32, strategy="virtual", max_sequences=3, max_length=LENGTH)
    assert set(layout_record._CACHES) > before
    other.close()
    del other
    gc.collect()
    assert set(layout_record._CACHES) == before


@pytest.mark.parametrize("view", [lambda each: each[::2], lambda each: each[0].unflatten(0, (-1, 16))])
def test_other_views_are_refused(cache, view):
    keys, values = map(view, tensors(cache))
    with pytest.raises(lz.InvalidCallError, match="key_cache: wanted a cache whose memory grows as it is"):
        lz.append_paged_kv_(*drawn(1), keys, values, places(LENGTH - 1))

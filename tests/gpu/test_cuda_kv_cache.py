"""A cache whose memory is mapped as it grows, on a GPU: what attention reads of it, what it takes and gives back."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.ops.kv import ranges

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # libraries warn of each other when they are imported
]

GRAIN = 2**21


def cache_of(strategy, **more):
    sizes = {"max_sequences": 4, "max_length": 16384, "dtype": torch.bfloat16, "device": "cuda"}
    return lz.KVCache(2, 8, 128, strategy=strategy, **sizes | more)


def appended(cache, names, counts):
    total = sum(counts)
    query = torch.randn(total, 32, 128, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(total, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with cache.writing(names, counts) as step:
        for layer in cache.layers:
            lz.append_paged_kv_(key, value, layer, slot_mapping=step.slots)
    return query, key, value


def test_the_driver_reserves_maps_and_gives_back():
    found = ranges.Driver()
    assert found.version() >= 12000
    assert found.granularity(0) == GRAIN
    torch.zeros(1, device="cuda")
    address, handle = found.reserve(2 * GRAIN), found.create(GRAIN, 0)
    found.map(address, GRAIN, handle, 0)
    found.unmap(address, GRAIN)
    found.release(handle)
    found.free(address, 2 * GRAIN)


@pytest.mark.parametrize("strategy", ["virtual", "unified", "contiguous"])
def test_rows_hold_what_was_appended_and_kernels_read_them(strategy):
    cache = cache_of(strategy)
    names = [cache.allocate() for _ in range(3)]
    held = [appended(cache, names, [count] * 3)[1:] for count in (700, 1, 1, 3000)]
    keys, values, lens = cache.rows(names, 1)
    assert lens.tolist() == [3702] * 3
    for row in range(3):
        mine = torch.cat([key.unflatten(0, (3, -1))[row] for key, _ in held])
        assert torch.equal(keys[row], mine)
    query = torch.randn(3, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    got = lz.attention(query, keys, values, layout="BSHD")
    want = lz.attention(query, keys.clone(), values.clone(), layout="BSHD")
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    step = lz.StepMetadata(*cache.block_tables(names))
    paged = lz.paged_attention(query, cache.layer(1), step=step)
    torch.testing.assert_close(paged, want, rtol=2e-2, atol=2e-2)
    cache.close()


def test_memory_comes_with_tokens_and_goes_when_it_is_trimmed():
    before = torch.cuda.mem_get_info()[0]
    cache = cache_of("virtual")
    assert cache.choice.strategy is lz.KVCacheStrategy.VIRTUAL
    assert cache.usage().committed_bytes == 2 * GRAIN
    name = cache.allocate()
    cache.writing([name], [8000]).commit()
    usage = cache.usage()
    assert usage.needed_bytes <= usage.committed_bytes <= usage.needed_bytes + 2 * 2 * GRAIN
    assert before - torch.cuda.mem_get_info()[0] >= usage.committed_bytes - GRAIN
    cache.free(name)
    cache.trim()
    assert cache.usage().committed_bytes == 2 * GRAIN
    cache.close()
    assert before - torch.cuda.mem_get_info()[0] < 2 * GRAIN


def test_too_little_memory_is_told_before_anything_is_written():
    cache = cache_of("virtual", limit_bytes=20 * GRAIN)
    name = cache.allocate()
    cache.writing([name], [4000]).commit()
    with pytest.raises(lz.KVCacheError, match="VIRTUAL_MEMORY_EXHAUSTED"):
        cache.writing([name], [12000])
    assert (cache.length(name), cache.usage().committed_bytes <= 20 * GRAIN) == (4000, True)
    cache.close()


@pytest.mark.parametrize("strategy", ["paged", "virtual"])
def test_swapping_and_moving_leave_tokens_as_they_were(strategy):
    sizes = {"pages": 64, "page_size": 16, "max_sequences": None, "max_length": None} if strategy == "paged" else {}
    cache = cache_of(strategy, **sizes)
    names = [cache.allocate() for _ in range(2)]
    appended(cache, names, [100, 200])

    def read():
        tables, lens = cache.block_tables(names[1:])
        places = torch.arange(200, device="cuda")
        slots = tables[0].long()[places // cache.page_size] * cache.page_size + places % cache.page_size
        assert lens.tolist() == [200]
        return [each.clone() for each in lz.gather_paged_kv(cache.layer(1), slot_mapping=slots)]

    before = read()
    cache.swap_out(names[1])
    cache.free(names[0])
    cache.swap_in(names[1])
    cache.compact()
    assert all(torch.equal(*pair) for pair in zip(read(), before, strict=True))
    cache.close()


def test_a_captured_step_follows_a_row_that_grows():
    cache = cache_of("virtual")
    name = cache.allocate()
    appended(cache, [name], [1000])
    query = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    step = cache.writing([name], capturable=True)
    slots, layer = step.slots, cache.layer(0)
    key, value = (torch.randn(1, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run():
        lz.append_paged_kv_(key, value, layer, slot_mapping=slots)
        return lz.paged_attention(query, layer, step=step)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    step.commit()
    for _ in range(1200):  # beyond what was mapped at the capture
        cache.writing([name], reuse=step)
        graph.replay()
        step.commit()
    keys, values, _ = cache.rows([name], 0)
    want = lz.attention(query, keys, values, layout="BSHD")
    torch.testing.assert_close(output, want, rtol=2e-2, atol=2e-2)
    cache.close()


def test_debug_mode_finds_places_without_memory():
    """A kernel that goes there takes the context with it."""
    cache = cache_of("virtual", max_length=2**20)
    name = cache.allocate()
    appended(cache, [name], [20])
    layer, far = cache.layers[1], torch.tensor([3 * 2**20 + 7], device="cuda")
    new = [torch.randn(1, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    tables, lens = (torch.full(size, 3, dtype=torch.int32, device="cuda") for size in ((1, 1), (1,)))
    query = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    with lz.scope(debug=True):
        for call in ((layer,), (layer.keys, layer.values)):
            with pytest.raises(lz.InvalidCallError, match=r"slot_mapping\[0\]: wanted a place with memory"):
                lz.append_paged_kv_(*new, *call, slot_mapping=far)
        with pytest.raises(lz.InvalidCallError, match=r"block_tables\[0, 0\]: wanted a page with memory"):
            lz.paged_attention(query, layer.keys, layer.values, tables, lens)
    del call
    cache.close()

"""How the memory of a cache of sequences grows, why it lies where it does, and caches of codes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import layerzero as lz
from drawing import at_once
from kv_caches import FORMS, appended, drawn, made, plain
from layerzero.ops.kv import form as forms
from layerzero.ops.kv import ranges

# strategies


def test_the_strategy_follows_from_facts_and_says_so():
    def chosen(**facts):
        found = lz.kv_cache_strategy("cuda", **{"cuda": 12040} | facts)
        return found.strategy.value, found.because

    assert chosen(captured=True) == (
        "virtual", "captured steps want addresses that stay, contiguous kernels serve rows that grow"
    )  # fmt: skip
    assert chosen(captured=True, cuda=11080)[0] == "contiguous"
    assert chosen(max_sequences=1001) == ("paged", "1001 sequences are more than 1000")
    assert chosen(max_sequences=1000)[0] == "virtual"
    assert chosen(cuda=11080) == ("contiguous", "virtual memory cannot be had here")
    assert chosen(paged=True)[0] == "paged"
    assert chosen(strategy="unified") == ("unified", "it was requested")
    assert lz.kv_cache_strategy("cpu").strategy is lz.KVCacheStrategy.CONTIGUOUS
    refused = lz.kv_cache_strategy("cuda", cuda=11080).refused
    assert "the driver's CUDA must be >= 12.0, is 11.8" in str(refused[lz.KVCacheStrategy.VIRTUAL])


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"strategy": "virtual", "cuda": 11080}, lz.ReasonCode.DRIVER_VERSION_UNSUPPORTED),
        ({"strategy": "virtual", "layout": "HND", "cuda": 12040}, lz.ReasonCode.KV_STRATEGY_UNSUPPORTED),
        ({"strategy": "contiguous", "layout": "VLLM", "cuda": 12040}, lz.ReasonCode.KV_STRATEGY_UNSUPPORTED),
        ({"strategy": "unified", "device": "xpu"}, lz.ReasonCode.KV_STRATEGY_UNSUPPORTED),
    ],
)
def test_a_strategy_that_cannot_be_had_is_refused(facts, code):
    with pytest.raises(lz.KVCacheError) as caught:
        lz.kv_cache_strategy(**{"device": "cuda"} | facts)
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"max_sequences": ""}, "max_sequences: wanted a number of at least 1, got ''"),
        ({"device": "typo"}, "device: wanted one that torch knows, such as 'cuda:0', got 'typo'"),
        ({"device": 3.5}, "device: wanted one that torch knows, such as 'cuda:0', got 3.5"),
        ({"cuda": "x"}, "cuda: wanted a number such as 12040 for 12.4, or None for the driver's, got 'x'"),
        ({"device": "cpu", "cuda": True}, "cuda: wanted a number .*, got True"),
        ({"layout": "typo"}, "layout: wanted NHD or HND or VLLM or VLLM_CPU, got 'typo'"),
        ({"paged": 7}, "paged: wanted True or False, got 7"),
        ({"captured": "x"}, "captured: wanted True or False, got 'x'"),
    ],
)
def test_what_no_strategy_can_be_chosen_for_is_refused_by_name(given, problem):
    with pytest.raises(lz.InvalidCallError, match=f"kv_cache_strategy: {problem}"):
        lz.kv_cache_strategy(**given)


def test_without_a_driver_there_is_no_virtual_memory(monkeypatch):
    monkeypatch.setattr(ranges, "driver", lambda: None)
    assert forms._driver_version() == 0
    assert lz.kv_cache_strategy("cuda").strategy is lz.KVCacheStrategy.CONTIGUOUS


def test_the_library_way_raises_what_the_driver_answers(monkeypatch):
    class Answers:
        def __init__(self, name):
            assert name == "libcuda.so.1"
            self.results = {"cuMemCreate": 2, "cuMemMap": 1}

        def __getattr__(self, name):
            def function(*arguments):
                return self.results.get(name, 0)

            setattr(self, name, function)
            return function

    monkeypatch.setattr(ranges.ctypes, "CDLL", Answers)
    found = ranges.Driver()
    assert found.version() == 0
    with pytest.raises(MemoryError, match="cuMemCreate: the device is out of memory"):
        found.create(1, 0)
    with pytest.raises(RuntimeError, match="cuMemMap: the CUDA driver answered 1"):
        found.map(0, 1, 2, 0)


def virtual(**more):
    sizes = {"max_sequences": 3, "max_length": 8192, "dtype": torch.float32, "strategy": "virtual"}
    return lz.KVCache(2, 2, 32, **sizes | more)


def test_virtual_rows_take_memory_as_they_grow():
    cache = virtual()
    start = cache.usage()
    assert (start.committed_bytes, start.growths) == (2 * ranges._GRAIN, 0)
    assert start.reserved_bytes == 3 * 2 * 8192 * 512
    cache.allocate("a")
    for _ in range(4):
        cache.writing(["a"], [1000]).commit()
    usage = cache.usage()
    assert usage.needed_bytes == 4000 * 2 * 512
    assert usage.needed_bytes <= usage.committed_bytes <= usage.needed_bytes + 2 * (4 * ranges._GRAIN + 256 * 512)
    cache.free("a")
    assert cache.usage().committed_bytes == usage.committed_bytes, "kept for the next sequence"
    cache.trim()
    assert cache.usage().committed_bytes == 2 * ranges._GRAIN
    assert cache.layer(0).keys.shape == (3, 8192, 2, 32)
    assert cache.layer(0).keys.untyped_storage().data_ptr() == cache.layer(1).values.untyped_storage().data_ptr()
    cache.close()


def test_growth_happens_behind_the_steps():
    cache = virtual()
    cache.allocate("a")
    cache.writing(["a"], [100]).commit()
    waited = cache.usage().waited_growths
    for _ in range(1500):
        cache.writing(["a"]).commit()
        for future in list(cache._storage._coming.values()):
            future.result()
    usage = cache.usage()
    assert usage.waited_growths == waited
    assert usage.growths > waited + 5
    cache.close()


def test_virtual_memory_that_is_short_is_told_before_anything_is_written():
    limit = 3_000_000
    cache = virtual(limit_bytes=limit)
    cache.allocate("a")
    cache.allocate("b")
    cache.writing(["a"], [1000]).commit()
    before = cache.usage()
    with pytest.raises(
        lz.KVCacheError, match=r"\[VIRTUAL_MEMORY_EXHAUSTED\] .*wanted \d+ bytes more, got \d+ of 3000000"
    ):
        cache.writing(["a", "b"], [10, 4000])
    after = cache.usage()
    assert (after.tokens, after.free_pages) == (before.tokens, before.free_pages)
    assert after.committed_bytes <= limit
    cache.free("a")
    cache.writing(["b"], [2000]).commit()  # what the free row had is given back first
    with pytest.raises(lz.KVCacheError, match=r"wanted at most 8192 tokens a sequence \(max_length\), got 9000"):
        cache.writing(["b"], [7000])
    cache.close()


def test_rows_serve_contiguous_kernels():
    for form in ("contiguous", "virtual", "unified"):
        for layout in ("NHD", "HND") if form != "virtual" else ("NHD",):
            cache = made(**FORMS[form], layout=layout)
            names = [cache.allocate() for _ in range(3)]
            new, _ = appended(cache, names, [9, 3, 14])
            keys, values, lens = cache.rows(names, 0, exact=form == "contiguous")
            assert lens.tolist() == [9, 3, 14]
            query = torch.randn(3, 1, 4, 32)
            if layout == "HND":
                got = lz.attention(query.transpose(1, 2), keys, values, kv_lens=lens, layout="BHSD").transpose(1, 2)
            else:
                got = lz.attention(query, keys, values, kv_lens=lens, layout="BSHD")
            for row, name in enumerate(names):
                want = lz.attention(query[row : row + 1], *(each[None] for each in new[name][1:]), layout="BSHD")
                torch.testing.assert_close(got[row : row + 1], want, rtol=1e-5, atol=1e-5)
            with pytest.raises(lz.KVCacheError, match="rows that follow each other"):
                cache.rows([names[2], names[0]], 0)
            cache.close()


# caches of float8 and int8


@at_once("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@at_once("scales", ["tensor", "head", "token"])
@at_once("layout", ["NHD", "HND"])
def test_a_cache_of_codes_is_read_with_its_scales(dtype, scales, layout):
    cache = lz.KVCache(2, 2, 32, pages=6, page_size=16, layout=layout, dtype=dtype, scales=scales)
    cache.allocate("a")
    cache.allocate("b")
    layer = cache.layer(1)
    query, key, value = drawn(25)
    key[:, 1] *= 3  # a head of larger numbers
    with cache.writing(["a", "b"], [20, 5]) as step:
        if scales == "token":
            layer.fit_scales(key, value, step.slots)
        else:
            layer.key_scale.fill_(0.09)
            layer.value_scale.fill_(0.04)
        lz.append_quantized_kv_(key, value, layer, slot_mapping=step.slots)
        got = lz.paged_attention(query, layer, step=step)
        with pytest.raises(
            lz.InvalidCallError, match=r"key.*got one of (float8|int8).*append_quantized_kv_ writes codes"
        ):
            lz.append_paged_kv_(key, value, layer, slot_mapping=step.slots)
        with pytest.raises(lz.InvalidCallError, match="key_scale: wanted a float32 tensor with a quantized cache"):
            lz.paged_attention(
                query, layer.keys, layer.values, step.block_tables, step.context_lens, cu_seqlens_q=step.cu_seqlens_q,
                layout=layout,
            )  # fmt: skip
    want = torch.cat([plain(query[:20], key[:20], value[:20]), plain(query[20:], key[20:], value[20:])])
    rounding = {torch.float8_e4m3fn: 0.2, torch.float8_e5m2: 0.4, torch.int8: 0.15}[dtype]
    assert (got - want).abs().mean() < rounding / 4
    with cache.writing(["a", "b"]) as step:
        query, key, value = drawn(2)
        if scales == "token":
            layer.fit_scales(key, value, step.slots)
        lz.append_quantized_kv_(key, value, layer, slot_mapping=step.slots)
        tokens = lz.paged_attention(query, layer, step=lz.StepMetadata(
            step.block_tables, step.context_lens, cu_seqlens_q=torch.arange(3, dtype=torch.int32)
        ))  # fmt: skip
        torch.testing.assert_close(lz.paged_attention(query.unsqueeze(1), layer, step=step)[:, 0], tokens)
    cache.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.int8}, "scales: wanted tensor, head, token with heads in NHD or HND .*, got None"),
        ({"dtype": torch.int8, "scales": "row"}, "scales: wanted .* got 'row'"),
        ({"scales": "head"}, "scales: wanted None for a cache of torch.float32, got 'head'"),
        ({"dtype": torch.int8, "scales": "head", "layout": "VLLM"}, "scales: wanted .*"),
        ({"dtype": torch.int32}, "dtype: wanted float32, .* or int8, got torch.int32"),
    ],
)
def test_scales_go_with_codes(change, message):
    with pytest.raises(lz.InvalidCallError, match=message):
        lz.KVCache(**{"layers": 1, "kv_heads": 2, "head_dim": 8, "pages": 4, "dtype": torch.float32} | change)


@pytest.mark.parametrize("end", ["free", "truncate", "swap_out", "abort"])
def test_a_step_whose_sequence_gave_tokens_back_reads_and_writes_no_others(end):
    cache = lz.KVCache(layers=1, kv_heads=2, head_dim=32, pages=4, page_size=16, dtype=torch.float32)
    cache.allocate("alice")
    query, *_ = drawn(4)
    step = cache.writing(["alice"], [4])
    if end == "abort":
        cache.abort(step)
    else:
        cache.commit(step)
        lz.paged_attention(query, cache.layer(0), step=step)
        cache.truncate("alice", 3) if end == "truncate" else getattr(cache, end)("alice")
    layer = cache.layer(0)

    def by_tensors():
        starts = {"cu_seqlens_q": step.cu_seqlens_q, "step": step}
        return lz.paged_attention(query, layer.keys, layer.values, step.block_tables, step.context_lens, **starts)

    for use in (lambda: step.slots, lambda: lz.paged_attention(query, layer, step=step), by_tensors):
        with pytest.raises(lz.KVCacheError, match="aborted" if end == "abort" else "freed, truncated or swapped out"):
            use()


@pytest.mark.usefixtures("path")
def test_tensors_of_a_layer_are_read_by_no_step_that_its_cache_refuses():
    """A call by tensors costs less than one with a layer, and looks as closely at its step."""
    cache = made()
    names = [cache.allocate(name) for name in ("first", "second")]
    cache.writing(names, [20, 20]).commit()
    step = cache.writing(["second"])
    step.commit()
    query, keys, values = torch.randn(1, 1, 4, 32), cache.layer(0).keys, cache.layer(0).values

    def attend():
        return lz.paged_attention(query, keys, values, step.block_tables, step.context_lens, step=step)

    attend()
    attend()
    cache.free("first")
    attend()
    cache.compact()
    with pytest.raises(lz.KVCacheError, match=r"made since pages moved.*writing\(\) begins another"):
        attend()
    step = cache.writing(["second"])
    step.commit()
    attend()
    cache.close()
    for use in (attend, lambda: step.slots):
        with pytest.raises(lz.KVCacheError, match="got one that was closed"):
            use()


@pytest.mark.parametrize("strategy", ["paged", "virtual"])
def test_a_limit_of_memory_holds_from_the_beginning(strategy):
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": torch.float32, "strategy": strategy}
    sizes |= {"pages": 4, "page_size": 16} if strategy == "paged" else {"max_sequences": 4, "max_length": 64}
    with pytest.raises(lz.KVCacheError, match="got a limit of 100"):
        lz.KVCache(**sizes, limit_bytes=100)
    for wrong in (0, -5, "x", True):
        with pytest.raises(lz.InvalidCallError, match="limit_bytes: wanted a number"):
            lz.KVCache(**sizes, limit_bytes=wrong)
    lz.KVCache(**sizes, limit_bytes=2**24).close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers": 2**40}, "layers: wanted at most 65536, got 1099511627776"),
        ({"pages": 2**40}, "pages: wanted at most 2147483647, got 1099511627776"),
        ({"head_dim": 2**62}, r"\[KV_CACHE_EXHAUSTED\].*wanted \d+ bytes on cpu.*fewer pages"),
        ({"dtype": []}, r"dtype: wanted float32, .*, got \[\]"),
        ({"device": "nowhere"}, "device: wanted one that torch knows, such as 'cuda:0', got 'nowhere'"),
        ({"device": 1.5}, "device: wanted one that torch knows, such as 'cuda:0', got 1.5"),
    ],
)
def test_what_no_memory_or_library_has_is_told_by_this_one(given, said):
    with pytest.raises(lz.LayerZeroError, match=said):
        lz.KVCache(**{"layers": 2, "kv_heads": 2, "head_dim": 32, "pages": 4, "dtype": torch.float32} | given)


@pytest.mark.parametrize("name", [[], {}, (1, [2])])
def test_names_without_a_hash_are_told(name):
    cache = made()
    first = cache.allocate()
    assert name not in cache
    for call in (lambda: cache.allocate(name), lambda: cache.fork(first, name)):
        with pytest.raises(lz.LayerZeroError, match="wanted a name with a hash, such as a number or a string, got"):
            call()
    for call in (
        lambda: cache.writing([name]),
        lambda: cache.block_tables([name]),
        lambda: cache.length(name),
        lambda: cache.free(name),
    ):
        with pytest.raises(lz.LayerZeroError, match=r"wanted a sequence that was allocated \(0\), got"):
            call()
    for method in (cache.writing, cache.block_tables, cache.ragged_tables, cache.shared_prefix):
        with pytest.raises(lz.InvalidCallError, match="sequences: wanted a list of names, got 0; put one name into"):
            method(first)
    with pytest.raises(lz.InvalidCallError, match=r"counts: wanted a number or one for each sequence, got 1\.5"):
        cache.writing([first], 1.5)
    assert list(cache) == [first]
    cache.close()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_cache_says_that_it_is_not_copied(make):
    cache = lz.KVCache(1, 1, 8, pages=2, page_size=4)
    with pytest.raises(lz.KVCacheError, match=r"wanted a cache in the process .* got a copy or a pickle.*fork\(name\)"):
        make(cache)
    cache.close()

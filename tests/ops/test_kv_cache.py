"""A cache of sequences: what attention reads of it, what it refuses, how its memory grows, and why it lies where."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from launches import Counted
from layerzero.ops.kv import driver, ranges, strategy
from layerzero.ops.kv.page_table import CachedSequence, Growth
from layerzero.ops.kv.step import PackedStep
from layerzero.ops.paged import layout_record

FORMS = {
    "paged": {"pages": 12, "page_size": 16},
    "heads first": {"pages": 12, "page_size": 16, "layout": "HND"},
    "contiguous": {"max_sequences": 4, "max_length": 64, "strategy": "contiguous"},
    "virtual": {"max_sequences": 4, "max_length": 64, "strategy": "virtual"},
    "unified": {"max_sequences": 4, "max_length": 64, "strategy": "unified"},
}


def made(**form):
    return lz.KVCache(2, 2, 32, dtype=torch.float32, **(form or FORMS["paged"]))


def drawn(tokens):
    return torch.randn(tokens, 4, 32), torch.randn(tokens, 2, 32), torch.randn(tokens, 2, 32)


def appended(cache, names, counts, layer=0):
    """Write random tokens into one layer and attend; the new keys and values by name, and the output."""
    query, key, value = drawn(sum(counts))
    with cache.writing(names, counts) as step:
        lz.append_paged_kv_(key, value, cache.layer(layer), slot_mapping=step.slots)
        shaped = query.unsqueeze(1) if step.cu_seqlens_q is None else query
        output = lz.paged_attention(shaped, cache.layer(layer), step=step).reshape(query.shape)
    return dict(
        zip(names, zip(query.split(counts), key.split(counts), value.split(counts), strict=True), strict=True)
    ), output


def plain(query, keys, values):
    return lz.attention(query[None], keys[None], values[None], causal=True, layout="BSHD")[0]


@pytest.mark.parametrize("form", FORMS)
def test_sequences_attend_to_what_was_appended(form):
    cache = made(**FORMS[form])
    first, second = cache.allocate(), cache.allocate("b")
    assert (first, second, len(cache), "b" in cache, list(cache)) == (0, "b", 2, True, [0, "b"])
    held = {name: [] for name in (first, second)}
    for counts in ((17, 5), (1, 1), (4, 1), (1, 0)):
        new, output = appended(cache, [first, second], counts)
        outputs = dict(zip(new, output.split(counts), strict=True))
        for name, (query, *pair) in new.items():
            held[name].append(pair)
            keys, values = (torch.cat(each) for each in zip(*held[name], strict=True))
            torch.testing.assert_close(outputs[name], plain(query, keys, values), rtol=1e-5, atol=1e-5)
    assert [cache.length(name) for name in cache] == [23, 7]
    cache.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_fork_reads_the_same_tokens_and_writes_its_own(form):
    cache = made(**FORMS[form])
    cache.allocate("a")
    ((_, key, value),) = appended(cache, ["a"], [20])[0].values()
    assert cache.fork("a", "b") == "b"
    assert cache.fork("a", "c", 16) == "c"
    before = cache.usage()
    assert (before.tokens, before.sequences) == (20, 3)
    assert before.shared_pages == (2 if form in ("paged", "heads first") else 1)
    new, output = appended(cache, ["a", "b", "c"], [1, 1, 1])
    for row, (name, length) in enumerate((("a", 20), ("b", 20), ("c", 16))):
        query, *pair = new[name]
        keys, values = (torch.cat((old[:length], each)) for old, each in zip((key, value), pair, strict=True))
        torch.testing.assert_close(output[row : row + 1], plain(query, keys, values)[-1:], rtol=1e-5, atol=1e-5)
    cache.close()


@pytest.mark.parametrize("form", FORMS)
def test_swapped_and_moved_sequences_are_as_they_were(form):
    cache = made(**FORMS[form])
    for name, count in (("a", 9), ("b", 33), ("c", 20)):
        cache.allocate(name)
        for layer in (0, 1):
            _, key, value = drawn(count)
            if layer == 0:
                step = cache.writing([name], [count])
            lz.append_paged_kv_(key, value, cache.layer(layer), slot_mapping=step.slots)
        step.commit()

    def read(name):
        query = torch.ones(1, 1, 4, 32)
        tables, lens = cache.block_tables([name])
        return [lz.paged_attention(query, layer, block_tables=tables, context_lens=lens) for layer in cache.layers]

    before = {name: read(name) for name in ("b", "c")}
    cache.free("a")
    cache.swap_out("b")
    assert cache.usage().host_bytes == 33 * 2 * 2 * 2 * 32 * 4
    with pytest.raises(
        lz.KVCacheError, match=r"wanted a sequence on the device, got 'b' on the host; swap_in\(\) first"
    ):
        cache.table("b")
    assert cache.compact() > 0
    cache.swap_in("b")
    cache.defragment()
    for name, outputs in before.items():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(read(name), outputs, strict=True))
    cache.close()


def test_both_forms_of_tables_say_the_same():
    cache = made()
    for name, count in (("a", 16), ("b", 0), ("c", 21)):
        cache.allocate(name)
        cache.writing([name], [count]).commit()
    tables, lens = cache.block_tables(["a", "b", "c"])
    starts, pages, last = cache.ragged_tables(["a", "b", "c"])
    assert lens.tolist() == [16, 0, 21]
    assert (starts.tolist(), pages.tolist(), last.tolist()) == ([0, 1, 1, 3], [0, 1, 2], [16, 0, 5])
    assert tables.tolist() == [[0, 0], [0, 0], [1, 2]]
    assert {each.dtype for each in (tables, lens, starts, pages, last)} == {torch.int32}


def test_shared_prefixes_are_what_cascade_attention_takes():
    cache = made()
    cache.allocate("system")
    appended(cache, ["system"], [35])
    for name in ("a", "b", "c"):
        cache.fork("system", name)
    cache.allocate("alone")
    names = ["a", "alone", "b", "c"]
    new, output = appended(cache, names, [1, 1, 1, 1])
    group, other = cache.shared_prefix(names)
    assert (group.sequences, group.rows, group.shared_blocks) == (("a", "b", "c"), (0, 2, 3), 2)
    assert (other.sequences, other.shared_blocks) == (("alone",), 0)
    query = torch.cat([new[name][0] for name in group.sequences]).unsqueeze(1)
    tables, lens = cache.block_tables(group.sequences)
    step = lz.StepMetadata(tables, lens)
    got = lz.cascade_attention(query, cache.layer(0), step=step, shared_blocks=group.shared_blocks)
    torch.testing.assert_close(got[:, 0], output[list(group.rows)], rtol=1e-5, atol=1e-5)


def test_a_step_that_fails_leaves_everything_as_it_was():
    cache = made()
    cache.allocate("a")
    appended(cache, ["a"], [20])
    cache.fork("a", "b")
    before, usage = (cache.table("a"), cache.table("b")), cache.usage()
    with pytest.raises(RuntimeError, match="in the middle"), cache.writing(["a", "b"], [3, 30]):
        raise RuntimeError("in the middle")
    assert (cache.table("a"), cache.table("b")) == before
    assert cache.usage() == usage
    with pytest.raises(lz.KVCacheError, match=r"\[KV_CACHE_EXHAUSTED\] .*13 free pages .*got 10 of 12; nothing was"):
        cache.writing(["a", "b"], [1, 200])
    assert cache.usage() == usage


def test_one_step_at_a_time():
    cache = made()
    cache.allocate("a")
    cache.allocate("b")
    step = cache.writing(["a"])
    for refused in (lambda: cache.writing(["b"]), cache.compact, lambda: cache.free("a"), lambda: cache.fork("a")):
        with pytest.raises(lz.KVCacheError, match=r"commit\(\) or abort\(\)"):
            refused()
    step.abort()
    for ended in (step.commit, step.abort):
        with pytest.raises(lz.KVCacheError, match="wanted the step that is open"):
            ended()
    assert cache.length("a") == 0


def test_steps_of_other_caches_and_from_before_pages_moved_are_refused():
    cache, other = made(), made()
    for each in (cache, other):
        each.allocate("a")
        each.allocate("b")
        each.writing(["a", "b"], [20, 20]).commit()
    query = torch.randn(2, 1, 4, 32)
    step = cache.writing(["a", "b"])
    step.commit()
    with pytest.raises(lz.KVCacheError, match="wanted a step of this cache"):
        lz.paged_attention(query, other.layer(0), step=step)
    lz.paged_attention(query, cache.layer(0), step=step)
    cache.free("a")
    cache.compact()
    with pytest.raises(lz.KVCacheError, match="made since pages moved"):
        lz.paged_attention(query, cache.layer(0), step=step)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_device_that_is_not_here_is_told():
    with pytest.raises(lz.InvalidCallError, match="device: wanted one that is here, got 'cuda'"):
        made(**FORMS["paged"], device="cuda")


def test_a_layer_whose_cache_is_gone_takes_no_step_of_another():
    layer, other = made().layer(0), made()
    gc.collect()
    step = other.writing([other.allocate()], [3])
    with pytest.raises(lz.KVCacheError, match="wanted a step of this cache, got one of another"):
        lz.paged_attention(torch.randn(3, 4, 32), layer, step=step)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("batch", [1, 64])
def test_the_next_step_on_a_cpu_launches_nothing_whatever_its_batch(batch, count):
    cache, names = made(pages=512), list(range(batch))
    for name in names:
        cache.allocate(name)
    step = cache.writing(names, count, blocks=4)
    step.commit()
    with Counted() as counted:
        cache.writing(names, count, reuse=step)
        slots = step.slots
    assert counted.calls == []
    wanted = [cache.table(name)[place // 16] * 16 + place % 16 for name in names for place in range(count, 2 * count)]
    assert slots.tolist() == wanted
    step.abort()


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_what_a_step_sends_is_what_the_book_says(data):
    cache = made(**FORMS[data.draw(st.sampled_from(["paged", "contiguous"]))])
    names, step = [cache.allocate() for _ in range(3)], None
    for _ in range(data.draw(st.integers(1, 5))):
        room = min(64, cache.usage().free_pages * cache.page_size // 3)
        counts = [data.draw(st.sampled_from([1, 1, 0, 7, 40])) for _ in names]
        if any(cache.length(name) + count > room for name, count in zip(names, counts, strict=True)):
            for name in names:
                cache.truncate(name, data.draw(st.integers(0, cache.length(name))))
            continue
        fits = (
            step is not None and sum(step.counts) == sum(counts) and (step.cu_seqlens_q is None) == (set(counts) == {1})
        )
        kept = {"reuse": step} if fits else {"blocks": 12}
        step = cache.writing(names, counts, **kept)
        lens = [cache.length(name) for name in names]
        tables = [cache.table(name) for name in names]
        columns = step.block_tables.shape[1]
        assert step.block_tables.tolist() == [[*table, *[0] * (columns - len(table))] for table in tables]
        assert step.context_lens.tolist() == step.host[0].tolist() == lens
        size = cache.page_size
        assert step.slots.tolist() == [
            table[place // size] * size + place % size
            for table, length, count in zip(tables, lens, counts, strict=True)
            for place in range(length - count, length)
        ]
        assert step.positions.tolist() == [
            place for length, count in zip(lens, counts, strict=True) for place in range(length - count, length)
        ]
        step.abort() if data.draw(st.booleans()) else step.commit()


def test_a_reused_step_has_as_many_tokens_as_its_slots():
    cache = made()
    cache.allocate("a")
    step = cache.writing(["a"], 3)
    step.commit()
    with pytest.raises(lz.InvalidCallError, match="reuse: wanted 3 new tokens as its slots have, got 2"):
        cache.writing(["a"], 2, reuse=step)
    assert cache.length("a") == 3


@pytest.mark.parametrize(("tokens", "columns"), [(1, 16), (255, 16), (256, 16), (257, 32), (600, 64)])
def test_tables_have_columns_by_class(tokens, columns):
    cache = made(pages=64, page_size=16)
    with cache.writing([cache.allocate()], [tokens]) as step:
        assert step.block_tables.shape == (1, columns)
        assert step.max_context_len == -(-tokens // 16) * 16


def test_lengths_on_the_host_outlive_the_steps_after():
    cache = made()
    cache.allocate("a")
    step = cache.writing(["a"])
    step.commit()
    first = step.host[0]
    for _ in range(2):
        cache.writing(["a"], reuse=step).commit()
    assert (first.tolist(), step.host[0].tolist()) == ([1], [3])


def test_a_reused_step_keeps_its_buffers():
    cache = made()
    cache.allocate("a")
    first = cache.writing(["a"], blocks=4, capturable=True)
    first.commit()
    slots, pointer = first.slots, first.block_tables.data_ptr()
    for length in range(2, 20):
        step = cache.writing(["a"], reuse=first)
        assert step is first
        assert step.slots is slots
        assert slots.tolist() == [cache.table("a")[-1] * 16 + (length - 1) % 16]
        assert (step.block_tables.data_ptr(), step.context_lens.tolist()) == (pointer, [length])
        assert step.positions.tolist() == [length - 1]
        step.commit()
    with pytest.raises(lz.InvalidCallError, match="reuse: wanted a step of as many sequences"):
        cache.writing(["a"], 2, reuse=first)


@pytest.mark.parametrize("by_starts", [False, True])
def test_numbers_that_are_staged_on_the_host_are_those_that_are_written_in_place(by_starts):
    """What a GPU gets by a copy, with memory of this host in its place."""
    entries = [CachedSequence(array("i", [3, 5]), 20), CachedSequence(array("i", [7]), 9)]
    counts = (3, 1) if by_starts else (1, 1)
    growth = Growth(entries, [20 - counts[0], 8], [20, 9])
    made_ = [
        PackedStep(2, 4, sum(counts), 16, torch.device("cpu"), by_starts=by_starts, staged=each) for each in (0, 1)
    ]
    for _again in range(3):
        plain, staged = (each.fill(growth, counts) for each in made_)
        assert plain == staged
        for name in ("tables", "lens", "starts", "slots", "positions"):
            one, other = (getattr(each, name) for each in made_)
            assert one is other is None or one.tolist() == other.tolist()
    assert made_[1].slots.tolist() == ([81, 82, 83, 120] if by_starts else [83, 120])


def test_sequences_that_share_a_page_share_it_again_after_an_abort():
    """Of two that write into one page in a step, the last one keeps it: until the step is taken back."""
    cache = made()
    cache.allocate("a")
    cache.writing(["a"], [3]).commit()
    cache.fork("a", "b")
    cache.writing(["a", "b"]).abort()
    assert cache.table("a") == cache.table("b")
    cache.writing(["b"]).commit()
    assert cache.table("a") != cache.table("b")


def test_a_step_is_filled_for_other_sequences():
    cache = made()
    for name, tokens in (("a", 3), ("b", 20), ("c", 40)):
        cache.allocate(name)
        cache.writing([name], [tokens]).commit()
    step = cache.writing(["a", "b"], blocks=4, capturable=True)
    step.commit()
    slots = step.slots
    with cache.writing(["c", "a"], reuse=step) as again:
        assert again is step
        assert step.sequences == ("c", "a")
        assert slots.tolist() == [cache.table("c")[2] * 16 + 8, cache.table("a")[0] * 16 + 4]
        assert step.block_tables[0, :3].tolist() == cache.table("c")
    with pytest.raises(lz.InvalidCallError, match="reuse: wanted a step of as many sequences"):
        cache.writing(["a"], reuse=step)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.writing(["x"]), r"wanted a sequence that was allocated \('a', 'b'\), got 'x'"),
        (lambda cache: cache.writing([["a"]]), "unhashable|wanted a sequence that was allocated"),
        (lambda cache: cache.writing(["a", "a"]), "sequences: wanted each once, got one twice"),
        (lambda cache: cache.writing(["a"], [1, 2]), "counts: wanted 1, one a sequence, got 2"),
        (lambda cache: cache.writing(["a"], [-1]), "counts: wanted numbers of at least 0, got -1"),
        (lambda cache: cache.writing(["a"], [True]), "counts: wanted numbers of at least 0, got True"),
        (lambda cache: cache.writing(["a"], [40], blocks=2), "blocks: wanted at least 3 columns"),
        (
            lambda cache: cache.writing(["a"], reuse="a"),
            r"reuse: wanted a step that writing\(\) gave, or None, got 'a'",
        ),
        (lambda cache: cache.layer(2), "KVCache.layer: number: wanted a layer from 0 to 1, got 2"),
        (lambda cache: cache.layer(-1), "wanted a layer from 0 to 1, got -1"),
        (lambda cache: cache.layer("a"), "wanted a layer from 0 to 1, got 'a'"),
        (lambda cache: cache.free("x"), "got 'x'"),
        (lambda cache: cache.fork("a", tokens=1), "tokens: wanted 0 to 0 or None, got 1"),
        (lambda cache: cache.truncate("a", 1), "tokens: wanted 0 to 0, got 1"),
        (lambda cache: cache.swap_in("a"), "wanted a sequence on the host, got 'a'"),
        (lambda cache: cache.allocate("a"), "wanted a name that no sequence has, got 'a'"),
        (lambda cache: cache.rows(["a"], 0), "wanted a cache of rows with heads, got a paged one"),
    ],
)
def test_mistakes_are_told(call, message):
    cache = made()
    cache.allocate("a")
    cache.allocate("b")
    with pytest.raises((lz.LayerZeroError, TypeError), match=message):
        call(cache)
    assert cache.usage().free_pages == 12


@at_once(
    "change, message",
    [
        ({"layers": 0}, "layers: wanted a number of at least 1, got 0"),
        ({"captured": "no"}, "captured: wanted True or False, got 'no'"),
        ({"device": 2**70}, "device: wanted one that torch knows"),
        ({"kv_heads": None}, "kv_heads: wanted a number of at least 1, got None"),
        ({"layout": "DNH"}, "layout: wanted NHD or HND or VLLM or VLLM_CPU, got 'DNH'"),
        ({"dtype": torch.bool}, "dtype: wanted float32, .* got torch.bool"),
        ({"latent": (512, 64)}, "latent: wanted no kv_heads, head_dim and value_dim with it"),
        ({"pages": None}, "max_sequences and max_length: wanted both for a contiguous cache"),
        ({"strategy": "virtual"}, "pages: wanted None for a virtual cache"),
        ({"max_length": 64}, "max_length: wanted None with pages, which say how many tokens fit, got 64"),
        ({"strategy": "elsewhere"}, "strategy: wanted contiguous, paged, virtual, unified or None, got 'elsewhere'"),
        ({"layout": "VLLM", "head_dim": 6}, "head_dim: wanted a multiple of 4 in VLLM, got 6"),
    ],
)
def test_what_is_no_cache_is_refused(change, message):
    given = {"layers": 1, "kv_heads": 2, "head_dim": 8, "pages": 4, "dtype": torch.float32} | change
    with pytest.raises(lz.InvalidCallError, match=message):
        lz.KVCache(**given)


def test_a_closed_cache_says_so_and_its_memory_is_free_for_another_layout():
    cache = made()
    layer, name = cache.layer(0), cache.allocate()
    cache.close()
    cache.close()
    for ask in (lambda: layer.keys, lambda: cache.length(name), cache.usage, cache.allocate):
        with pytest.raises(lz.KVCacheError, match="got one that was closed; make another"):
            ask()
    query = torch.randn(1, 1, 4, 32)
    step = lz.StepMetadata(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(lz.KVCacheError, match="got one that was closed"):
        lz.paged_attention(query, layer, step=step)
    assert "closed" in repr(cache)
    assert "closed" in repr(layer), "what shows an object does not raise"


def test_layers_say_in_which_layout_they_are_written():
    gc.collect()
    cache = made(**FORMS["heads first"])
    keys, values = cache.layer(0).keys, cache.layer(0).values
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    query = torch.randn(1, 1, 4, 32)
    with pytest.raises(lz.InvalidCallError, match="KV_CACHE_LAYOUT_MISMATCH"):
        lz.paged_attention(query, keys.transpose(1, 2), values.transpose(1, 2), tables, lens)
    split = made(pages=4, layout="VLLM")
    new = drawn(5)[1:]
    split.allocate("a")
    with split.writing(["a"], [5]) as step:
        split.layer(1).append(*new, step.slots)
        assert all(torch.equal(*pair) for pair in zip(split.layer(1).gather(step.slots), new, strict=True))
        for layout in ("NHD", "HND"):
            other = split.layer(1).converted(layout)
            got = lz.gather_paged_kv(other, slot_mapping=step.slots)
            assert all(torch.equal(*pair) for pair in zip(got, new, strict=True))
        with pytest.raises(lz.InvalidCallError, match=r"KV_CACHE_LAYOUT_MISMATCH.*converted\(\)"):
            lz.paged_attention(query, split.layer(1), step=step)
    del step, other
    split.close()
    cache.close()
    assert not layout_record._LAYOUTS


def test_a_latent_cache_brings_its_two_planes():
    cache = lz.KVCache(2, latent=(512, 64), pages=4, page_size=16)
    cache.allocate("a")
    layer = cache.layer(1)
    assert (layer.ckv_cache.shape, layer.kpe_cache.shape) == ((4, 16, 512), (4, 16, 64))
    with cache.writing(["a"], [20]) as step:
        new = torch.randn(20, 512, dtype=torch.bfloat16), torch.randn(20, 64, dtype=torch.bfloat16)
        layer.append(*new, step.slots)
        queries = torch.randn(1, 2, 16, 512, dtype=torch.bfloat16), torch.randn(1, 2, 16, 64, dtype=torch.bfloat16)
        output = lz.mla_attention(*queries, layer, step=step, scale=0.07)
        with lz.scope(debug=True):
            assert torch.equal(lz.mla_attention(*queries, layer, step=step, scale=0.07), output)
        tables = step.block_tables, step.context_lens
        planes = layer.ckv_cache.contiguous(), layer.kpe_cache.contiguous()
        torch.testing.assert_close(output, lz.mla_attention(*queries, *planes, *tables, 0.07), rtol=2e-2, atol=2e-2)
    assert layer.ckv_cache.untyped_storage().data_ptr() == layer.kpe_cache.untyped_storage().data_ptr()
    with pytest.raises(TypeError, match="missing required arguments: 'scale'"):
        lz.mla_attention(*queries, layer, step=step)
    slots = step.slots
    assert torch.equal(layer.ckv_cache.flatten(0, 1)[slots], new[0])
    assert torch.equal(layer.kpe_cache.flatten(0, 1)[slots], new[1])
    with pytest.raises(lz.InvalidCallError, match="got one of latent attention"):
        lz.paged_attention(torch.randn(1, 1, 4, 32), layer, step=step)


@pytest.mark.slow
def test_the_code_of_the_serving_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "import vllm" in code:  # tests/engines runs it, where vLLM has all that it needs
            continue
        own = dict(names)
        exec(code, own)  # a later section's names are not this one's
        made = [value for name, value in own.items() if names.get(name) is not value]
        if not names or any(isinstance(each, lz.KVCache) for each in made):
            names.update(own)
    cache, group = names["cache"], names["group"]
    assert (group.shared_blocks, group.rows) == (2, (0, 1, 2))
    assert ([*cache], cache.usage().swapped, cache.length("system")) == (["system", 0, 2], 1, 40)
    want = lz.paged_attention(names["query"][2:], names["layer"], step=lz.StepMetadata(*cache.block_tables([2])))
    torch.testing.assert_close(names["output"][2:], want, rtol=1e-5, atol=1e-5)


# calls with a cache in place of tensors


@pytest.mark.usefixtures("path")
def test_calls_take_a_cache_in_place_of_its_tensors():
    for layout in ("NHD", "HND"):
        cache = lz.PagedCache.allocate(4, 16, 2, 32, layout=layout, dtype=torch.float32)
        query, key, value = drawn(18)
        cos, sin = lz.rope_table(64, 32, base=10000.0)
        slots = torch.arange(18)
        for form in ({"key_cache": cache}, {"key_cache": cache, "value_cache": cache, "layout": layout}):
            turned = lz.rope_append_(query, key, value, cos, sin, **form, positions=slots, slot_mapping=slots)
        tables, lens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([18], dtype=torch.int32)
        starts = torch.tensor([0, 18], dtype=torch.int32)
        step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts)
        want = lz.paged_attention(
            turned, cache.keys, cache.values, tables, lens, layout=layout, cu_seqlens_q=starts, step=step
        )
        assert torch.equal(lz.paged_attention(turned, cache, step=step), want)
        assert torch.equal(lz.paged_attention(turned, cache, cache, tables, lens, cu_seqlens_q=starts), want)
        assert lz.which("paged_attention", turned, cache, step=step) is not None
        rows = lz.KVCache(1, 2, 32, max_sequences=2, max_length=32, layout=layout, dtype=torch.float32)
        lz.append_kv_(key[None], value[None], rows.layer(0).keys[:1], rows.layer(0).values[:1], slots, layout=layout)
        assert torch.equal(lz.gather_paged_kv(rows.layer(0), slot_mapping=slots)[0], key)
        lz.copy_kv_blocks_(cache, from_pages=torch.tensor([0, 1]), to_pages=torch.tensor([1, 0]))
        assert torch.equal(lz.gather_paged_kv(cache, slot_mapping=slots[:2] + 16)[1], value[:2])


@pytest.mark.usefixtures("path")
def test_a_cache_beside_other_tensors_or_in_another_layout_is_refused():
    cache = lz.PagedCache.allocate(4, 16, 2, 32, layout="NHD", dtype=torch.float32)
    query, tables, lens = (
        torch.randn(1, 1, 4, 32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
    )
    with pytest.raises(lz.InvalidCallError, match="layout: wanted 'NHD', which the cache is written in, got 'HND'"):
        lz.paged_attention(query, cache, block_tables=tables, context_lens=lens, layout="HND")
    with pytest.raises(lz.InvalidCallError, match="value_cache: wanted that of the same cache, or nothing with it"):
        lz.paged_attention(query, cache, torch.zeros(4, 16, 2, 32), tables, lens)
    with pytest.raises(lz.InvalidCallError, match="query: wanted a tensor, got a PagedCache"):
        lz.paged_attention(cache, cache.keys, cache.values, tables, lens)
    with pytest.raises(TypeError, match="missing required arguments: 'block_tables', 'context_lens'"):
        lz.paged_attention(query, cache)
    with pytest.raises(
        TypeError, match=r"'value_cache'; wanted value_cache .pages, page_size, kv_heads, value_dim., got query"
    ):
        lz.paged_attention(query, cache.keys, block_tables=tables, context_lens=lens)


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


def test_without_a_driver_there_is_no_virtual_memory(monkeypatch):
    monkeypatch.setattr(driver, "driver", lambda: None)
    assert strategy._driver_version() == 0
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

    monkeypatch.setattr(driver.ctypes, "CDLL", Answers)
    found = driver.Driver()
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
        ({"device": "nowhere"}, "device: wanted one that torch knows, such as 'cuda:0', or None, got 'nowhere'"),
        ({"device": 1.5}, "device: wanted one that torch knows, such as 'cuda:0', or None, got 1.5"),
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

"""Steps of a cache of sequences: one at a time, what they send, and what they keep for the next."""

from __future__ import annotations

import gc
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from kv_caches import FORMS, made
from launches import Counted
from layerzero.ops.kv.page_table import CachedSequence, Growth
from layerzero.ops.kv.step import PackedStep


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

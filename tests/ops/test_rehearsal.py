"""Steps before traffic: they are of every class that traffic brings, and leave the cache as it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.engine import dispatch
from layerzero.ops.kv.step import bound_for, columns_for, counts_of, promise_for


def made(**more):
    return lz.KVCache(1, 2, 16, dtype=torch.float32, **({"pages": 64, "page_size": 4} | more))


def class_of(counts):
    """What a call's choice may depend on of the new tokens of its sequences."""
    one = all(each == 1 for each in counts)
    promises = () if one else (bound_for(max(counts)), promise_for(counts))
    return (len(counts).bit_length(), (len(counts) + 1).bit_length(), sum(counts).bit_length(), *promises)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from([1, 1, 1, 2, 5, 17, 40, 70]), min_size=1, max_size=20))
def test_every_step_is_of_a_class_that_was_rehearsed(counts):
    counts.sort(key=lambda each: each > 1)  # decodes first, as a step has them
    if sum(counts) > 128:
        return
    rehearsed = {class_of(each) for batch in range(1, 21) for each in counts_of(batch, 128)}
    assert class_of(counts) in rehearsed


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 5000))
def test_promises_hold(counts, pages):
    assert bound_for(max(counts)) >= max(counts)
    first = next((place for place, count in enumerate(counts) if count != 1), len(counts))
    promised = promise_for(counts)
    assert (promised is None) == (first == 0)
    assert promised is None or first / 4 < promised <= first
    assert columns_for(pages) >= pages


def test_a_rehearsal_leaves_the_cache_as_it_was():
    cache = made()
    kept = cache.allocate("kept")
    cache.writing([kept], [5]).commit()
    before = cache.usage()
    steps = [(step.counts, step.block_tables.shape) for step in cache.rehearsal(3, 12, 100)]
    assert cache.usage() == before
    assert [*cache] == ["kept"]
    assert {shape[1] for _, shape in steps} == {16, 32}
    assert len(steps) == len(set(steps))
    for step in cache.rehearsal(3, 12, 100):
        assert step.is_open
        break
    assert cache.usage() == before


def test_no_call_is_chosen_for_after_a_rehearsal(monkeypatch):
    """Random steps of growing sequences: the attention of each is of a class that is known."""
    cache, missed, generator = made(pages=200), [], torch.Generator().manual_seed(1)

    def attend(step):
        tokens = len(step.slots)
        query, key = torch.zeros(tokens, 4, 16), torch.zeros(tokens, 2, 16)
        layer = cache.layers[0]
        lz.append_paged_kv_(key, key, layer.keys, layer.values, step.slots)
        read = layer.keys, layer.values, step.block_tables, step.context_lens
        if step.cu_seqlens_q is None:
            return lz.paged_attention(query.unsqueeze(1), *read, step=step)
        promises = {"max_seqlen_q": step.max_seqlen_q, "decodes": step.decodes}
        return lz.paged_attention(query, *read, step=step, cu_seqlens_q=step.cu_seqlens_q, **promises)

    for step in cache.rehearsal(6, 24, 120):
        attend(step)
    usual = dispatch.Dispatcher.miss
    monkeypatch.setattr(dispatch.Dispatcher, "miss", lambda self, *call: (missed.append(self), usual(self, *call))[1])
    names = []
    for _ in range(150):
        number = int(torch.randint(0, 1000, (), generator=generator))
        if len(names) < 6 and number % 3 == 0:
            names.append(cache.allocate())
        if names and number % 7 == 0:
            cache.free(names.pop(number % len(names)))
        if not names:
            continue
        counts = [1 if cache.length(name) else 1 + number % 9 for name in names]
        order = sorted(range(len(names)), key=lambda place: counts[place] > 1)
        for name in names:
            if cache.length(name) > 100:
                cache.truncate(name, 1)
        if sum(counts) > 24:
            continue
        with cache.writing([names[place] for place in order], [counts[place] for place in order]) as step:
            attend(step)
    assert missed == []


def test_bad_numbers_are_refused_by_name():
    for given_, said in (
        ((0, 4, 4), "sequences: wanted a number of at least 1, got 0"),
        ((4, 2, 4), "tokens: wanted at least one for each of 4 sequences, got 2"),
        ((4, 4, "long"), "length: wanted a number of at least 1"),
    ):
        with pytest.raises(lz.InvalidCallError, match=said):
            next(made().rehearsal(*given_))

"""Prompts that begin alike share pages: what is found, what is evicted first, and who may write."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz


def made(pages=8, **more):
    return lz.KVCache(1, 1, 2, pages=pages, page_size=4, dtype=torch.float32, **more)


def written(cache, tokens, name=None, *, publish=True):
    """A sequence of these tokens, whose keys are the tokens; pages that are known are not written again."""
    name = cache.allocate(name, prompt=tokens)
    have = cache.length(name)
    with cache.writing([name], [len(tokens) - have]) as step:
        key = torch.tensor(tokens[have:], dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 2).contiguous()
        lz.append_paged_kv_(key, key, cache.layers[0], slot_mapping=step.slots)
    if publish:
        cache.publish(name, tokens)
    return name


def test_a_prompt_finds_full_pages_and_never_its_last_token():
    cache = made()
    first = written(cache, [*range(10)])
    found = {length: cache.allocate(prompt=[*range(length)]) for length in (4, 5, 8, 9, 12)}
    assert {length: cache.length(name) for length, name in found.items()} == {4: 0, 5: 4, 8: 4, 9: 8, 12: 8}
    assert cache.table(found[12]) == cache.table(first)[:2]
    assert cache.usage().found_tokens == 4 + 4 + 8 + 8
    other = cache.allocate(prompt=[9, *range(1, 10)])
    assert cache.length(other) == 0


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_tokens_may_be_bytes(kind):
    """Eight of them were read as one number of 64 bits."""
    cache = made()
    assert cache.publish(written(cache, [*range(16)], publish=False), kind(range(16))) == 4
    assert cache.length(cache.allocate(prompt=kind(range(10)))) == 8
    assert cache.length(cache.allocate(prompt=[*range(10)])) == 8


def test_the_second_page_is_known_by_the_first_as_well():
    cache = made()
    written(cache, [1, 1, 1, 1, 7, 7, 7, 7])
    assert cache.length(cache.allocate(prompt=[2, 2, 2, 2, 7, 7, 7, 7, 0])) == 0


def test_a_salt_parts_what_is_alike():
    cache = made()
    name = written(cache, [*range(8)], publish=False)
    assert cache.publish(name, [*range(8)], salt="adapter") == 2
    assert cache.length(cache.allocate(prompt=[*range(9)])) == 0
    assert cache.length(cache.allocate(prompt=[*range(9)], salt="adapter")) == 8


def test_what_is_idle_longest_is_evicted_first_and_a_prefix_loses_its_end():
    cache = made(pages=4)
    for start in (0, 100):
        cache.free(written(cache, [*range(start, start + 8)]))
    assert (cache.usage().known_pages, cache.usage().free_pages) == (4, 4)
    cache.free(cache.allocate(prompt=[*range(9)]))  # used later than the other
    written(cache, [7, 8, 9])
    assert cache.usage().evictions == 1
    assert cache.length(cache.allocate("late", prompt=[*range(100, 109)])) == 4
    assert cache.length(cache.allocate(prompt=[*range(9)])) == 8


def test_no_page_in_use_is_evicted():
    cache = made(pages=3)
    written(cache, [*range(8)], "a")
    written(cache, [50], "b", publish=False)
    with pytest.raises(lz.KVCacheError) as raised:
        cache.writing(["b"], [4])
    assert raised.value.code is lz.ReasonCode.KV_CACHE_EXHAUSTED
    cache.free("a")
    cache.writing(["b"], [4]).commit()
    assert cache.usage().known_pages == 1


def test_a_known_page_is_copied_before_it_is_written():
    cache = made()
    name = written(cache, [*range(8)])
    cache.truncate(name, 6)
    before = cache.table(name)
    with cache.writing([name], [1]) as step:
        key = torch.full((1, 1, 2), 99.0)
        lz.append_paged_kv_(key, key, cache.layers[0], slot_mapping=step.slots)
    assert cache.table(name)[0] == before[0] != cache.table(name)[1] != before[1]
    other = cache.allocate(prompt=[*range(9)])
    keys = cache.layers[0].keys[torch.tensor(cache.table(other))].flatten(0, 1)[:, 0, 0]
    assert keys.tolist() == [float(each) for each in range(8)]


def test_a_step_that_is_aborted_gives_the_known_page_back():
    cache = made(pages=3)
    name = written(cache, [*range(8)])
    cache.truncate(name, 6)
    before = cache.table(name)
    cache.writing([name], [1]).abort()
    assert cache.table(name) == before
    assert cache.length(cache.allocate(prompt=[*range(9)])) == 8


def test_bad_arguments_are_refused_by_name():
    cache = made()
    name = written(cache, [*range(8)])
    for call, said in (
        (lambda: cache.allocate(prompt=5), "prompt: wanted a list of token ids, got 5"),
        (lambda: cache.allocate(prompt=[1.5]), "prompt: wanted a list of token ids"),
        (lambda: cache.allocate(prompt=[1], salt=3), "salt: wanted a string, got 3"),
        (lambda: cache.publish(name, [*range(9)]), "tokens: wanted at most the 8 that the sequence has, got 9"),
    ):
        with pytest.raises(lz.InvalidCallError, match=said):
            call()
    with pytest.raises(lz.KVCacheError, match="wanted a sequence that was allocated"):
        cache.publish("nobody", [1])
    rows = lz.KVCache(1, 1, 2, max_sequences=2, max_length=8, dtype=torch.float32)
    with pytest.raises(lz.KVCacheError, match="wanted a paged cache for prompt="):
        rows.allocate(prompt=[1])


def test_a_name_that_is_taken_leaves_known_pages_free():
    cache = made()
    cache.free(written(cache, [*range(8)]))
    cache.allocate("taken")
    with pytest.raises(lz.KVCacheError, match="wanted a name that no sequence has"):
        cache.allocate("taken", prompt=[*range(9)])
    assert (cache.free_pages, cache.usage().found_tokens) == (8, 0)


def test_idle_pages_that_others_move_into_count_as_evicted():
    cache = made()
    first = written(cache, [*range(8)])
    written(cache, [9, 9, 9], publish=False)
    cache.free(first)
    assert cache.compact() == 1
    assert (cache.usage().known_pages, cache.usage().evictions) == (1, 1)

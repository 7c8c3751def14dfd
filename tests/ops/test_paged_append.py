"""Appending to paged caches: what is written, and what a call refuses."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.ops.paged.append import append_paged_kv_
from paged_calls import PAGE


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_writes_its_slots_and_nothing_else(layout):
    torch.manual_seed(0)
    keys, values = torch.randn(3, PAGE, 2, 8), torch.randn(3, PAGE, 2, 6)
    new_keys, new_values = torch.randn(4, 2, 8), torch.randn(4, 2, 6)
    slots = torch.tensor([11, -1, 0, 6])
    wanted = [keys.clone(), values.clone()]
    for token, slot in ((0, 11), (2, 0), (3, 6)):
        wanted[0][slot // PAGE, slot % PAGE] = new_keys[token]
        wanted[1][slot // PAGE, slot % PAGE] = new_values[token]
    given = [cache if layout == "NHD" else cache.transpose(1, 2).contiguous() for cache in (keys, values)]
    assert lz.append_paged_kv_(new_keys, new_values, *given, slots, layout=layout) is None
    got = [cache if layout == "NHD" else cache.transpose(1, 2) for cache in given]
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_padding_alone_writes_nothing():
    keys, values = torch.randn(2, PAGE, 1, 4), torch.randn(2, PAGE, 1, 4)
    before = keys.clone(), values.clone()
    append_paged_kv_(torch.randn(2, 1, 4), torch.randn(2, 1, 4), keys, values, torch.tensor([-1, -1]))
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])


def test_caches_may_be_two_views_of_one_tensor():
    both = torch.zeros(3, 2, PAGE, 1, 4)
    for _ in range(2):  # the second call is a hit
        lz.append_paged_kv_(torch.ones(1, 1, 4), torch.ones(1, 1, 4) * 2, both[:, 0], both[:, 1], torch.tensor([5]))
    assert both[1, 0, 1].tolist() == [[1.0] * 4]
    assert both[1, 1, 1].tolist() == [[2.0] * 4]
    assert both.sum() == 12


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([0, 12], r"slot_mapping\[1\]: wanted -1 to 11, got 12"),
        ([-2, 0], r"slot_mapping\[0\]: wanted -1 to 11, got -2"),
        ([3, 3], "slot_mapping: wanted each place once, got 3 at 0 and 1"),
    ],
)
def test_debug_mode_looks_at_slots_before_anything_is_written(slots, text):
    keys, values, new = torch.zeros(3, PAGE, 1, 4), torch.zeros(3, PAGE, 1, 4), torch.ones(2, 1, 4)
    with lz.scope(debug=True), pytest.raises(lz.InvalidCallError, match=text):
        lz.append_paged_kv_(new, new.clone(), keys, values, torch.tensor(slots))
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping: wanted dtype int64, got int32"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, "slot_mapping: wanted tokens 2"),
        ({"key": torch.ones(2, 4)}, "key: wanted a 3D tensor"),
        ({"value": torch.ones(2, 2, 4)}, "wanted kv_heads 1"),
        ({"layout": "HND"}, "key_cache: wanted kv_heads 1"),
    ],
)
def test_append_refuses_what_does_not_fit(changes, text):
    arguments = {"key": torch.ones(2, 1, 4), "value": torch.ones(2, 1, 4), "slot_mapping": torch.tensor([0, 1])}
    arguments |= {"key_cache": torch.zeros(3, PAGE, 1, 4), "value_cache": torch.zeros(3, PAGE, 1, 4)}
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.append_paged_kv_(**arguments | changes)


def test_append_refuses_memory_that_is_shared():
    cache, new = torch.zeros(3, PAGE, 1, 4), torch.ones(2, 1, 4)
    slots = torch.tensor([0, 1])
    with pytest.raises(lz.InvalidCallError, match="value_cache: wanted elements of its own, got memory that it shares"):
        lz.append_paged_kv_(new, new.clone(), cache, cache, slots)
    with pytest.raises(lz.InvalidCallError, match="shares with key"):
        lz.append_paged_kv_(cache[0, :2], new, cache, cache.clone(), slots)
    with pytest.raises(lz.InvalidCallError, match="expanded view"):
        lz.append_paged_kv_(new, new.clone(), cache[:1].expand(3, PAGE, 1, 4), cache, slots)


@pytest.mark.parametrize("width_by_width", [True, False])
def test_keys_and_values_in_one_tensor_are_written_apart_and_together_refused(width_by_width):
    both = torch.zeros(3, 4, 2, 16) if width_by_width else torch.zeros(3, 2, 4, 2, 8)
    caches = both.split(8, -1) if width_by_width else both.unbind(1)
    keys, values = torch.randn(2, 5, 2, 8)
    slots = torch.tensor([3, 11, 0, 7, 8])
    lz.append_paged_kv_(keys, values, *caches, slots)
    for cache, new in zip(caches, (keys, values), strict=True):
        assert torch.equal(cache.reshape(12, 2, 8)[slots], new)
    overlapping = (caches[0], both[..., 4:12] if width_by_width else caches[0])
    with pytest.raises(lz.InvalidCallError, match="value_cache: wanted elements of its own"):
        lz.append_paged_kv_(keys, values, *overlapping, slots)

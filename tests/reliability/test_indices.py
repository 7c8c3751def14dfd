"""No kernel follows an index out of a tensor on a CPU: pages, slots and lengths are looked at before it runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from layerzero.core import indices
from layerzero.engine import accelerator

pytestmark = pytest.mark.usefixtures("path")

QUERY = torch.randn(2, 1, 4, 64)


def caches(layout="NHD", pages=4):
    """Keys and values in the middle of larger memory, whose rest must stay as it is."""
    shape = (pages + 2, 2, 64, 16) if layout == "vllm" else (pages + 2, 16, 2, 64)
    whole = [torch.zeros(shape), torch.zeros(pages + 2, 2, 16, 64) if layout == "vllm" else torch.zeros(shape)]
    keys, values = (each[1:-1] for each in whole)
    return whole, (keys.transpose(2, 3) if layout == "vllm" else keys), values


def kernels(operation, *call, **options):
    report = lz.explain(operation, *call, **options)
    return [each.kernel.id for each in report.candidates if each.legal]


APPEND = {"NHD": "NHD", "vllm": "HND"}


@at_once("memory", APPEND)
@at_once("slot", [64, 2**33, 2**62, -2, -(2**40)])
def test_a_slot_beyond_the_cache_writes_nothing(memory, slot):
    whole, keys, values = caches(memory)
    new, layout = torch.ones(3, 2, 64), APPEND[memory]
    call = new, new, keys, values, torch.tensor([5, slot, 7])
    names = kernels("append_paged_kv_", *call, layout=layout)
    assert len(names) > 1
    for kernel in names:
        with lz.scope(locks={"kv.append.paged": kernel}):
            for _ in range(2):
                with pytest.raises(lz.InvalidCallError, match=rf"slot_mapping\[1\]: wanted -1 to 63, got {slot}$"):
                    lz.append_paged_kv_(*call, layout=layout)
    assert not any(each.any() for each in whole)


@at_once("change, text", [
    (lambda tables, lens: tables[1].__setitem__(0, -1), r"block_tables\[1, 0\]: wanted 0 to 3, got -1"),
    (lambda tables, lens: tables[0].__setitem__(1, 4), r"block_tables\[0, 1\]: wanted 0 to 3, got 4"),
    (lambda tables, lens: tables[0].__setitem__(1, 2**30), r"block_tables\[0, 1\]: wanted 0 to 3, got 1073741824"),
    (lambda tables, lens: lens.__setitem__(0, -1), r"context_lens\[0\]: wanted 0 to 32, got -1"),
    (lambda tables, lens: lens.__setitem__(1, 33), r"context_lens\[1\]: wanted 0 to 32, got 33"),
])  # fmt: skip
@at_once("memory", APPEND)
def test_a_page_or_length_beyond_the_cache_is_not_followed(memory, change, text):
    _, keys, values = caches(memory)
    tables, lens = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
    call, layout = (QUERY, keys, values, tables, lens), APPEND[memory]
    names = kernels("paged_attention", *call, layout=layout)
    assert len(names) > 1
    tables[1, 1] = -7  # beyond the second sequence: it may hold anything
    for kernel in names:
        with lz.scope(locks={"attention.gqa.decode.paged": kernel}):
            lz.paged_attention(*call, layout=layout)
    change(tables, lens)
    for kernel in names:
        with lz.scope(locks={"attention.gqa.decode.paged": kernel}), pytest.raises(lz.InvalidCallError, match=text):
            lz.paged_attention(*call, layout=layout)


def test_a_length_above_a_promised_bound_is_an_error():
    _, keys, values = caches()
    tables, lens = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
    lz.paged_attention(QUERY, keys, values, tables, lens, max_context_len=20)
    with pytest.raises(lz.InvalidCallError, match=r"context_lens\[0\]: wanted 0 to 19, got 20"):
        lz.paged_attention(QUERY, keys, values, tables, lens, max_context_len=19)


@at_once("moment", ["asked", "advanced"])
@at_once("change, pages", [
    (lambda tables, lens: lens.fill_(33), None),
    (lambda tables, lens: tables.fill_(-1), None),
    (lambda tables, lens: tables.fill_(4), 4),
])  # fmt: skip
def test_a_step_tells_of_a_token_without_a_place(change, pages, moment):
    tables, lens = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
    if moment == "advanced":
        step = lz.StepMetadata(tables, lens, pages=pages)
        assert step.slot_mapping(16).tolist() == [19, 36]
    change(tables, lens)
    with pytest.raises(lz.InvalidCallError, match="got 2 tokens beyond their table or on a page that does not exist"):
        step.advance() if moment == "advanced" else lz.StepMetadata(tables, lens, pages=pages).slot_mapping(16)


def test_tokens_before_the_first_are_padding():
    tables, lens = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    assert lz.StepMetadata(tables, lens).slot_mapping(16, tokens=3).tolist() == [-1, -1, -1, -1, 32, 33]


@pytest.mark.parametrize("numbers", [(0,), (-1,), (16, 0), ("16",)])
def test_slots_of_no_page_or_token_are_refused(numbers):
    tables, lens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(lz.InvalidCallError, match="wanted a number from 1 to 2147483647, got"):
        lz.StepMetadata(tables, lens).slot_mapping(*numbers)


@pytest.mark.parametrize("length", [-1, 9, 2**40])
def test_lengths_beyond_the_keys_are_errors(length):
    query = torch.randn(2, 8, 4, 16)
    with pytest.raises(lz.InvalidCallError, match=rf"kv_lens\[1\]: wanted 0 to 8, got {length}"):
        lz.attention(query, query, query, layout="BSHD", kv_lens=torch.tensor([8, length]))
    lz.attention(query, query, query, layout="BSHD", kv_lens=torch.tensor([8, 0]))


def test_a_kernel_that_looks_itself_pays_nothing():
    def append(key, value, key_cache, value_cache, slot_mapping):
        raise IndexError("slot 64 is beyond the cache")

    lz.register_kernel("kv.append.paged", "user.careful", priority=100, checks_indices=True, layout="NHD")(append)
    _, keys, values = caches()
    new = torch.ones(1, 2, 64)
    plan = lz.bind(lz.append_paged_kv_, new, new, keys, values, torch.tensor([1])).plan
    assert "within" not in plan.source
    with pytest.raises(lz.InvalidCallError, match="slot_mapping"):  # said by LayerZero, found by the kernel
        lz.append_paged_kv_(new, new, keys, values, torch.tensor([64]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("native", [False, True])
def test_comparing_is_exact(dtype, native):
    if native and accelerator.HOT is None:
        pytest.skip(accelerator.ABSENT)
    source = accelerator.HOT if native else indices
    most = torch.iinfo(dtype).max
    values = torch.tensor([[3, 0, 7], [2, 5, 1]], dtype=dtype)
    for tensor in (values, values.T, values[:, ::2], values.expand(4, 2, 3), values[0], values[0, 1], values[:0]):
        least, largest = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
        assert source.within(tensor, least, largest + 1)
        assert source.within(tensor, least, largest) is (tensor.numel() == 0)
        assert source.within(tensor, least + 1, largest + 2) is (tensor.numel() == 0)
    assert source.within(torch.full((300,), most, dtype=dtype), 0, most) is False
    assert source.within(torch.full((300,), torch.iinfo(dtype).min, dtype=dtype), -1, most) is False
    counts = torch.tensor([4, 3], dtype=torch.int32)
    assert source.firsts_within(values, counts, 2, 6)  # two entries of each row are read: 3 0, 2 5
    assert not source.firsts_within(values, counts, 2, 5)
    assert source.firsts_within(values, counts * 0 - 5, 2, 0)
    assert not source.firsts_within(values - 3, counts, 2, 9)


@pytest.mark.parametrize("source", ["python", "extension"])
@settings(max_examples=examples(100), deadline=None)
@given(rows=st.lists(st.integers(-2, 40), max_size=12), count=st.integers(1, 3), long=st.booleans(), wide=st.booleans())
def test_a_place_that_comes_twice_is_found_in_its_row(source, rows, count, long, wide):
    if source == "extension" and accelerator.HOT is None:
        pytest.skip(accelerator.ABSENT)
    look = indices.distinct if source == "python" else accelerator.HOT.distinct
    rows = [*rows, *(range(1000, 1600) if long else ())]
    values = torch.tensor([rows] * count, dtype=torch.int64 if wide else torch.int32).view(count, len(rows))
    named = [each for each in rows if each >= 0]
    assert look(values) is (len(set(named)) == len(named))
    assert look(values.flatten()) is (look(values) if count == 1 else not named)
    assert look(values.repeat_interleave(2, 1)[:, ::2]) is look(values)


@pytest.mark.parametrize("function", ["append_paged_kv_", "append_quantized_kv_", "copy_kv_blocks_", "append_kv_"])
def test_a_place_that_is_named_twice_is_told_before_anything_is_written(function):
    new, twice = torch.ones(3, 2, 64), torch.tensor([5, -1, 5])
    caches = [torch.zeros(8, 16, 2, 64) for _ in range(2)]
    if function == "append_quantized_kv_":
        caches = [each.to(torch.int8) for each in caches]
        call, name = (new, new, *caches, twice, torch.tensor(1.0), torch.tensor(1.0)), "slot_mapping"
    elif function == "append_paged_kv_":
        call, name = (new, new, *caches, twice), "slot_mapping"
    elif function == "copy_kv_blocks_":
        call, name = (*caches, torch.tensor([1, 2, 3]), torch.tensor([5, 0, 5])), "to_pages"
    else:
        batch = torch.ones(8, 3, 2, 64)
        call, name = (batch, batch, *caches, torch.tensor([5, 0, 5])), "positions"
    for _ in range(2):
        with pytest.raises(lz.InvalidCallError, match=f"{name}: wanted each place once, got 5 at 0 and 2$"):
            getattr(lz, function)(*call)
    assert not any(each.any() for each in caches)


def test_each_sequence_of_a_batch_may_name_the_same_place():
    new, caches = torch.ones(2, 2, 2, 64), [torch.zeros(2, 16, 2, 64) for _ in range(2)]
    lz.append_kv_(new, new, *caches, torch.tensor([[3, 4], [4, 3]]))
    assert [each.sum().item() for each in caches] == [512, 512]

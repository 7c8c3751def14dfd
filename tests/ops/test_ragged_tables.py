"""Block tables without padding: what they say is what the padded ones say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@given(lens=st.lists(st.integers(0, 23), max_size=5), page_size=st.sampled_from([1, 3, 8]), more=st.integers(0, 2))
@settings(max_examples=examples(40), deadline=None)
def test_a_step_of_unpadded_tables_is_that_of_the_padded_ones(lens, page_size, more):
    cache = lz.KVCache(1, 2, 16, pages=130, page_size=page_size, dtype=torch.float32)
    names = [cache.allocate() for _ in lens]
    with cache.writing(names, lens):
        pass
    tables, lengths = cache.block_tables(names)
    width = max(tables.shape[1], 1) + more
    step = lz.StepMetadata.of_ragged_tables(*cache.ragged_tables(names), page_size, max_blocks=width if more else None)
    assert torch.equal(step.context_lens, lengths)
    assert step.block_tables.dtype is step.context_lens.dtype is torch.int32
    for row, length in enumerate(lens):
        used = -(-length // page_size)
        assert torch.equal(step.block_tables[row, :used], tables[row, :used])
        assert not step.block_tables[row, used:].any()
    cache.close()


def test_kernels_take_it_as_any_other_step():
    cache = lz.PagedCache(torch.randn(6, 4, 2, 16), torch.randn(6, 4, 2, 16))
    step = lz.StepMetadata.of_ragged_tables(int32(0, 2, 2, 5), int32(3, 1, 0, 5, 2), int32(1, 4, 3), 4)
    query = torch.randn(3, 1, 4, 16)
    tables, lens = int32(3, 1, 0, 0, 0, 0, 0, 5, 2).view(3, 3), int32(5, 0, 11)
    torch.testing.assert_close(
        lz.paged_attention(query, cache, step=step),
        lz.paged_attention(query, cache, block_tables=tables, context_lens=lens),
    )


@at_once(
    "change, text",
    [
        ({"kv_indptr": int32(0, 3, 2)}, r"kv_indptr\[2\]: wanted at least 3, the number before it, got 2"),
        ({"kv_indptr": int32(1, 2, 3)}, r"kv_indptr\[0\]: wanted 0, got 1"),
        ({"kv_indptr": int32(0, 1, 2)}, r"kv_indptr\[2\]: wanted 3, the number of kv_indices, got 2"),
        ({"kv_indptr": torch.arange(3)}, r"kv_indptr: wanted an int32 tensor .* got int64 \(3,\)"),
        (
            {"kv_indices": int32(1, 2, 3).view(1, 3)},
            r"kv_indices: wanted an int32 tensor of one axis, got int32 \(1, 3\)",
        ),
        ({"kv_last_page_len": [1, 1]}, "kv_last_page_len: wanted an int32 tensor of one axis, got list"),
        ({"kv_last_page_len": int32(4)}, "kv_last_page_len: wanted 2 as in kv_indptr, got 1"),
        ({"kv_last_page_len": int32(4, 0)}, r"kv_last_page_len\[1\]: wanted 1 to 4, got 0"),
        ({"kv_last_page_len": int32(5, 1)}, r"kv_last_page_len\[0\]: wanted 1 to 4, got 5"),
        ({"max_blocks": 1}, "max_blocks: wanted at least 2, the pages of a sequence, got 1"),
        ({"max_blocks": 2**40}, "max_blocks: wanted a number from 1 to"),
        ({"page_size": 2**31 - 1}, r"kv_indptr: wanted sequences of less than 2\*\*31 tokens, got one of 2147483651"),
        ({"page_size": 0}, "page_size: wanted a number from 1 to .*, got 0"),
        (
            {"kv_indices": torch.empty(3, dtype=torch.int32, device="meta")},
            "kv_indices: wanted device cpu .*, got meta",
        ),
    ],
)
def test_what_are_no_tables_is_refused(change, text):
    given = {"kv_indptr": int32(0, 2, 3), "kv_indices": int32(0, 1, 2), "kv_last_page_len": int32(4, 2), "page_size": 4}
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.StepMetadata.of_ragged_tables(**given | change)

"""Merging parts of attention, and decodes behind a prefix that all sequences share."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.cascade import merge_attention_states

PAGE = 4


def parts(tokens=5, heads=4, dim=8, first=6, second=9):
    """Attention over the first and the second keys, each (T, H, D) and (H, T), and over all of them."""
    torch.manual_seed(0)
    query = torch.randn(1, tokens, heads, dim, dtype=torch.float64)
    key, value = (torch.randn(1, first + second, heads, dim, dtype=torch.float64) for _ in range(2))
    found = []
    for keys in (slice(first), slice(first, None), slice(None)):
        output, lse = attention_reference(query, key[:, keys], value[:, keys], return_lse=True)
        found.append((output[0], lse[0]))
    return found


@pytest.mark.parametrize("merge", [merge_attention_states, lambda *each: lz.merge_attention_states(*each)])
def test_two_parts_give_attention_over_all_keys(merge):
    first, second, both = parts()
    output, lse = merge(*first, *second)
    torch.testing.assert_close(output, both[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, both[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("part", "ab")
@pytest.mark.parametrize("number", [1.0, math.nan])
def test_debug_mode_refuses_a_part_without_keys_that_is_not_0(part, number):
    (one, of_one), (two, of_two), _ = parts()
    states = {"output_a": one, "lse_a": of_one.float(), "output_b": two, "lse_b": of_two.float()}
    states[f"lse_{part}"] = states[f"lse_{part}"].clone()
    states[f"lse_{part}"][1, 2] = -torch.inf
    states[f"output_{part}"] = states[f"output_{part}"].clone()
    states[f"output_{part}"][2, 1] = 0.0
    with lz.scope(debug=True):
        lz.merge_attention_states(**states)
        states[f"output_{part}"][2, 1, 3] = number
        with pytest.raises(lz.InvalidCallError, match=f"output_{part}: wanted 0 wherever lse_{part} is -inf"):
            lz.merge_attention_states(**states)


def test_a_part_that_saw_no_key_has_no_share():
    (output, lse), _, _ = parts()
    nothing = torch.zeros_like(output), torch.full_like(lse, -math.inf)
    for one, other in (((output, lse), nothing), (nothing, (output, lse))):
        got = lz.merge_attention_states(*one, *other)
        torch.testing.assert_close(got[0], output)
        assert torch.equal(got[1], lse)
    merged = lz.merge_attention_states(*nothing, *nothing)
    assert merged[0].abs().max() == 0
    assert torch.equal(merged[1], nothing[1])


WRONG_STATES = [
    (lambda c: {"lse_a": c["lse_a"].double()}, "lse_a: wanted dtype float32"),
    (lambda c: {"lse_b": c["lse_b"].t()}, "lse_b: wanted heads 4"),
    (lambda c: {"output_b": c["output_b"][:3]}, "output_b: wanted tokens 5"),
    (lambda c: {"output_b": c["output_b"].float()}, "output_b: wanted dtype float64"),
]


@pytest.mark.parametrize(("change", "text"), WRONG_STATES, ids=[text for _, text in WRONG_STATES])
def test_states_that_do_not_fit_are_refused(change, text):
    (output, lse), _, _ = parts()
    arguments = {"output_a": output, "lse_a": lse, "output_b": output, "lse_b": lse}
    lz.merge_attention_states(**arguments)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.merge_attention_states(**arguments | change(arguments))


def shared(lens=(12, 9, 16), blocks=2, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    """A decode's call whose tables begin with the same pages, NaN beyond every sequence, and how many are the same."""
    torch.manual_seed(0)
    columns, pages = 4, len(lens) * 4 + 1
    table = torch.randperm(pages)[: len(lens) * columns].view(len(lens), columns).int()
    table[:, :blocks] = table[:1, :blocks]
    keys, values = (torch.full((pages, PAGE, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2))
    for row, length in enumerate(lens):
        for position in range(length):
            place = int(table[row, position // PAGE]), position % PAGE
            keys[place], values[place] = torch.randn(2, kv_heads, dim, dtype=dtype)
    query = torch.randn(len(lens), 1, heads, dim, dtype=dtype)
    return query, keys, values, table, torch.tensor(lens, dtype=torch.int32), blocks


@pytest.mark.parametrize("kernel", ["torch.cascade_sdpa", "torch.paged_gather", None])
@pytest.mark.parametrize("lens", [(12, 9, 16), (8, 8, 8), (8, 11)], ids=str)
def test_a_shared_prefix_changes_no_result(lens, kernel):
    *call, blocks = shared(lens)
    wanted = lz.paged_attention(*call)
    with lz.scope(locks={} if kernel is None else {"attention.cascade.decode.paged": kernel}):
        torch.testing.assert_close(lz.cascade_attention(*call, blocks), wanted)
        torch.testing.assert_close(lz.cascade_attention(*call, 1, scale=0.2), lz.paged_attention(*call, scale=0.2))


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")  # only the reference has it of a plain decode
def test_its_log_sum_exp_is_that_of_all_keys():
    *call, blocks = shared()
    output, lse = lz.cascade_attention(*call, blocks, return_lse=True)
    wanted = lz.paged_attention(*call, return_lse=True)
    torch.testing.assert_close(output, wanted[0])
    torch.testing.assert_close(lse, wanted[1])


def test_caches_of_the_other_layout_and_windows_are_served():
    query, keys, values, table, lens, blocks = shared()
    moved = [cache.transpose(1, 2).contiguous() for cache in (keys, values)]
    wanted = lz.paged_attention(query, keys, values, table, lens, window=(3, 0))
    got = lz.cascade_attention(query, *moved, table, lens, blocks, layout="HND", window=(3, 0))
    torch.testing.assert_close(got, wanted)


WRONG = [
    (lambda c: {"shared_blocks": 0}, "shared_blocks: wanted 1 to 4, the pages of a table, got 0"),
    (lambda c: {"shared_blocks": 5}, "shared_blocks: wanted 1 to 4"),
    (lambda c: {"shared_blocks": 3}, r"block_tables\[1\]: wanted the first 3 pages as in row 0"),
    (lambda c: {"context_lens": c["context_lens"] - 5}, r"context_lens\[0\]: wanted at least the 8 tokens"),
    (lambda c: {"block_tables": c["block_tables"].long()}, "block_tables: wanted an int32 tensor"),
    (lambda c: {"context_lens": c["context_lens"] + 9}, r"context_lens\[0\]: wanted 0 to 16, got 21"),
    (lambda c: {"query": c["query"][:, 0]}, "query: wanted a 4D tensor"),
    (lambda c: {"query": c["query"].expand(3, 2, 4, 8)}, "one token a sequence"),
    (
        lambda c: {"step": lz.StepMetadata(c["block_tables"].clone(), c["context_lens"])},
        "step: wanted the StepMetadata",
    ),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[text for _, text in WRONG])
def test_what_means_nothing_is_refused(change, text):
    names = ("query", "key_cache", "value_cache", "block_tables", "context_lens", "shared_blocks")
    arguments = dict(zip(names, shared(), strict=True))
    lz.cascade_attention(**arguments)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.cascade_attention(**arguments | change(arguments))

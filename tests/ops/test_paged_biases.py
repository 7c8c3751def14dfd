"""Drafts that branch, slopes and sinks over a paged cache: against dense and ragged calls, and what calls refuse."""

from __future__ import annotations

import gc
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from launches import Counted
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.paged import tree
from paged_calls import PAGE, paged, starts


def named(call):
    names = "query", "key_cache", "value_cache", "block_tables", "context_lens", "cu_seqlens_q"
    return dict(zip(names, call, strict=True))


def drafts():
    """A decode, five drafts of two branches, no query at all, and a prefill that is longer than the mask is wide."""
    call = named(paged((1, 5, 0, 8), (5, 7, 2, 8)))
    parents = {1: [-1], 5: [-1, 0, 0, 1, 2]}
    mask, first = torch.zeros(14, 6, dtype=torch.bool), 0
    for count in (1, 5):
        for place, parent in enumerate(parents[count]):
            if parent >= 0:
                mask[first + place] = mask[first + parent]
            mask[first + place, place] = True
        first += count
    return call, mask


@pytest.mark.parametrize("kernel", ["torch.paged_sdpa", "reference.attention.gqa.prefill.paged"])
@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("slopes", [None, (), (4,)], ids=["no slopes", "slopes", "slopes by sequence"])
def test_drafts_see_their_ancestors_and_what_was_cached_before(kernel, window, slopes):
    """Windows and slopes count depths, as each branch alone would have it."""
    call, mask = drafts()
    biases = {} if slopes is None else {"alibi_slopes": torch.rand(*slopes, 4, dtype=torch.float64)}
    with lz.scope(locks={"attention.gqa.prefill.paged": kernel}):
        output, lse = lz.paged_attention(**call, tree_mask=mask, window=window, **biases, return_lse=True)
        chains = lz.paged_attention(**call, window=window, **biases)
    assert torch.allclose(output[[0, 1, 2]], chains[[0, 1, 2]])
    assert torch.allclose(output[6:], chains[6:])
    whole = {name: call[name] for name in ("key_cache", "value_cache")}
    keys, values = (each[call["block_tables"][1, :2].long()].flatten(0, 1)[:7] for each in whole.values())
    for node, ancestors in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4])):  # what a branch alone would hold
        of_branch = [0, 1, *(2 + each for each in ancestors)]
        wanted, sums = attention_reference(
            call["query"][None, 1 + node : 2 + node],
            *(each[None, of_branch] for each in (keys, values)),
            window=window,
            return_lse=True,
            **{name: each[1:2] if slopes else each for name, each in biases.items()},
        )
        assert torch.allclose(output[1 + node], wanted[0, 0])
        assert torch.allclose(lse[:, 1 + node], sums[0, :, 0])


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("kernel", ["torch.paged_sdpa", "reference.attention.gqa.prefill.paged"])
def test_slopes_over_pages_are_those_of_ragged_keys(kernel, by_sequence):
    call = named(paged())
    slopes = torch.rand(4, 4, dtype=torch.float64) if by_sequence else torch.rand(4, dtype=torch.float64)
    with lz.scope(locks={"attention.gqa.prefill.paged": kernel}):
        output = lz.paged_attention(**call, alibi_slopes=slopes)
    assert torch.allclose(output, lz.ragged_attention(*ragged_of(call), alibi_slopes=slopes))


@pytest.mark.parametrize("kernel", ["torch.paged_sdpa", "reference.attention.gqa.prefill.paged"])
@pytest.mark.parametrize("lens", [(5, 7, 2, 8), (5, 3, 0, 8)])
def test_sinks_over_pages_are_those_of_ragged_keys(kernel, lens):
    call, sinks = named(paged(lens=lens)), torch.randn(4, dtype=torch.float64)
    kind = "attention.gqa.prefill"
    locks = {f"{kind}.paged": kernel, f"{kind}.ragged": f"reference.{kind}.ragged"}
    with lz.scope(locks=locks):
        output, lse = lz.paged_attention(**call, sinks=sinks, return_lse=True)
        wanted, sums = lz.ragged_attention(*ragged_of(call), sinks=sinks, return_lse=True)
        assert torch.equal(lz.paged_attention(**call, sinks=sinks), output)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, sums)


@at_once("dtype", [torch.float32, torch.float64, torch.bfloat16])
@at_once("sink", [math.nan, math.inf, -math.inf])
@at_once("queries", [(1, 3, 0, 8), (2, 5, 3, 8)])
def test_sinks_that_are_no_numbers_give_what_the_reference_gives(dtype, sink, queries):
    """The third sequence has no key, the first fewer keys than queries."""
    call = named(paged(queries, (1, 7, 0, 8), dtype=dtype))
    sinks, found = torch.tensor([0.3, sink, -2.0, sink]), []
    for kernel in ("torch.paged_sdpa", "reference.attention.gqa.prefill.paged"):
        with lz.scope(locks={"attention.gqa.prefill.paged": kernel}):
            found.append(lz.paged_attention(**call, sinks=sinks, return_lse=True))
            assert torch.equal(lz.paged_attention(**call, sinks=sinks).nan_to_num(), found[-1][0].nan_to_num())
    (output, lse), (wanted, sums) = found
    near = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(output, wanted, rtol=near, atol=near, equal_nan=True)
    exact = 1e-4 if dtype is torch.bfloat16 else 1e-5  # with AVX2 torch adds up what it rounded to bfloat16: 6e-5 off
    torch.testing.assert_close(lse, sums, rtol=exact, atol=exact, equal_nan=True)
    assert output[:, [1, 3]].isnan().all() == (sink != -math.inf)
    assert not output[:, [0, 2]].isnan().any()


def put(mask, row, column, value):
    changed = mask.clone()
    changed[row, column] = value
    return changed


def ragged_of(call):
    """The same keys without pages."""
    lens = call["context_lens"].tolist()
    caches = [
        torch.cat(
            [
                call[name][call["block_tables"][row, : -(-n // PAGE)].long()].flatten(0, 1)[:n]
                for row, n in enumerate(lens)
            ]
        )
        for name in ("key_cache", "value_cache")
    ]
    return call["query"], *caches, call["cu_seqlens_q"], starts(*lens)


@at_once("change, text", [
    (lambda m: m.float(), r"tree_mask: wanted a bool tensor \(14, columns\), a row for each query, got torch.float32"),
    (lambda m: m[:13], r"tree_mask: wanted a bool tensor \(14, columns\), a row for each query, got .* \(13, 6\)"),
    (lambda m: m & False, r"tree_mask\[0\]: wanted the token itself and what its parent sees, columns \[0\], got \[\]"),
    (lambda m: put(m, 1, 4, True), r"tree_mask\[1\]: .*\[0\], got \[0, 4\]"),
    (lambda m: put(m, 4, 2, True), r"tree_mask\[4\]: .*got \[0, 1, 2, 3\]"),
    (lambda m: put(m, 4, 0, False), r"tree_mask\[4\]: .*got \[1, 3\]"),
])  # fmt: skip
@at_once("known", [False, True])
def test_a_mask_that_is_no_tree_is_told_on_every_call(change, text, known):
    call, mask = drafts()
    if known:
        lz.paged_attention(**call, tree_mask=mask)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.paged_attention(**call, tree_mask=change(mask))


@pytest.fixture
def looked(monkeypatch):
    """Masks that were looked at on the host, in order."""
    found, look = [], tree.value_problems
    monkeypatch.setattr(tree, "value_problems", lambda mask, starts: found.append(mask) or look(mask, starts))
    return found


@pytest.mark.parametrize("inference", [False, True])
def test_the_layers_of_a_step_look_at_their_mask_once(looked, inference):
    with torch.inference_mode(inference):
        call, mask = drafts()
        other = {name: each.float() if each.is_floating_point() else each for name, each in call.items()}
        for _ in range(4):
            lz.paged_attention(**call, tree_mask=mask)
            lz.paged_attention(**other, tree_mask=mask)  # another plan
        assert len(looked) == 1
        lz.paged_attention(**call, tree_mask=mask.clone())
        assert len(looked) == 2


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("columns", [63, 64])
def test_large_masks_without_a_count_of_writes_are_compared_number_by_number(columns, offset):
    with torch.inference_mode():
        mask = torch.zeros(72 * 64 + 8, dtype=torch.bool)[offset : offset + 72 * columns].view(72, columns)
        for each in (mask, mask[:, :-1], mask[::2]):
            kept = tree._state_of(each)
            assert tree._is_still(each, kept)
            each[-1, -1] ^= True
            assert not tree._is_still(each, kept)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", [
    lambda mask, starts: mask[3].fill_(False),
    lambda mask, starts: mask.view(-1)[18:20].fill_(False),  # through a view
    lambda mask, starts: starts[1:2].add_(1),
])  # fmt: skip
def test_a_mask_is_looked_at_again_once_it_or_its_starts_were_written_into(change, inference):
    with torch.inference_mode(inference):
        call, mask = drafts()
        given = "paged_attention", mask, call["cu_seqlens_q"]
        ran = []
        for _ in range(2):
            with Counted() as counted:
                tree.check(*given)
            ran.append(counted.calls)
        assert len(ran[0]) > 20
        assert ran[1] == (["aten.equal.default"] * 2 if inference else [])
        change(*given[1:])
        for _ in range(2):  # what was wrong is not remembered
            with pytest.raises(lz.InvalidCallError, match=r"tree_mask\[\d\]: wanted the token itself"):
                tree.check(*given)
        gc.collect()  # an error is in a cycle with the frames that have its mask
        known = len(tree._TREES)
        del given, mask
        assert len(tree._TREES) == known - 1


def test_a_mask_is_looked_at_where_it_lies_and_beside_gradients():
    call, mask = drafts()
    with torch.device("meta"):
        assert tree.value_problems(mask, call["cu_seqlens_q"]) == []
    call["query"].requires_grad_()
    with (
        pytest.warns(lz.LayerZeroFallbackWarning),
        pytest.raises(lz.InvalidCallError, match=r"tree_mask\[0\]: wanted the token itself"),
    ):
        lz.paged_attention(**call, tree_mask=mask & False)


def problems_row_by_row(mask, starts):
    """What :func:`tree.value_problems` says, by one row after the other."""
    problems = []
    for first, last in pairwise(starts.tolist()):
        count = last - first
        rows = mask[first:last, :count].tolist() if count <= mask.shape[1] else []
        for place, row in enumerate(rows):
            seen = [each for each in range(place) if row[each]]
            wanted = list(rows[seen[-1]]) if seen else [False] * count
            wanted[place] = True
            if row != wanted:
                told, got = ([each for each, sees in enumerate(of) if sees][-8:] for of in (wanted, row))
                text = f"wanted the token itself and what its parent sees, columns {told}, got {got}"
                problems.append(f"tree_mask[{first + place}]: {text}")
    return problems[:4]


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_a_tree_is_told_as_row_by_row(data):
    """Forests of empty, short and too long sequences, garbage behind their columns, and some bits turned."""
    counts = data.draw(st.lists(st.integers(0, 12), max_size=6))
    columns, begins = data.draw(st.integers(0, 12)), starts(*counts)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    mask = torch.rand(sum(counts), columns, generator=generator) < 0.5
    for first, count in zip(begins.tolist(), counts, strict=False):
        for place in range(count if count <= columns else 0):
            parent = data.draw(st.integers(-1, place - 1))
            mask[first + place, :count] = mask[first + parent, :count] if parent >= 0 else False
            mask[first + place, place] = True
    assert tree.value_problems(mask, begins) == problems_row_by_row(mask, begins) == []
    if mask.numel():
        for _ in range(data.draw(st.integers(0, 4))):
            row, column = data.draw(st.integers(0, len(mask) - 1)), data.draw(st.integers(0, columns - 1))
            mask[row, column] ^= True
    if data.draw(st.booleans()):
        mask = mask.t().contiguous().t()
    assert tree.value_problems(mask, begins) == problems_row_by_row(mask, begins)


def test_a_tree_is_causal_and_of_several_tokens():
    call, mask = drafts()
    with pytest.raises(lz.InvalidCallError, match="causal: wanted True with tree_mask"):
        lz.paged_attention(**call, tree_mask=mask, causal=False)
    one = {**call, "query": call["query"][:4].unsqueeze(1)}
    del one["cu_seqlens_q"]
    with pytest.raises(lz.InvalidCallError, match="sinks: wanted cu_seqlens_q with it"):
        lz.paged_attention(**one, sinks=torch.zeros(4))
    with pytest.raises(lz.InvalidCallError, match=r"alibi_slopes: wanted shape \(4,\) or \(4, 4\), got \(3,\)"):
        lz.paged_attention(**call, alibi_slopes=torch.zeros(3))


@at_once("name", ["sinks", "alibi_slopes", "slopes by sequence", "tree_mask"])
@at_once("kernel", ["torch.quantized_sdpa", "reference.attention.quantized.prefill.paged"])
@at_once("dtype", [torch.float8_e4m3fn, torch.int8])
@at_once("of_tokens", [False, True])
def test_a_cache_of_codes_takes_what_one_of_floats_takes(name, kernel, dtype, of_tokens):
    call, mask = drafts()
    given = {
        "sinks": {"sinks": torch.randn(4)},
        "alibi_slopes": {"alibi_slopes": torch.rand(4)},
        "slopes by sequence": {"alibi_slopes": torch.rand(4, 4)},
        "tree_mask": {"tree_mask": mask},
    }[name]
    lead = call["key_cache"].shape[:3]
    scales = {f"{each}_scale": 0.03 + 0.03 * torch.rand(lead if of_tokens else ()) for each in ("key", "value")}
    codes, wide = {}, {}
    for each in ("key", "value"):
        factor = scales[f"{each}_scale"].unsqueeze(-1)
        codes[f"{each}_cache"] = held = (call[f"{each}_cache"].nan_to_num() / factor).clamp(-127, 127).to(dtype)
        wide[f"{each}_cache"] = (held.float() * factor).to(call["query"].dtype)
    with lz.scope(locks={"attention.quantized.prefill.paged": kernel}):
        output, lse = lz.paged_attention(**call | codes | scales, **given, return_lse=True)
    with lz.scope(locks={"attention.gqa.prefill.paged": "reference.attention.gqa.prefill.paged"}):
        wanted, sums = lz.paged_attention(**call | wide, **given, return_lse=True)
        assert not torch.allclose(lz.paged_attention(**call | wide), wanted)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(0, -1), (1, -1), (-1, 3), (2, 20)])
def test_open_windows_of_more_queries_than_keys_with_a_softcap(window):
    """A window that is open to the right ended as many keys behind a query as there are: first queries saw none."""
    call = named(paged((1, 9, 20), (5, 7, 2)))
    call = {name: each.float() if each.is_floating_point() else each for name, each in call.items()}
    found = []
    for kernel in ("torch.paged_softcap", "reference.attention.gqa.prefill.paged"):
        with lz.scope(locks={"attention.gqa.prefill.paged": kernel}):
            found.append(lz.paged_attention(**call, causal=False, window=window, softcap=5.0))
    torch.testing.assert_close(*found)

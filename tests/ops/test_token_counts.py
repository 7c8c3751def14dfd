"""Counts that run along with requests, and bits of a grammar: each beside lists, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_running_counts_are_those_of_whole_lists(data):
    """Requests begin, say tokens and end in any order; penalties are those of their padded lists."""
    counts, live = lz.TokenCounts(VOCAB, rows=1), {}
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) or not live:
            prompt = data.draw(st.lists(TOKENS, max_size=5))
            row = counts.begin(prompt)
            assert row not in live
            live[row] = (prompt, [])
        elif data.draw(st.booleans()):
            row = data.draw(st.sampled_from(sorted(live)))
            counts.end(row)
            del live[row]
        else:
            rows = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True))
            said = [data.draw(st.lists(TOKENS, max_size=3)) for _ in rows]
            counts.add(rows, torch.tensor([each + [-1] * (3 - len(each)) for each in said]).view(len(rows), 3).long())
            for row, each in zip(rows, said, strict=True):
                live[row][1].extend(each)
        assert len(counts) == len(live)
    rows = data.draw(st.permutations(sorted(live)))
    if not rows:
        return
    logits = torch.randn(len(rows), VOCAB)
    output, prompts = (
        torch.tensor([live[row][place] + [-1] * (40 - len(live[row][place])) for row in rows]) for place in (1, 0)
    )
    numbers = {"repetition": 1.3, "presence": 0.5, "frequency": torch.rand(len(rows))}
    torch.testing.assert_close(
        lz.apply_penalties(logits, **counts.of(rows), **numbers), lz.apply_penalties(logits, output, prompts, **numbers)
    )
    told = counts.of(rows)["output_counts"]
    assert [Counter({place: int(each) for place, each in enumerate(row) if each}) for row in told] == [
        Counter(live[row][1]) for row in rows
    ]


def test_rows_that_follow_each_other_are_no_copy():
    counts = lz.TokenCounts(VOCAB)
    rows = [counts.begin() for _ in range(3)]
    assert counts.of(rows)["output_counts"].data_ptr() == counts.output_counts.data_ptr()


def test_rows_stay_the_same_memory_while_more_are_made():
    """An engine keeps what it was given for as long as its batch does not change."""
    counts = lz.TokenCounts(VOCAB, rows=1)
    kept = counts.of([counts.begin([3])])
    rows = [0, *[counts.begin() for _ in range(5)]]
    counts.add(rows, torch.full((6,), 7))
    assert kept["output_counts"].tolist() == counts.of([0])["output_counts"].tolist()
    assert kept["prompt_mask"].nonzero().tolist() == [[0, 3]]
    assert counts.of(rows)["output_counts"].sum(1).tolist() == [1] * 6


def test_bad_rows_and_tokens_are_refused_by_name():
    counts = lz.TokenCounts(VOCAB)
    row = counts.begin([1])
    for call, said in (
        (lambda: lz.TokenCounts(0), "vocab: wanted a number of at least 1, got 0"),
        (lambda: counts.begin([VOCAB]), "prompt: wanted tokens from 0 to 39, got 40"),
        (lambda: counts.begin([1, 2.5]), "prompt: wanted whole numbers, got float32 1.0"),
        (lambda: counts.begin(torch.tensor([True])), "prompt: wanted whole numbers, got bool True"),
        (lambda: counts.begin(["a"]), r"prompt: wanted token ids, got \['a'\]"),
        (lambda: counts.add([row], torch.tensor([1.5])), "ids: wanted whole numbers, got float32 1.5"),
        (lambda: counts.add(row, torch.tensor([1])), "rows: wanted a list of rows, got 0; put one row into a list"),
        (lambda: counts.end(row + 1), "rows: wanted rows that begin"),
        (lambda: counts.add([row, row], torch.tensor([1, 2])), "rows: wanted rows that begin.. gave, each once"),
        (lambda: counts.add([row], torch.tensor([1, 2])), r"ids: wanted \(1,\) or \(1, N\), got \(2,\)"),
        (lambda: counts.add([row], torch.tensor([-2])), "ids: wanted tokens from -1 to 39, got -2"),
    ):
        with pytest.raises(lz.InvalidCallError, match=said):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_a_bit_allows_a_place(dtype, data):
    vocab, rows = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 3))
    allowed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * vocab, max_size=rows * vocab)))
    allowed = allowed.view(rows, vocab)
    words = torch.zeros(rows, -(-vocab // 32), dtype=torch.int64)
    for place in range(vocab):
        words[:, place // 32] |= allowed[:, place].long() << place % 32
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)  # as a buffer of int32 holds them
    logits = torch.randn(rows, vocab).to(dtype)
    found = lz.apply_token_bitmask(logits, words)
    assert torch.equal(found, logits.masked_fill(~allowed, -torch.inf))


def test_a_mask_of_too_few_words_is_refused():
    with pytest.raises(lz.InvalidCallError, match="bitmask: wanted 2 words of 32 places for 33, got 1"):
        lz.apply_token_bitmask(torch.zeros(1, 33), torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(lz.InvalidCallError, match="bitmask: wanted the rows"):
        lz.apply_token_bitmask(torch.zeros(2, 32), torch.zeros(1, 1, dtype=torch.int32))


def test_xgrammar_fills_such_masks():
    xgrammar = pytest.importorskip("xgrammar")
    mask = xgrammar.allocate_token_bitmask(2, 50)
    logits = torch.randn(2, 50)
    assert torch.equal(lz.apply_token_bitmask(logits, mask), logits)

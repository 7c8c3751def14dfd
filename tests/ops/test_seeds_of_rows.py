"""Draws with a seed for each row: they depend on nothing but their row, and come as the probabilities say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.core.judges import Distribution
from layerzero.ops.sampling import formulas

SEEDS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def rows(draw):
    """Logits of a few requests, what each of them keeps, and its seed."""
    count, vocab = draw(st.integers(1, 6)), draw(st.sampled_from([1, 7, 40, 2000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(count, vocab, generator=generator) * draw(st.sampled_from([0.3, 3.0]))
    numbers = {
        "top_k": draw(st.lists(st.integers(1, 2100), min_size=count, max_size=count)),
        "top_p": draw(st.lists(st.sampled_from([0.1, 0.5, 0.9, 1.0]), min_size=count, max_size=count)),
        "min_p": draw(st.lists(st.sampled_from([0.0, 0.05, 0.5]), min_size=count, max_size=count)),
        "temperature": draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=count, max_size=count)),
    }
    kept = {name: torch.tensor(each) for name, each in numbers.items() if draw(st.booleans())}
    seeds = torch.tensor(draw(st.lists(SEEDS, min_size=count, max_size=count)))
    order = draw(st.permutations(range(count)))
    return logits, kept, seeds, order[: draw(st.integers(1, count))]


@pytest.mark.parametrize("kernel", ["torch.sample_filtered", "reference.sampling.filtered"])
@settings(max_examples=examples(60), deadline=None)
@given(rows())
def test_a_draw_depends_on_its_own_row_alone(kernel, case):
    logits, kept, seeds, some = case
    with lz.scope(locks={"sampling.filtered": kernel}):
        whole = lz.sample(logits, seed=seeds, **kept)
        part = lz.sample(logits[some], seed=seeds[some], **{name: each[some] for name, each in kept.items()})
    assert part.tolist() == whole[some].tolist()


@pytest.mark.parametrize(
    "kept", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}], ids=str
)
@pytest.mark.parametrize("kernel", ["torch.sample_filtered", "reference.sampling.filtered"])
def test_seeds_that_follow_each_other_draw_as_the_probabilities_say(kernel, kept):
    draws, vocab = 100_000, 12
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    with lz.scope(locks={"sampling.filtered": kernel}):
        found = lz.sample(logits.expand(draws, -1).contiguous(), seed=torch.arange(draws), **kept)
    weights = logits.double().softmax(-1)
    weights = weights * formulas.keep_all_three(weights, **kept)
    counts = torch.bincount(found, minlength=vocab).unsqueeze(0)
    assert int(counts[weights == 0].sum()) == 0
    assert Distribution(lambda _: weights, "").unlikely(counts, weights / weights.sum()) == ""


def test_all_three_in_one_call_are_top_k_then_top_p_then_min_p():
    probs = torch.tensor([[0.4, 0.25, 0.15, 0.1, 0.06, 0.04]])
    found = lz.sample(probs.log().expand(2000, -1).contiguous(), top_k=5, top_p=0.9, min_p=0.3, seed=torch.arange(2000))
    assert sorted(set(found.tolist())) == [0, 1, 2]  # min-p alone leaves what is above 0.12
    found = lz.sample(probs.log().expand(2000, -1).contiguous(), top_k=4, top_p=0.9, min_p=0.05, seed=1)
    assert sorted(set(found.tolist())) == [0, 1, 2, 3]
    found = lz.sample(probs.log().expand(2000, -1).contiguous(), top_k=4, top_p=0.85, min_p=0.05, seed=1)
    assert sorted(set(found.tolist())) == [0, 1, 2]  # of 0.9 that four have, three have 0.8 of 0.765


def test_wide_rows_are_sorted_where_the_likeliest_places_do_not_say_it():
    flat = torch.zeros(2, 5000)
    flat[1, 77] = 30.0
    assert lz.sample(flat, top_p=torch.tensor([0.5, 0.5]), seed=torch.tensor([1, 2])).tolist()[1] == 77
    assert lz.which("sample", flat, top_p=0.5, seed=torch.tensor([1, 2]))["kernel_id"] == "torch.sample_filtered"


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_verified_row_depends_on_neither_its_neighbours_nor_their_drafts(data):
    """Ragged drafts, of trees as well: a row alone says what it says beside others, whose drafts are longer."""
    batch, most, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4)), 5
    lens = data.draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    target = torch.rand(batch, most + 1, vocab, generator=generator).softmax(-1)
    drafted = torch.rand(batch, most, vocab, generator=generator).softmax(-1)
    drafts = torch.randint(vocab, (batch, most), generator=generator)
    parents = torch.tensor([[data.draw(st.integers(-1, node - 1)) for node in range(most)] for _ in range(batch)])
    tree = {"parents": parents.view(batch, most).long()} if data.draw(st.booleans()) else {}
    seeds = torch.tensor(data.draw(st.lists(SEEDS, min_size=batch, max_size=batch)))
    for row, length in enumerate(lens):  # what is behind a draft is not read
        target[row, length + 1 :], drafted[row, length:] = torch.nan, -1.0
    ids, nodes = lz.verify_speculative(drafts, target, drafted, draft_lens=torch.tensor(lens), seed=seeds, **tree)
    best, _ = lz.verify_speculative(drafts, target, draft_lens=torch.tensor(lens), greedy=True, **tree)
    for row, length in enumerate(lens):
        own = {name: each[row : row + 1, :length] for name, each in tree.items()}
        short = drafts[row : row + 1, :length], target[row : row + 1, : length + 1]
        alone, stood = lz.verify_speculative(*short, drafted[row : row + 1, :length], seed=seeds[row : row + 1], **own)
        assert ids[row].tolist() == alone[0].tolist() + [-1] * (most - length)
        assert nodes[row].tolist() == stood[0].tolist() + [-1] * (most - length)
        greedy, _ = lz.verify_speculative(*short, greedy=True, **own)
        assert best[row].tolist() == greedy[0].tolist() + [-1] * (most - length)


def test_a_draft_may_be_drawn_by_the_seeds_that_verify_it():
    """With one random number for a draw and for its verification a target's 0.03 became 0."""
    draws, vocab = 50_000, 8
    generator = torch.Generator().manual_seed(1)
    draft, target = ((torch.randn(vocab, generator=generator) * 2).softmax(-1) for _ in range(2))
    seeds, drafted = torch.arange(draws), draft.expand(draws, 1, -1).contiguous()
    tokens = lz.sample_probs(drafted[:, 0], seed=seeds).unsqueeze(1)
    ids, _ = lz.verify_speculative(tokens, target.expand(draws, 2, -1).contiguous(), drafted, seed=seeds)
    counts = torch.bincount(ids[:, 0], minlength=vocab).unsqueeze(0)
    assert Distribution(lambda _: target, "").unlikely(counts, target.unsqueeze(0).double()) == ""


@pytest.mark.parametrize("kernel", ["torch.verify", "torch.verify_tree"])
def test_ragged_drafts_leave_the_targets_distribution(kernel):
    """Rows without a draft, with one token and with two, in one call, each by a seed of its own."""
    draws, vocab = 120_000, 5
    generator = torch.Generator().manual_seed(1)
    target, draft = (torch.randn(3, vocab, generator=generator).softmax(-1) for _ in range(2))
    lens = torch.arange(draws) % 3
    drafts = torch.stack([torch.multinomial(draft[node], draws, True, generator=generator) for node in range(2)], 1)
    drafted = draft[:2].expand(draws, -1, -1).contiguous()
    parents = {"parents": torch.tensor([[-1, 0]]).expand(draws, -1)} if kernel.endswith("tree") else {}
    with lz.scope(locks={"sampling.verify.tree" if parents else "sampling.verify": kernel}):
        ids, nodes = lz.verify_speculative(
            drafts,
            target.expand(draws, -1, -1).contiguous(),
            drafted,
            draft_lens=lens,
            seed=torch.arange(draws),
            **parents,
        )
    for length in range(3):
        first = torch.bincount(ids[lens == length, 0], minlength=vocab).unsqueeze(0)
        probs = target[:1].double()
        assert Distribution(lambda _, probs=probs: probs, "").unlikely(first, probs) == ""
        assert bool((nodes[lens == length, length:] == -1).all())
        assert bool((ids[lens == length, length + 1 :] == -1).all())


def test_bad_seeds_and_lengths_are_refused_by_name():
    logits, probs = torch.zeros(2, 5), torch.full((2, 3, 5), 0.2)
    drafts, seeds = torch.zeros(2, 2, dtype=torch.int64), torch.arange(2)
    for call, said in (
        (lambda: lz.sample(logits, seed=torch.arange(3)), "seed: wanted shape .2,., a number for each row, got .3,."),
        (lambda: lz.sample(logits, seed=torch.zeros(2)), "seed: wanted dtype int64"),
        (lambda: lz.sample(logits, seed=seeds, generator=torch.Generator()), "seed: wanted a seed or a generator"),
        (lambda: lz.sample(logits, min_p=2.0, top_k=3), "min_p: wanted a share above 0 and up to 1, got 2"),
        (lambda: lz.sample(logits, top_k=0), "top_k: wanted"),
        (lambda: lz.verify_speculative(drafts, probs, seed=torch.arange(3)), "seed: wanted batch 2 as in"),
        (lambda: lz.verify_speculative(drafts, probs, draft_lens=torch.arange(3)), "draft_lens: wanted batch 2"),
        (lambda: lz.verify_speculative(drafts, probs, draft_lens=torch.tensor([0, 3])), "draft_lens"),
        (lambda: lz.verify_speculative(drafts, probs, greedy=True, seed=seeds), "seed: wanted none where the draft"),
    ):
        with pytest.raises(lz.InvalidCallError, match=said):
            call()

"""Verified drafts: greedy ones exactly, others as the target alone would draw, chains and trees; bad input."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import layerzero as lz
from drawing import at_once, examples
from layerzero.backends.flashinfer import sampling
from layerzero.core import values
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.judges import Distribution
from layerzero.ops import FUNCTIONS, OPERATIONS
from layerzero.ops.sampling import formulas
from layerzero.testing import compare, fuzz
from layerzero.testing.generate import RandomCall, random_call

VOCAB = 5
DRAWS = 100_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(*shape, seed=0):
    return (torch.randn(*shape, VOCAB, generator=generator(seed)) * 1.5).softmax(-1)


def likely(counts, probabilities):
    """Whether counts of draws are those of probabilities, by the judge's own chi-square test."""
    judge = Distribution(lambda _: probabilities, "")
    return judge.unlikely(counts.unsqueeze(0), probabilities.double().unsqueeze(0)) == ""


@pytest.mark.parametrize("kernel", ["torch.verify", "reference.sampling.verify"])
def test_tokens_of_a_drafted_chain_come_as_the_target_alone_draws_them(kernel):
    """All outcomes of two tokens together: drafts drawn anew for each of 100,000 rows, whatever stood of them."""
    target, draft = rows(1, seed=1)[0], rows(1, seed=2)[0]
    after, after_draft = rows(VOCAB, seed=3), rows(VOCAB, seed=4)
    first = torch.multinomial(draft, DRAWS, True, generator=generator(5))
    second = torch.multinomial(after_draft[first], 1, generator=generator(6)).squeeze(-1)
    targets = torch.stack((target.expand(DRAWS, -1), after[first], rows(1, seed=7).expand(DRAWS, -1)), 1)
    drafts = torch.stack((draft.expand(DRAWS, -1), after_draft[first]), 1)
    with lz.scope(locks={"sampling.verify": kernel}):
        ids, nodes = lz.verify_speculative(torch.stack((first, second), 1), targets, drafts, seed=8)
    assert likely(torch.bincount(ids[:, 0], minlength=VOCAB), target)
    went_on = nodes[:, 0] == 0
    pairs = torch.bincount(ids[went_on, 0] * VOCAB + ids[went_on, 1], minlength=VOCAB**2)
    stood = torch.minimum(target, draft).unsqueeze(1) * after
    assert likely(pairs, (stood / stood.sum()).flatten())
    assert bool((ids[~went_on, 1] == -1).all())


@pytest.mark.parametrize("again", [True, False], ids=["put back", "not put back"])
@pytest.mark.parametrize("kernel", ["torch.verify_tree", "reference.sampling.verify.tree"])
def test_siblings_leave_the_targets_distribution(kernel, again):
    """Three tokens of one distribution side by side, drawn with and without putting back."""
    target, draft = rows(1, seed=1)[0], rows(1, seed=2)[0]
    tokens = torch.multinomial(draft.expand(DRAWS, -1), 3, again, generator=generator(3))
    drafts = draft.expand(DRAWS, 3, -1).clone()
    if not again:
        for place in (1, 2):
            left = drafts[:, place - 1].scatter(-1, tokens[:, place - 1 : place], 0.0)
            drafts[:, place] = left / left.sum(-1, keepdim=True)
    targets = torch.cat((target.expand(DRAWS, 1, -1), rows(3, seed=4).expand(DRAWS, -1, -1)), 1)
    parents = torch.full((DRAWS, 3), -1)
    with lz.scope(locks={"sampling.verify.tree": kernel}):
        ids, nodes = lz.verify_speculative(tokens, targets, drafts, parents, seed=5)
    assert likely(torch.bincount(ids[:, 0], minlength=VOCAB), target)
    for node in range(3):
        behind = ids[nodes[:, 0] == node, 1]
        assert likely(torch.bincount(behind, minlength=VOCAB), targets[0, node + 1])


@pytest.mark.parametrize("kernel", ["torch.verify_tree", "reference.sampling.verify.tree"])
def test_a_certain_tree_leaves_the_targets_distribution(kernel):
    """A draft without probabilities: two siblings, and a child of the second."""
    target = rows(1, seed=1)[0]
    targets = torch.cat((target.unsqueeze(0), rows(3, seed=4))).expand(DRAWS, -1, -1)
    tokens, parents = torch.tensor([[2, 0, 3]]).expand(DRAWS, -1), torch.tensor([[-1, -1, 1]]).expand(DRAWS, -1)
    with lz.scope(locks={"sampling.verify.tree": kernel}):
        ids, nodes = lz.verify_speculative(tokens, targets, None, parents, seed=5)
    assert likely(torch.bincount(ids[:, 0], minlength=VOCAB), target)
    second = ids[nodes[:, 0] == 1, 1]
    assert likely(torch.bincount(second, minlength=VOCAB), targets[0, 2])
    assert bool(((nodes[:, 1] == 2) == ((nodes[:, 0] == 1) & (ids[:, 1] == 3))).all())


def test_the_marginals_that_judge_are_those_of_every_way_through():
    """The arithmetic behind the judge against the sum over all ways through a small tree."""
    parents, tokens = torch.tensor([[-1, -1, 0, 0]]), torch.tensor([[1, 2, 0, 1]])
    target, draft = rows(1, 5, seed=1).double(), rows(1, 4, seed=2).double()
    ids, nodes = formulas.chances(tokens, target, draft, parents)
    want = torch.zeros_like(nodes)
    for falls in itertools.product((False, True), repeat=4):
        chance, last, depth, left, path = 1.0, -1, 0, target[0, 0], []
        for node, fell in enumerate(falls):
            if int(parents[0, node]) != last:
                chance *= not fell
                continue
            share = min(1.0, float(left[tokens[0, node]] / draft[0, node, tokens[0, node]]))
            chance *= 1 - share if fell else share
            if fell:
                left = (left - draft[0, node]).clamp(min=0) / (left - draft[0, node]).clamp(min=0).sum().clamp(
                    min=1e-300
                )
            else:
                last, depth, left = node, depth + 1, target[0, node + 1]
                path.append(node)
        for place in range(4):
            want[0, place, path[place] + 1 if place < len(path) else 0] += chance
    torch.testing.assert_close(nodes, want)
    torch.testing.assert_close(ids.sum(-1), torch.ones_like(ids.sum(-1)))


@pytest.mark.parametrize("kernel", ["torch.verify_greedy", "reference.sampling.verify.greedy"])
def test_greedy_verification_is_exact(kernel):
    target = torch.zeros(3, 4, VOCAB)
    target[torch.arange(3).unsqueeze(1), torch.arange(4), torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4], [1, 2, 0, 4]])] = (
        9.0
    )
    draft = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    tree, nested = torch.tensor([[0, 1, 2]]), torch.tensor([[-1, -1, 1]])
    with lz.scope(locks={"sampling.verify.greedy": kernel}):
        ids, nodes = lz.verify_speculative(draft, target, greedy=True)
        assert ids.tolist() == [[1, 2, 3, 4], [0, -1, -1, -1], [1, 2, 0, -1]]
        assert nodes.tolist() == [[0, 1, 2], [-1, -1, -1], [0, 1, -1]]
        ids, nodes = lz.verify_speculative(tree, target[:1], parents=nested, greedy=True)
    assert ids.tolist() == [[1, 3, -1, -1]]
    assert nodes.tolist() == [[1, -1, -1]]


def test_a_draft_of_the_targets_own_probabilities_stands_always():
    target = rows(64, 5)
    drafts = target[:, :-1]
    tokens = torch.multinomial(drafts.reshape(-1, VOCAB), 1, generator=generator(1)).view(64, 4)
    ids, nodes = lz.verify_speculative(tokens, target, drafts, seed=3)
    assert torch.equal(ids[:, :4], tokens)
    assert nodes.tolist() == [[0, 1, 2, 3]] * 64


def test_seeds_and_generators_decide():
    target, tokens = rows(200, 3), torch.zeros(200, 2, dtype=torch.int64)
    first = lz.verify_speculative(tokens, target, seed=1)[0]
    assert torch.equal(first, lz.verify_speculative(tokens, target, seed=1)[0])
    assert not torch.equal(first, lz.verify_speculative(tokens, target, seed=2)[0])
    own = generator(4)
    drawn = [lz.verify_speculative(tokens, target, generator=own)[0] for _ in range(2)]
    assert not torch.equal(*drawn)


WRONG = {
    "target_probs: wanted a row more than the 2 of draft_ids": {"target_probs": rows(2, 2)},
    "draft_ids[0, 1]: wanted 0 to 4, got 5": {"draft_ids": torch.tensor([[0, 5], [0, 0]])},
    "parents[0, 0]: wanted -1 to 1, got 2": {"parents": torch.tensor([[2, 0], [-1, 0]])},
    "draft_probs: wanted none where the draft is verified greedily": {"draft_probs": rows(2, 2), "greedy": True},
    "seed: wanted a seed or a generator, got both": {"seed": 1, "generator": torch.Generator()},
    "draft_probs: wanted batch 2 as in target_probs, got 3": {"draft_probs": rows(3, 2)},
    "target_probs: wanted rows that something can be drawn of, got one whose probabilities add up to inf": {
        "target_probs": torch.full((2, 3, 5), 3e38)
    },
    "target_probs[1, 2]: wanted finite numbers from 0 up": {
        "target_probs": torch.stack((rows(3), rows(3).index_fill(0, torch.tensor(2), 0.0)))
    },
}


@pytest.mark.parametrize("problem", WRONG)
def test_bad_calls(problem):
    given = {"draft_ids": torch.zeros(2, 2, dtype=torch.int64), "target_probs": rows(2, 3), **WRONG[problem]}
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.verify_speculative(**given)
    assert problem in str(raised.value)
    assert raised.value.function == "verify_speculative"
    assert "temperature" not in str(raised.value)


@at_once("parents", [None, torch.tensor([[-1, -1]])])
@at_once("kernel", ["torch", "reference"])
@at_once("number, told", [(float("nan"), "nan"), (float("inf"), "inf"), (-0.5, "-0.5")])
def test_a_draft_of_no_probabilities_is_refused(parents, kernel, number, told):
    drafted = torch.full((1, 2, 4), 0.25)
    drafted[0, 1, 3] = number
    name = {"torch": "torch.verify*", "reference": "reference.*"}[kernel]
    with (
        lz.prefer(name),
        pytest.raises(lz.InvalidCallError, match=rf"^verify_speculative: draft_probs\[0, 1, 3\]: .* got {told}"),
    ):
        lz.verify_speculative(torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 3, 4), 0.25), drafted, parents)


@at_once("nothing", [-1, VOCAB, 2**31 - 1])
@at_once("dtype", [torch.int32, torch.int64])
@at_once("given", [{}, {"seed": 1, "parents": [[-1, 0], [-1, 0]]}, {"greedy": True}, {"drafts": True}])
@at_once("kernel", ["torch.verify*", "reference.*"])
def test_what_stands_behind_a_rows_nodes_is_no_token(kernel, given, dtype, nothing):
    """Padding of -1 ended in an IndexError and a kernel that rested, beyond the vocabulary on each way."""
    target, more = rows(2, 3), {name: value for name, value in given.items() if name in ("greedy", "seed")}
    parents = torch.tensor(given["parents"], dtype=dtype) if "parents" in given else None
    drafts = rows(2, 2, seed=1) if "drafts" in given else None
    more |= {} if "greedy" in given else {"seed": 1}
    found = []
    with lz.prefer(kernel):
        for behind in (nothing, 0):
            ids = torch.tensor([[3, behind], [1, 2]], dtype=dtype)
            lens = torch.tensor([1, 2], dtype=dtype)
            found.append(lz.verify_speculative(ids, target, drafts, parents, draft_lens=lens, **more))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert bool((found[0][0][0, 2:] == -1).all())


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made while it is entered."""

    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and not each._is_view():
                self.made = max(self.made, each.nbytes)
        return found


@pytest.mark.parametrize("wrong", [False, True])
def test_a_draft_is_checked_without_an_index_for_each_element(wrong):
    """Debug mode made 1 GB of int64 for 64 drafts of 8 tokens over a vocabulary of 128,256."""
    drafted = torch.full((7, 8, 1000), 1e-3)
    if wrong:
        drafted[2, 3, 5], drafted[2, 3, 7], drafted[6, 0, 999] = -1.0, float("nan"), float("inf")
    target = torch.full((7, 9, 1000), 1e-3)
    check = OPERATIONS["sampling.verify"].check_values
    with Largest() as largest:
        told = values.problems(check(target_probs=target, draft_probs=drafted))
    places = ["draft_probs[2, 3, 5]", "draft_probs[6, 0, 999]"] if wrong else []
    assert [each.partition(":")[0] for each in told] == places
    assert largest.made <= target.nbytes


def test_a_draft_of_zeros_may_be():
    """Where siblings are drawn without putting back, nothing may be left for the last; a token that pads has none."""
    ids, _ = lz.verify_speculative(
        torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 2, 4), 0.25), torch.zeros(1, 1, 4), seed=0
    )
    assert int(ids[0, 0]) in range(4)


@pytest.mark.parametrize("certain", [True, False])
def test_flashinfers_module_is_asked_as_it_wants_to_be(certain, monkeypatch):
    """The binding alone, with the walk in the library's place."""
    asked = []

    def chain(draft_probs, tokens, target, ids, standing, stood, deterministic, seeds, seed, offsets, offset):
        assert (deterministic, seeds, offsets) == (True, None, None)
        assert tokens.dtype is ids.dtype is standing.dtype is torch.int32
        assert draft_probs.shape == target[:, 1:].shape
        asked.append((seed, offset))
        found = formulas.walked(tokens, target, draft_probs, formulas.chain_of(tokens), generator(seed))
        ids.copy_(found[0])
        stood += (found[1] >= 0).sum(-1).int()

    module = types.ModuleType("flashinfer.sampling")
    module.get_seed_and_offset = lambda numbers, *_: (numbers, 7)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    monkeypatch.setattr(sampling, "built", lambda: types.SimpleNamespace(chain_speculative_sampling=chain))
    tokens, target = torch.tensor([[1, 2], [0, 3], [4, 4]]), rows(3, 3)
    given = {"draft_ids": tokens, "target_probs": target} | ({} if certain else {"draft_probs": rows(3, 2, seed=1)})
    facts = FactsBuilder(OPERATIONS["sampling.verify"]).of_valid(given, device=Device.named("H200"))
    run = sampling.KERNELS[-1].load(facts)
    truth = compare.expected(RandomCall("verify_speculative", given))
    for seed in (1, None):
        results = run(target, tokens, draft_probs=given.get("draft_probs"), seed=seed, generator=None)
        assert compare.problems(results, {}, truth) == []
    assert asked == [(1, 0), (12, 7)], "of 2 tokens: one each, one more for that which falls, and one in its place"


def test_random_calls(monkeypatch):
    name = "verify_speculative"
    monkeypatch.setattr("layerzero.testing.generate.FUNCTIONS_BY_NAME", {name: FUNCTIONS[name]})
    report = fuzz.run(examples(150), 3)
    assert report.ok, str(report)


def test_a_row_of_which_exactly_nothing_is_left_may_come_as_it_is():
    call = random_call(3, 10353, data=1)  # the draft gives the first token what the target does, and the second more
    assert compare.check(call) == []

"""What sampling draws: its sets against a definition in plain Python, how often, seeds, rows, and bad input."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends.torch import sampling_filters
from layerzero.core.handle import FOREIGN
from layerzero.core.judge import Given
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS, OPERATIONS
from layerzero.ops.calls import arguments_of
from layerzero.ops.sampling import formulas
from layerzero.ops.sampling.declare import generator_for
from layerzero.testing import compare, fuzz
from layerzero.testing.battery import Battery
from layerzero.testing.generate import RandomCall
from sampled_functions import KINDS

KERNELS = [
    ("sample", "torch.sample"),
    ("sample_topk", "torch.sample_topk"),
    ("sample_topk", "torch.sorted_topk"),
    ("sample_topp", "torch.sample_topp"),
    ("sample_topp", "torch.sorted_topp"),
    ("sample_minp", "torch.sample_minp"),
    ("sample_topk_topp", "torch.sample_topk_topp"),
    ("sample_topk_topp", "torch.sorted_topk_topp"),
]
NAMES = [*KINDS, *(f"{name}_probs" for name in KINDS)]
BOTH = sorted(NAMES)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def source(name, *shape, seed=0):
    logits = torch.randn(*shape, generator=generator(seed)) * 2
    return logits.softmax(-1) if name.endswith("_probs") else logits


def parameters(name):
    return KINDS[name.removesuffix("_probs")]


def kept(probs, top_k=None, top_p=None, min_p=None):
    """The places of one row that may come, by the definition."""
    every = list(range(len(probs)))
    if top_k is not None:
        every = [at for at in every if sum(other > probs[at] for other in probs) < top_k]
    if top_p is not None:
        whole = sum(probs[at] for at in every)
        every = [at for at in every if sum(probs[other] for other in every if probs[other] > probs[at]) < top_p * whole]
    if min_p is not None:
        every = [at for at in every if probs[at] >= min_p * max(probs)]
    return {at for at in every if probs[at] > 0}


def seen(name, tensor, draws=4000, **given):
    """The places that come of one row."""
    return set(getattr(lz, name)(tensor.expand(draws, -1), **given, seed=3).tolist())


ROWS = {
    "spread": [0.4, 0.3, 0.2, 0.1],
    "tied": [0.2, 0.2, 0.2, 0.2, 0.2],
    "pairs": [0.3, 0.3, 0.15, 0.15, 0.1],
    "padded": [0.5, 0.0, 0.25, 0.25, 0.0],
    "peaked": [0.0625, 0.875, 0.0625],
    "one": [1.0],
}


SETS = {  # of each function, what it is given
    "topk": [{"top_k": k} for k in (1, 2, 3, 99)],
    "topp": [{"top_p": p} for p in (1e-30, 0.35, 0.55, 0.95, 1.0, 1)],
    "minp": [{"min_p": p} for p in (1e-30, 0.45, 0.7, 1.0)],
    "topk_topp": [{"top_k": k, "top_p": p} for k, p in ((1, 1.0), (2, 0.55), (3, 0.35), (4, 0.9), (99, 0.55))],
}


@at_once("row", ROWS)
@at_once("way", ["torch.sample_", "torch.sorted_", "reference"])
@at_once("kind, given", [(kind, each) for kind, sets in SETS.items() for each in sets])
def test_what_comes_is_what_the_definition_keeps(kind, given, way, row):
    """Top-p is of what top-k leaves."""
    operation = f"sampling.{kind}.probs"
    lock = (
        f"reference.{operation}"
        if way == "reference"
        else way.replace("sorted", "sample" if kind == "minp" else "sorted") + kind
    )
    with lz.scope(locks={operation: lock}):
        assert seen(f"sample_{kind}_probs", torch.tensor(ROWS[row]), **given) == kept(ROWS[row], **given)


@at_once("name, kernel", KERNELS)
@at_once("ending", ["", "_probs"])
def test_a_hundred_thousand_draws_come_as_often_as_they_should(name, kernel, ending):
    rows = source(name + ending, 4, 32)
    given = KINDS[name]
    operation = FUNCTIONS[name + ending].operations[0]
    many = rows.repeat_interleave(25_000, 0)
    with lz.scope(locks={operation.name: kernel}):
        ids = getattr(lz, name + ending)(many, **given, seed=11)
    call = RandomCall(name + ending, {operation.schema.inputs[0].name: rows, **given})
    judge, truth = compare.expected(call).judges["ids"]
    probabilities, support = truth.basis
    assert torch.equal(probabilities > 0, support), "no row lies on the bound, so all are counted"
    counts = torch.stack([torch.bincount(each, minlength=32) for each in ids.view(4, -1)])
    assert judge.unlikely(counts, probabilities) == ""
    assert not counts[~support].any()


def test_places_are_drawn_of_weights_that_want_a_gradient():
    """On a GPU those of logits of a model in training do."""
    assert sampling_filters.by_race(
        torch.tensor([[0.0, 1.0], [2.0, 0.0]], requires_grad=True), generator()
    ).tolist() == [1, 0]


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_a_temperature_divides_logits(name, kernel):
    operation = FUNCTIONS[name].operations[0]
    logits = source(name, 2, 16)
    with lz.scope(locks={operation.name: kernel}):
        plain = getattr(lz, name)(logits.repeat(500, 1) / 0.3, **KINDS[name], seed=5)
        assert torch.equal(getattr(lz, name)(logits.repeat(500, 1), **KINDS[name], temperature=0.3, seed=5), plain)
        likeliest = logits.argmax(-1).repeat(500)
        assert torch.equal(getattr(lz, name)(logits.repeat(500, 1), **KINDS[name], temperature=1e-6), likeliest)


@pytest.mark.parametrize("name", BOTH)
def test_seeds_and_generators_decide_what_is_drawn(name):
    tensor, given, call = source(name, 64, 100), parameters(name), getattr(lz, name)
    first = call(tensor, **given, seed=1)
    assert first.dtype is torch.int64
    assert first.shape == (64,)
    assert torch.equal(first, call(tensor, **given, seed=1))
    assert not torch.equal(first, call(tensor, **given, seed=2))
    own = generator(7)
    drawn = [call(tensor, **given, generator=own) for _ in range(2)]
    assert not torch.equal(*drawn), "a generator goes on"
    assert torch.equal(drawn[0], call(tensor, **given, generator=generator(7)))
    torch.manual_seed(9)
    before = call(tensor, **given)
    assert not torch.equal(before, call(tensor, **given))
    torch.manual_seed(9)
    assert torch.equal(before, call(tensor, **given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 8, 9, 400])
def test_the_largest_of_blocks_are_the_largest(count, dtype):
    """As topk says, among ties any of the equals; of a vocabulary that is no whole blocks, too."""
    logits = (torch.randn(2, 3, 4096, generator=generator()) * 3).to(dtype)
    logits[0, 0, 100:140] = 20.0
    for tensor in (logits, logits[..., :1001], logits[0, 0]):
        values, places = sampling_filters.largest(tensor, count)
        assert torch.equal(values, tensor.topk(count).values)
        assert torch.equal(tensor.gather(-1, places), values)
        assert all(len(set(each)) == count for each in places.reshape(-1, count).tolist())


@pytest.mark.parametrize("name", ["sample_topk", "sample_topk_topp", "sample_topk_probs", "sample_topk_topp_probs"])
def test_few_rows_are_drawn_of_as_many_are(name):
    """What Python draws of a few rows has the sets that torch's operators have of many."""
    tensor, given = source(name, 1, 64), parameters(name)
    many = set(getattr(lz, name)(tensor.expand(4000, -1), **given, seed=1).tolist())
    own = generator(2)
    assert {int(getattr(lz, name)(tensor, **given, generator=own)) for _ in range(600)} == many


def test_a_seed_leaves_torchs_own_generator_as_it_was():
    before = torch.get_rng_state()
    lz.sample(torch.randn(3, 8, generator=generator()), seed=4)
    assert torch.equal(before, torch.get_rng_state())


@at_once("ending", ["", "_probs"])
@at_once("name, kernel", [each for each in KERNELS if each[0] != "sample"])
def test_rows_have_numbers_of_their_own(name, kernel, ending):
    """A row draws what it would alone, and out of range the ends of the range hold."""
    probs = torch.tensor(ROWS["pairs"])
    tensor = probs if ending else probs.log()
    counts, shares = torch.tensor([-3, 1, 3, 4, 900]), torch.tensor([-1.0, 0.35, 0.55, 0.7, 1.5])
    operation = FUNCTIONS[name + ending].operations[0]
    given = {each: (counts if each == "top_k" else shares).repeat_interleave(2000) for each in KINDS[name]}
    with lz.scope(locks={operation.name: kernel}):
        ids = getattr(lz, name + ending)(tensor.expand(10_000, -1), **given, seed=0).view(5, -1)
    for row, k, share in zip(ids, counts.clamp(1).tolist(), shares.clamp(1e-30, 1).tolist(), strict=True):
        of = {each: k if each == "top_k" else share for each in KINDS[name]}
        assert set(row.tolist()) == kept(ROWS["pairs"], **of)


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_rows_have_temperatures_of_their_own(name, kernel):
    """What a row draws at its temperature is what it draws at that of all; 0 and less is the likeliest place."""
    logits, warm = source(name, 3, 16), torch.tensor([0.3, 1.0, 0.0])
    operation = FUNCTIONS[name].operations[0]
    with lz.scope(locks={operation.name: kernel}):
        ids = getattr(lz, name)(logits.repeat(500, 1), **KINDS[name], temperature=warm.repeat(500), seed=5)
        divided = logits / torch.tensor([0.3, 1.0, 1e-6]).unsqueeze(1)
        assert torch.equal(ids, getattr(lz, name)(divided.repeat(500, 1), **KINDS[name], seed=5))
        assert bool((ids.view(500, 3)[:, 2] == logits[2].argmax()).all())
        with pytest.raises(lz.InvalidCallError, match=r"temperature: wanted shape .* a number for each row, got"):
            getattr(lz, name)(logits, **KINDS[name], temperature=warm[:2])


@at_once("name", BOTH)
@at_once("shape", [(5,), (2, 3, 5), (0, 5), (4, 1)])
def test_any_number_of_leading_axes(name, shape):
    ids = getattr(lz, name)(source(name, *shape), **parameters(name))
    assert ids.shape == shape[:-1]
    assert bool(((ids >= 0) & (ids < shape[-1])).all())


@at_once("dtype", [torch.float16, torch.bfloat16, torch.float64])
@at_once("name", BOTH)
def test_dtypes(name, dtype):
    peaked = torch.full((3, 100), -50.0)
    peaked[:, 7] = 50.0
    tensor = peaked.softmax(-1) if name.endswith("_probs") else peaked
    assert getattr(lz, name)(tensor.to(dtype), **parameters(name)).tolist() == [7, 7, 7]


def test_logits_that_ask_for_gradients_are_drawn_of_by_the_same_kernel():
    logits = torch.randn(4, 64, requires_grad=True)
    assert lz.explain("sample_topp", logits, 0.9).kernel_id == "torch.sample_topp"
    assert not lz.sample_topp(logits, 0.9).requires_grad


def test_a_count_above_the_vocabulary_keeps_every_place():
    logits = torch.randn(64, 8)
    assert torch.equal(lz.sample_topk(logits, 9, seed=1), lz.sample_topk(logits, 8, seed=1))
    assert torch.equal(lz.sample_topk_topp(logits, 2**31 - 1, 0.9, seed=1), lz.sample_topk_topp(logits, 8, 0.9, seed=1))


def test_a_generator_of_another_device_is_foreign():
    kind = OPERATIONS["sampling.topp"].schema.param("generator").kind_of
    assert kind(torch.Generator(), {"logits": torch.ones(1)}) == "given"
    assert kind(torch.Generator(), {"logits": torch.ones(1, device="meta")}) == "given"

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    assert kind(torch.Generator(), {"logits": torch.ones(1).as_subclass(Elsewhere)}) == FOREIGN


@pytest.mark.parametrize("kernel", ["torch.greedy", "torch.greedy_blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_picks_the_first_of_equals(kernel, dtype):
    logits = torch.randn(5, 3, 512, generator=generator()).to(dtype)
    logits[..., [3, 300, 511]] = 50.0
    logits[0, :, 2] = math.nan
    logits[1] = -math.inf
    logits[2, :, 400] = math.inf
    wanted = torch.tensor([2, 0, 400, 3, 3]).unsqueeze(1).expand(5, 3)
    with lz.scope(locks={"sampling.greedy": kernel}):
        assert torch.equal(lz.greedy(logits), wanted)


@pytest.mark.parametrize("name", [*BOTH, "greedy"])
def test_compiled(name):
    tensor = source(name, 16, 64)
    given = parameters(name) | {"seed": 1} if name != "greedy" else {}
    torch.compiler.reset()  # a lambda is compiled for each name, which are more than torch allows one
    compiled = torch.compile(lambda tensor: getattr(lz, name)(tensor, **given), fullgraph=True, backend="eager")
    assert torch.equal(compiled(tensor), getattr(lz, name)(tensor, **given))


def test_a_generator_is_no_promise_and_does_not_advance_with_a_step():
    operation = OPERATIONS["sampling.categorical"]
    assert "generator" not in arguments_of(operation, operation.cases[0], torch.float32, promised=True)
    checks = [each.name for each in Battery(REGISTRY.kernel("torch.sample"), operation, "cpu", 0, 2).checks()]
    assert "distribution, float32" in checks
    assert not [name for name in checks if "advances" in name]


def test_parts_of_a_row_add_up_in_any_order():
    weights = torch.randn(3, 1000, generator=generator()).softmax(-1)
    parts = formulas.parts(weights)
    assert torch.equal(parts.cumsum(-1)[:, -1], parts.flip(-1).cumsum(-1)[:, -1])
    assert bool((parts.sum(-1).double() / formulas.WHOLE - 1).abs().max() < 1e-12)
    assert not formulas.parts(torch.tensor([0.0, 0.0])).any()
    assert not formulas.parts(torch.tensor([math.nan, 1.0])).any()


def test_a_kernel_that_keeps_too_much_is_found_wrong():
    """The judge sees one place too many, and counts that are those of another p."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    call = RandomCall("sample_topp", {"logits": logits, "top_p": 0.8})
    truth = compare.expected(call)
    assert compare.problems(torch.tensor([1]), {}, truth) == []
    assert "got 2, of probability 0" in compare.problems(torch.tensor([2]), {}, truth)[0]
    judge, given = truth.judges["ids"]
    assert isinstance(given, Given)
    probabilities, _ = given.basis
    assert judge.unlikely(torch.tensor([[50_000, 50_000, 0, 0]]), probabilities)


def test_what_lies_on_the_bound_may_come_or_not():
    """Half the row is exactly what the likeliest place has: with p of 0.5 float32 decides about the next one."""
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    truth = compare.expected(RandomCall("sample_topp_probs", {"probs": probs, "top_p": 0.5}))
    assert compare.problems(torch.tensor([1]), {}, truth) == []
    assert compare.problems(torch.tensor([0]), {}, truth) == []
    assert compare.problems(torch.tensor([2]), {}, truth)


@pytest.mark.parametrize("kernels", [["torch.sample*", "torch.sorted*", "torch.greedy*"]])
def test_random_calls(kernels, monkeypatch):
    names = {*BOTH, "greedy"}
    kept = {name: function for name, function in FUNCTIONS.items() if name in names}
    monkeypatch.setattr("layerzero.testing.generate.FUNCTIONS_BY_NAME", kept)
    report = fuzz.run(300, 5, kernels=kernels)
    assert report.ok, str(report)
    assert len(report.kernels) == 11


def test_a_recorded_call_with_a_generator_is_asked_about_without_tensors():
    """There are no generators on the meta device; tuning of such a recorded call ended."""
    made = generator_for(None, "logits")({"logits": torch.empty(2, 8, device="meta")})
    assert made.device == torch.device("cpu")

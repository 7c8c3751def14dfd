"""Each kind of judge on right and on wrong results, and what an operation may say of its own."""

from __future__ import annotations

import invented
import pytest
import torch
from invented import invented_operations  # noqa: F401  # a fixture

import layerzero as lz
from layerzero.core.judge import Elementwise, Exact, Given, Indices, Property, reproducible
from layerzero.core.judges import Distribution
from layerzero.testing import compare
from layerzero.testing.generate import RandomCall

pytestmark = pytest.mark.usefixtures("invented_operations")

FLOAT32 = Given(torch.float32)
SCORES = torch.tensor([[3.0, 5.0, 5.0, 1.0], [2.0, 2.0, 0.0, 9.0]], dtype=torch.float64)


def test_numbers_may_be_as_far_off_as_the_tolerance_of_the_calls_dtype_says():
    judge = Elementwise({torch.float32: lz.Tolerance(0.0, 0.1), torch.int8: lz.Tolerance(0.0, 1.0)}, "a test")
    want = torch.tensor([1.0, torch.inf, torch.nan], dtype=torch.float64)
    near = torch.tensor([1.05, torch.inf, torch.nan])
    assert judge.problem(near, want, FLOAT32) == ""
    assert "1 of 3 elements too far; worst at (0,): wanted 1, got 1.1" in judge.problem(near + 0.15, want, FLOAT32)
    assert judge.problem(near + 0.15, want, Given(torch.int8)) == ""
    assert judge.problem(near + 0.15, want, Given(torch.float32, wider=lz.Tolerance(0.0, 0.5))) == ""
    with pytest.raises(ValueError, match=r"wanted a call in float32 or int8, .*; got one in float16"):
        judge.problem(near, want, Given(torch.float16))


def test_a_small_sum_of_large_numbers_may_be_as_far_off_as_they_are():
    judge = Elementwise({torch.float32: lz.Tolerance(0.01, 0.1)}, "a test", lambda of: of["terms"].abs().sum(-1))
    terms = torch.tensor([[100.0, -99.0], [0.5, 0.5]], dtype=torch.float64)
    given = Given(torch.float32, judge.basis({"terms": terms}))
    want = terms.sum(-1)
    assert judge.problem(want + torch.tensor([2.0, 0.0]), want, given) == ""
    found = judge.problem(want + torch.tensor([2.0, 2.0]), want, given)
    assert "1 of 2 elements too far; worst at (1,)" in found
    assert "atol 0.1, 1 summed" in found
    assert judge.problem(torch.full((2,), torch.nan), want, given)
    assert judge.problem(want, want, given) == ""


def test_exact_values_are_those_of_the_truth_rounded_to_the_results_dtype():
    judge = Exact("it moves numbers")
    want = torch.tensor([0.1, torch.nan, 3.0], dtype=torch.float64)
    assert judge.problem(want.to(torch.bfloat16), want, FLOAT32) == ""
    wrong = torch.tensor([0.1, torch.nan, 3.1], dtype=torch.bfloat16)
    assert "1 of 3 elements differ, and none may; first at (2,): wanted 3.0, got 3.09" in judge.problem(
        wrong, want, FLOAT32
    )
    large = torch.tensor([2**60 + 1])
    assert judge.problem(large, large, FLOAT32) == ""
    assert judge.problem(large - 1, large, FLOAT32), "no integer is seen as float64"


CHOICES = [
    ([[1], [3]], [[1], [3]], ""),
    ([[2], [3]], [[1], [3]], ""),
    ([[0], [3]], [[1], [3]], "first at (0, 0): wanted 1 with a score of 5, or one that ties; got 0 with 3"),
    ([[2, 1], [3, 1]], [[1, 2], [3, 0]], ""),
    ([[1, 1], [3, 0]], [[1, 2], [3, 0]], "(0,): wanted different places, got 1 twice"),
    ([[1, 2], [3, 4]], [[1, 2], [3, 0]], "(1, 1): wanted a place from 0 to 3, got 4"),
    ([1, 3], [1, 3], ""),
    ([2, 3], [1, 3], ""),
    ([2, 0], [1, 3], "first at (1,): wanted 3 with a score of 9, or one that ties; got 0 with 2"),
    ([-1, 3], [1, 3], "(0,): wanted a place from 0 to 3, got -1"),
    ([-1, 3], [-1, 3], ""),
]  # fmt: skip


@pytest.mark.parametrize(("got", "want", "problem"), CHOICES)
def test_another_place_is_right_if_its_score_ties(got, want, problem):
    judge = Indices(lambda arguments: arguments["scores"], "a test")
    given = Given(torch.float32, judge.basis({"scores": SCORES}))
    found = judge.problem(torch.tensor(got, dtype=torch.int32), torch.tensor(want), given)
    assert found == problem or (problem and found.endswith(problem))


def test_how_near_scores_tie_may_depend_on_the_dtype():
    judge = Indices(lambda arguments: arguments["scores"], "a test", {torch.bfloat16: lz.Tolerance(0.0, 2.5)})
    basis = judge.basis({"scores": SCORES})
    got, want = torch.tensor([0, 3]), torch.tensor([1, 3])
    assert judge.problem(got, want, Given(torch.bfloat16, basis)) == ""
    assert judge.problem(got, want, Given(torch.float32, basis))


ODDS = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.1, 0.2, 0.7]], dtype=torch.float64)


def odds(rows=ODDS, **more):
    judge = Distribution(lambda arguments: rows, "a test", **more)
    return judge, Given(torch.float32, judge.basis({}))


def test_a_draw_is_right_if_it_may_come():
    judge, given = odds()
    want = torch.tensor([0, 3])
    assert judge.problem(torch.tensor([1, 1]), want, given) == ""
    told = judge.problem(torch.tensor([3, 3]), want, given)
    assert told == "1 of 2 draws cannot come; first at (0,): got 3, of probability 0; row (0,) has 3 that can"
    assert judge.problem(torch.tensor([0, 4]), want, given) == "(1,): wanted a place from 0 to 3, got 4"
    assert judge.problem(torch.tensor([[0, 1, 2], [1, 2, 0]]), want, given).endswith("row (1,) has 3 that can")


def test_rows_without_probabilities_say_nothing_and_ties_may_widen_what_may_come():
    judge, given = odds(torch.tensor([[0.0, 0.0], [torch.nan, 1.0]], dtype=torch.float64))
    assert judge.problem(torch.tensor([1, 0]), torch.tensor([0, 0]), given) == ""
    judge, given = odds(support=lambda arguments: torch.ones(2, 4, dtype=torch.bool))
    assert judge.problem(torch.tensor([3, 0]), torch.tensor([0, 3]), given) == ""


@pytest.mark.parametrize("seed", range(20))
def test_a_right_sampler_passes_and_one_that_is_off_by_2_percent_does_not(seed):
    judge, _ = odds()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, 32, generator=generator, dtype=torch.float64).softmax(-1)
    drawn = torch.multinomial(rows, 25_000, replacement=True, generator=generator)

    def counts(draws):
        return torch.stack([torch.bincount(row, minlength=32) for row in draws])

    assert judge.unlikely(counts(drawn), rows) == ""
    astray = torch.rand(drawn.shape, generator=generator) < 0.02
    told = judge.unlikely(counts(drawn.masked_fill(astray, 0)), rows)
    assert "drawn with other probabilities: chi-square" in told
    assert "farthest off place 0 of row" in told


def test_rare_places_are_counted_together():
    judge, _ = odds()
    rows = torch.tensor([[1.0 - 1e-3, *([1e-6] * 1000)]], dtype=torch.float64)
    drawn = torch.multinomial(rows, 1000, replacement=True, generator=torch.Generator().manual_seed(0))
    assert judge.unlikely(torch.bincount(drawn[0], minlength=1001).unsqueeze(0), rows) == ""
    only = torch.zeros(1, 1001, dtype=torch.int64)
    only[0, 7] = 1000
    assert "place 7 of row 0: wanted about 0, got 1000 of 1000" in judge.unlikely(only, rows)


def test_a_property_can_judge_a_result_by_itself():
    def ascending(results, truth, given):
        ((got,),) = results
        return "" if torch.equal(got, got.sort().values) else "wanted it sorted"

    judge = Property("sorted", ascending)
    given = Given(torch.float32, judge.basis({}))
    assert judge.problem(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0]), given) == ""
    assert judge.problem(torch.tensor([2.0, 1.0]), torch.tensor([5.0, 6.0]), given) == "wanted it sorted"


def changed(operation, **parts):
    names = ("schema", "summary", "reference", "fake", "cases", "tolerance", "tolerance_reason", "judge", "properties")
    return lz.Operation(**({name: getattr(operation, name) for name in names} | parts))


def test_a_judge_of_no_result_and_a_property_of_no_argument_are_refused():
    wanted = r"operation 'invented.choose': judge: wanted names among chosen, got 'choosen'"
    with pytest.raises(lz.RegistrationError, match=wanted):
        changed(invented.CHOOSE, judge={"choosen": Exact("a test")})
    wanted = r"properties: sead decides what is random: wanted arguments of the operation, got 'sead'"
    with pytest.raises(lz.RegistrationError, match=wanted):
        changed(invented.DRAW, properties=(reproducible("sead", 1, 2),))


def test_dtypes_are_those_that_a_call_may_have_and_a_judge_can_judge():
    assert invented.PRODUCT.dtypes == (torch.int8,)
    assert invented.DRAW.dtypes == (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert invented.UNSAID.dtypes == ()
    few = changed(invented.CHOOSE, judge=None, tolerance={torch.float16: lz.Tolerance(0.0, 0.0)})
    assert few.dtypes == (torch.float16,)


def test_compare_asks_the_judges():
    scores = torch.tensor([[1.0, 4.0, 4.0, 2.0]])
    truth = compare.expected(RandomCall("invented_choose", {"scores": scores, "count": 2}))
    assert compare.problems(torch.tensor([[2, 1]]), {}, truth) == []
    assert compare.problems(torch.tensor([[2, 3]]), {}, truth)
    assert "wanted torch.int64 (1, 2)" in compare.problems(torch.tensor([[2, 3]], dtype=torch.int32), {}, truth)[0]
    left, right = torch.ones(1, 16, dtype=torch.int8), torch.ones(3, 16, dtype=torch.int8)
    truth = compare.expected(RandomCall("invented_product", {"left": left, "right": right}))
    assert compare.problems(torch.full((1, 3), 16.0), {}, truth) == []
    assert "too far" in compare.problems(torch.full((1, 3), 16.1), {}, truth)[0]


def test_a_truth_that_is_drawn_leaves_random_states_as_they_were():
    weights = torch.ones(4, 8)
    call = RandomCall("invented_draw", {"weights": weights})
    before = torch.get_rng_state()
    truth = compare.expected(call)
    assert torch.equal(torch.get_rng_state(), before)
    assert compare.problems(torch.randint(0, 8, (4,)), {}, truth) == []
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    torch.rand(4, generator=compare.copied(generator))
    torch.rand(4, generator=compare.widened(generator))
    assert torch.equal(generator.get_state(), state)


def test_where_an_argument_makes_results_random_only_their_kind_is_compared():
    query = torch.randn(1, 4, 2, 8)
    call = RandomCall("attention", dict(zip(("query", "key", "value"), [query] * 3, strict=True)) | {"dropout_p": 0.5})
    truth = compare.expected(RandomCall(call.function, call.arguments | {"layout": "BSHD"}))
    assert truth.loose
    assert compare.problems(torch.randn(1, 4, 2, 8), {}, truth) == []
    assert "wanted torch.float32" in compare.problems(torch.randn(1, 4, 2, 8).half(), {}, truth)[0]


def test_a_reference_and_a_fake_function_that_contradict_each_other_are_told(monkeypatch):
    monkeypatch.setattr("layerzero.testing.compare.fake_call", lambda routed: None)
    call = RandomCall("invented_draw", {"weights": torch.ones(4, 8)})
    with pytest.raises(ValueError, match=r"invented.draw: .*, got 1 of its reference, 0 of"):
        compare.expected(call)


def test_where_what_is_summed_is_no_number_nothing_more_is_allowed():
    judge = Elementwise({torch.float32: lz.Tolerance(0.01, 0.1)}, "a test", lambda of: of["terms"])
    want = torch.ones(2, dtype=torch.float64)
    for terms in (torch.nan, torch.inf):
        given = Given(torch.float32, judge.basis({"terms": torch.full((2,), terms, dtype=torch.float64)}))
        assert "2 of 2 elements too far" in judge.problem(want + 4, want, given)


def test_copies_of_what_lies_in_one_memory_lie_in_one_memory():
    both = torch.randn(4, 6)
    memory: dict = {}
    left, right, alone = (compare.copied(each, memory) for each in (both[:, :4], both[:, 4:], torch.ones(3)))
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr() != both.untyped_storage().data_ptr()
    assert torch.equal(torch.as_strided(left, (4, 6), (6, 1)), both)
    assert alone.untyped_storage().data_ptr() != left.untyped_storage().data_ptr()
    assert compare.copied(both).untyped_storage().data_ptr() != left.untyped_storage().data_ptr()

"""What sampling refuses: rows that nothing can be drawn of, numbers and tensors that mean nothing."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops import FUNCTIONS
from sampled_functions import KINDS


@at_once(
    "name, values, problem",
    [
        ("logits", [0.0, math.nan], "wanted no NaN, no +inf, and a number above -inf, got NaN at 1"),
        ("logits", [math.inf, 0.0], "wanted no NaN, no +inf, and a number above -inf, got +inf at 0"),
        ("logits", [-math.inf, -math.inf], "wanted no NaN, no +inf, and a number above -inf, got -inf everywhere"),
        ("probs", [0.0, 0.0], "wanted finite numbers from 0 up, one of them above, got 0 everywhere"),
        ("probs", [math.nan, 1.0], "wanted finite numbers from 0 up, one of them above, got NaN at 0"),
        ("probs", [1.5, -0.5], "wanted finite numbers from 0 up, one of them above, got -0.5 at 1"),
        ("probs", [0.5, math.inf], "wanted finite numbers from 0 up, one of them above, got +inf at 1"),
    ],
)
@at_once("kernel", ["own", "sorted", "reference"])
@at_once("kind", KINDS)
def test_rows_that_nothing_can_be_drawn_of(kind, kernel, name, values, problem):
    tensor = torch.tensor([[1.0, 0.0], values])
    called = kind if name == "logits" else f"{kind}_probs"
    operation = FUNCTIONS[called].operations[0].name
    own = f"torch.{kind}" if kernel == "own" else f"torch.{kind.replace('sample', 'sorted')}"
    lock = f"reference.{operation}" if kernel == "reference" else own
    if kernel == "sorted" and kind in ("sample", "sample_minp"):
        pytest.skip("it has no kernel that sorts")
    given = {each: 1 if each == "top_k" else value for each, value in KINDS[kind].items()}
    with lz.scope(locks={operation: lock}), pytest.raises(lz.InvalidCallError) as raised:
        getattr(lz, called)(tensor, **given)
    assert str(raised.value).startswith(f"{called}: {name}[1]: {problem}")
    assert lz.sample(torch.randn(2, 8)).shape == (2,), "no kernel rests for it"


WRONG = {
    "top_p: wanted a share above 0 and up to 1, got 0.0": {"top_p": 0.0},
    "top_p: wanted a share above 0 and up to 1, got 1.01": {"top_p": 1.01},
    "top_p: wanted a share above 0 and up to 1, got nan": {"top_p": math.nan},
    "top_p: wanted a number or a tensor with one for each row, got True": {"top_p": True},
    "top_p: wanted a number or a tensor with one for each row, got '0.9'": {"top_p": "0.9"},
    "temperature: wanted a number or a tensor with one for each row, got [1.0, 2.0]": {
        "top_p": 1.0,
        "temperature": [1.0, 2.0],
    },
    "top_p: wanted a number or a tensor with one for each row, got None": {},
    "top_p: wanted shape (3,), a number for each row, got (2,)": {"top_p": torch.ones(2)},
    "top_p: wanted dtype float32, got float64": {"top_p": torch.ones(3, dtype=torch.float64)},
    "temperature: wanted 1e-06 to 1e+06; the likeliest place is what greedy picks, got 0": {
        "top_p": 1.0,
        "temperature": 0,
    },
    "temperature: wanted 1e-06 to 1e+06; the likeliest place is what greedy picks, got -1": {
        "top_p": 1.0,
        "temperature": -1,
    },
    "top_p: wanted a share above 0 and up to 1, got -0.5": {"top_p": -0.5},
    "seed: wanted a seed or a generator, got both": {"top_p": 1.0, "seed": 1, "generator": torch.Generator()},
    "seed: wanted 0 to 9.22337e+18, got -1": {"top_p": 1.0, "seed": -1},
    "seed: wanted int, got 1.5": {"top_p": 1.0, "seed": 1.5},
    "generator: wanted a Generator or None, got int": {"top_p": 1.0, "generator": 3},
}


@at_once("wanted", WRONG)
def test_bad_arguments(wanted):
    lz.sample_topp(torch.ones(3, 8), 0.5)  # a plan is kept, which must not serve them
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.sample_topp(torch.ones(3, 8), **WRONG[wanted])
    assert wanted in str(raised.value)


@pytest.mark.parametrize("k", [0, -1, 1.0, True])
def test_bad_counts(k):
    wanted = r"top_k: wanted (a number or a tensor with one for each row|1 to 2147483647|int), got"
    with pytest.raises(lz.InvalidCallError, match=wanted):
        lz.sample_topk(torch.ones(3, 8), k)


@at_once(
    "tensor, problem",
    [
        (torch.ones(3, 0), r"logits: wanted at least one place in the last axis, got \(3, 0\)"),
        (torch.ones(3, 8, dtype=torch.int64), r"logits: wanted dtype .*, got int64"),
        (torch.ones(()), r"logits: wanted .* got .*\(\)"),
    ],
)
@at_once("name", [*KINDS, "greedy"])
def test_bad_tensors(name, tensor, problem):
    with pytest.raises(lz.InvalidCallError, match=problem):
        getattr(lz, name)(tensor, **KINDS.get(name, {}))


def test_a_temperature_of_a_row_that_is_none_is_named():
    with pytest.raises(lz.InvalidCallError, match="add up to nan; is a temperature NaN"):
        lz.sample(torch.zeros(2, 4), temperature=torch.tensor([1.0, math.nan]))
    with pytest.raises(lz.InvalidCallError, match="or so low that logits overflow"):
        lz.sample(torch.tensor([[1e33, 1.0]]), temperature=torch.zeros(1))


def test_probabilities_that_add_up_to_infinity_are_told_as_that():
    with pytest.raises(lz.InvalidCallError, match=r"got one whose probabilities add up to inf$"):
        lz.sample_probs(torch.full((2, 4), 3e38))

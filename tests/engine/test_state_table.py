"""Eager state that functions declare: a plan, a time and a frozen choice of one value do not answer for another."""

from __future__ import annotations

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.core import eager_state
from layerzero.core.eager_state import EAGER_STATE, STATE_FACTS
from layerzero.core.errors import RegistrationError
from layerzero.core.evidence import call_work
from layerzero.core.operation import Function
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS

pytestmark = pytest.mark.usefixtures("path")

NAMES = {each.name for each in FUNCTIONS["linear"].operations}
MULTIPLYING = ("linear", "mlp", "qkv_linear")


@pytest.fixture(autouse=True)
def precision():
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


def call(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(4, 16).to(dtype), torch.randn(8, 16).to(dtype)


def plans(name="linear"):
    return len(CALLS[name].dispatcher.cache.current)


def told(*tensors):
    return lz.explain("linear", *tensors).facts


def test_a_plan_of_one_precision_is_not_used_under_another():
    tensors = call()
    lz.linear(*tensors)
    before = plans()
    for _ in range(3):
        lz.linear(*tensors)
    assert plans() == before
    torch.set_float32_matmul_precision("high")
    lz.linear(*tensors)
    assert plans() == before + 1
    assert {plan.report.facts["matmul_precision"] for plan in CALLS["linear"].dispatcher.cache.current.values()} >= {
        *("highest", "high")
    }
    torch.set_float32_matmul_precision("highest")
    lz.linear(*tensors)
    assert plans() == before + 1, "the first plan serves again"


def test_a_bound_callable_says_that_the_precision_is_another():
    tensors = call()
    bound = lz.bind("linear", *tensors)
    torch.testing.assert_close(bound(*tensors), torch.nn.functional.linear(*tensors))
    torch.set_float32_matmul_precision("high")
    with pytest.raises(lz.InvalidCallError, match=r"what float32 is multiplied in: wanted .* as bound, got tf32"):
        bound(*tensors)


def test_other_dtypes_do_not_ask():
    tensors = call(torch.bfloat16)
    lz.linear(*tensors)
    before = plans()
    torch.set_float32_matmul_precision("high")
    lz.linear(*tensors)
    assert plans() == before
    assert told(*tensors)["matmul_precision"] == "highest"


def test_functions_that_do_not_declare_it_are_the_same_under_each():
    tensors = torch.randn(4, 16), torch.ones(16)
    lz.rms_norm(*tensors)
    before = plans("rms_norm")
    torch.set_float32_matmul_precision("high")
    lz.rms_norm(*tensors)
    assert plans("rms_norm") == before
    assert lz.explain("rms_norm", *tensors).facts["matmul_precision"] == "highest"


def test_the_fact_is_told_and_rules_match_it():
    tensors = call()
    assert told(*tensors)["matmul_precision"] == "highest"
    torch.set_float32_matmul_precision("high")
    assert told(*tensors)["matmul_precision"] == "high"
    assert lz.explain("linear", *tensors).to_dict()["facts"]["matmul_precision"] == "high"
    torch.set_float32_matmul_precision("medium")
    assert told(*tensors)["matmul_precision"] == "medium"


def test_what_only_the_newer_way_can_say_is_read_where_torchs_own_question_raises():
    before = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        lz.linear(*call())
        assert told(*call())["matmul_precision"] == "medium"
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert told(*call())["matmul_precision"] == "highest", "of tensors on the CPU"
        assert EAGER_STATE["matmul"].read(cuda=True) == "high"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision = before


def test_times_are_kept_apart_and_those_of_the_default_where_they_were():
    works = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        lz.linear(*call())
        works.append(dict(call_work(_facts(precision))))
    assert "matmul_precision" not in works[0]
    assert works[1] == works[0] | {"matmul_precision": "high"}


def _facts(wanted):
    """The facts of the plan that was made under a precision."""
    found = [plan.report.facts for plan in CALLS["linear"].dispatcher.cache.current.values()]
    return next(each for each in found if each["matmul_precision"] == wanted and each["dtype"] is torch.float32)


def test_a_frozen_choice_of_one_precision_is_none_of_another():
    torch.set_float32_matmul_precision("high")
    lz.linear(*call())
    document = lz.freeze()
    try:
        ours = [each for each in document.choices.values() if each.call.operation in NAMES]
        assert "high" in {each.state["matmul_precision"] for each in ours}
        assert any("matmul_precision=high" in name for name in document.choices)
        torch.set_float32_matmul_precision("medium")
        lz.linear(*call())
        assert any("matmul_precision=medium" in name for name in lz.frozen().added)
    finally:
        lz.thaw()
    lz.freeze(document)
    lz.thaw()
    older = {
        name: msgspec.structs.replace(each, state={k: v for k, v in each.state.items() if k != "matmul_precision"})
        for name, each in document.choices.items()
    }
    lz.freeze(msgspec.structs.replace(document, choices=older).sealed())  # one of before the state was read
    lz.thaw()


@pytest.mark.parametrize("name", MULTIPLYING)
def test_functions_that_multiply_declare_it(name):
    assert "matmul" in FUNCTIONS[name].state


def test_a_state_that_is_not_in_the_table_is_refused():
    function = FUNCTIONS["linear"]
    with pytest.raises(RegistrationError, match="state: wanted some of sdpa, matmul, got weather"):
        Function("other", function.signature, function.route, function.operations, state=frozenset({"weather"}))


def test_every_row_is_read_and_its_neutral_value_is_what_it_restores():
    for row in EAGER_STATE.values():
        for cuda in (False, True):
            assert type(row.read(cuda=cuda)) is type(row.neutral)
            assert all(each.ask(*each.given) in each.answers for each in row.questions)
        assert row.restored(row.neutral) == row.neutral
    assert eager_state.state_values({}, torch.float32) == {fact: row.neutral for fact, row in STATE_FACTS.items()}


def test_an_answer_that_torch_did_not_have_is_told_as_it_is():
    assert EAGER_STATE["matmul"].value(["fp8"]) == "fp8"

"""A call that was written down is made again from its recipe, with what it chose: for every operation."""

from __future__ import annotations

import pytest
import torch

from layerzero.core.operation import Case
from layerzero.core.recipe import CallRecipe, TensorRecipe
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.ops import OPERATIONS
from layerzero.ops.recipes import arguments_of_recipe
from layerzero.testing.generate import case_call
from layerzero.tuning.measuring.jobs import Job


def facts_of_call(name, arguments):
    dispatcher = CALLS[name].dispatcher
    report, _ = dispatcher.explain(dispatcher.function.bind((), arguments), current_policy())
    return report.facts


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_smallest_call_of_an_operation_is_made_again(name):
    operation = OPERATIONS[name]
    case = min(operation.cases, key=lambda each: sum(each.sizes.values()))
    dtype = min(operation.dtypes, key=lambda each: (each != torch.float32, str(each)))
    call = case_call(operation, case, dtype)
    facts = facts_of_call(call.function, call.arguments)
    function, arguments = arguments_of_recipe(CallRecipe.of(facts), operation)
    again = facts_of_call(function.name, arguments)
    assert again.operation is facts.operation
    assert {each: tensor.shape for each, tensor in again.tensors.items()} == {
        each: tensor.shape for each, tensor in facts.tensors.items()
    }
    told = Job(operation.name, case, "", recipe=CallRecipe.of(again)).facts("cpu")
    assert (dict(told.items()), told.tensors) == (dict(again.items()), again.tensors), "without its data it is the same"


def test_the_facts_of_a_written_call_take_no_memory_however_large_it_was():
    rows, hidden = 1 << 40, 4096
    tensors = {
        "input": TensorRecipe((rows, hidden), (hidden, 1), "bfloat16", alignment_bytes=2),
        "weight": TensorRecipe((hidden,), (1,), "bfloat16"),
    }
    recipe = CallRecipe("norm.rms", None, "cpu", tensors, {"eps": 1e-6})
    facts = Job("norm.rms", Case("", {}), "bfloat16", recipe=recipe).facts("cpu")
    assert (facts.size("rows"), facts.device.torch_type) == (rows, "cpu")
    assert [each.alignment_bytes for each in facts.tensors.values()] == [2, 16]

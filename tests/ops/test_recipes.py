"""A call that was written down is made again from its recipe, with what it chose: for every operation."""

from __future__ import annotations

import pytest
import torch

from layerzero.core.recipe import CallRecipe
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.ops import OPERATIONS
from layerzero.ops.recipes import arguments_of_recipe
from layerzero.testing.generate import case_call


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

"""A call that was written down is made again from its recipe, with what it chose: for every operation."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core.operation import Case
from layerzero.core.recipe import CallRecipe, TensorRecipe
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.ops import OPERATIONS
from layerzero.ops.recipes import arguments_of_recipe
from layerzero.testing.generate import case_call
from layerzero.tuning.measurement.jobs import Job


def facts_of_call(name, arguments):
    dispatcher = CALLS[name].dispatcher
    report, _ = dispatcher.explain(dispatcher.function.bind((), arguments), current_policy())
    return report.facts


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@at_once("name", sorted(OPERATIONS))
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


@pytest.mark.parametrize("gap", [0, 8])
def test_columns_of_one_tensor_lie_in_one_again(gap):
    operation = OPERATIONS["attention.mla.decode.paged"]
    both, query = torch.randn(6, 16, 64 + 8 + gap), torch.randn(2, 1, 4, 64 + 8)
    given = {"q_nope": query[..., :64], "q_pe": query[..., 64:], "ckv_cache": both[..., :64]}
    given |= {"kpe_cache": both[..., 64 : 64 + 8], "scale": 0.1}
    given |= {"block_tables": torch.arange(6).int().view(2, 3), "context_lens": torch.tensor([40, 3]).int()}
    _, again = arguments_of_recipe(CallRecipe.of(facts_of_call("mla_attention", given)), operation)
    for left, right in (("q_nope", "q_pe"), ("ckv_cache", "kpe_cache")):
        one, other = again[left], again[right]
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        assert other.data_ptr() - one.data_ptr() == 64 * 4
        assert (one.shape, one.stride(), other.stride()) == (given[left].shape, given[left].stride(), one.stride())
        assert all(each.unique().numel() > each.numel() // 2 for each in (one, other)), "both are drawn"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (TensorRecipe((4, 8), (8, 1), "float32"), TensorRecipe((4, 8), (8, 1), "float32")),
        (TensorRecipe((4, 8), (12, 1), "float32"), TensorRecipe((4, 8), (12, 1), "float32")),
        (TensorRecipe((4, 8), (16, 1), "float32"), TensorRecipe((4, 8), (16, 1), "float32", alignment_bytes=4)),
        (TensorRecipe((1, 8), (16, 1), "float32"), TensorRecipe((1, 8), (16, 1), "float32")),
        (TensorRecipe((4, 8), (0, 1), "float32"), TensorRecipe((4, 8), (0, 1), "float32")),
    ],
    ids=["dense", "no room", "another address", "one row", "expanded"],
)
def test_tensors_that_are_no_columns_of_one_lie_apart(left, right):
    operation = OPERATIONS["mlp.silu_mul"]
    assert [each.name for each in operation.schema.inputs] == ["input", "up"]
    recipe = CallRecipe(operation.name, None, "cpu", {"input": left, "up": right}, {})
    _, made = arguments_of_recipe(recipe, operation)
    gate, up = made["input"], made["up"]
    assert gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
    assert (gate.stride(), up.stride()) == (left.strides, right.strides)


def test_a_gate_beside_what_it_lets_through_lies_so_again():
    operation, halves = OPERATIONS["mlp.silu_mul"], TensorRecipe((4, 8), (16, 1), "float32")
    recipe = CallRecipe(operation.name, None, "cpu", {"input": halves, "up": halves}, {})
    made = arguments_of_recipe(recipe, operation)[1]
    gate, up = made["input"], made["up"]
    assert up.data_ptr() - gate.data_ptr() == 8 * 4
    assert not torch.equal(gate, up)


@pytest.mark.parametrize("name", ["add_rms_norm_", "add_residual_rms_norm_"])
def test_slices_of_two_tensors_that_are_written_lie_apart_again(name):
    given = {each: torch.randn(4, 16)[:, :8] for each in ("input", "residual")} | {"weight": torch.ones(8)}
    given = {each: given[each] for each in CALLS[name].dispatcher.names if each in given}
    facts = facts_of_call(name, given)
    function, again = arguments_of_recipe(CallRecipe.of(facts), facts.operation)
    assert function.name == name
    assert again["input"].untyped_storage().data_ptr() != again["residual"].untyped_storage().data_ptr()
    getattr(lz, name)(**again)


@at_once("name", [name for name in sorted(OPERATIONS) if "quant" in name and not name.startswith("quantize.")])
def test_a_written_call_of_quantised_numbers_is_made_again_so_that_it_runs(name):
    """Packed weights without a bias, permuted groups, scales above 0: plain random numbers are no such tensors."""
    operation, told = OPERATIONS[name], torch.float32 if torch.float32 in OPERATIONS[name].dtypes else torch.bfloat16
    for case in [each for each in operation.cases if each.name.startswith("small")]:
        call = case_call(operation, case, told)
        facts = facts_of_call(call.function, call.arguments)
        function, arguments = arguments_of_recipe(CallRecipe.of(facts), operation)
        result = getattr(lz, function.name)(**arguments)
        results = [each for each in (result if isinstance(result, tuple) else (result,)) if each is not None]
        assert all(each.float().isfinite().all() for each in results), case.name


@at_once(
    "name", [name for name in sorted(OPERATIONS) if OPERATIONS[name].check_values and not name.startswith("comm.")]
)
def test_a_written_call_has_values_that_its_operation_allows(name):
    """Targets of a loss are classes: random ones neither built nor were timed, and end a GPU's context."""
    operation = OPERATIONS[name]
    case = min(operation.cases, key=lambda each: sum(each.sizes.values()))
    call = case_call(operation, case, min(operation.dtypes, key=lambda each: (each != torch.float32, str(each))))
    facts = facts_of_call(call.function, call.arguments)
    function, arguments = arguments_of_recipe(CallRecipe.of(facts), operation)
    with lz.scope(debug=True):
        getattr(lz, function.name)(**arguments)

"""What a schema says about a call: everything that is wrong, with wanted and got."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import TensorFacts
from layerzero.ops import OPERATIONS

SCHEMA = lz.OperationSchema(
    operation="test.weighted",
    inputs=(
        lz.TensorSchema("x", ("batch", "width"), frozenset({torch.float32})),
        lz.TensorSchema("w", ("width",), frozenset({torch.float32, torch.bfloat16})),
        lz.TensorSchema("three", ("3",), required=False, same_dtype=False),
    ),
    outputs=(lz.TensorSchema("y", ("batch",)),),
    params=(lz.Param("scale", float), lz.Param("flag", bool, False)),
)
X, W = torch.zeros(2, 4), torch.zeros(4)


@pytest.mark.parametrize("role", [lz.Role.CHOSEN, lz.Role.PASSED, lz.Role.BOUND])
def test_a_bound_holds_for_numbers_of_every_role(role):
    param = lz.Param("groups", int, None, role, least=2, most=9)
    assert not any(param.problem(value) for value in (None, 2, 9))
    for value in (0, 1, 10):
        assert param.problem(value).startswith("groups: wanted")


def test_a_right_call_has_no_problems():
    assert SCHEMA.validate(X, W, scale=1.0) == []
    assert SCHEMA.validate(x=X, w=W, scale=1, flag=True, three=torch.zeros(3, dtype=torch.int8)) == []


@at_once("args, kwargs, problem", [
    ((X,), {"scale": 1.0}, "w: wanted a tensor, got nothing"),
    ((X, W), {}, "scale: wanted float, got None"),
    ((X, W), {"scale": "1"}, "scale: wanted float, got '1'"),
    ((X, W), {"scale": True}, "scale: wanted float, got True"),
    ((X, W), {"scale": 1.0, "flag": 1}, "flag: wanted bool, got 1"),
    ((X, W), {"scale": 1.0, "other": 1}, "unknown argument 'other'"),
    ((X, W, None, None), {"scale": 1.0}, "at most 3 tensors"),
    (([1], W), {"scale": 1.0}, "x: wanted a tensor, got list"),
    ((X[0], W), {"scale": 1.0}, "x: wanted a 2D tensor (batch, width), got 1D (4,)"),
    ((X, W[:3]), {"scale": 1.0}, "w: wanted width 4 as in x, got 3 in (3,)"),
    ((X.double(), W), {"scale": 1.0}, "x: wanted dtype float32, got float64"),
    ((X, W.bfloat16()), {"scale": 1.0}, "w: wanted dtype float32 like x, got bfloat16"),
    ((X, W.to("meta")), {"scale": 1.0}, "w: wanted device cpu like x, got meta"),
    ((X, W, torch.zeros(4)), {"scale": 1.0}, "three: wanted 3 3 as in the schema, got 4"),
])  # fmt: skip
def test_problems_say_wanted_and_got(args, kwargs, problem):
    problems = SCHEMA.validate(*args, **kwargs)
    assert any(problem in each for each in problems), problems


def test_all_problems_are_listed():
    assert len(SCHEMA.validate(X[0], W.to("meta"), flag=3)) == 4


def test_the_builder_validates_and_names_every_fact():
    operation = next(each for each in lz.list_operations() if each.name == "attention.gqa.prefill")
    query, key = torch.zeros(2, 16, 8, 32), torch.zeros(2, 12, 2, 32)
    facts = lz.SelectionContextBuilder(operation).build(query, key=key, value=key, causal=True)
    named = {
        name: facts[name] for name in ("batch_size", "seq_len_q", "seq_len_k", "num_heads", "num_kv_heads", "group")
    }
    assert named == {"batch_size": 2, "seq_len_q": 16, "seq_len_k": 12, "num_heads": 8, "num_kv_heads": 2, "group": 4}
    assert facts["attn_mask"] == "none"
    assert facts["causal"] is True
    with pytest.raises(ValueError, match="head_dim 32 as in query, got 16"):
        lz.SelectionContextBuilder(operation).build(query, key[..., :16], key, causal=True)


@pytest.mark.parametrize(("parts", "problem"), [
    ({"params": (lz.Param("x", float),)}, "x: wanted a name once, got it twice"),
    ({"params": (lz.Param("how", list, None),)}, "how: types: wanted some of bool, dtype, float, int, str, tuple"),
    ({"params": (lz.Param("seed", int, 7, lz.Role.PASSED),)}, "seed: neutral: wanted None for what is passed, got 7"),
    ({"params": (lz.Param("plan", object, None, lz.Role.HANDLE, made_of=("z",)),)}, "plan: made_of: .* got 'z'"),
    ({"inputs": (lz.TensorSchema("ids", ("n",), indexes=("rows",)),)}, "ids: wanted places .* got 'rows'"),
    ({"inputs": (lz.TensorSchema("x", ("a", "b"), has_layout=True),)}, "x: has a layout"),
    ({"outputs": (lz.TensorSchema("y", when="asked"),)}, "y: when: wanted a chosen parameter, got 'asked'"),
    ({"outputs": (lz.TensorSchema("y", dtype_from="w"),)}, "y: dtype_from: wanted an argument, got 'w'"),
    ({"dtype_of": "w"}, "dtype_of: wanted a tensor, got 'w'"),
])  # fmt: skip
def test_a_broken_schema_is_refused_where_it_is_written(parts, problem):
    whole = {"operation": "test.broken", "inputs": (lz.TensorSchema("x", ("n",)),), "outputs": ()}
    with pytest.raises(lz.RegistrationError, match=f"operation 'test.broken': {problem}"):
        lz.OperationSchema(**whole | parts)


def test_facts_can_be_asked_about_in_place_of_tensors():
    query = torch.zeros(2, 16, 8, 32)
    facts = lz.facts("attention", query, query, query, layout="BSHD", device="H100")
    assert (
        lz.which(facts, device="H100", libraries={})["kernel_id"] == "torch.sdpa.efficient"
    )  # the others lack float32
    assert lz.explain(facts, device="CPU", libraries={}).kernel_id == "torch.sdpa.cpu_flash"
    assert lz.explain(facts, device="H100", libraries={}, capturing=True).facts["capturing"] is True
    with pytest.raises(lz.InvalidCallError, match="wanted no further arguments"):
        lz.explain(facts, query)


@pytest.mark.parametrize("shape_strides", [
    ((2, 3, 4), (12, 4, 1), True), ((2, 3, 4), (12, 1, 3), False), ((2, 1, 4), (4, 99, 1), True),
    ((1, 1), (7, 9), True), ((0, 3), (3, 1), True), ((2, 3), (4, 1), False),
])  # fmt: skip
def test_contiguity_ignores_axes_of_size_one(shape_strides):
    shape, strides, contiguous = shape_strides
    assert TensorFacts(shape, strides, torch.float32).contiguous is contiguous
    real = torch.zeros(200).as_strided(shape, strides)
    assert real.is_contiguous() is contiguous


def test_contiguity_agrees_with_torch_on_random_strides():
    torch.manual_seed(0)
    for _ in range(300):
        shape = tuple(torch.randint(1, 4, (3,)).tolist())
        strides = tuple(torch.randint(1, 13, (3,)).tolist())
        real = torch.zeros(128).as_strided(shape, strides)
        assert TensorFacts.of(real).contiguous == real.is_contiguous(), (shape, strides)


def test_every_dtype_of_an_operation_has_a_name_that_is_read_back():
    """Times and recorded calls keep names; one that nobody reads ends the run that meets it."""
    schemas = [operation.schema for operation in OPERATIONS.values()]
    tensors = [tensor for schema in schemas for tensor in (*schema.inputs, *schema.outputs)]
    for dtype in {each for tensor in tensors for each in tensor.dtype_constraint or ()}:
        assert dtype_named(dtype_name(dtype)) is dtype

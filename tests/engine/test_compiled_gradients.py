"""Gradients through torch's operators: of functions that write in compiled code, and gradients of gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS
from layerzero.testing.generate import random_call

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")

CODES = {"append_quantized_kv_"}
"""What writes codes, which have no gradient."""

TABLES = {"cos", "sin"}
"""What no model learns: torch cannot write into queries that the gradient of these needs as they were."""


def written(name):
    return sorted({each for operation in FUNCTIONS[name].operations for each in operation.schema.mutated})


WRITE = sorted(name for name in FUNCTIONS if written(name) and name not in CODES)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def learns(name, value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and name not in TABLES


def loss_of(name):
    """A number that reads all that a call gives, and what it wrote."""

    def loss(leaves):
        given = {key: value * 1 if learns(key, value) else value for key, value in leaves.items()}
        found = CALLS[name].fast(**given)
        results = [*(found if isinstance(found, tuple) else (found,)), *(given[each] for each in written(name))]
        return sum((each * each).sum() for each in results if each is not None)

    return loss


def gradients(loss, arguments):
    leaves = {key: each.clone().requires_grad_() if learns(key, each) else each for key, each in arguments.items()}
    loss(leaves).backward()
    return {key: each.grad for key, each in leaves.items() if learns(key, each)}


def test_which_functions_write():
    assert {"add_residual_rms_norm_", "add_rms_norm_", "rope_", "append_kv_", "add_residual_"} <= set(WRITE)


QUICK = {"add_residual_rms_norm_", "rope_", "append_kv_"}


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in WRITE]
)
def test_gradients_are_those_of_calls_that_are_not_compiled(name):
    arguments = random_call(5, 0, function=name, dtype=torch.float32).arguments
    wanted = gradients(loss_of(name), arguments)
    got = gradients(torch.compile(loss_of(name), backend="aot_eager", fullgraph=True), arguments)
    assert wanted
    for key, each in wanted.items():
        torch.testing.assert_close(got[key], each, rtol=1e-4, atol=1e-4, msg=lambda told, key=key: f"{key}: {told}")


def test_under_autocast_the_reference_keeps_its_types():
    arguments = random_call(5, 0, function="add_residual_rms_norm_", dtype=torch.float32).arguments
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients(loss_of("add_residual_rms_norm_"), arguments)
        got = gradients(
            torch.compile(loss_of("add_residual_rms_norm_"), backend="aot_eager", fullgraph=True), arguments
        )
    for key, each in wanted.items():
        torch.testing.assert_close(got[key], each, rtol=1e-4, atol=1e-4)


def test_gradients_of_gradients_lead_back_through_operators():
    """What a dispatch mode counts runs as an operator, whose gradients were constants to the next pass."""
    arguments = random_call(5, 0, function="rms_norm", dtype=torch.float64).arguments

    def second(mode):
        leaves = {key: each.clone().requires_grad_() if learns(key, each) else each for key, each in arguments.items()}
        wanted = [each for each in leaves.values() if learns("", each)]
        with mode:
            result = CALLS["rms_norm"].fast(**leaves)
        first = torch.autograd.grad(result.sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), wanted)

    torch.testing.assert_close(second(FlopCounterMode(display=False)), second(contextlib.nullcontext()))

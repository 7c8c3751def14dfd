"""What was registered can be taken back whole, and registered again; what is built in cannot."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.core.errors import RegistrationError
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS

PAGE = Path(__file__).parents[2] / "docs/adding_operations.md"
NAME = "example.blend"
pytestmark = pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")


@pytest.fixture
def declared():
    space = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], space)
    yield space["OPERATION"], space["FUNCTION"]
    if NAME in REGISTRY.operations():
        lz.unregister_operation(NAME)


def register(operation, function):
    lz.register_operation(operation)
    lz.register_function(function)


def test_nothing_is_left_and_it_can_come_again(declared):
    before = REGISTRY.operations(), dict(FUNCTIONS), len(ENGINE.caches)
    kernels = {each.id for each in REGISTRY.kernels()}
    x = torch.randn(3, 8)
    for _ in range(2):
        register(*declared)
        lz.register_kernel(NAME, kernel_id="mine.blend")(lambda input, other, *, clamp, alpha=None: input + other)
        torch.testing.assert_close(lz.blend(x, x), x + x)
        torch.testing.assert_close(torch.ops.layerzero.blend(x, x), x + x)
        with lz.scope(locks={NAME: "mine.blend"}):
            lz.blend(x, x)
        lz.unregister_operation(NAME)
        assert not hasattr(lz, "blend")
        assert not hasattr(torch.ops.layerzero, "blend")
        assert "blend" not in CALLS
        after = REGISTRY.operations(), dict(FUNCTIONS), len(ENGINE.caches)
        assert after == before
        assert {each.id for each in REGISTRY.kernels()} == kernels
        with pytest.raises(KeyError, match=NAME):
            lz.list_kernels(NAME)


def test_a_callable_that_somebody_kept_says_that_its_operation_is_gone(declared):
    lz.register_operation(declared[0])
    kept = lz.register_function(declared[1])
    x = torch.randn(3, 8)
    kept(x, x)
    lz.unregister_operation(NAME)
    with pytest.raises(KeyError, match=NAME):
        kept(x, x)


def test_built_in_ones_stay():
    with pytest.raises(RegistrationError, match="got a built-in one"):
        lz.unregister_operation("norm.rms")
    assert lz.rms_norm(torch.randn(2, 8), torch.ones(8)).shape == (2, 8)
    with pytest.raises(KeyError, match=r"no\.such"):
        lz.unregister_operation("no.such")


def test_a_kernel_of_other_operations_is_not_taken_along(declared):
    register(*declared)
    kernel = REGISTRY.kernel(f"reference.{NAME}")
    both = dataclasses.replace(kernel, id="mine.both", operations=(NAME, "activation.silu"))
    ENGINE.registry._known = ENGINE.registry._known.plus([both])
    with pytest.raises(RegistrationError, match=r"mine\.both.*activation\.silu.*lz\.unregister_kernel first"):
        lz.unregister_operation(NAME)
    assert NAME in REGISTRY.operations()
    assert hasattr(lz, "blend")
    lz.unregister_kernel("mine.both")
    lz.unregister_operation(NAME)

"""What a table shows as torch's own way to a result takes whatever its function takes, and computes the same."""

from __future__ import annotations

import dataclasses

import pytest

from layerzero.core.judge import Elementwise, Tolerance
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS
from layerzero.testing import expected, random_call
from layerzero.testing.compare import Expected, copied, problems
from layerzero.tuning.measurement.contest import torch_default

CALLS_EACH = 12
ROUNDED_ONCE_MORE = 4.0
"""How much farther off than a kernel: what people write rounds after each step."""


def loosened(truth: Expected) -> Expected:
    judges = {
        name: (
            judge,
            dataclasses.replace(given, wider=Tolerance(*[ROUNDED_ONCE_MORE * each for each in allowed(judge, given)])),
        )
        if isinstance(judge, Elementwise)
        else (judge, given)
        for name, (judge, given) in truth.judges.items()
    }
    return dataclasses.replace(truth, judges=judges)


def allowed(judge, given):
    tolerance = judge.allowed(given)
    return tolerance.rtol, tolerance.atol


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
def test_torchs_own_way_takes_the_arguments_of_the_function(function):
    if CALLS[function].function.operations[0].stock is None:
        pytest.skip("torch has none")
    made = 0
    for number in range(CALLS_EACH):
        call = random_call(3, number, function=function)
        truth, arguments = expected(call), copied(call.arguments)
        run = torch_default(function, arguments)
        made += run is not None
        if run is not None and not truth.random:  # torch's own draws refuse rows in which nothing is left
            assert problems(run(), arguments, loosened(truth)) == [], call
    assert made, "it says of no call what torch would do"

"""Numbers that no kernel can be given are errors of the caller, with words: integers of many digits, and odd types."""

from __future__ import annotations

import contextlib
import decimal
import fractions

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.core.arguments import told
from layerzero.core.errors import LayerZeroError
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS
from layerzero.testing.compare import copied
from layerzero.testing.generate import case_call

HUGE = st.sampled_from([2**53 + 1, 2**63, 2**64, 10**400, 10**5000]).flatmap(
    lambda each: st.sampled_from([each, -each])
)
ODD = st.sampled_from([
    *(fractions.Fraction(1, 2), decimal.Decimal("0.5"), np.float32(0.5), np.float64(0.5), np.int64(3)),
    *(np.bool_(True), True, False, float("nan"), float("inf"), "1", b"1", 1j, None, -1, 0, [], (), {}, object),
])  # fmt: skip
VALUES = st.one_of(HUGE, ODD, st.tuples(HUGE), st.tuples(HUGE, st.just(1)), st.tuples(ODD, HUGE))
PLACES = [
    (name, operation.name, parameter.name)
    for name, function in FUNCTIONS.items()
    for operation in function.operations
    for parameter in function.parameters
    if parameter.name not in function.tensors
]


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")  # that a reference runs
@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(place=st.sampled_from(PLACES), value=VALUES, native=st.booleans())
def test_whatever_a_number_is_a_call_answers_or_says_what_is_wrong(place, value, native):
    name, operation, parameter = place
    call = CALLS[name]
    (operation,) = (each for each in call.function.operations if each.name == operation)
    arguments = {each: copied(given) for each, given in CASES[operation.name].items()}
    with contextlib.suppress(LayerZeroError):
        (call.fast if native else call.python)(**{**arguments, parameter: value})
    assert not ENGINE.health.breakers()


CASES = {
    operation.name: case_call(operation, operation.cases[0], torch.float32).arguments
    for function in FUNCTIONS.values()
    for operation in function.operations
}
TABLES, LENGTHS = torch.arange(4, dtype=torch.int32).view(1, 4), torch.tensor([40], dtype=torch.int32)


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 10**5000, 2**64, 2**63, True, float("nan"), "x", None, -1], ids=told
)
@pytest.mark.parametrize("made", [
    lambda value: lz.configure(tune_samples=value),
    lambda value: lz.configure(sampling_rate=value),
    lambda value: lz.scope(memory_headroom_mb=value).__enter__(),
    lambda value: lz.StepMetadata(TABLES, LENGTHS, max_context_len=value),
    lambda value: lz.StepMetadata(TABLES, LENGTHS).slot_mapping(value),
    lambda value: lz.StepMetadata(TABLES, LENGTHS).slot_mapping(16, value),
    lambda value: lz.PagedCache.allocate(*4 * [value if type(value) is not bool else 10**30]),
    lambda value: lz.rope_frequencies(value),
    lambda value: lz.rope_frequencies(64, base=value),
    lambda value: lz.rope_frequencies(64, scaling={"rope_type": "linear", "factor": value}),
])  # fmt: skip
def test_objects_and_settings_answer_or_say_what_is_wrong_too(made, value):
    with contextlib.suppress(LayerZeroError):
        made(value)


def test_the_words_say_how_large_it_is():
    with pytest.raises(
        lz.InvalidCallError, match="eps: wanted a number that a float can hold, got an integer of 1329 bits"
    ):
        lz.rms_norm(torch.randn(2, 8), torch.randn(8), eps=10**400)
    with pytest.raises(
        lz.InvalidCallError, match="max_context_len: wanted a number of at least 1 or None, got an integer"
    ):
        lz.paged_attention(**{**CASES["attention.standard.decode.paged"], "max_context_len": 2**64})


def test_an_integer_beyond_exact_floats_is_the_float_that_it_is_nearest_to():
    x, w = torch.randn(2, 8), torch.randn(8)
    assert torch.equal(lz.rms_norm(x, w, eps=2**70), lz.rms_norm(x, w, eps=2.0**70))

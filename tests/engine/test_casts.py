"""Casts as steps of a plan: a weight of another dtype than the input's, which torch takes."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from layerzero.core.errors import InvalidCallError, NoKernelFoundError
from layerzero.engine.dispatch import ENGINE

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MIXED = list(itertools.permutations(FLOATING, 2))


def normal(*shape, dtype=torch.float32):
    torch.manual_seed(len(shape) + shape[-1])
    return torch.randn(shape).to(dtype)


def of_torch(input, weight):
    with warnings.catch_warnings():  # torch says that it does not fuse this
        warnings.simplefilter("ignore", UserWarning)
        return functional.rms_norm(input, weight.shape, weight, 1e-6)


def chosen():
    """How often a kernel was chosen in this process."""
    return sum(cache.misses for cache in ENGINE.caches)


@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED)
def test_a_weight_of_another_dtype_gives_what_torch_gives(dtype, weight_dtype):
    input, weight = normal(5, 24, dtype=dtype), normal(24, dtype=weight_dtype)
    wanted = of_torch(input, weight)
    for _ in range(2):  # chosen, then kept
        got = lz.rms_norm(input, weight)
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted)


def test_keys_tell_dtypes_of_a_weight_apart():
    input = normal(6, 40, dtype=torch.bfloat16)
    for weight in (normal(40), normal(40, dtype=torch.bfloat16), normal(40, dtype=torch.float16), normal(40)):
        for rows in (6, 5, 7):
            got = lz.rms_norm(input[:1].expand(rows, -1), weight)
            torch.testing.assert_close(got, of_torch(input[:1].expand(rows, -1), weight))


def test_a_plan_that_casts_serves_other_rows_and_tensors_that_lie_otherwise():
    weight = normal(32)
    called = [normal(rows, 32, dtype=torch.bfloat16) for rows in (17, 18, 31, 20)]
    wide = normal(32, 65, dtype=torch.bfloat16)
    called += [wide.t()[1:30], wide.t()[:40:2], normal(31, 64, dtype=torch.bfloat16)[:, ::2]]
    before = chosen()
    for input in called[:4]:
        torch.testing.assert_close(lz.rms_norm(input, weight), of_torch(input, weight))
    assert chosen() - before == 1
    for input in called[4:]:
        torch.testing.assert_close(lz.rms_norm(input, weight), of_torch(input, weight))


def test_a_negated_view_keeps_its_sign():
    numbers = torch.randn(4, 16, dtype=torch.complex64)
    negated = numbers.conj().imag
    assert negated.is_neg()
    weight = normal(16, dtype=torch.float64)
    torch.testing.assert_close(lz.rms_norm(negated, weight), of_torch(negated.resolve_neg(), weight))


def test_explain_and_the_plan_name_both_casts():
    input, weight = normal(3, 8, dtype=torch.bfloat16), normal(8)
    steps = ["cast input from bfloat16 to float32", "cast the result from float32 to bfloat16"]
    report = lz.explain(lz.rms_norm, input, weight)
    assert [each.text for each in report.chosen.adaptations][:2] == steps
    assert all(f"adapts: {step}" in str(report) for step in steps)
    plan = lz.bind(lz.rms_norm, input, weight).plan
    assert plan.transforms[:2] == tuple(steps)
    assert plan.transform_cost_total >= 2
    assert plan.gives is torch.bfloat16
    assert "input.resolve_neg().to(torch.float32" in plan.source
    other = lz.explain(lz.rms_norm, input.float(), weight.bfloat16())
    assert "adapts: cast weight from bfloat16 to float32" in str(other)
    assert "cast the result" not in str(other)


@pytest.mark.parametrize("setting", [{"strict_mode": True}, {"allow_adaptation": False}])
def test_what_refuses_conversions_refuses_casts(setting):
    with lz.scope(**setting), pytest.raises(NoKernelFoundError, match="input must be float32, is bfloat16"):
        lz.rms_norm(normal(3, 8, dtype=torch.bfloat16), normal(8))


def test_an_integer_weight_is_refused_as_before():
    with pytest.raises(InvalidCallError, match="weight: wanted dtype"):
        lz.rms_norm(normal(3, 8), torch.ones(8, dtype=torch.int32))


def test_a_call_without_memory_an_operator_and_transforms_give_the_inputs_dtype():
    input, weight = normal(3, 8, dtype=torch.bfloat16), normal(8)
    wanted = of_torch(input, weight)
    assert lz.rms_norm(input.to("meta"), weight.to("meta")).dtype is torch.bfloat16
    torch.testing.assert_close(torch.ops.layerzero.rms_norm(input, weight), wanted)
    torch.testing.assert_close(torch.func.vmap(lz.rms_norm, (0, None))(input, weight), wanted)
    compiled = torch.compile(lz.rms_norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input, weight), wanted)


def test_gradients_have_the_dtypes_of_what_they_belong_to():
    input, weight = normal(3, 8, dtype=torch.bfloat16).requires_grad_(), normal(8).requires_grad_()
    twins = [each.detach().clone().requires_grad_() for each in (input, weight)]
    lz.rms_norm(input, weight).float().square().sum().backward()
    of_torch(*twins).float().square().sum().backward()
    for each, twin in zip((input, weight), twins, strict=True):
        assert each.grad.dtype is each.dtype
        torch.testing.assert_close(each.grad, twin.grad, rtol=0.05, atol=0.05)


def test_frozen_choices_hold_for_a_cast_call():
    input, weight = normal(3, 8, dtype=torch.bfloat16), normal(8)
    lz.rms_norm(input, weight)
    lz.freeze()
    try:
        torch.testing.assert_close(lz.rms_norm(input, weight), of_torch(input, weight))
        assert not lz.frozen().departures
    finally:
        lz.thaw()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [("weight",), ("weight", "bias"), ("bias",)])
def test_layer_norm_takes_float32_beside_half_precision_on_a_cpu(dtype, given):
    input, scales = normal(5, 24, dtype=dtype), {name: normal(24) for name in given}
    wanted = functional.layer_norm(input, (24,), **scales)
    got = lz.layer_norm(input, 24, **scales)
    assert got.dtype is wanted.dtype
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("dtype", "weight", "bias"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_layer_norm_refuses_what_torch_refuses(dtype, weight, bias):
    called = functools.partial(functional.layer_norm, normal(2, 8, dtype=dtype), (8,))
    with pytest.raises(RuntimeError, match=r"type"):
        called(normal(8, dtype=weight), normal(8, dtype=bias))
    with pytest.raises(InvalidCallError, match="wanted dtype"):
        lz.layer_norm(normal(2, 8, dtype=dtype), 8, normal(8, dtype=weight), normal(8, dtype=bias))


def test_a_sum_that_is_written_in_place_takes_no_other_dtype():
    input, residual = normal(2, 8, dtype=torch.bfloat16), normal(3, 8, dtype=torch.bfloat16)[:2]
    with pytest.raises(InvalidCallError, match="wanted dtype bfloat16 like input"):
        lz.add_residual_rms_norm_(input, residual, normal(8))

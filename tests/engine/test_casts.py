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


ELSEWHERE = {
    "meta": lambda call, *given: call(*(each.to("meta") for each in given)),
    "vmap": lambda call, *given: torch.func.vmap(call, (0, *[None] * (len(given) - 1)))(given[0][None], *given[1:]),
    "grad": lambda call, *given: torch.func.grad(lambda *inputs: call(*inputs).sum())(*given),
    "compiled": lambda call, *given: torch.compile(call, fullgraph=True)(*given),  # inductor drops what nothing reads
}


@pytest.mark.parametrize("setting", [{"strict_mode": True}, {"allow_adaptation": False}])
@pytest.mark.parametrize("way", ELSEWHERE)
def test_calls_without_a_plan_cast_nothing_either(way, setting):
    key = normal(1, 7, 2, 16, dtype=torch.bfloat16)
    calls = [(lz.rms_norm, normal(3, 8, dtype=torch.bfloat16), normal(8))]
    calls += [(functools.partial(lz.attention, layout="BSHD"), normal(1, 5, 4, 16), key, key)]
    for call, *given in calls:
        with lz.scope(**setting), pytest.raises(NoKernelFoundError, match="must be float32, is bfloat16"):
            ELSEWHERE[way](call, *given)


@pytest.mark.parametrize(
    ("other", "backend"),
    [("nothing", "aot_eager"), ("setting", "aot_eager"), ("frozen", "aot_eager"), ("nothing", "inductor")],
)
def test_compiled_appends_to_a_list_cast_nothing_where_that_is_refused(other, backend):
    if other == "setting":
        lz.configure(deterministic=True)
    elif other == "frozen":
        lz.silu(normal(4))
        lz.freeze()
    caches = lz.CacheList(*([torch.zeros(length, 2, 16) for length in (8, 5)] for _ in range(2)))
    places = torch.tensor([[2], [2]])

    def append(new):
        lz.append_kv_(new, new, caches, positions=places)
        return new.flatten(1) @ new.flatten(1).T  # torch's own product: Inductor's loops took 9 s of a compiler for C++

    compiled = torch.compile(append, backend=backend, fullgraph=True)  # one graph, which refuses when it runs
    with lz.scope(strict_mode=True):
        with pytest.raises(NoKernelFoundError, match="key must be float32, is bfloat16"):
            compiled(normal(2, 1, 2, 16, dtype=torch.bfloat16))
        assert not any(each.any() for row in caches.rows for each in row)
        compiled(normal(2, 1, 2, 16))
    for dtype in (torch.float32, torch.bfloat16):
        new = normal(2, 1, 2, 16, dtype=dtype)
        compiled(new)
        for row, pair in enumerate(caches.rows):
            assert all(torch.equal(each[2], new[row, 0].float()) for each in pair)


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


def dense(heads, dtype, held, tokens=9):
    """Queries, keys and values (B, H, S, D), as a cache of another dtype holds them."""
    return normal(2, heads, 4, 16, dtype=dtype), *(normal(2, 2, tokens, 16, dtype=held) for _ in range(2))


@pytest.mark.parametrize(("dtype", "held"), MIXED)
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_over_a_cache_of_another_dtype_is_that_of_float64(dtype, held, heads):
    query, key, value = dense(heads, dtype, held)
    wanted, wanted_lse = lz.attention(
        query.double(), key.double(), value.double(), False, layout="BHSD", return_lse=True
    )
    for _ in range(2):  # chosen, then kept
        output, lse = lz.attention(query, key, value, False, layout="BHSD", return_lse=True)
        assert (output.dtype, lse.dtype) == (dtype, torch.float32)
        rounding = torch.finfo(dtype).eps if dtype.itemsize < 4 else 1e-5
        torch.testing.assert_close(output.double(), wanted, rtol=rounding, atol=rounding)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    meta = lz.attention(*(each.to("meta") for each in (query, key, value)), False, layout="BHSD", return_lse=True)
    assert [each.dtype for each in meta] == [dtype, torch.float32]


def test_explain_names_the_casts_of_attention_and_strict_mode_refuses_them():
    query, key, value = dense(4, torch.float32, torch.bfloat16)
    report = lz.explain(lz.attention, query, key, value, layout="BHSD")
    assert [each.text for each in report.chosen.adaptations][:2] == [
        "cast key from bfloat16 to float32",
        "cast value from bfloat16 to float32",
    ]
    with lz.scope(strict_mode=True), pytest.raises(NoKernelFoundError, match="key must be float32, is bfloat16"):
        lz.attention(query, key, value, layout="BHSD")
    with pytest.raises(InvalidCallError, match="value: wanted dtype float32 like query"):
        lz.attention(query, query[:, :2], value, layout="BHSD")


@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32])
def test_a_mask_of_the_queries_dtype_is_cast_with_them(mask_dtype):
    query, key, value = dense(4, torch.bfloat16, torch.float32)
    mask = normal(4, 9, dtype=mask_dtype)
    wanted = lz.attention(*(each.double() for each in (query, key, value)), layout="BHSD", attn_mask=mask.double())
    got = lz.attention(query, key, value, layout="BHSD", attn_mask=mask)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)


def appended(held, paged, **named):
    """Both caches after float32 tokens were written into the places 2 and 3 of a row, or of pages of 4 slots."""
    key, value = normal(1, 2, 2, 8), normal(1, 2, 2, 8) * 3
    caches = [torch.zeros(1, 4, 2, 8, dtype=held) for _ in range(2)]
    if paged:
        lz.append_paged_kv_(key[0], value[0], *caches, torch.tensor([2, 3]), **named)
    else:
        lz.append_kv_(key, value, *caches, torch.tensor([2, 3]), **named)
    wanted = [torch.cat((torch.zeros(1, 2, 2, 8), each), 1).to(held) for each in (key, value)]
    return caches, wanted


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("held", [torch.float16, torch.bfloat16, torch.float64])
def test_tokens_are_rounded_to_the_caches_dtype_where_the_caller_names_it(held, paged):
    for got, wanted in zip(*appended(held, paged, cache_dtype=held), strict=True):
        assert torch.equal(got, wanted)
    if held is torch.float64:  # it holds every float32
        got, wanted = appended(held, paged)
        assert torch.equal(got[0], wanted[0])
        return
    with pytest.raises(InvalidCallError, match=f"key: wanted .* got float32; cache_dtype={held} rounds"):
        appended(held, paged)
    with lz.scope(strict_mode=True), pytest.raises(NoKernelFoundError, match="strict_mode"):
        appended(held, paged, cache_dtype=held)


def test_an_append_says_its_casts_and_refuses_a_dtype_that_is_not_the_caches():
    key, caches = normal(2, 2, 8), [torch.zeros(1, 4, 2, 8, dtype=torch.float16) for _ in range(2)]
    call = key, key, *caches, torch.tensor([2, 3])
    report = lz.explain(lz.append_paged_kv_, *call, cache_dtype=torch.float16)
    assert "adapts: cast key from float32 to float16" in str(report)
    for other, told in ((torch.bfloat16, "bfloat16"), ("float16", "'float16'")):
        with pytest.raises(
            InvalidCallError, match=f"cache_dtype: wanted float16 as key_cache has, or None, got {told}"
        ):
            lz.append_paged_kv_(*call, cache_dtype=other)

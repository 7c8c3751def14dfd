"""Gradients beside a mask of floats that hides whole rows: by the least number of a dtype, and by -inf."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from layerzero.backends.torch import attention
from layerzero.backends.torch.attention import blanked, levelled, loses_log_sums, short_mask

OTHERS = ["onnxruntime", "zentorch", "flex_attention", "inductor"]
PADDED = 4


def left_padded(dtype, number, seq, heads=1):
    """A causal mask of two sequences, the second with padding in front: rows there see no key."""
    mask = torch.zeros(2, heads, seq, seq, dtype=dtype)
    mask.masked_fill_(torch.ones(seq, seq, dtype=torch.bool).triu(1), number)
    mask[1, ..., :PADDED] = number
    return mask


def gradients(compute, *tensors):
    tensors = [each.detach().clone().requires_grad_() for each in tensors]
    output = compute(*tensors)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output.backward(weights.to(output.dtype))
    return output.detach(), *[each.grad for each in tensors]


def eager(mask):
    """Attention as models write it."""
    return lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask, -1) @ v


def ours(mask):
    return lambda q, k, v: lz.attention(q, k, v, attn_mask=mask, layout="BHSD", causal=False)


def drawn(dtype, seq, kv_heads=4):
    torch.manual_seed(0)
    return torch.randn(2, 4, seq, 8, dtype=dtype), *(torch.randn(2, kv_heads, seq, 8, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize("seq", [13, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_those_of_float64_where_models_hide_rows_of_padding(dtype, seq):
    tensors, mask = drawn(dtype, seq), left_padded(dtype, torch.finfo(dtype).min, seq)
    truth = gradients(eager(mask.double()), *(each.double() for each in tensors))
    with lz.scope(deny=OTHERS):
        got = gradients(ours(mask), *tensors)
    for found, wanted in zip(got, truth, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_heads_that_share_keys_get_them_too():
    query, key, value = drawn(torch.float32, 20, kv_heads=2)
    mask = left_padded(torch.float32, torch.finfo(torch.float32).min, 20)
    repeated = [each.repeat_interleave(2, 1) for each in (key, value)]
    wanted = eager(mask)(query, *repeated)
    with lz.scope(deny=OTHERS, locks={"attention.gqa.prefill": "torch.sdpa.cpu_flash"}):
        output, query_grad, *_ = gradients(ours(mask), query, key, value)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(query_grad, gradients(eager(mask), query, *repeated)[1], rtol=1e-4, atol=1e-5)


def test_rows_hidden_by_infinity_give_zero_and_get_no_gradient():
    tensors, mask = drawn(torch.float32, 40), left_padded(torch.float32, -math.inf, 40)
    with lz.scope(deny=OTHERS):
        output, *grads = gradients(ours(mask), *tensors)
    assert output[1, :, :PADDED].abs().sum() == 0
    assert grads[0][1, :, :PADDED].abs().sum() == 0
    assert all(each.isfinite().all() for each in grads)


@pytest.mark.parametrize(("number", "lost"), [(0.0, False), (-100.0, False), (-1e9, True), (-math.inf, False)])
def test_a_log_sum_is_lost_beside_large_numbers_alone(number, lost):
    assert loses_log_sums(left_padded(torch.float32, number, 8)) is lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_levelled_rows_have_the_same_shares_and_a_log_sum_that_holds_them(dtype):
    """What kernels of GPUs get, which no wait reads: shares of keys are equal where scores vanish."""
    query, key, value = drawn(torch.float32, 24)
    mask = left_padded(dtype, torch.finfo(dtype).min, 24)
    mask[0, 0, 5] = -1e4  # a row of no particular height
    mask[0, 0, 6] = -math.inf
    flat, level = levelled(query, mask)
    assert set(level.amax(-1).flatten().tolist()) == {0.0, -math.inf}
    wanted = functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask.double())
    got = functional.scaled_dot_product_attention(flat.double(), key.double(), value.double(), level.double())
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert blanked(got, level)[0, :, 6].abs().sum() == 0


def test_gradients_of_levelled_rows_are_those_of_float64_for_values_and_visible_rows():
    query, key, value = drawn(torch.float32, 24)
    mask = left_padded(torch.float32, torch.finfo(torch.float32).min, 24)

    def fused(q, k, v):
        flat, level = levelled(q, mask)
        return functional.scaled_dot_product_attention(flat, k, v, level)

    def scores_left_out(q, k, v):
        """As in float64, but that scores which vanish get no gradient."""
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = (mask.amax(-1, keepdim=True) < 0).expand_as(scores[..., :1])
        return torch.softmax(torch.where(hidden, scores.detach(), scores) + mask.double(), -1) @ v

    truth = gradients(scores_left_out, query.double(), key.double(), value.double())
    for found, wanted in zip(gradients(fused, query, key, value), truth, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("number", "masks"), [(1.0, 0), (math.nan, 1), (math.inf, 1), (3e37, 1)])
def test_few_keys_get_a_mask_only_where_a_score_may_be_no_number(monkeypatch, number, masks, causal):
    """torch's kernel takes scores of NaN beside fewer than 16 keys for hidden; 3e37 squared overflows."""
    made = []
    monkeypatch.setattr(attention, "short_mask", lambda *a, **k: made.append(a) or short_mask(*a, **k))
    query, key, value = torch.randn(3, 2, 16, 10, 8)
    query[1, 2, 9] = number
    if not causal:  # a mask adds -inf, which leaves NaN as it is
        key[1, 2, 3] = number
    with lz.scope(locks={"attention.standard.prefill": "torch.sdpa.cpu_flash"}):
        got = lz.attention(query, key, value, causal=causal, layout="BHSD")
    scores = query @ key.transpose(-1, -2) * 8**-0.5
    if causal:
        scores.masked_fill_(torch.ones(10, 10, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(got, torch.softmax(scores, -1) @ value, equal_nan=True)
    assert len(made) == masks


@pytest.mark.parametrize(("number", "masks"), [(1.0, 0), (math.nan, 1)])
def test_few_keys_of_a_sequence_get_a_mask_only_where_a_score_may_be_no_number(monkeypatch, number, masks):
    made = []
    monkeypatch.setattr(attention, "short_mask", lambda *a, **k: made.append(a) or short_mask(*a, **k))
    query, (key, value) = torch.randn(20, 16, 8), torch.randn(2, 10, 16, 8)
    key[3, 2] = number
    starts = (torch.tensor([0, count], dtype=torch.int32) for count in (20, 10))
    with lz.scope(locks={"attention.standard.prefill.ragged": "torch.ragged_sdpa"}):
        got = lz.ragged_attention(query, key, value, *starts, causal=False)
    scores = torch.einsum("qhd,khd->hqk", query, key) * 8**-0.5
    wanted = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), value)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    assert len(made) == masks

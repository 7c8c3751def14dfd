"""lz.alibi_slopes and lz.alibi_bias: the paper's numbers, alignment, gradients, what is refused."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.engine.functions import CALLS
from layerzero.ops import OPERATIONS


def test_slopes_of_a_power_of_two_are_a_geometric_sequence():
    torch.testing.assert_close(lz.alibi_slopes(8), torch.tensor([2.0**-each for each in range(1, 9)]))
    torch.testing.assert_close(lz.alibi_slopes(16)[:3], torch.tensor([2.0**-0.5, 2.0**-1, 2.0**-1.5]))
    assert lz.alibi_slopes(1, dtype=torch.float64).tolist() == [2.0**-8]


def test_slopes_of_other_counts_take_every_second_of_the_next_power():
    wanted = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    torch.testing.assert_close(lz.alibi_slopes(6), torch.tensor(wanted))
    for heads in range(1, 130):
        slopes = lz.alibi_slopes(heads)
        assert slopes.shape == (heads,)
        assert len(set(slopes.tolist())) == heads
        assert ((slopes > 0) & (slopes < 1)).all()


@pytest.mark.parametrize("heads", [0, -1, 2.0, True])
def test_a_number_of_heads_that_means_nothing_is_refused(heads):
    with pytest.raises(lz.InvalidCallError, match="heads: wanted a number of at least 1"):
        lz.alibi_slopes(heads)


def test_the_last_query_stands_at_the_last_key():
    bias = lz.alibi_bias(torch.tensor([0.5]), 2, 4)
    assert bias.tolist() == [[[-1.0, -0.5, 0.0, -0.5], [-1.5, -1.0, -0.5, 0.0]]]
    bias = lz.alibi_bias(torch.tensor([0.5]), 2, 4, causal=True)
    assert bias.tolist() == [[[-1.0, -0.5, 0.0, -torch.inf], [-1.5, -1.0, -0.5, 0.0]]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (5, 9), (9, 9), (9, 5)])
def test_every_pair_of_lengths(q_len, kv_len, causal):
    slopes = lz.alibi_slopes(6)
    wanted = OPERATIONS["posenc.alibi"].reference(slopes, q_len=q_len, kv_len=kv_len, causal=causal)
    got = lz.alibi_bias(slopes, q_len, kv_len, causal=causal)
    assert got.is_contiguous()
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(OPERATIONS["posenc.alibi"].stock(slopes, q_len, kv_len, causal=causal)(), wanted)


def test_attention_takes_it_as_a_mask():
    query, key, value = (torch.randn(2, 4, each, 16) for each in (3, 7, 7))
    bias = lz.alibi_bias(lz.alibi_slopes(4), 3, 7, causal=True)
    wanted = torch.softmax(query @ key.transpose(-1, -2) / 4 + bias, -1) @ value
    got = lz.attention(query, key, value, attn_mask=bias, causal=False, layout="BHSD")
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_result_has_the_dtype_that_was_asked_for():
    slopes = lz.alibi_slopes(4, dtype=torch.bfloat16)
    assert lz.alibi_bias(slopes, 3, 5).dtype is torch.bfloat16
    wide = lz.alibi_bias(slopes, 3, 5, out_dtype=torch.float32)
    torch.testing.assert_close(wide, lz.alibi_bias(slopes.float(), 3, 5))


def test_no_length_is_chosen_by():
    cache = CALLS["alibi_bias"].dispatcher.cache
    lz.configure()  # a new epoch: nothing is kept
    before = cache.size()
    for length in range(1, 60):
        assert lz.alibi_bias(lz.alibi_slopes(4), 1, length).shape == (4, 1, length)
    assert cache.size() - before <= 2


def test_gradients_by_finite_differences():
    slopes = lz.alibi_slopes(3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda each: lz.alibi_bias(each, 3, 5), [slopes])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slopes": torch.ones(2, 2)}, "slopes: wanted a 1D tensor"),
        ({"slopes": torch.ones(2).long()}, "slopes: wanted dtype"),
        ({"q_len": 0}, "q_len: wanted 1 to 16777216, got 0"),
        ({"kv_len": -3}, "kv_len: wanted 1 to 16777216, got -3"),
        ({"kv_len": 2**24 + 1}, "kv_len: wanted 1 to 16777216, got 16777217"),
        ({"kv_len": 2.5}, "kv_len: wanted int, got 2.5"),
        ({"out_dtype": torch.int32}, "out_dtype: wanted a floating dtype of at least 16 bits, got int32"),
        ({"out_dtype": torch.float8_e4m3fn}, "of at least 16 bits, got float8_e4m3"),
    ],
)
def test_what_means_nothing_is_refused_with_wanted_and_got(change, words):
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.alibi_bias(**({"slopes": torch.ones(2), "q_len": 3, "kv_len": 5} | change))

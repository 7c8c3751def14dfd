"""What docs/backends.md promises to whoever writes a kernel, seen from inside of one."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz

QUERY, KEY = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)
ARGUMENTS = ("causal", "scale", "attn_mask", "window", "return_lse")


@pytest.fixture
def seen():
    """What a kernel of grouped attention was called with, by position and by keyword."""
    calls = []

    def load(facts):
        def kernel(*args, **kwargs):
            calls.append((args, kwargs))
            output = args[0].new_zeros(args[0].shape)
            return (output, torch.zeros(2, 4, 3)) if kwargs["return_lse"] else output

        return kernel

    lz.register_backend([
        lz.Kernel(
            id="mine.watching", operations=("attention.gqa.prefill",), load=load, layout="BHSD", accepts=ARGUMENTS,
            backend=lz.Backend(name="mine", summary="a kernel that watches"), limits=(lz.limits.contiguous("key"),),
        ),
    ])  # fmt: skip
    lz.lock("attention.gqa.prefill", "mine.watching")
    return calls


def called(seen, **arguments):
    lz.attention(QUERY, KEY, KEY, layout="BSHD", **arguments)
    return seen[-1]


def test_required_tensors_come_by_position_in_the_kernels_layout(seen):
    tensors, _ = called(seen)
    assert [tuple(each.shape) for each in tensors] == [(2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8)]
    assert tensors[1].is_contiguous(), "a limit asks for it"
    assert not tensors[0].is_contiguous(), "no limit does"


def test_parameters_always_come_and_tensors_where_they_are_given(seen):
    _, given = called(seen)
    assert given == {"causal": True, "scale": None, "window": None, "return_lse": False}
    _, given = called(seen, causal=False, attn_mask=torch.zeros(5))
    assert set(given) == {*ARGUMENTS}


def test_the_usual_scale_arrives_as_none(seen):
    assert called(seen, scale=1 / math.sqrt(8))[1]["scale"] is None
    assert called(seen, scale=0.5)[1]["scale"] == 0.5


@pytest.mark.parametrize("shape", [(5,), (3, 1), (1, 3, 5), (2, 1, 3, 5)], ids=str)
def test_a_mask_has_four_axes_and_comes_without_causal(seen, shape):
    mask = torch.ones(shape, dtype=torch.bool)
    _, given = called(seen, causal=False, attn_mask=mask)
    assert given["attn_mask"].ndim == 4
    assert given["attn_mask"].dtype is torch.bool
    assert given["causal"] is False
    with pytest.raises(lz.InvalidCallError, match="together with causal=True"):
        called(seen, causal=True, attn_mask=mask)


def test_a_window_without_bounds_is_none(seen):
    assert called(seen, window=(-1, -1))[1]["window"] is None
    assert called(seen, window=(2, -1))[1]["window"] == (2, -1)


def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity():
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    lz.lock("attention.gqa.prefill", "reference")
    output, lse = lz.attention(QUERY, KEY, KEY, causal=False, attn_mask=mask, layout="BSHD", return_lse=True)
    assert output[:, 1].eq(0).all()
    assert lse[:, :, 1].eq(-math.inf).all()
    assert lse[:, :, ::2].isfinite().all()

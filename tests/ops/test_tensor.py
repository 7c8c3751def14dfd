"""Numbers that are only moved: where they come to lie, whose memory it is, gradients, and bad input."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once, examples
from layerzero.ops import FUNCTIONS
from layerzero.testing import fuzz

NAMES = ("transpose_head_token", "transpose_token_head", "split_qkv", "copy_slice_")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@at_once("dtype", DTYPES)
@at_once("lead", [(), (2,), (2, 3)])
def test_heads_and_tokens_change_places_and_back(path, lead, dtype):
    x = torch.randn(*lead, 4, 7, 8).to(dtype)
    moved = lz.transpose_head_token(x)
    assert moved.shape == (*lead, 7, 4, 8)
    assert moved.is_contiguous()
    assert all(torch.equal(moved[..., t, h, :], x[..., h, t, :]) for t in range(7) for h in range(4))
    assert torch.equal(lz.transpose_token_head(moved), x)


def test_one_token_has_memory_of_its_own_as_well():
    """A transposed view of one token is contiguous already; the result is a copy all the same."""
    x = torch.randn(3, 1, 8)
    moved = lz.transpose_head_token(x)
    x.zero_()
    assert bool(moved.any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_joined_product_comes_apart(path, dtype):
    qkv = torch.randn(2, 5, 20).to(dtype)
    query, key, value = lz.split_qkv(qkv, 4)
    assert torch.equal(query, qkv[..., :12])
    assert torch.equal(key, qkv[..., 12:16])
    assert torch.equal(value, qkv[..., 16:])
    assert all(each.is_contiguous() for each in (query, key, value))
    qkv.zero_()
    assert bool(value.any())


def test_a_slice_is_written_and_nothing_beside_it(path):
    cache, new = torch.zeros(2, 9, 8), torch.randn(2, 3, 8)
    assert lz.copy_slice_(cache[:, 3:6], new) is None
    assert torch.equal(cache[:, 3:6], new)
    assert not bool(cache[:, :3].any())
    assert not bool(cache[:, 6:].any())


@pytest.mark.parametrize("name", ["transpose_head_token", "transpose_token_head", "split_qkv"])
def test_gradients_go_back_where_numbers_came_from(name):
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    function = getattr(lz, name)
    assert torch.autograd.gradcheck(lambda each: function(each, 2) if name == "split_qkv" else function(each), (x,))


SHARED = torch.zeros(4, 8)
WRONG = {
    "input: wanted at least a 3D tensor": ("transpose_head_token", (torch.zeros(3, 4),)),
    "input: wanted dtype": ("transpose_token_head", (torch.zeros(2, 3, 4, dtype=torch.int32),)),
    "kv_features: wanted 1 to 3, so that queries are left of 8, got 4": ("split_qkv", (torch.zeros(2, 8), 4)),
    "kv_features: wanted 1 to 3, so that queries are left of 8, got 0": ("split_qkv", (torch.zeros(2, 8), 0)),
    "kv_features: wanted 1 to 3, so that queries are left of 8, got -1": ("split_qkv", (torch.zeros(2, 8), -1)),
    "kv_features: wanted int, got 1.5": ("split_qkv", (torch.zeros(2, 8), 1.5)),
    "input: wanted shape (2, 8) like destination, got (1, 8)": ("copy_slice_", (torch.zeros(2, 8), torch.zeros(1, 8))),
    "input: wanted dtype float32 like destination, got float64": (
        "copy_slice_",
        (torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.float64)),
    ),
    "destination: wanted memory of its own, got memory that it shares with input": (
        "copy_slice_",
        (SHARED[:3], SHARED[1:]),
    ),
    "destination: wanted memory of its own, got an expanded view": (
        "copy_slice_",
        (torch.zeros(1, 8).expand(2, 8), torch.zeros(2, 8)),
    ),
}


@pytest.mark.parametrize("problem", WRONG)
def test_what_is_wrong_is_said(problem):
    name, arguments = WRONG[problem]
    with pytest.raises(lz.InvalidCallError) as raised:
        getattr(lz, name)(*arguments)
    assert problem in str(raised.value)


def test_random_calls(monkeypatch):
    monkeypatch.setattr("layerzero.testing.generate.FUNCTIONS_BY_NAME", {name: FUNCTIONS[name] for name in NAMES})
    report = fuzz.run(examples(200), 9)
    assert report.ok, str(report)

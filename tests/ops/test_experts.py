"""Stacks of weights: what a batched and a grouped product give, where groups end, and what is refused."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.engine.functions import CALLS


def counted(*counts):
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("biased", [False, True])
def test_each_group_of_rows_is_multiplied_with_its_own_weight(biased):
    rows, weight = torch.randn(9, 16), torch.randn(4, 8, 16)
    bias = torch.randn(4, 8) if biased else None
    got = lz.grouped_linear(rows, weight, counted(3, 0, 5, 1), bias=bias)
    group = torch.tensor([0] * 3 + [2] * 5 + [3])
    want = torch.einsum("tk,tnk->tn", rows, weight[group]) + (bias[group] if biased else 0.0)
    torch.testing.assert_close(got, want)


def test_a_stack_of_inputs_is_multiplied_with_a_stack_of_weights():
    rows, weight, bias = torch.randn(3, 5, 16), torch.randn(3, 8, 16), torch.randn(3, 8)
    got = lz.batched_linear(rows, weight, bias=bias)
    torch.testing.assert_close(got, torch.einsum("gmk,gnk->gmn", rows, weight) + bias[:, None])


def test_all_rows_may_be_of_one_group_and_there_may_be_none():
    rows, weight = torch.randn(4, 16), torch.randn(3, 8, 16)
    torch.testing.assert_close(lz.grouped_linear(rows, weight, counted(0, 4, 0)), rows @ weight[1].T)
    assert lz.grouped_linear(rows[:0], weight, counted(0, 0, 0)).shape == (0, 8)


def test_few_choices_serve_every_number_of_rows():
    weight, cache = torch.randn(3, 64, 32), CALLS["grouped_linear"].dispatcher.cache
    lz.configure()  # a new epoch: nothing is kept
    before = cache.size()
    for count in range(1, 301):
        rows = torch.randn(count, 32)
        got = lz.grouped_linear(rows, weight, counted(count // 3, 0, count - count // 3))
        torch.testing.assert_close(got[-1], weight[2] @ rows[-1])
    assert cache.size() - before <= 12


@pytest.mark.parametrize(
    ("group_ends", "told"),
    [
        (torch.tensor([3, 4, 9]), "group_ends: wanted dtype int32, got int64"),
        (counted(3, 0, 7), r"group_ends\[2\]: wanted 0 to 9, got 10"),
        (counted(3, 6), "group_ends: wanted experts 3 as in weight, got 2"),
        (torch.tensor([3, -1, 9], dtype=torch.int32), r"group_ends\[1\]: wanted 0 to 9, got -1"),
    ],
)
def test_ends_that_are_none_are_refused(group_ends, told):
    with pytest.raises(lz.InvalidCallError, match=told):
        lz.grouped_linear(torch.randn(9, 16), torch.randn(3, 8, 16), group_ends)


@pytest.mark.parametrize(
    ("group_ends", "told"),
    [
        (torch.tensor([5, 3, 9], dtype=torch.int32), "group_ends: wanted numbers that do not fall"),
        (counted(3, 3, 2), "group_ends: wanted the last to be the 9 rows of input"),
    ],
)
def test_values_of_ends_are_looked_at_in_debug_mode(group_ends, told):
    with lz.scope(debug=True), pytest.raises(lz.InvalidCallError, match=told):
        lz.grouped_linear(torch.randn(9, 16), torch.randn(3, 8, 16), group_ends)


def test_gradients_reach_rows_and_weights():
    rows, weight = torch.randn(6, 8, requires_grad=True), torch.randn(2, 4, 8, requires_grad=True)
    lz.grouped_linear(rows, weight, counted(2, 4)).square().sum().backward()
    assert rows.grad.abs().sum() > 0
    assert weight.grad.abs().sum() > 0

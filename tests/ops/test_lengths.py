"""Encoder and cross attention: lengths of padded keys in place of masks, whatever lies beyond them."""

from __future__ import annotations

import math

import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops import OPERATION_ALIASES
from layerzero.ops.attention.reference import attention_reference


def padded(lens, queries, keys=40, heads=4, kv_heads=2, dim=16, dtype=torch.float64):
    torch.manual_seed(0)
    query = torch.randn(len(lens), queries, heads, dim, dtype=dtype)
    key, value = torch.randn(2, len(lens), keys, kv_heads, dim, dtype=dtype)
    for row, length in enumerate(lens):
        key[row, length:] = value[row, length:] = math.nan
    return query, key, value, torch.tensor(lens)


@at_once("queries", [1, 7])
@at_once("kv_heads", [2, 4])
@at_once("arguments", [{}, {"scale": 0.3}, {"window": (3, 2)}, {"causal": True}, {"causal": True, "window": (5, 0)}])
def test_lengths_are_what_calls_of_one_sequence_each_give(queries, kv_heads, arguments):
    query, key, value, lens = padded((40, 9, 0, 3), queries, kv_heads=kv_heads)
    arguments = {"causal": False} | arguments
    kernel = f"torch.{'decode' if queries == 1 else 'prefill'}_lengths_cpu"
    operation = f"attention.{'gqa' if kv_heads == 2 else 'standard'}.{'decode' if queries == 1 else 'prefill'}"
    with lz.scope(locks={operation: kernel}):
        output, lse = lz.attention(query, key, value, kv_lens=lens, layout="BSHD", return_lse=True, **arguments)
    for row, length in enumerate(lens.tolist()):
        one = (query[row : row + 1], key[row : row + 1, :length], value[row : row + 1, :length])
        wanted, sums = attention_reference(*one, return_lse=True, **arguments)
        torch.testing.assert_close(output[row], wanted[0])
        torch.testing.assert_close(lse[row], sums[0])


def test_cross_attention_goes_by_its_names():
    prefill, facts = OPERATION_ALIASES["attention.cross.prefill"]
    assert set(prefill) == {"attention.standard.prefill", "attention.gqa.prefill"}
    assert facts == {"causal": False}
    query, key, value, lens = padded((40, 9), 3)
    with lz.scope(deny=["torch.prefill_lengths_cpu"]):
        dense = lz.attention(query, key, value, causal=False, kv_lens=lens, layout="BSHD")
    with lz.scope(locks={"attention.cross.prefill": "torch.prefill_lengths_cpu"}):
        report = lz.explain("attention", query, key, value, causal=False, kv_lens=lens, layout="BSHD")
        assert "-> torch.prefill_lengths_cpu" in str(report).splitlines()[0]
        torch.testing.assert_close(lz.attention(query, key, value, causal=False, kv_lens=lens, layout="BSHD"), dense)

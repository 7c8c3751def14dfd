"""Lengths of dense calls for FlashAttention 3 as vLLM builds it: rows of a table, which growing contexts share."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from layerzero.backends.shape_cache import Prepared
from layerzero.backends.vllm import flash_attn
from layerzero.core.fact_reads import EVERYTHING, reads_of

LIBRARIES = {"torch": "2.11.0", "vllm": "0.20.0"}


@given(batch=st.integers(1, 40_000), seq_k=st.integers(1, 2**20))
def test_a_row_is_the_length_of_every_sequence(batch, seq_k):
    found = flash_attn.lengths("cpu", batch, seq_k, capturing=False)
    assert found.dtype is torch.int32
    assert found.is_contiguous()
    assert torch.equal(found, torch.full((batch,), seq_k, dtype=torch.int32))


@pytest.fixture
def v3(monkeypatch):
    """A loaded kernel whose operator notes the lengths that it gets, and the tables that were made."""
    given, made = [], []

    def fwd(*arguments):
        given.append(arguments[11])
        return arguments[0], torch.zeros(1)

    def table(where, batch, number):
        made.append((where, batch, number))
        return flash_attn._table("cpu", batch, number)

    monkeypatch.setattr(
        flash_attn, "operators", lambda *_: types.SimpleNamespace(fwd=types.SimpleNamespace(default=fwd))
    )
    monkeypatch.setattr(flash_attn, "TABLES", Prepared(table, 4))
    return flash_attn._load_v3(facts_of(1, 2048)), given, made


def facts_of(batch, seq_k):
    query = torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(batch, seq_k, 8, 128, dtype=torch.bfloat16, device="meta")
    return lz.explain("attention", query, keys, keys, layout="BSHD", device="H200", libraries=LIBRARIES).facts


def test_what_is_loaded_depends_on_no_length(v3):
    reads = reads_of(flash_attn._load_v3, facts_of(1, 2048))
    assert not {EVERYTHING, "seq_k", "batch"} & reads, reads


def test_steps_share_a_table_and_layers_a_row(v3):
    run, given, made = v3
    query = torch.zeros(1, 1, 4, 16)
    for seq_k in (2048, 2048, 2049, 2050):
        keys = torch.zeros(1, seq_k, 4, 16)
        run(query, keys, keys)
    assert [each.tolist() for each in given] == [[2048], [2048], [2049], [2050]]
    assert given[0] is given[1]
    assert made == [("cuda:0", 1, 0)]
    keys = torch.zeros(3, 5, 4, 16)
    run(torch.zeros(3, 1, 4, 16), keys, keys)
    assert given[-1].tolist() == [5, 5, 5]
    assert made[1:] == [("cuda:0", 3, 0)]


def test_a_capture_takes_what_was_made_before(monkeypatch):
    monkeypatch.setattr(flash_attn, "TABLES", Prepared(flash_attn._table, 4))
    with pytest.raises(RuntimeError, match="was not made before the CUDA graph capture"):
        flash_attn.lengths("cpu", 2, 100, capturing=True)
    flash_attn.lengths("cpu", 2, 7, capturing=False)  # of the same table
    assert flash_attn.lengths("cpu", 2, 100, capturing=True).tolist() == [100, 100]

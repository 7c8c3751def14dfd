"""cuDNN over sequences of unlike lengths: what a graph is told of them, and what a query that sees nothing gets."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import layerzero as lz
from layerzero.backends import cudnn_ragged
from layerzero.backends.cudnn_frontend import Graph
from layerzero.core.facts import FactsBuilder
from layerzero.engine.registry import REGISTRY
from layerzero.ops.attention.reference import attention_reference

HEADS, KV_HEADS, DIM = 4, 2, 16


class Node:
    """A tensor of a graph: what was set of it."""

    def __init__(self, **given):
        self.__dict__.update(given)

    def __getattr__(self, name):
        def setter(value):
            setattr(self, name.removeprefix("set_"), value)
            return self

        return setter


class Library:
    """Builds a graph, and attends to what lies where offsets and lengths say; queries without a key get NaN."""

    def __init__(self):
        self.built, self.asked = 0, {}
        self.module = types.SimpleNamespace(
            data_type=types.SimpleNamespace(INT32="int32", INT64="int64"),
            diagonal_alignment=types.SimpleNamespace(BOTTOM_RIGHT="bottom right"),
        )

    def begun(self, _name, _index, dtype):
        return types.SimpleNamespace(tensor=Node, sdpa=self.sdpa), dtype

    def sdpa(self, **given):
        self.asked, self.output = given, Node(dim=None)
        return self.output, None

    def graph(self, _):
        self.built += 1
        asked = self.asked
        return Graph(lambda *given, tensor_uids: self.execute(asked, tensor_uids, *given), 0)

    def execute(self, asked, uids, tensors, _workspace, _handle):
        given = dict(zip(uids, tensors, strict=True))
        query, key, value = (given[asked[name].uid].flatten() for name in "qkv")
        heads, longest, dim = asked["q"].dim[1:]
        assert longest >= int(given[asked["seq_len_q"].uid].max())
        assert asked["k"].dim[2] >= int(given[asked["seq_len_kv"].uid].max())
        output = given[cudnn_ragged._OUT].flatten().fill_(torch.nan)
        for row in range(asked["q"].dim[0]):
            queries, keys = (int(given[asked[name].uid].flatten()[row]) for name in ("seq_len_q", "seq_len_kv"))
            first = int(given[asked["q"].ragged_offset.uid].flatten()[row])
            from_key = int(given[asked["k"].ragged_offset.uid].flatten()[row])
            rows = slice(first, first + queries * heads * dim)
            columns = slice(from_key, from_key + keys * KV_HEADS * dim)
            causal = asked.get("diagonal_alignment") == "bottom right"
            seen = max(queries - keys, 0) if causal else queries if keys == 0 else 0
            found = attention_reference(
                query[rows].view(1, queries, heads, dim),
                *(each[columns].view(1, keys, KV_HEADS, dim) for each in (key, value)),
                causal=causal,
                scale=asked["attn_scale"],
            )
            found[0, :seen] = torch.nan
            output[rows] = found.flatten()
        given[cudnn_ragged._OUT].copy_(output.view(query.numel() // (heads * dim), heads, dim))


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setitem(sys.modules, "cudnn", made.module)
    for name, stand_in in (("begun", made.begun), ("built", made.graph), ("handle", lambda index: index)):
        monkeypatch.setattr(cudnn_ragged, name, stand_in)
    monkeypatch.setattr(cudnn_ragged, "_GRAPHS", cudnn_ragged.Prepared(cudnn_ragged._build, 8))
    return made


def call(queries, keys):
    torch.manual_seed(0)
    starts = [torch.tensor([0, *each]).cumsum(0, dtype=torch.int32) for each in (queries, keys)]
    query = torch.randn(sum(queries), HEADS, DIM).bfloat16()
    return (query, *torch.randn(2, sum(keys), KV_HEADS, DIM).bfloat16(), *starts)


def facts_of(tensors, **arguments):
    operation = REGISTRY.operation("attention.gqa.prefill.ragged")
    return FactsBuilder(operation).build(*tensors, device=lz.Device.named("H100"), **arguments)


LENGTHS = [((3, 5), (3, 5)), ((2, 0, 4), (7, 3, 4)), ((5, 3, 1), (2, 0, 1))]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS, ids=["square", "an empty one", "more queries than keys"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_graph_is_told_where_sequences_lie(library, queries, keys, causal, stepped):
    tensors = call(queries, keys)
    step = lz.RaggedMetadata(*tensors[3:]) if stepped else None
    run = cudnn_ragged._load(facts_of(tensors, causal=causal, scale=0.3))
    wanted = REGISTRY.operation("attention.gqa.prefill.ragged").reference(*tensors, causal=causal, scale=0.3)
    for longest in (None, max(queries)):
        got = run(*tensors, causal=causal, scale=0.3, max_seqlen_q=longest, step=step)
        torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)
    assert library.built == 1  # either way the longest sequence is shorter than a tile
    assert library.asked["use_padding_mask"]
    assert library.output.ragged_offset is library.asked["q"].ragged_offset


def test_longer_sequences_get_another_graph_and_a_step_that_advances_other_places(library):
    tensors = call((3, 5), (3, 5))
    step = lz.RaggedMetadata(*tensors[3:])
    run = cudnn_ragged._load(facts_of(tensors, causal=True))
    run(*tensors, causal=True, step=step)
    tensors[3][1] = tensors[4][1] = 6
    step.advance()
    wanted = REGISTRY.operation("attention.gqa.prefill.ragged").reference(*tensors, causal=True)
    got = run(*tensors, causal=True, step=step, max_seqlen_q=6, max_seqlen_k=6)
    torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)
    assert library.built == 1
    longer = call((70, 2), (70, 130))
    got = run(*longer, causal=True)
    wanted = REGISTRY.operation("attention.gqa.prefill.ragged").reference(*longer, causal=True)
    torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)
    assert library.built == 2
    assert (library.asked["q"].dim[2], library.asked["k"].dim[2]) == (128, 256)
    with pytest.raises(lz.InvalidCallError, match="step: wanted that of these cu_seqlens"):
        run(*longer, causal=True, step=step)


def test_what_a_graph_has_no_room_for_is_refused():
    (kernel,) = cudnn_ragged.KERNELS
    assert not [each for limit in kernel.limits for each in limit.check(facts_of(call((3, 5), (3, 5))))]
    wide = [each.repeat(1, 1, 16) if each.ndim == 3 else each for each in call((3, 5), (3, 5))]
    found = [each.reason.fact for limit in kernel.limits for each in limit.check(facts_of(wide))]
    assert found == ["head_dim"]
    assert not {"window", "softcap", "return_lse", "sinks", "alibi_slopes"} & set(kernel.accepts)

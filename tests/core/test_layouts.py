"""Which layout a call has: told, proved by shapes, plausible, seen in strides, or assumed with a warning."""

from __future__ import annotations

import warnings

import pytest
import torch

import layerzero as lz
from layerzero.ops.attention.layout import resolve
from layerzero.ops.attention.reference import attention_reference


def layout_of(query, key=None, **call):
    key = query if key is None else key
    report = lz.explain("attention", query, key, key, causal=False, **call)
    return report.facts.layout, any("layout was assumed" in note for note in report.notes)


@pytest.mark.parametrize(("query", "key", "layout", "assumed"), [
    ((1, 1024, 32, 128), (1, 1024, 8, 128), "BSHD", False),  # as BHSD, 1024 heads of 1024 groups: not plausible
    ((1, 32, 1024, 128), (1, 8, 1024, 128), "BHSD", False),
    ((2, 12, 16, 64), (2, 12, 5, 64), "BHSD", False),  # 16 heads are no multiple of 5
    ((2, 16, 12, 64), (2, 5, 12, 64), "BSHD", False),
    ((4, 1, 32, 128), (4, 512, 8, 128), "BSHD", False),  # decode: read as BHSD, 1 head cannot have 512 kv heads
    ((4, 32, 1, 128), (4, 8, 512, 128), "BHSD", False),
    ((2, 32, 32, 64), (2, 32, 32, 64), "BSHD", True),
    ((2, 64, 64, 64), (2, 64, 64, 64), "BSHD", True),
    ((2, 128, 16, 64), (2, 128, 16, 64), "BSHD", True),  # 128 could be heads
    ((2, 512, 16, 64), (2, 512, 16, 64), "BSHD", False),
    ((2, 16, 512, 64), (2, 16, 512, 64), "BHSD", False),
    ((2, 1, 1, 64), (2, 1, 1, 64), "BSHD", False),  # both readings are the same computation
])  # fmt: skip
def test_what_shapes_prove(query, key, layout, assumed):
    assert layout_of(torch.empty(query, device="meta"), torch.empty(key, device="meta")) == (layout, assumed)


def test_a_transposed_view_tells_its_layout():
    projected = torch.empty(2, 32, 32, 64)  # (B, S, H, D) as a projection writes it
    assert layout_of(projected.transpose(1, 2)) == ("BHSD", False)
    assert layout_of(projected) == ("BSHD", True)
    assert resolve((2, 32, 32, 8), (2, 32, 32, 8), (2, 32, 32, 8), (8192, 256, 8, 1), (8192, 8, 256, 1))[0] == "BHSD"


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_an_explicit_layout_is_right_where_both_are_possible(size, layout):
    query, key, value = (torch.randn(2, size, size, 16) for _ in range(3))
    result = lz.attention(query, key, value, layout=layout)
    swap = (lambda x: x.transpose(1, 2)) if layout == "BHSD" else (lambda x: x)
    wanted = swap(attention_reference(swap(query), swap(key), swap(value), causal=True))
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_an_assumption_warns_once_a_minute_for_the_same_shapes():
    query = torch.randn(2, 16, 16, 8)
    with pytest.warns(lz.LayerZeroLayoutWarning, match="pass layout=|Pass layout="):
        lz.attention(query, query, query)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lz.attention(query, query, query)
        lz.attention(query, query, query, causal=False)
    with pytest.warns(lz.LayerZeroLayoutWarning):
        lz.attention(query[:1], query[:1], query[:1])


def test_the_output_has_the_inputs_layout():
    query, key, value = torch.randn(2, 8, 20, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 24)
    assert lz.attention(query, key, value, layout="BHSD").shape == (2, 8, 20, 24)
    moved = lz.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), layout="BSHD")
    assert moved.shape == (2, 20, 8, 24)

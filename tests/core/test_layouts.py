"""Which layout a call has: named, configured, proved by shapes, plausible; an error where both readings fit."""

from __future__ import annotations

import re

import pytest
import torch

import layerzero as lz
from layerzero.ops.attention.reference import attention_reference


def layout_of(query, key=None, **call):
    key = query if key is None else key
    return lz.explain("attention", query, key, key, causal=False, **call).facts.layout


@pytest.mark.parametrize(("query", "key", "layout"), [
    ((1, 1024, 32, 128), (1, 1024, 8, 128), "BSHD"),  # as BHSD, 1024 heads of 1024 groups: not plausible
    ((1, 32, 1024, 128), (1, 8, 1024, 128), "BHSD"),
    ((2, 12, 16, 64), (2, 12, 5, 64), "BHSD"),  # 16 heads are no multiple of 5
    ((2, 16, 12, 64), (2, 5, 12, 64), "BSHD"),
    ((4, 1, 32, 128), (4, 512, 8, 128), "BSHD"),  # decode: read as BHSD, 1 head cannot have 512 kv heads
    ((4, 32, 1, 128), (4, 8, 512, 128), "BHSD"),
    ((2, 257, 16, 64), (2, 257, 16, 64), "BSHD"),  # no model has more than 256 heads
    ((2, 16, 257, 64), (2, 16, 257, 64), "BHSD"),
    ((2, 1, 1, 64), (2, 1, 1, 64), "BSHD"),  # both readings are the same computation
])  # fmt: skip
def test_what_shapes_prove(query, key, layout):
    assert layout_of(torch.empty(query, device="meta"), torch.empty(key, device="meta")) == layout


BOTH = [(1, 12, 20, 64), (2, 32, 32, 64), (2, 256, 16, 64), (2, 512, 512, 8)]
READINGS = r"(attention|rope): layout: wanted layout='BSHD' or layout='BHSD', got neither, and both fit query {}: "


@pytest.mark.parametrize("shape", BOTH)
def test_shapes_that_fit_both_layouts_are_an_error_with_both_readings(shape):
    first, second = shape[1:3]
    reads = f"BSHD reads {first} tokens of {second} heads, BHSD {second} tokens of {first} heads. Pass layout="
    words = READINGS.format(re.escape(str(shape))) + re.escape(reads)
    query = torch.zeros(shape)
    angles = torch.zeros(512, shape[-1] // 2)
    compiled = torch.compile(lambda x: lz.attention(x, x, x), backend="eager", dynamic=False, fullgraph=True)
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.attention(query, query, query)
    with pytest.raises(lz.InvalidCallError, match=words):  # a view does not say how its memory was written
        lz.attention(*(query.transpose(1, 2).contiguous().transpose(1, 2),) * 3)
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.attention(*(query.to("meta"),) * 3)
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.explain("attention", query, query, query)
    with pytest.raises(lz.InvalidCallError, match=words):
        torch.ops.layerzero.attention(query, query, query)
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.rope(query, query, angles, angles)
    with pytest.raises(Exception, match=words):
        compiled(query)
    with lz.scope(layout="BHSD"):
        assert layout_of(query) == "BHSD"
        assert lz.attention(query, query, query).shape == shape
        assert layout_of(query, layout="BSHD") == "BSHD"


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_an_explicit_layout_is_right_where_both_are_possible(size, layout):
    query, key, value = (torch.randn(2, size, size, 16) for _ in range(3))
    result = lz.attention(query, key, value, layout=layout)
    swap = (lambda x: x.transpose(1, 2)) if layout == "BHSD" else (lambda x: x)
    wanted = swap(attention_reference(swap(query), swap(key), swap(value), causal=True))
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_the_output_has_the_inputs_layout():
    query, key, value = torch.randn(2, 8, 20, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 24)
    assert lz.attention(query, key, value, layout="BHSD").shape == (2, 8, 20, 24)
    moved = lz.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), layout="BSHD")
    assert moved.shape == (2, 20, 8, 24)

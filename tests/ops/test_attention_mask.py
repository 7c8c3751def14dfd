"""A mask alone says everything: it is causal only where the call or the mask says so."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import layerzero as lz
from layerzero.engine.dispatch import Dispatcher
from layerzero.engine.functions import CALLS
from layerzero.ops.attention.layout import stock

QUERY = torch.randn(2, 6, 4, 8)
MASK = (torch.rand(2, 1, 6, 6) > 0.3) | torch.eye(6, dtype=torch.bool)


def wanted(**said):
    heads_first = QUERY.transpose(1, 2)
    return scaled_dot_product_attention(heads_first, heads_first, heads_first, **said).transpose(1, 2)


def attend(**said):
    return lz.attention(QUERY, QUERY, QUERY, layout="BSHD", **said)


def operator(**said):
    return torch.ops.layerzero.attention(QUERY, QUERY, QUERY, layout="BSHD", **said)


def compiled(**said):
    return torch.compile(attend, fullgraph=True, backend="aot_eager")(**said)


def as_stock(**said):
    return stock(QUERY, QUERY, QUERY, layout="BSHD", **said)()


@pytest.mark.parametrize("way", [attend, operator, compiled, as_stock])
@pytest.mark.parametrize("mask", [MASK, MASK.float() * 2 - 1], ids=["bool", "float"])
def test_a_mask_alone_is_not_causal(way, mask):
    for _ in range(2):  # the second call is a hit
        torch.testing.assert_close(way(attn_mask=mask), wanted(attn_mask=mask))
        torch.testing.assert_close(way(attn_mask=mask, causal=False), wanted(attn_mask=mask))
        torch.testing.assert_close(way(), wanted(is_causal=True))
        torch.testing.assert_close(way(causal=None), wanted(is_causal=True))


@pytest.mark.parametrize("said", [{}, {"causal": None}, {"causal": True}, {"causal": False}, {"attn_mask": MASK}])
@pytest.mark.parametrize("way", ["fast", "python"])
def test_each_way_to_say_it_is_found_again_without_a_choice(way, said, monkeypatch):
    call = CALLS["attention"]
    attend_by = getattr(call, way)
    attend_by(QUERY, QUERY, QUERY, layout="BSHD", **said)
    monkeypatch.setattr(Dispatcher, "miss", lambda *_: pytest.fail("chosen again"))
    monkeypatch.setattr(Dispatcher, "run_unkept", lambda *_: pytest.fail("chosen again"))
    attend_by(QUERY, QUERY, QUERY, layout="BSHD", **said)


@pytest.mark.parametrize("way", [attend, operator])
def test_a_mask_beside_causal_is_still_an_error_that_names_the_way_out(way):
    with pytest.raises(lz.InvalidCallError, match="wanted one of them, got both; pass causal=False") as refused:
        way(attn_mask=MASK, causal=True)
    assert refused.value.code is lz.ReasonCode.ATTN_MASK_INVALID
    with pytest.raises(lz.InvalidCallError, match="causal: wanted bool, got"):
        attend(attn_mask=MASK, causal=torch.ones(3))


def test_questions_say_what_a_call_does():
    assert lz.explain("attention", QUERY, QUERY, QUERY, layout="BSHD", attn_mask=MASK).facts["causal"] is False
    assert lz.explain("attention", QUERY, QUERY, QUERY, layout="BSHD").facts["causal"] is True

"""Softcap and sinks beside masks, by the function that a GPU runs; here on a CPU, where its operators are the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once
from layerzero.backends.torch import softcap as cuda_scored
from layerzero.backends.torch.softcap import scored
from layerzero.ops.attention.reference import attention_reference

SINKS = torch.tensor([0.3, -2.0, 4.0, 0.0, -0.5, -math.inf])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def tensors(seq_q: int, seq_k: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_q + seq_k)
    shapes = [(2, 6, seq_q, 16), (2, 2, seq_k, 16), (2, 2, seq_k, 8)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
    """Compare with the formula in float64, and give the result."""
    got, lse = scored(query, key, value, return_lse=True, **more)
    assert torch.equal(scored(query, key, value, **more), got) or got.isnan().any()
    wide = {
        name: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in more.items()
    }
    lie = [each.double().transpose(1, 2) for each in (query, key, value)]
    wanted, wanted_lse = attention_reference(*lie, return_lse=True, **wide)
    off = TOLERANCE[query.dtype]
    assert got.dtype is query.dtype
    torch.testing.assert_close(got.double(), wanted.transpose(1, 2), atol=off, rtol=off)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=off, rtol=off)
    return got


@pytest.fixture(autouse=True)
def _without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AMX it reads over the ends of bfloat16 rows that do not fill its tiles."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture(params=[1, 2**26])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores in memory at once: a query at a time, and all of them."""
    monkeypatch.setattr(cuda_scored, "SCORES", request.param)


@pytest.mark.usefixtures("_pieces")
@at_once("dtype", TOLERANCE)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 20), (7, 7), (5, 20), (20, 17)])
@at_once("causal", [False, True])
@at_once("more", [{"softcap": 3.0}, {"sinks": SINKS}, {"softcap": 3.0, "sinks": SINKS}])
def test_lengths_and_causality(dtype: torch.dtype, seq_q: int, seq_k: int, causal: bool, more: dict[str, Any]) -> None:
    check(*tensors(seq_q, seq_k, dtype), causal=causal, **more)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("shape", [(9, 20), (1, 20), (2, 1, 9, 20), (2, 1, 1, 20), (2, 6, 9, 20), (20,)], ids=str)
def test_masks_of_every_width(shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mask[mask > 1.0] = -math.inf
    for each in (mask, mask > -math.inf):
        check(*tensors(9, 20), attn_mask=each, softcap=5.0)
        check(*tensors(9, 20), attn_mask=each, sinks=SINKS)
        check(*tensors(9, 20), attn_mask=each, sinks=SINKS, causal=True)


@pytest.mark.usefixtures("_pieces")
def test_padding_on_the_left_is_not_read() -> None:
    """As a batch of texts is decoded: whatever lies under the padding."""
    query, key, value = tensors(1, 20)
    mask = torch.zeros(2, 1, 1, 20)
    mask[0, ..., :7] = -math.inf
    wanted = check(query, key, value, attn_mask=mask, softcap=5.0)
    key[0, :, :7] = math.nan
    torch.testing.assert_close(scored(query, key, value, attn_mask=mask, softcap=5.0), wanted)


@pytest.mark.usefixtures("_pieces")
def test_a_query_that_sees_no_key_gives_zeros() -> None:
    mask = torch.zeros(2, 1, 9, 20)
    mask[1, :, 3] = -math.inf
    got = check(*tensors(9, 20), attn_mask=mask, softcap=5.0)
    assert not got[1, :, 3].any()
    got = check(*tensors(9, 20), attn_mask=mask, sinks=SINKS)
    assert not got[1, :, 3].any()


def test_a_sink_that_is_no_number_or_has_no_bound_gives_what_a_softmax_over_it_does() -> None:
    sinks = torch.tensor([math.nan, math.inf, 0.0, -math.inf, 1.0, 2.0])
    got, lse = scored(*tensors(3, 20), sinks=sinks, return_lse=True)
    assert got[:, :2].isnan().all()
    assert got[:, 2:].isfinite().all()
    assert lse[:, 0].isnan().all()
    assert (lse[:, 1] == math.inf).all()
    assert lse[:, 2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_rows_that_a_mask_hides_by_the_least_number_of_its_type(dtype: torch.dtype, name: str) -> None:
    """As Transformers' eager masks do; a sink of -inf takes nothing from them."""
    mask = torch.full((2, 1, 3, 20), torch.finfo(dtype).min)
    more: dict[str, Any] = {"softcap": 1.0} if name == "softcap" else {"sinks": torch.full((6,), -math.inf)}
    query, key, value = tensors(3, 20)
    got = scored(query, key * 0, value, attn_mask=mask, **more)
    torch.testing.assert_close(got, value.mean(2, keepdim=True).repeat_interleave(3, 1).expand_as(got))


def test_no_queries_and_a_mask_of_one_number() -> None:
    query, key, value = tensors(3, 20)
    got, lse = scored(query[:, :, :0], key, value, softcap=3.0, return_lse=True)
    assert got.shape == (2, 6, 0, 8)
    assert lse.shape == (2, 6, 0)
    check(query, key, value, attn_mask=torch.tensor(0.5), softcap=3.0)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 1), (64, 40)])
def test_what_is_in_memory_at_once_is_told(monkeypatch: pytest.MonkeyPatch, seq_q: int, seq_k: int) -> None:
    """Scores of as many queries as fit, with the columns beside them."""
    monkeypatch.setattr(cuda_scored, "SCORES", 2**10)
    pieces = cuda_scored._pieces(seq_q, 12 * (seq_k + cuda_scored.TAIL))
    most = max(each.stop - each.start for each in pieces) * 12 * (seq_k + cuda_scored.TAIL)
    assert most <= 2**10
    assert [each.start for each in pieces[1:]] == [each.stop for each in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, seq_q)


@given(scale=st.floats(-2.0, 2.0), softcap=st.floats(1e-3, 1e3), seed=st.integers(0, 9))
def test_any_factor_and_cap(scale: float, softcap: float, seed: int) -> None:
    check(*tensors(3, 5 + seed), scale=scale, softcap=softcap)


def test_on_a_gpu_it_is_there_for_softcap_and_sinks_alone() -> None:
    query = torch.empty(2, 9, 6, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(2, 1, 9, 9, dtype=torch.bool, device="meta")
    reports = [
        lz.explain("attention", query, query, query, layout="BSHD", causal=False, device="H100", **more)
        for more in (
            {"softcap": 50.0, "attn_mask": mask},
            {"attn_mask": mask},
            {"softcap": 50.0},
            {"softcap": 50.0, "scale": 0.0},
        )
    ]
    assert reports[0].kernel_id == "torch.cuda.scored"
    codes = [{each.code for each in report.failures.get("torch.cuda.scored", ())} for report in reports]
    assert codes == [set(), {lz.ReasonCode.CONSTRAINT_FAILED}, set(), {lz.ReasonCode.CONSTRAINT_FAILED}]

"""Softcap and sinks on a CPU: the kernels that stand where only the reference was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends.torch import softcap
from layerzero.ops.attention.reference import attention_reference

KERNEL = {"softcap": "torch.cpu.softcap", "sinks": "torch.sdpa.cpu_flash_sinks"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def call(name: str, seq_q: int, seq_k: int, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seq_q + seq_k)
    tensors = [
        torch.randn(2, heads, seq, 16, generator=generator) for heads, seq in ((6, seq_q), (2, seq_k), (2, seq_k))
    ]
    given: dict[str, Any] = dict(zip(("query", "key", "value"), (each.to(dtype) for each in tensors), strict=True))
    given[name] = 3.0 if name == "softcap" else torch.tensor([0.3, -2.0, 4.0, 0.0, -0.5, 1.0])
    return given | {"layout": "BHSD", "causal": False} | more


def check(name: str, given: dict[str, Any]) -> None:
    """The kernel runs, and gives what the formula gives in float64."""
    assert lz.which("attention", **given)["kernel_id"] == KERNEL[name]
    got = lz.attention(**given)
    dtype = given["query"].dtype
    wide = {
        key: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for key, each in given.items()
    }
    wide |= {key: wide[key].transpose(1, 2) for key in ("query", "key", "value")}
    del wide["layout"]
    wanted = attention_reference(**wide)
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for number, (one, other) in enumerate(pairs):
        wanted_dtype = torch.float32 if number else dtype
        assert one.dtype is wanted_dtype
        other = other if number else other.transpose(1, 2)  # noqa: PLW2901
        torch.testing.assert_close(
            one.double(), other.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True
        )


@pytest.fixture(params=[3, 128])
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of a piece: some pieces to a call, and one."""
    monkeypatch.setattr(softcap, "ROWS", request.param)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("name", KERNEL)
@at_once("dtype", TOLERANCE)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 20), (7, 7), (5, 20), (20, 20)])
@at_once("causal", [False, True])
def test_lengths_and_causality(name: str, dtype: torch.dtype, seq_q: int, seq_k: int, causal: bool) -> None:
    check(name, call(name, seq_q, seq_k, dtype, causal=causal))


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("name", KERNEL)
def test_queries_before_the_first_key_give_zeros(name: str) -> None:
    given = call(name, 20, 17, causal=True)
    check(name, given)
    assert not lz.attention(**given)[:, :, :3].any()


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("name", KERNEL)
@pytest.mark.parametrize("more", [{"window": (4, 0), "causal": True}, {"scale": -0.4}, {"window": (2, 3)}], ids=str)
def test_windows_and_factors(name: str, more: dict[str, Any]) -> None:
    check(name, call(name, 9, 20, **more))


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("name", KERNEL)
@pytest.mark.parametrize("kind", ["bool", "float", "rows alone", "keys alone", "by head"])
def test_masks_also_those_that_leave_a_query_without_keys(name: str, kind: str) -> None:
    given = call(name, 9, 20)
    seen = torch.ones(2, 1, 9, 20, dtype=torch.bool).tril(4)
    seen[1, :, 3:6] = False
    added = torch.randn(2, 1, 9, 20).masked_fill(~seen, -math.inf)
    masks = {"bool": seen, "float": added, "rows alone": added[0, 0], "keys alone": added[:, :, 8:], "by head": added}
    mask = masks[kind].expand(2, 6, 9, 20) if kind == "by head" else masks[kind]
    check(name, given | {"attn_mask": mask})
    if kind == "bool":
        assert not lz.attention(**given, attn_mask=mask)[1, :, 3:6].any()


@at_once("dtype", TOLERANCE)
@at_once("softcap", [1e-6, 1e-3, 0.5, 999.0, 1e3, 1e5, 1e7, 1e12, 1e30])
def test_narrow_and_wide_caps(dtype: torch.dtype, softcap: float) -> None:
    check("softcap", call("softcap", 9, 20, dtype, causal=True, softcap=softcap))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("softcap", [1e-40, 1e-7, 1e31, 1e38])
def test_caps_that_leave_the_range_of_float32_are_the_references(dtype: torch.dtype, softcap: float) -> None:
    given = call("softcap", 9, 20, dtype, softcap=softcap)
    assert str(lz.which("attention", **given)["kernel_id"]).startswith("reference.")
    (told,) = (each for each in lz.explain("attention", **given).candidates if each.kernel.id == KERNEL["softcap"])
    assert "1e-06 to 1e+30" in str(told)
    with pytest.warns(lz.LayerZeroFallbackWarning, match="runs its slow reference"):
        assert lz.attention(**given).isfinite().all()


def test_hidden_keys_may_be_anything_beside_a_softcap() -> None:
    given = call("softcap", 4, 20)
    seen = torch.ones(4, 20, dtype=torch.bool)
    seen[:, 11:] = False
    wanted = lz.attention(**given, attn_mask=seen)
    given["key"][:, :, 11:] = math.nan
    assert torch.equal(lz.attention(**given, attn_mask=seen), wanted)


def test_nan_is_not_hidden() -> None:
    for name in KERNEL:
        given = call(name, 4, 20)
        given["query"][0, 1, 2] = math.nan
        got = lz.attention(**given)
        assert got[0, 1, 2].isnan().all()
        assert got.isnan().sum() == 16


@pytest.mark.parametrize("more", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("seq_q", [1, 20])
def test_sinks_take_part_in_the_log_sum_exp(seq_q: int, more: dict[str, Any]) -> None:
    check("sinks", call("sinks", seq_q, 20, return_lse=True, **more))


def test_a_sink_of_minus_infinity_is_none() -> None:
    given = call("sinks", 20, 17, causal=True) | {"sinks": torch.full((6,), -math.inf)}
    check("sinks", given)


@at_once("dtype", TOLERANCE)
@at_once("sink", [math.nan, math.inf, -math.inf])
@at_once("seq_k", [20, 17])
def test_sinks_that_are_no_numbers_give_what_the_reference_gives(dtype: torch.dtype, sink: float, seq_k: int) -> None:
    sinks = torch.tensor([0.3, sink, -2.0, sink, 1.0, 0.0])
    given = call("sinks", 20, seq_k, dtype, causal=True, sinks=sinks, return_lse=True)
    check("sinks", given)
    output, lse = lz.attention(**given)
    assert output[:, [1, 3]].isnan().all() == (sink != -math.inf)
    assert lse[:, 1].isnan().all() == math.isnan(sink)
    assert not output[:, [0, 2, 4, 5]].isnan().any()


def test_gradients_and_float64_are_the_references() -> None:
    for name in KERNEL:
        given = call(name, 4, 20)
        given["query"].requires_grad_()
        assert str(lz.which("attention", **given)["kernel_id"]).startswith("reference.")
        assert str(lz.which("attention", **call(name, 4, 20, torch.float64))["kernel_id"]).startswith("reference.")


def test_calls_without_either_are_not_theirs() -> None:
    given = call("softcap", 4, 20) | {"softcap": None}
    report = lz.explain("attention", **given)
    for each in report.candidates:
        if each.kernel.id in KERNEL.values():
            assert "given" in str(each)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # of torch 2.11
@pytest.mark.parametrize("name", KERNEL)
def test_no_key_is_copied_for_its_group(name: str) -> None:
    """Elements that torch copies for one query: less than the keys, which eager attention repeats three times."""
    given = call(name, 1, 200)
    lz.attention(**given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        lz.attention(**given)
    sizes = [each.input_shapes[0] for each in seen.events() if each.name in {"aten::copy_", "aten::cat"}]
    assert sum(math.prod(each) for each in sizes if isinstance(each, list)) < given["key"].numel()

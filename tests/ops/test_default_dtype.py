"""torch's default dtype is another while a model is loaded in it: what is computed and kept then is what it ever is."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends.vllm_cpu.norm import VLLM_CPU
from layerzero.core.device import Device
from layerzero.engine.probe import this_machine

MISSING = this_machine().state(VLLM_CPU, Device.detect("cpu")).reason


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default(request):
    """Sets the default dtype where a test asks for it."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


@at_once("kernel", ["torch.penalties*", "reference.*"])
def test_penalties_are_computed_in_float32(default, kernel):
    ids = torch.tensor([[1, 2, 2, 2, -1]])
    logits, given = torch.zeros(1, 4, dtype=torch.float32), {"presence": 0.7, "frequency": 0.3}
    counts = torch.tensor([[0, 1, 3, 0]])
    wanted = -0.7 * (counts > 0).double() - 0.3 * counts.double()
    default()
    with lz.prefer(kernel):
        for said in ({"output_ids": ids}, {"output_counts": counts}):
            got = lz.apply_penalties(logits, **said, **given)
            assert got.dtype is torch.float32
            torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_form_that_is_made_meanwhile_is_exact(default):
    """The matrix of a rotated weight is kept with its form, rounded to bfloat16 for good."""
    known = lz.quantize_weight(torch.randn(64, 96), "mxfp8:rotation=32")
    rows = torch.randn(4, 96)
    packed = lz.PackedWeight(known, dense=True)
    default()
    with lz.prefer("torch.kept_mx"):
        got = lz.quantized_linear(rows, known, packed=packed)
    torch.testing.assert_close(got, rows @ known.dequantized(torch.float32).t(), rtol=1e-4, atol=1e-4)


def test_weights_are_quantized_and_read_as_ever(default):
    numbers = torch.randn(64, 64)
    wanted = lz.quantize_weight(numbers, "nf4:group=64")
    rotation = torch.ones(1, 1)
    for _ in range(5):
        rotation = torch.cat((torch.cat((rotation, rotation), 1), torch.cat((rotation, -rotation), 1))) / 2**0.5
    mx = lz.quantize_weight(numbers, "mxfp4:rotation=32")
    default()
    assert torch.equal(lz.quantize_weight(numbers, "nf4:group=64").fields.data, wanted.fields.data)
    assert lz.QuantizedWeight.from_mx(mx.fields.data, mx.fields.scale, rotation=rotation).format == mx.format


def test_scales_of_caches_are_float32(default):
    default()
    cache = lz.KVCache(1, 2, 8, pages=2, page_size=4, dtype=torch.int8, scales="head")
    paged = lz.PagedCache.allocate(2, 4, 2, 8, dtype=torch.int8, scales="head")
    assert {each.key_scale.dtype for each in (cache.layers[0], paged)} == {torch.float32}


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_experts_with_one_bias_of_two(default):
    weights = [(torch.randn(*shape) / 8).bfloat16() for shape in ((4, 128, 64), (4, 64, 64))]
    given = {
        "input": torch.randn(5, 64).bfloat16(), "gate_up_weight": weights[0], "down_weight": weights[1],
        "expert_ids": torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]]), "expert_weights": torch.full((5, 2), 0.5),
        "down_bias": torch.randn(4, 64).bfloat16(), "activation": "swiglu_oai",
    }  # fmt: skip
    packed = {"packed_gate_up": lz.PackedWeight(weights[0]), "packed_down": lz.PackedWeight(weights[1])}
    report = lz.explain("moe_experts", **given, **packed)
    if report.reasons("vllm.cpu.fused_experts"):
        pytest.skip("; ".join(map(str, report.reasons("vllm.cpu.fused_experts"))))
    wide = {name: each.float() for name, each in given.items() if name not in ("expert_ids", "activation")}
    wanted = lz.moe_experts(**given | wide)
    default()
    with lz.scope(locks={"moe.experts": "vllm.cpu.fused_experts"}):
        got = lz.moe_experts(**given, **packed)
    torch.testing.assert_close(got.float(), wanted, rtol=5e-2, atol=5e-2)

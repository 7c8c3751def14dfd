"""Who computes with packed weights where no time is known: torch's own library, but on AMD's processors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import layerzero as lz
from layerzero.engine.dispatch import ENGINE

XEON = lz.Device(
    "cpu",
    "Intel(R) Xeon(R) Processor",
    "intel",
    architecture="x86_64",
    instruction_sets=frozenset({"avx2", "avx512", "avx512_bf16", "amx_bf16"}),
    dtypes=frozenset({"float32", "bfloat16"}),
)
EPYC = dataclasses.replace(XEON, name="AMD EPYC", vendor="amd", instruction_sets=XEON.instruction_sets - {"amx_bf16"})

PACKED = {
    "linear": ("packed",),
    "mlp": ("packed_up", "packed_down"),
    "qkv_linear": ("packed_q", "packed_k", "packed_v"),
}


def asked(function: str, dtype: torch.dtype, device: lz.Device, *, packed: bool = True) -> list[str]:
    """Kernels of a product, or of products, the best one first."""
    weight = torch.randn(64, 64, dtype=dtype)
    names = PACKED[function]
    forms = {name: lz.PackedWeight(weight) for name in names} if packed else {}
    report = lz.explain(function, torch.randn(4, 64, dtype=dtype), *[weight] * len(names), **forms, device=device)
    return [each.kernel.id for each in report.candidates if not each.reasons]


def priority(kernel: str) -> int:
    """What is declared of a kernel."""
    return next(each.priority for each in lz.list_kernels() if each.id == kernel)


@pytest.fixture(autouse=True)
def without_times(monkeypatch):
    monkeypatch.setattr(type(ENGINE.ledger), "evidence", lambda *_: {})


@pytest.mark.parametrize("function", ["linear", "mlp", "qkv_linear"])
def test_bfloat16_is_onednns_as_in_torch_itself(function):
    first = asked(function, torch.bfloat16, XEON)[0]
    assert first.startswith("torch.onednn_")
    assert first.endswith("_packed")


@pytest.mark.parametrize("function", ["linear", "mlp", "qkv_linear"])
def test_float32_stays_with_torchs_own_library(function):
    assert asked(function, torch.float32, XEON)[0] in {"torch.linear", "torch.mlp", "torch.qkv_linear"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", ["linear", "mlp", "qkv_linear"])
def test_amds_processors_have_priorities(function, dtype):
    kernels = asked(function, dtype, EPYC)
    assert kernels == sorted(kernels, key=lambda name: -priority(name))


@pytest.mark.parametrize("device", [XEON, EPYC], ids=["intel", "amd"])
def test_a_weight_that_nobody_packed_is_torchs_own(device):
    assert asked("linear", torch.bfloat16, device, packed=False)[0] == "torch.linear"


@pytest.mark.parametrize(("tokens", "device", "own"), [(1, XEON, False), (64, XEON, True), (64, EPYC, False)])
def test_packed_experts_stay_with_torch_where_tiles_pay_that_the_library_has_not(tokens, device, own):
    gate_up, down = torch.empty(4, 128, 64, dtype=torch.bfloat16), torch.empty(4, 64, 64, dtype=torch.bfloat16)
    ids, weights = torch.zeros(tokens, 2, dtype=torch.int32), torch.ones(tokens, 2)
    report = lz.explain(
        "moe_experts",
        torch.empty(tokens, 64, dtype=torch.bfloat16),
        gate_up,
        down,
        ids,
        weights,
        packed_gate_up=lz.PackedWeight(gate_up),
        packed_down=lz.PackedWeight(down),
        device=device,
    )
    if report.chosen is None or not any("packed" in each.kernel.id for each in report.candidates if not each.reasons):
        pytest.skip("needs a kernel with packed weights")
    assert (report.kernel_id == "torch.experts_each") is own


@pytest.mark.parametrize(("rows", "tiles", "zentorchs"), [(8, False, True), (16, True, True), (512, True, False)])
def test_codes_of_four_bits_are_multiplied_by_tiles_where_rows_are_many(rows, tiles, zentorchs):
    """By vectors torch's took 5 times as long for 64 rows, and zentorch's 9 times for 512."""
    weight = lz.quantize_weight(torch.randn(64, 128, dtype=torch.bfloat16), "int4", group_size=64)
    given = torch.randn(rows, 128, dtype=torch.bfloat16), weight
    for device in (XEON, EPYC):
        report = lz.explain("quantized_linear", *given, packed=lz.PackedWeight(weight), device=device)
        facts = {
            name: {each.fact for each in report.reasons(name)}
            for name in ("vllm.cpu.wna16_tiles", "zentorch.codes_linear")
        }
        assert ("rows" in facts["zentorch.codes_linear"]) == (device is XEON and not zentorchs)
        assert ("rows" in facts["vllm.cpu.wna16_tiles"]) == (not tiles)
        legal = [each.kernel.id for each in report.candidates if not each.reasons]
        assert "vllm.cpu.wna16" not in legal or (legal[0] == "vllm.cpu.wna16_tiles") == (device is XEON and tiles)
    assert priority("vllm.cpu.wna16_tiles") > priority("torch.int4pack_mm")


@pytest.mark.parametrize(("kernel", "rows"), [("torch.int8pack_mm", 16), ("zentorch.int8_linear_packed", 128)])
def test_products_of_int8_by_vectors_are_for_few_rows_where_tiles_take_less(kernel, rows):
    weight, scale = torch.ones(64, 64, dtype=torch.int8), torch.ones(64)
    by = {"activations": "int8"} if "zentorch" in kernel else {}
    for device, more in ((XEON, 0), (XEON, -1), (EPYC, 0)):
        given = torch.ones(rows + more, 64, dtype=torch.bfloat16)
        report = lz.explain(
            "quantized_linear", given, weight, scale, packed=lz.PackedWeight(weight), device=device, **by
        )
        fewer = "rows" in {each.fact for each in report.reasons(kernel)}
        assert fewer == (device is XEON and not more)


def test_a_large_weight_of_int8_is_not_widened_for_few_rows():
    """Its copy took 2.5 times as long as the product by vectors."""
    given = torch.empty(32, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.int8), torch.empty(4096)
    report = lz.explain("quantized_linear", *given, device=XEON)
    assert "rows" not in {each.fact for each in report.reasons("torch.int8pack_mm")}

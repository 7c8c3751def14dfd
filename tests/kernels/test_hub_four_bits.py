"""The hub's products with weights of four bits, by builds in Python that read the layout that their sources read."""

import pytest
import torch

import layerzero as lz
from hub_builds import plant, settings
from layerzero.engine.registry import REGISTRY
from layerzero.ops.quantize.schemes import SCHEMES
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import WeightFormat

pytest.importorskip("kernels.variants", reason="the package that reads hub kernels is not installed")
pytest.importorskip("kernel_abi_check", reason="the package that checks shared libraries is not installed")

CODES = """
import torch

def codes_of(weight):
    outputs, half = weight.shape
    found = torch.empty(outputs, 2 * half, dtype=torch.uint8)
    data = weight.view(outputs // 32, half, 32)
    for place in range(64):
        shift = 4 * (place // 32)
        found[place // 2 :: 32, place % 2 :: 2] = data[:, :, place % 32] >> shift & 15
    return found
"""

OF_GROUPS = (
    CODES
    + """
def gemm_int4_forward(input, weight, zeros, absmax, blocksize):
    zero, scale = (each.t().repeat_interleave(blocksize, 1) for each in (zeros, absmax))
    return input @ ((codes_of(weight).to(torch.int8) - zero.to(torch.int8)) * scale).t()
"""
)

OF_BLOCKS = (
    CODES
    + """
NUMBERS = {numbers}

def gemm_4bit_forward(input, weight, absmax, blocksize, quant_type):
    table = torch.tensor(NUMBERS[quant_type])
    return input @ (table[codes_of(weight).long()] * absmax.t().repeat_interleave(blocksize, 1)).to(input.dtype).t()
""".replace("{numbers}", str([SCHEMES[each].numbers for each in ("nf4", "fp4")]))
)

GROUPS = [
    "gptq:bits=4,group=128,zeros=minus_one",
    "gptq:bits=3,group=96,zeros=stored,permuted=True",
    "awq:bits=4,group=32,zeros=stored",
    "compressed-tensors:bits=4",
]


@pytest.fixture
def _planted(tmp_path):
    plant(tmp_path, "quantization-gptq", OF_GROUPS)
    plant(tmp_path, "quantization-bitsandbytes", OF_BLOCKS)
    lz.configure(require_vetting=False, **settings(tmp_path))
    REGISTRY.ready()


@pytest.mark.slow
@pytest.mark.usefixtures("_planted")
def test_codes_and_scales_arrive_where_the_sources_read_them():
    """Both repositories' CPU sources, compiled, conform with the same adapter (AMD EPYC, 2026-11-27)."""
    formats = {"quantization-gptq": GROUPS, "quantization-bitsandbytes": ["nf4:group=64", "fp4:group=128"]}
    for name, operation in (("quantization-gptq", "group"), ("quantization-bitsandbytes", "codebook")):
        for text in formats[name]:
            of, generator = WeightFormat.of(text), torch.Generator().manual_seed(0)
            weight = QuantizedWeight.unchecked(of, (64, 384), SCHEMES[of.scheme].random(of, 64, 384, generator))
            rows = torch.randn(3, 384, generator=generator).to(torch.bfloat16)
            wanted = rows.float() @ weight.dequantized(torch.float32).t()
            with lz.scope(locks={f"mlp.linear.quant.{operation}": f"hub.{name}.linear"}):
                got = lz.quantized_linear(rows, weight, packed=lz.PackedWeight(weight))
            torch.testing.assert_close(
                got.float(), wanted, atol=0.03, rtol=0.03, msg=lambda told, of=of: f"{of}: {told}"
            )


@pytest.mark.usefixtures("_planted")
def test_blocks_that_end_within_a_row_are_refused():
    weight = lz.quantize_weight(torch.randn(64, 96), "nf4:group=64")
    report = lz.explain("quantized_linear", torch.ones(2, 96, dtype=torch.bfloat16), weight)
    wanted = "in_features must be a multiple of weight_group, is 96"
    assert wanted in [str(each.message) for each in report.reasons("hub.quantization-bitsandbytes.linear")]

"""Libraries that quantize on GPUs which are not here: what they are given, and that they are vetted before they run."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.backends.torch import quantized_linear
from layerzero.backends.torch.quantize import e2m1_by_bits
from layerzero.backends.vllm import quantize
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.reasons import ReasonCode
from layerzero.ops import OPERATIONS
from layerzero.ops.calls import function_for, routed
from layerzero.ops.quantize.formats import e2m1_codes

LIBRARIES = {"torch": "2.11.0", "vllm": "0.20.0"}
LINEAR = ("mlp.linear.quant.int8", "mlp.linear.quant.fp8_e4m3")
UNPROVED = {
    "vllm.quantize_rows": "quantize.int8",
    "vllm.quantize_by_one": "quantize.int8",
    "vllm.int8_linear": LINEAR[0],
    "torch.cuda.int_mm": LINEAR[0],
    "torch.cuda.scaled_mm": LINEAR[1],
}


def call(kernel, dtype=torch.bfloat16):
    """A call that the kernel takes, on the CPU."""
    x = torch.randn(2, 32, 64).to(dtype)
    if UNPROVED[kernel] == "quantize.int8":
        given = {"per": "row"} if kernel.endswith("rows") else {"scale": torch.tensor(0.02)}
        return {"input": x, "dtype": "int8", **given}
    name = UNPROVED[kernel].rpartition(".")[2]
    weight, scale = lz.quantize(torch.randn(48, 64) / 8, name, per="row")
    return {"input": x, "weight": weight, "weight_scale": scale, "bias": torch.randn(48).to(dtype), "activations": name}


def facts_of(kernel, arguments):
    operation = OPERATIONS[UNPROVED[kernel]]
    found = routed(function_for(operation), arguments)
    return found, FactsBuilder(operation).of_valid(found.arguments, device=Device.named("H200"))


@pytest.mark.parametrize("kernel", UNPROVED)
def test_a_kernel_that_nobody_ran_waits_for_a_verdict(kernel):
    function = function_for(UNPROVED[kernel]).name
    arguments = {name: each.to("meta") if hasattr(each, "to") else each for name, each in call(kernel).items()}
    found = lz.explain(function, **arguments, device="H200", libraries=LIBRARIES)
    assert {reason.code for reason in found.reasons(kernel)} == {ReasonCode.NOT_VETTED}


@given(st.floats(width=32, allow_nan=False))
@settings(max_examples=examples(300))
def test_codes_by_bits_are_those_of_the_formula(number):
    quotients = torch.tensor([number, -number, number * 1e-38, 0.0])
    assert torch.equal(e2m1_by_bits(quotients), e2m1_codes(quotients))


def test_codes_by_bits_go_to_the_even_number_in_the_middle():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    beside = torch.cat([torch.nextafter(middles, torch.tensor(each)) for each in (0.0, 9.0)])
    quotients = torch.cat((middles, beside, -middles, -beside))
    assert torch.equal(e2m1_by_bits(quotients), e2m1_codes(quotients))


class Operators:
    """Stands for vLLM's operators on CUDA: as their source says, a row of zeros gets a scale of 0."""

    @staticmethod
    def rows(output, rows, scale, azp):
        assert azp is None
        assert rows.ndim == 2
        assert scale.shape == (len(rows), 1)
        scale.copy_(rows.float().abs().amax(-1, keepdim=True) / 127)
        output.copy_((rows.float() / scale).nan_to_num(0.0).round())

    @staticmethod
    def given(output, rows, scale, azp):
        assert azp is None
        output.copy_((rows.float() / scale).round().clamp(-128, 127))

    @staticmethod
    def product(output, codes, weight, scale, weight_scale, bias):
        assert weight.stride(0) == 1  # columns
        assert weight_scale.shape == (weight.shape[1],)
        output.copy_((codes.float() @ weight.float()) * scale * weight_scale + bias)


@pytest.fixture
def library(monkeypatch):
    stand = {
        "dynamic_scaled_int8_quant": Operators.rows,
        "static_scaled_int8_quant": Operators.given,
        "cutlass_scaled_mm": Operators.product,
    }
    names = {name: types.SimpleNamespace(default=function) for name, function in stand.items()}
    monkeypatch.setattr(quantize, "operators", lambda *_: types.SimpleNamespace(**names))


@pytest.mark.parametrize("kernel", [each for each in UNPROVED if each.startswith("vllm")])
def test_vllm_gets_rows_and_gives_what_the_reference_does(library, kernel):
    arguments = call(kernel)
    arguments["input"][0, 3] = 0.0
    found, facts = facts_of(kernel, arguments)
    declared = next(each for each in quantize.KERNELS if each.id == kernel)
    operation = found.operation
    given = {name: found.arguments[name] for name in declared.accepts if found.arguments.get(name) is not None}
    got = declared.load(facts)(*[found.arguments[each.name] for each in operation.schema.required], **given)
    wanted = operation.reference(*[found.arguments[each.name] for each in operation.schema.required], **given)
    if isinstance(got, tuple):
        assert torch.equal(got[0], wanted[0])
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=0.0)
        assert (got[1] > 0).all()
    else:
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_torchs_scaled_product_gets_columns_and_a_scale_for_each_row(monkeypatch):
    def product(codes, weight, scale, of_weight, bias, *, out_dtype):
        assert codes.dtype is weight.dtype is torch.float8_e4m3fn
        assert weight.stride(0) == 1
        assert (scale.shape, of_weight.shape) == ((64, 1), (1, 48))
        return ((codes.float() @ weight.float()) * scale * of_weight + bias).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    found, facts = facts_of("torch.cuda.scaled_mm", call("torch.cuda.scaled_mm"))
    declared = next(each for each in quantized_linear.KERNELS if each.id == "torch.cuda.scaled_mm")
    tensors = [found.arguments[each.name] for each in found.operation.schema.required]
    got = declared.load(facts)(*tensors, bias=found.arguments["bias"])
    wanted = found.operation.reference(*tensors, bias=found.arguments["bias"])
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)

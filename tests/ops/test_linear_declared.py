"""The CUDA kernels of products on devices that are not here: what each is offered, and how its library is called."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

import layerzero as lz
from layerzero.backends.flashinfer import rows as flashinfer
from layerzero.backends.torch import linear as torch_linear
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.reasons import ReasonCode
from layerzero.engine.legality import limit_findings
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS

LIBRARIES = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1"}
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WRONG, DTYPE = ReasonCode.CONSTRAINT_FAILED, ReasonCode.DTYPE_UNSUPPORTED


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def codes(kernel, rows=8, inputs=4096, outputs=4096, dtype=BF16, device="H200", *, biased=True, **arguments):
    given = {"input": meta(rows, inputs, dtype=dtype), "weight": meta(outputs, inputs, dtype=dtype)}
    given |= {"bias": meta(outputs, dtype=dtype)} if biased else {}
    with lz.scope(allow_jit_compile=True):
        report = lz.explain("linear", **given, **arguments, device=device, libraries=LIBRARIES)
    return {reason.code for reason in report.reasons(kernel)}


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({}, set()),
        ({"rows": 1, "biased": False}, set()),
        ({"rows": 64}, set()),
        ({"rows": 65}, {WRONG}),
        ({"inputs": 4128}, {WRONG}),
        ({"outputs": 4104}, {WRONG}),
        ({"dtype": F16}, {DTYPE}),
        ({"activation": "silu"}, {WRONG}),
        ({"device": "A100"}, {ReasonCode.SM_TOO_OLD}),
        ({"device": "MI300X"}, {ReasonCode.PLATFORM_MISMATCH}),
    ],
)
def test_flashinfers_small_product(sizes, refused):
    assert codes("flashinfer.tinygemm", **sizes) - {ReasonCode.NOT_INSTALLED} == refused


@pytest.mark.parametrize(
    ("kernel", "arguments", "refused"),
    [
        ("torch.mm_wide", {"out_dtype": F32}, set()),
        ("torch.mm_wide", {"out_dtype": F32, "activation": "gelu"}, set()),
        ("torch.mm_wide", {}, {WRONG}),
        ("torch.mm_wide", {"dtype": F32}, {WRONG, DTYPE}),
        ("torch.addmm_activation", {"activation": "relu"}, set()),
        ("torch.addmm_activation", {"activation": "gelu_tanh"}, set()),
        ("torch.addmm_activation", {"activation": "gelu_tanh", "outputs": 31}, set()),
        ("torch.addmm_activation", {"activation": "relu", "outputs": 31}, {WRONG}),  # loses a NaN
        ("torch.addmm_activation", {"activation": "relu", "inputs": 100}, {WRONG}),
        ("torch.addmm_activation", {"activation": "relu", "outputs": 31, "dtype": F32}, set()),
        ("torch.addmm_activation", {"activation": "gelu"}, {WRONG}),
        ("torch.addmm_activation", {"activation": "relu", "biased": False}, {WRONG}),
        ("torch.addmm_activation", {"activation": "relu", "dtype": F64}, {DTYPE}),
        ("torch.linear", {}, set()),
        ("torch.onednn_linear", {"dtype": F32}, {ReasonCode.PLATFORM_MISMATCH}),
    ],
)
def test_torchs_products_on_a_gpu(kernel, arguments, refused):
    assert codes(kernel, **arguments) == refused


def facts_of(arguments):
    operation = OPERATIONS["mlp.linear"]
    given = {**operation.schema.neutral, **arguments}
    return FactsBuilder(operation).of_valid(given, device=Device.named("H200"))


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
@pytest.mark.parametrize(("dtype", "refused"), [(BF16, {WRONG}), (F32, set())], ids=str)
def test_relu_in_one_launch_wants_all_of_its_tensors_aligned(name, dtype, refused):
    given = {"input": torch.zeros(8, 64), "weight": torch.zeros(32, 64), "bias": torch.zeros(32)}
    given = {each: value.to(dtype) for each, value in given.items()}
    given[name] = torch.zeros(given[name].numel() + 1, dtype=dtype)[1:].view_as(given[name])
    findings = limit_findings(REGISTRY.kernel("torch.addmm_activation"), facts_of({**given, "activation": "relu"}))
    assert {each.reason.code for each in findings} == refused


def test_a_row_that_begins_off_sixteen_bytes_is_copied():
    declared = REGISTRY.kernel("flashinfer.tinygemm")
    memory = torch.zeros(4 * 64 + 8, dtype=BF16)
    given = {"input": memory[1:257].view(4, 64), "weight": torch.zeros(16, 64, dtype=BF16)}
    found = [(each.reason.code, each.repair.argument) for each in limit_findings(declared, facts_of(given))]
    assert found == [(ReasonCode.MISALIGNED, "input")]


@pytest.mark.parametrize("rows", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_the_small_product_is_called_as_its_library_wants_it(monkeypatch, rows, biased):
    def with_bias(input, weight, bias, output, overlap):
        assert input.ndim == output.ndim == 2
        assert overlap is False
        output.copy_(torch.nn.functional.linear(input, weight, bias))

    def without(input, weight, output, overlap):
        with_bias(input, weight, None, output, overlap)

    module = types.SimpleNamespace(tinygemm2_op=with_bias, tinygemm2_nobias_op=without)
    monkeypatch.setattr(flashinfer, "_module_linear", lambda: module)
    bound = []
    monkeypatch.setattr(flashinfer, "give_context", bound.append)
    given = {"input": torch.randn(*rows, 64), "weight": torch.randn(16, 64)}
    bias = {"bias": torch.randn(16)} if biased else {}
    got = flashinfer._load_linear(facts_of({**given, **bias}))(given["input"], given["weight"], **bias)
    torch.testing.assert_close(got, torch.nn.functional.linear(given["input"], given["weight"], **bias))
    assert bound == [given["input"]], "its first call in a thread is the driver's"


@pytest.mark.parametrize("rows", [(), (3,), (2, 3)], ids=str)
def test_torchs_wide_product_adds_bias_and_activation_to_what_was_not_rounded(monkeypatch, rows):
    def mm(input, weight, *, out_dtype):
        return input.to(out_dtype) @ weight.to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    tensors = {"input": torch.randn(*rows, 64), "weight": torch.randn(16, 64) / 8, "bias": torch.randn(16)}
    given = {name: each.to(BF16) for name, each in tensors.items()}
    params = {"activation": "silu", "out_dtype": F32}
    run = torch_linear._load_wide(facts_of({**given, **params}))
    got = run(given["input"], given["weight"], bias=given["bias"], **params)
    wanted = OPERATIONS["mlp.linear"].reference(given["input"], given["weight"], bias=given["bias"], **params)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("rows", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_the_epilogue_is_asked_for_by_torchs_name(monkeypatch, rows, activation):
    def operator(bias, input, weight, *, use_gelu):
        output = torch.addmm(bias, input, weight)
        return torch.nn.functional.gelu(output, approximate="tanh") if use_gelu else output.relu()

    monkeypatch.setattr(torch, "_addmm_activation", operator)
    given = {"input": torch.randn(*rows, 64), "weight": torch.randn(16, 64) / 8, "bias": torch.randn(16)}
    run = torch_linear._load_epilogue(facts_of({**given, "activation": activation}))
    got = run(given["input"], given["weight"], bias=given["bias"], activation=activation)
    wanted = OPERATIONS["mlp.linear"].reference(
        given["input"], given["weight"], bias=given["bias"], activation=activation
    )
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("features", "dtype", "instructions", "refused"), [
    (100, torch.bfloat16, {"avx512", "amx_bf16"}, True),
    (96, torch.bfloat16, {"avx512", "amx_bf16"}, False),
    (100, torch.bfloat16, {"avx512"}, False),
    (100, torch.float32, {"avx512", "amx_bf16"}, False),
])  # fmt: skip
def test_rows_that_run_into_each_other_are_refused(features, dtype, instructions, refused):
    device = dataclasses.replace(Device.named("CPU"), instruction_sets=frozenset(instructions))
    x, w = torch.empty(33, features, dtype=dtype, device="meta"), torch.empty(64, features, dtype=dtype, device="meta")
    report = lz.explain("linear", x, w, device=device)
    assert ["in_features" == each.fact for each in report.reasons("torch.onednn_linear")] == [True] * refused
    assert report.reasons("torch.linear") == (), "it fills rows up"

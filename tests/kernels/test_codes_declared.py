"""The CUDA kernels of weights by group on devices that are not here: what each is offered, and how it is called."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from weight_operators import BF16, F16, LIBRARIES, marlin_place, marlin_words, product, refused, stand_in, weight

import layerzero as lz
from drawing import at_once
from layerzero.backends import grouped_weights
from layerzero.backends.vllm import grouped_linear
from layerzero.core.device import Device
from layerzero.core.reasons import ReasonCode
from layerzero.engine.registry import REGISTRY
from layerzero.ops.quantize.groups import marlin_codes, marlin_scale, marlin_zero
from layerzero.ops.quantize.weight_format import unpacked

WRONG, DTYPE, PLATFORM = ReasonCode.CONSTRAINT_FAILED, ReasonCode.DTYPE_UNSUPPORTED, ReasonCode.PLATFORM_MISMATCH
GPTQ = "gptq:bits=4,group=128,zeros=minus_one"


CASES = [
    ("vllm.marlin", {}, set()),
    ("vllm.marlin", {"text": "awq:bits=4,group=64,zeros=stored"}, set()),
    ("vllm.marlin", {"text": "gptq:bits=4,group=32,zeros=stored,permuted=True", "dtype": F16}, set()),
    ("vllm.marlin", {"text": "compressed-tensors:bits=4"}, set()),
    ("vllm.marlin", {"text": "gptq:bits=3,group=128,zeros=stored"}, set()),
    ("vllm.marlin", {"text": "compressed-tensors:bits=5,group=128"}, {WRONG}),
    ("vllm.marlin", {"text": "compressed-tensors:bits=4,group=16"}, {WRONG}),
    ("vllm.marlin", {"outputs": 96}, {WRONG}),
    ("vllm.marlin", {"text": "compressed-tensors:bits=4,group=64", "inputs": 192}, {WRONG}),
    ("vllm.marlin", {"dtype": torch.float32}, {DTYPE}),
    ("vllm.marlin", {"device": "A100"}, set()),
    ("vllm.marlin", {"device": "T4"}, {ReasonCode.SM_TOO_OLD}),
    ("vllm.marlin", {"device": "MI300X"}, {PLATFORM}),
    ("vllm.marlin_int8", {"text": "compressed-tensors:bits=8,group=128"}, set()),
    ("vllm.marlin_int8", {"text": "gptq:bits=8,group=128,zeros=stored"}, {WRONG}),
    ("vllm.machete", {}, set()),
    ("vllm.machete", {"text": "gptq:bits=8,group=64,zeros=stored"}, set()),
    ("vllm.machete", {"text": "gptq:bits=4,group=32,zeros=stored"}, {WRONG}),
    ("vllm.machete", {"outputs": 64}, {WRONG}),
    ("vllm.machete", {"device": "A100"}, {ReasonCode.SM_TOO_OLD}),
    ("vllm.machete", {"device": "B200"}, {ReasonCode.SM_TOO_NEW}),
    ("vllm.gptq", {"text": "gptq:bits=3,group=128,zeros=stored", "dtype": F16}, set()),
    ("vllm.gptq", {}, {DTYPE}),
    ("vllm.awq", {"dtype": F16}, set()),
    ("vllm.awq", {"dtype": F16, "text": "compressed-tensors:bits=4"}, {WRONG}),
    ("torch.cuda.int4pack_mm", {}, set()),
    ("torch.cuda.int4pack_mm", {"rows": 65}, {WRONG}),
    ("torch.cuda.int4pack_mm", {"dtype": F16}, {DTYPE}),
    ("humming.linear", {"text": "compressed-tensors:bits=5,group=16"}, set()),
    ("humming.linear", {"text": "compressed-tensors:bits=4,group=8"}, {WRONG}),
    ("humming.linear", {"text": "compressed-tensors:bits=4,group=96", "inputs": 384}, {WRONG}),
    ("humming.linear", {"text": "compressed-tensors:bits=4", "inputs": 384}, set()),
    ("humming.linear", {"device": "MI300X"}, {PLATFORM}),
]


@at_once("kernel, given, wanted", CASES)
def test_each_kernel_says_what_it_is_not_for(kernel, given, wanted):
    found = refused(kernel, **{"text": GPTQ, **given})
    assert found - {ReasonCode.JIT_DISABLED} == wanted  # nothing is built for a GPU here


@pytest.mark.parametrize("bits", [4, 8])
def test_marlins_codes_lie_as_its_threads_read_them(bits):
    numbers = torch.randint(0, 1 << bits, (128, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(marlin_codes(numbers, bits), marlin_words(numbers, bits))


@pytest.mark.parametrize("groups", [1, 3])
def test_marlins_scales_and_zero_points_lie_as_its_threads_read_them(groups):
    scale = torch.arange(128 * groups, dtype=torch.float32).view(128, groups)
    ordered = marlin_scale(scale, torch.float32)
    assert ordered.is_contiguous()
    zero = torch.randint(0, 16, (128, groups), dtype=torch.uint8)
    codes = unpacked(marlin_zero(zero), 4, 128)
    for output in range(128):
        assert torch.equal(ordered[:, marlin_place(output, groups)], scale[output])
        place = marlin_place(output, 2)
        eighth = (0, 2, 4, 6, 1, 3, 5, 7).index(place % 8)
        assert torch.equal(codes[:, place - place % 8 + eighth], zero[output])


FORMATS = [
    GPTQ,
    "awq:bits=4,group=64,zeros=stored",
    "gptq:bits=4,group=128,zeros=stored,permuted=True",
    "compressed-tensors:bits=4,group=64",
    "compressed-tensors:bits=4",
    "compressed-tensors:bits=8,group=128",
    "gptq:bits=8,group=128,zeros=stored",
    "gptq:bits=3,group=128,zeros=minus_one",
    "compressed-tensors:bits=6,group=256,zeros=signed",
]


@pytest.fixture
def stood_in(monkeypatch):
    return stand_in(monkeypatch)


@pytest.mark.parametrize("kernel", sorted({kernel for kernel, _, _ in CASES}))
def test_each_library_is_called_as_it_reads_codes(stood_in, kernel):
    generator, taken = torch.Generator().manual_seed(2), 0
    for text, dtype in itertools.product(FORMATS, (F16, BF16)):
        known = weight(text)
        input, bias = torch.randn(2, 3, 256, generator=generator).to(dtype), torch.randn(128).to(dtype)
        got = product("group", kernel, known, input, bias)
        if got is None:
            continue
        taken += 1
        exact = input.double() @ known.dequantized(torch.float64).t() + bias.double()
        assert (got.dtype, got.shape) == (dtype, exact.shape)
        torch.testing.assert_close(got.double(), exact, rtol=0.0, atol=0.04 if dtype is BF16 else 0.01)
        first = product("group", kernel, known, input[0, 0])
        torch.testing.assert_close(first.double(), exact[0, 0] - bias.double(), rtol=0.0, atol=0.04)
    assert taken


def test_machete_has_a_context_before_its_first_call_which_is_the_drivers(stood_in, monkeypatch):
    bound = []
    monkeypatch.setattr(grouped_linear, "give_context", bound.append)
    product("group", "vllm.machete", weight(GPTQ), torch.randn(1, 256).to(BF16))
    assert len(bound) == 1


@pytest.mark.parametrize(("text", "tables"), [(GPTQ, 2), ("compressed-tensors:bits=4", 1)])
def test_humming_compiles_what_a_format_may_need_before_a_weight_is_seen(stood_in, text, tables):
    product("group", "humming.linear", weight(text), torch.randn(1, 256).to(BF16))
    assert len(stood_in.compiled) == tables


@pytest.mark.parametrize(("ending", "mode"), [("", None), ("_invariant", {"use_batch_invariant": True})])
def test_humming_computes_in_its_batch_invariant_mode_where_that_is_asked_for(stood_in, ending, mode):
    known, input = weight(GPTQ), torch.randn(3, 256).to(BF16)
    got = product("group", f"humming.linear{ending}", known, input)
    torch.testing.assert_close(got.double(), input.double() @ known.dequantized(torch.float64).t(), rtol=0, atol=0.04)
    assert [each and json.loads(each) for each in stood_in.modes] == [mode]
    kernel = REGISTRY.kernel(f"humming.linear{ending}")
    assert kernel.batch_invariant is kernel.asked_for is bool(ending)


def test_zero_points_that_are_all_in_the_middle_are_left_out(stood_in):
    known = weight("gptq:bits=4,group=128,zeros=stored")
    even = lz.QuantizedWeight(
        known.format,
        known.shape,
        known.fields.data,
        known.fields.scale,
        torch.full_like(known.fields.zero, -0x77777778),
    )
    input = torch.randn(1, 256).to(BF16)
    for kernel in ("vllm.marlin", "vllm.machete", "humming.linear"):
        product("group", kernel, even, input)
    forms = {kernel: slot.form[0] for (kernel, _), slot in even.packed._slots.items()}
    assert forms["vllm.marlin"][2] is None
    assert forms["vllm.machete"][3] is None
    assert forms["humming.linear"][3] is None


def test_a_form_whose_scales_are_in_the_dtype_of_the_rows_serves_no_other(stood_in):
    known = weight(GPTQ)
    for dtype in (F16, BF16):
        product("group", "vllm.marlin", known, torch.randn(1, 256).to(dtype))
    assert {slot.form[0][1].dtype for slot in known.packed._slots.values()} == {F16, BF16}


def test_a_capture_takes_kernels_that_made_a_form_before_it(stood_in, monkeypatch):
    monkeypatch.setattr(grouped_weights, "_MADE", set())
    known, input = weight(GPTQ), torch.randn(1, 256).to(BF16)
    device = Device.named("H100")

    def unsafe(kernel, inputs=256, device=device):
        given = known if inputs == 256 else weight(GPTQ, 128, inputs)
        found = lz.explain(
            "quantized_linear", torch.empty(1, inputs, dtype=BF16), given, device="H100", libraries=LIBRARIES
        )
        captured = lz.explain(found.facts.on(device, capturing=True))
        return any(reason.code is ReasonCode.CUDA_GRAPH_UNSAFE for reason in captured.reasons(kernel))

    assert unsafe("vllm.marlin")
    product("group", "vllm.marlin", known, input)
    assert not unsafe("vllm.marlin")
    assert unsafe("vllm.marlin", device=replace(device, index=1)), "what calls share lies on the first device"
    assert unsafe("vllm.machete")
    assert unsafe("vllm.marlin", 512)


def test_each_stream_has_locks_of_its_own_and_a_capture_takes_what_is_zero_already(monkeypatch):
    state = {"stream": 0, "capturing": False}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    locks = grouped_weights.Locks(4, torch.device("cpu"))
    first = locks.now()
    assert locks.now() is first
    state["stream"] = 7
    second = locks.now()
    assert second is not first
    state.update(stream=9, capturing=True)
    captured = locks.now()
    assert captured is locks.now()
    assert captured is not first
    assert captured is not second

"""lz.conv1d and lz.conv2d: torch's results and arguments, packed weights, what is refused before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from drawing import at_once
from layerzero.core.device import Device
from layerzero.ops import OPERATIONS

CALLS = (
    (functional.conv1d, (2, 6, 17), (8, 3, 3), {"groups": 2, "padding": 1}),
    (functional.conv1d, (6, 17), (4, 6, 4), {"padding": "same"}),
    (functional.conv1d, (0, 6, 17), (4, 6, 3), {}),
    (functional.conv2d, (2, 6, 9, 11), (8, 3, 3, 2), {"groups": 2, "padding": (1, 0), "stride": (2, 1)}),
    (functional.conv2d, (6, 9, 11), (6, 1, 3, 3), {"groups": 6, "padding": "same", "dilation": 2}),
    (functional.conv2d, (2, 6, 9, 11), (4, 6, 2, 3), {"padding": "same"}),
    (functional.conv2d, (2, 6, 9, 11), (4, 6, 3, 3), {"padding": "valid", "stride": [3]}),
)
PACKED = "torch.onednn_conv_packed"

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")


def drawn(shape, weight, dtype=torch.float32):
    torch.manual_seed(len(shape))
    return torch.randn(shape).to(dtype), torch.randn(weight).to(dtype), torch.randn(weight[0]).to(dtype)


def ours(function):
    return getattr(lz, function.__name__)


@at_once("biased", [True, False])
@at_once("function, shape, weight, named", CALLS)
def test_it_gives_what_torchs_function_gives(function, shape, weight, named, biased):
    input, weights, bias = drawn(shape, weight)
    given = (input, weights, bias if biased else None)
    assert torch.equal(ours(function)(*given, **named), function(*given, **named))


def test_steps_come_by_place_as_torchs_do():
    input, weight, bias = drawn((2, 6, 9, 11), (8, 3, 3, 3))
    assert torch.equal(lz.conv2d(input, weight, bias, 2, 1, 1, 2), functional.conv2d(input, weight, bias, 2, 1, 1, 2))


@pytest.mark.parametrize(("function", "shape", "weight", "named"), CALLS, ids=lambda each: str(each)[:40])
def test_gradients_are_torchs(function, shape, weight, named):
    found = []
    for compute in (ours(function), function):
        tensors = [each.requires_grad_() for each in drawn(shape, weight)]
        compute(*tensors, **named).square().sum().backward()
        found.append([each.grad for each in tensors])
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs)


@at_once(
    "wrong, said",
    [
        ({"groups": 3}, "input: wanted 3 x 3 channels, as weight (8, 3, 3, 3) and groups=3 have, got 6"),
        ({"groups": 3}, "groups: wanted a divisor of the weight's 8 outputs, got 3"),
        ({"groups": 0}, "groups: wanted a whole number from 1, got 0"),
        ({"padding": -1}, "padding: wanted a whole number from 0 or 2 of them, 'same' or 'valid', got -1"),
        ({"padding": "full"}, "padding: wanted a whole number from 0 or 2 of them, 'same' or 'valid', got 'full'"),
        ({"stride": 0}, "stride: wanted a whole number from 1 or 2 of them, got 0"),
        ({"stride": (1, 2, 3)}, "stride: wanted a whole number from 1 or 2 of them, got (1, 2, 3)"),
        ({"stride": 2.0}, "stride: wanted int or tuple, got 2.0"),
        ({"stride": 2, "padding": "same"}, "stride: wanted 1 with padding='same', got 2"),
        ({"dilation": 9}, "weight: wanted a kernel within the padded input (9, 11), got (19, 19), dilation included"),
        ({"input": (2, 5, 9, 11)}, "as weight (8, 3, 3, 3) and groups=2 have, got 5 in shape (2, 5, 9, 11)"),
        ({"input": (3, 2, 6, 9, 11)}, "input: wanted 3 or 4 axes, got shape (3, 2, 6, 9, 11)"),
        ({"input": (2, 6, 0, 11)}, "wanted channels and positions, got shapes (2, 6, 0, 11)"),
        ({"bias": (7,)}, "bias"),
        ({"weight": (8, 3, 3)}, "weight"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(wrong, said):
    input, weight, _ = drawn((2, 6, 9, 11), (8, 3, 3, 3))
    tensors = {name: torch.zeros(shape) for name, shape in wrong.items() if name in {"input", "weight", "bias"}}
    with pytest.raises(lz.InvalidCallError) as caught:
        lz.conv2d(**{"input": input, "weight": weight, "groups": 2} | wrong | tensors)
    assert said in str(caught.value)


@pytest.mark.parametrize(("given", "kept"), [("same", 1), ("valid", 0), ((2, 2), 2), ((1, 2), (1, 2))], ids=str)
def test_padding_is_numbers_wherever_both_ends_get_the_same(given, kept):
    input, weight, _ = drawn((2, 6, 9, 11), (8, 6, 3, 3))
    assert lz.explain("conv2d", input, weight, padding=given).facts["padding"] == kept


@pytest.mark.parametrize(("groups", "channels", "depthwise"), [(1, 6, False), (6, 6, True), (6, 12, False)])
def test_depthwise_is_a_fact(groups, channels, depthwise):
    input, weight, _ = drawn((2, 6, 9), (channels, 6 // groups, 3))
    assert lz.explain("conv1d", input, weight, groups=groups).facts["depthwise"] is depthwise


@needs_onednn
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "batch"])
@pytest.mark.parametrize("function", [functional.conv1d, functional.conv2d])
def test_a_large_weight_is_packed_once(function, alone):
    axes = 1 if function is functional.conv1d else 2
    input, weight, bias = drawn((64, *(6,) * axes) if alone else (2, 64, *(6,) * axes), (64, 64, *(5,) * axes))
    packed = lz.PackedWeight(weight)
    with lz.scope(locks={f"conv.{function.__name__}": PACKED}):
        for _ in range(2):
            found = ours(function)(input, weight, bias, padding=1, packed=packed)
            torch.testing.assert_close(found, function(input, weight, bias, padding=1), rtol=1e-4, atol=1e-3)
            assert found.is_contiguous()
    assert packed.forms == 1


@needs_onednn
def test_a_packed_result_lies_as_torchs_does():
    input, weight, _ = drawn((2, 8, 12, 12), (8, 8, 3, 3))
    packed, last = lz.PackedWeight(weight), input.to(memory_format=torch.channels_last)
    with lz.scope(locks={"conv.conv2d": PACKED}):
        found = lz.conv2d(last, weight, packed=packed)
    assert found.stride() == functional.conv2d(last, weight).stride()
    torch.testing.assert_close(found, functional.conv2d(last, weight), rtol=1e-4, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize(
    ("size", "named", "why"),
    [(64, {}, "a weight of 8 times as many numbers"), (6, {"padding": "same"}, "as much at both ends")],
)
def test_a_packed_weight_that_does_not_pay_is_left(size, named, why):
    input, weight, _ = drawn((1, 64, size, size), (64, 64, 4, 4))
    report = lz.explain("conv2d", input, weight, packed=lz.PackedWeight(weight), **named)
    assert report.kernel_id == "torch.conv"
    (packed,) = [each for each in report.candidates if each.kernel.id == PACKED]
    assert any(why in str(reason.wanted) for reason in packed.reasons)


@needs_onednn
@pytest.mark.parametrize(
    ("dtype", "tiles", "why"),
    [(torch.bfloat16, True, set()), (torch.bfloat16, False, {"weight"}), (torch.float32, True, {"weight"})],
)
def test_tiles_of_amx_pack_weights_that_are_less_large(dtype, tiles, why):
    input, weight, _ = drawn((1, 64, 8, 8), (64, 64, 3, 3), dtype)  # 4.5 times as large as input and result
    sets = {"avx2", "avx512", "avx512_bf16"} | ({"amx_bf16"} if tiles else set())
    device = Device(platform="cpu", name="another", vendor="intel", instruction_sets=frozenset(sets))
    report = lz.explain("conv2d", input, weight, padding=1, packed=lz.PackedWeight(weight), device=device)
    assert {each.fact for each in report.reasons(PACKED)} == why


def test_a_write_past_torchs_count_is_seen_in_a_weight_that_lies_channels_last():
    weight = torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)
    packed = lz.PackedWeight(weight)
    weight.data.zero_()
    assert packed.is_stale


def test_a_foreign_packed_weight_is_refused():
    input, weight, _ = drawn((1, 64, 6, 6), (64, 64, 5, 5))
    with pytest.raises(lz.InvalidCallError, match="the PackedWeight of this very weight tensor"):
        lz.conv2d(input, weight, packed=lz.PackedWeight(weight.clone()))


@pytest.mark.parametrize("padding", [1, (1, 0), "same"], ids=str)
def test_it_compiles_as_a_whole(padding):
    input, weight, bias = drawn((2, 6, 9, 11), (8, 6, 2, 2))
    compiled = torch.compile(lambda *given: lz.conv2d(*given, padding=padding) + 1, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(input, weight, bias), functional.conv2d(input, weight, bias, padding=padding) + 1
    )


@pytest.mark.parametrize("name", ["conv.conv1d", "conv.conv2d"])
def test_the_shape_is_known_without_numbers(name):
    operation = OPERATIONS[name]
    axes = 1 if name.endswith("1d") else 2
    input = torch.empty(2, 4, *(9,) * axes, device="meta")
    weight = torch.empty(6, 4, *(3,) * axes, device="meta")
    assert operation.reference(input, weight, stride=2).shape == (2, 6, *(4,) * axes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [6, 24])
@pytest.mark.parametrize("kernel", ["torch.conv_widened", "torch.onednn_conv_packed_widened"])
def test_widened_kernels_are_as_near_as_torchs(kernel, size, dtype):
    input, weight, bias = drawn((1, 64, size, size), (64, 64, 5, 5), dtype)
    packed = lz.PackedWeight(weight)
    if "packed" in kernel and (size > 6 or not torch.backends.mkldnn.is_available()):
        pytest.skip("its weight is large beside small pictures alone")
    with lz.scope(locks={"conv.conv2d": kernel}):
        found = lz.conv2d(input, weight, bias, padding=2, packed=packed)
    exact = functional.conv2d(input.double(), weight.double(), bias.double(), padding=2)
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert found.dtype == dtype
    assert error < (2e-3 if dtype is torch.float16 else 1e-2)

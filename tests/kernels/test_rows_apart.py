"""On a CPU with AMX a row's end is not read with the next row's beginning, whatever its length."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import layerzero as lz
from layerzero.backends.torch.cpu_half import _filled_up, linear_for
from layerzero.core.facts import Facts
from layerzero.engine.registry import REGISTRY

XEON = dataclasses.replace(lz.Device.detect("cpu"), instruction_sets=frozenset({"avx512", "avx512_bf16", "amx_bf16"}))
OTHER = dataclasses.replace(XEON, instruction_sets=frozenset({"avx512", "avx512_bf16"}))


def facts_of(features: int, dtype: torch.dtype, device: lz.Device = XEON) -> Facts:
    rows, weight = torch.empty(3, features, dtype=dtype), torch.empty(5, features, dtype=dtype)
    return lz.facts("linear", rows, weight, device=device)


@pytest.mark.parametrize("features", [1, 31, 33, 100])
def test_uneven_rows_in_bfloat16_are_filled_up(features):
    assert linear_for(facts_of(features, torch.bfloat16)) is _filled_up


@pytest.mark.parametrize(("features", "dtype"), [(32, torch.bfloat16), (64, torch.bfloat16), (33, torch.float32)])
def test_others_are_torchs_own(features, dtype):
    assert linear_for(facts_of(features, dtype)) is torch.nn.functional.linear


def test_other_processors_are_left_alone():
    assert linear_for(facts_of(33, torch.bfloat16, OTHER)) is torch.nn.functional.linear


@pytest.mark.parametrize(("device", "filled"), [(XEON, True), (OTHER, False)])
def test_rows_whose_gradients_are_recorded_may_be_filled_up(device, filled):
    rows = torch.empty(3, 64, dtype=torch.bfloat16, requires_grad=True)
    facts = lz.facts("linear", rows, torch.empty(5, 64, dtype=torch.bfloat16), device=device)
    assert (linear_for(facts) is _filled_up) == filled


@pytest.mark.parametrize("function", ["linear", "mlp", "qkv_linear"])
def test_no_call_is_refused_for_it(function):
    count = {"linear": 1, "mlp": 2, "qkv_linear": 3}[function]
    weights = [torch.empty(33, 33, dtype=torch.bfloat16)] * count
    report = lz.explain(function, torch.empty(3, 33, dtype=torch.bfloat16), *weights, device=XEON)
    assert report.kernel_id in {"torch.linear", "torch.mlp", "torch.qkv_linear"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("features", [1, 33, 96, 100])
def test_the_product_is_the_same_and_rows_stay_apart(features, bias):
    rows, weight = torch.randn(33, features).bfloat16(), torch.randn(64, features).bfloat16()
    offset = torch.randn(64).bfloat16() if bias else None
    wanted = torch.nn.functional.linear(rows.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(_filled_up(rows, weight, offset).double(), wanted, rtol=1e-2, atol=5e-2)
    rows[6] = torch.nan
    spoilt = _filled_up(rows, weight, offset).isnan().any(-1)
    assert spoilt.nonzero().flatten().tolist() == [6]


def test_gradients_go_through():
    rows, weight = (torch.ones(20, 33, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    _filled_up(rows, weight).sum().backward()
    assert rows.grad.shape == rows.shape
    torch.testing.assert_close(weight.grad, rows.detach().sum(0).expand(20, 33))


@pytest.mark.parametrize(("count", "features"), [(16, [33]), (17, [64])])
def test_as_few_rows_as_no_tile_reads_over_stay_as_they_are(count, features):
    seen = []

    def product(rows, weight, bias):
        seen.append(rows.shape[-1])
        return rows @ weight.mT

    _filled_up(torch.ones(count, 33).bfloat16(), torch.ones(5, 33).bfloat16(), product=product)
    assert seen == features


@pytest.mark.parametrize("features", [64, 33])
@pytest.mark.parametrize(("function", "groups"), [("linear", ()), ("batched_linear", (2,))])
def test_gradients_of_rows_stay_apart(function, groups, features):
    """They are a product of the result's gradient, whose rows are as long as there are outputs."""
    rows, weight = torch.randn(*groups, 40, features).bfloat16(), torch.randn(*groups, 33, features).bfloat16()
    bias, slope = torch.randn(*groups, 33).bfloat16(), torch.randn(*groups, 40, 33).bfloat16()
    slope[..., 16, :] = torch.nan
    rows.requires_grad_()
    weight.requires_grad_()
    facts = lz.facts(function, rows, weight, bias=bias, device=XEON)
    found = kernel("torch.linear" if not groups else "torch.bmm").load(facts)(rows, weight, bias=bias)
    assert found.shape == slope.shape
    assert found.is_contiguous()
    found.backward(slope)
    wanted = slope.double() @ weight.detach().double()
    torch.testing.assert_close(rows.grad.double(), wanted, rtol=2e-2, atol=1e-1, equal_nan=True)
    assert weight.grad.shape == weight.shape


@pytest.fixture
def whole_tiles(monkeypatch):
    """Products of torch's that take rows of whole tiles alone, as what follows a shorter row would be read."""

    def checked(compute, place):
        def run(*tensors, **named):
            rows = tensors[place]
            assert rows.dtype is not torch.bfloat16 or rows.shape[-1] % 32 == 0, tuple(rows.shape)
            return compute(*tensors, **named)

        return run

    for owner, name, place in ((torch.nn.functional, "linear", 0), (torch, "bmm", 0), (torch, "baddbmm", 1)):
        monkeypatch.setattr(owner, name, checked(getattr(owner, name), place))


def kernel(name):
    return next(each for each in REGISTRY.kernels() if each.id == name)


@pytest.mark.usefixtures("whole_tiles")
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_batches_are_filled_up(biased):
    rows, weight = torch.randn(2, 20, 33).bfloat16(), torch.randn(2, 7, 33).bfloat16()
    more = {"bias": torch.randn(2, 7).bfloat16()} if biased else {}
    got = kernel("torch.bmm").load(lz.facts("batched_linear", rows, weight, device=XEON, **more))(rows, weight, **more)
    wanted = rows.double() @ weight.double().mT + (more["bias"].double().unsqueeze(1) if biased else 0.0)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=5e-2)


@pytest.mark.usefixtures("whole_tiles")
def test_weights_of_attention_under_a_softcap_are_filled_up():
    query, key, value = (torch.randn(1, heads, size, 16).bfloat16() for heads, size in ((4, 5), (2, 33), (2, 33)))
    given = {"causal": False, "softcap": 20.0}
    facts = lz.facts("attention", query, key, value, layout="BHSD", device=XEON, **given)
    got = kernel("torch.cpu.softcap").load(facts)(query, key, value, **given)
    scores = 20.0 * (query.double() @ key.double().repeat_interleave(2, 1).mT / 80.0).tanh()
    wanted = scores.softmax(-1) @ value.double().repeat_interleave(2, 1)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("whole_tiles")
@pytest.mark.parametrize("rows", [20, 40])
def test_dequantised_weights_are_filled_up(rows):
    weight = lz.quantize_weight(torch.randn(24, 33), "fp8:group=128,rows=128")
    x = torch.randn(rows, 33).bfloat16()
    facts = lz.facts("quantized_linear", x, weight, device=XEON)
    fields, named = weight.fields, {"weight_format": str(weight.format), "out_dtype": None}
    got = kernel("torch.dequantized_block").load(facts)(x, fields.data, fields.scale, **named)
    wanted = x.double() @ weight.dequantized(torch.float64).T
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize(("out", "refused"), [(None, True), (torch.float32, False)])
def test_weights_that_are_kept_as_numbers_want_whole_tiles(out, refused):
    weight = lz.quantize_weight(torch.randn(24, 33), "fp8")
    packed = lz.PackedWeight(weight, dense=True)
    x = torch.randn(3, 33).bfloat16()
    report = lz.explain("quantized_linear", x, weight, packed=packed, out_dtype=out, device=XEON)
    assert ["in_features" == each.fact for each in report.reasons("torch.kept_quant")] == [True] * refused


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_of_a_loss_are_filled_up(monkeypatch, reduction, out_dtype):
    mm, seen = torch.mm, []
    monkeypatch.setattr(
        torch, "mm", lambda rows, *more, **named: seen.append(rows.shape[-1]) or mm(rows, *more, **named)
    )
    hidden, weight = (torch.randn(size, 33).bfloat16().requires_grad_() for size in (5, 50))
    target, given = torch.arange(5), {"reduction": reduction, "out_dtype": out_dtype}
    name = "torch.linear_cross_entropy_chunked" + ("_rows" if reduction == "none" else "")
    facts = lz.facts("linear_cross_entropy", hidden, weight, target, device=XEON, **given)
    options = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
    if reduction == "none":
        del given["reduction"]
    found = kernel(name).load(facts)(hidden, weight, target, **options, **given)
    found.sum().backward()
    assert not {33, 50} & set(seen)
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    wanted = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, target, reduction=reduction)
    wanted.sum().backward()
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=5e-2)
    for got, want in zip((hidden, weight), wide, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=5e-2, atol=5e-2)


WRONG_BY_TILES = [
    ((2, 16, 40), (7, 16, 4), {"stride": 4}),
    ((2, 8, 40), (8, 8, 8), {}),
    ((2, 32, 17, 3), (8, 32, 3, 3), {"stride": 2}),
    ((3, 96, 1), (48, 96, 1), {"stride": 3, "padding": 2}),
    ((1, 32, 1, 7), (8, 32, 2, 3), {"stride": (4, 1), "padding": 2, "dilation": (3, 2)}),
]


@pytest.mark.parametrize(("shape", "of_weight", "steps"), WRONG_BY_TILES)
def test_convolutions_that_tiles_get_wrong_are_in_float32(monkeypatch, shape, of_weight, steps):
    name = f"conv{len(shape) - 2}d"
    compute, seen = getattr(torch.nn.functional, name), []

    def in_float32(x, weight, *, bias, **by):  # what tiles get wrong may end the process, too
        seen.append(x.dtype)
        return compute(x.float(), weight.float(), bias.float(), **by).to(x.dtype)

    monkeypatch.setattr(torch.nn.functional, name, in_float32)
    x, weight, bias = (torch.randn(each).bfloat16() for each in (shape, of_weight, of_weight[:1]))
    for device, dtype in ((XEON, torch.float32), (OTHER, torch.bfloat16)):
        facts = lz.facts(name, x, weight, bias, **steps, device=device)
        more = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **steps}
        got = kernel("torch.conv").load(facts)(x, weight, bias=bias, **more)
        assert seen.pop() is dtype
        assert got.dtype is torch.bfloat16
    report = lz.explain(name, x, weight, bias, **steps, packed=lz.PackedWeight(weight), device=XEON)
    assert {"group_channels", "stride", "padding"} & {each.fact for each in report.reasons("torch.onednn_conv_packed")}


PADDING_ALONE = [
    ((3, 2, 1), (1, 2, 1), {"stride": 2, "padding": 1}),
    ((1, 8, 2), (16, 8, 1), {"stride": 3, "padding": 1}),
    ((2, 1, 1, 2), (64, 1, 1, 1), {"stride": (2, 3), "padding": (0, 1)}),
]


@pytest.mark.parametrize(("shape", "of_weight", "steps"), PADDING_ALONE)
def test_convolutions_in_float16_that_end_the_process_are_in_float32(shape, of_weight, steps):
    name = f"conv{len(shape) - 2}d"
    x, weight = torch.randn(shape).half(), torch.randn(of_weight).half()
    for more, wide in (({"avx512_fp16"}, True), ({"avx512_bf16", "amx_bf16"}, False)):
        device = dataclasses.replace(XEON, instruction_sets=frozenset({"avx512", *more}))
        loaded = kernel("torch.conv").load(lz.facts(name, x, weight, **steps, device=device))
        assert (loaded is not getattr(torch.nn.functional, name)) == wide
    found = getattr(lz, name)(x, weight, **steps)  # by the kernel of this very processor
    assert not found.any()
    assert found.dtype is torch.float16


@pytest.mark.parametrize(
    ("shape", "of_weight", "steps"), [*WRONG_BY_TILES, ((2, 64, 17, 9), (8, 64, 3, 3), {"stride": 2})]
)
def test_convolutions_are_right_on_this_processor(shape, of_weight, steps):
    function = f"conv{len(shape) - 2}d"
    x, weight = torch.randn(shape).bfloat16(), torch.randn(of_weight).bfloat16()
    got = getattr(lz, function)(x, weight, **steps).double()
    wanted = getattr(torch.nn.functional, function)(x.double(), weight.double(), **steps)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-1)


UNWRITTEN = [((1, 64, 2), (16, 64, 3), {"stride": 3, "padding": 2}, True), ((1, 64, 9), (16, 64, 3), {}, False)]


@pytest.mark.parametrize(("shape", "of_weight", "steps", "unwritten"), UNWRITTEN)
def test_convolutions_whose_gradients_are_left_unwritten_are_in_float32(shape, of_weight, steps, unwritten):
    x, weight = torch.randn(shape).bfloat16(), torch.randn(of_weight).bfloat16().requires_grad_()
    for given, wanted in ((weight, unwritten), (weight.detach(), False)):
        facts = lz.facts("conv1d", x, given, **steps, device=OTHER)
        assert (kernel("torch.conv").load(facts) is not torch.nn.functional.conv1d) == wanted


@pytest.mark.parametrize(("shape", "of_weight", "steps", "unwritten"), UNWRITTEN)
def test_gradients_of_convolutions_are_right_on_this_processor(shape, of_weight, steps, unwritten):
    weight = torch.randn(of_weight).bfloat16().requires_grad_()
    wide = weight.detach().double().requires_grad_()
    x = torch.randn(shape).bfloat16()
    unused = torch.full((3, *of_weight), torch.nan, dtype=torch.bfloat16)  # what nothing writes is read as this
    del unused
    lz.conv1d(x, weight, **steps).sum().backward()
    torch.nn.functional.conv1d(x.double(), wide, **steps).sum().backward()
    torch.testing.assert_close(weight.grad.double(), wide.grad, rtol=2e-2, atol=1e-1)

"""Packed weights: made once, freed with the weight, never used after it changed; and the kernels that want them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

import layerzero as lz
from drawing import at_once
from layerzero.engine.functions import CALLS
from layerzero.ops.linear.glance import LOOKS, Glances
from layerzero.ops.linear.packed import BELONGS

KERNELS = [kernel.id for kernel in lz.list_kernels("mlp.linear") if BELONGS in kernel.limits]


def made(dtype=torch.float32, rows=(5,), inputs=96, outputs=64):
    torch.manual_seed(1)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    return torch.randn(*rows, inputs).to(dtype), weight, torch.randn(outputs).to(dtype)


def close(got, x, weight, bias):
    wanted = functional.linear(x.double(), weight.double(), bias.double())
    tolerance = 1e-5 if x.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def locked(kernel, *given, **arguments):
    """Lock the kernel, or skip with its reasons where it is not legal here."""
    reasons = lz.explain("linear", *given, **arguments).reasons(kernel)
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    return lz.scope(locks={"mlp.linear": kernel})


def locked_call(kernel, *given, **arguments):
    with locked(kernel, *given, **arguments):
        return lz.linear(*given, **arguments)


def test_nothing_is_packed_until_a_kernel_wants_it():
    _, weight, _ = made()
    packed = lz.PackedWeight(weight)
    assert packed.bytes == 0
    assert packed.weight is weight
    assert repr(packed) == "PackedWeight((64, 96), 0 packed, 0 bytes)"


@at_once("dtype", [torch.float32, torch.bfloat16])
@at_once("kernel", KERNELS)
def test_a_kernel_packs_once_and_is_right(path, kernel, dtype):
    x, weight, bias = made(dtype)
    packed, before = lz.PackedWeight(weight), weight.clone()
    with locked(kernel, x, weight, bias, packed=packed):
        close(lz.linear(x, weight, bias, packed=packed), x, weight, bias)
        taken = packed.bytes
        assert taken >= weight.nbytes
        for rows in (1, 2, 3, 64):
            other = made(dtype, (rows,))[0]
            close(lz.linear(other, weight, bias, packed=packed), other, weight, bias)
        assert packed.bytes == taken
        assert f"1 packed, {taken} bytes" in repr(packed)
    assert torch.equal(weight, before)


@at_once("kernel", KERNELS)
@at_once("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_a_kernel_lets_nan_and_infinity_through(kernel, activation):
    x, weight, bias = made(torch.bfloat16)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    arguments = {"activation": activation, "packed": lz.PackedWeight(weight)}
    got = locked_call(kernel, x, weight, bias, **arguments)
    plain = functional.linear(x.double(), weight.double(), bias.double())
    assert got[1].isnan().all()
    if activation != "gelu":  # kernels differ in what an infinity gives
        assert torch.equal(got[2] == torch.inf, plain[2] == torch.inf)
    assert got[[0, 3, 4]].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_weight_that_was_written_into_is_packed_again(path, kernel):
    x, weight, bias = made(torch.bfloat16)
    packed = lz.PackedWeight(weight)
    locked_call(kernel, x, weight, bias, packed=packed)
    weight.mul_(2)
    assert packed.is_stale
    assert packed.kind_for(weight) == "stale"
    with pytest.raises(lz.InvalidCallError, match=r"got one made before it was written into; call refresh\(\)"):
        lz.linear(x, weight, bias, packed=packed)
    packed.refresh()
    assert packed.bytes == 0
    close(locked_call(kernel, x, weight, bias, packed=packed), x, weight, bias)


@at_once("kernel", KERNELS)
@at_once("way", ["data", "numpy", "inference"])
def test_writes_that_torch_does_not_count_are_seen_in_memory(path, kernel, way):
    x, weight, bias = made(torch.float32)
    if way == "inference":
        with torch.inference_mode():
            weight = weight.clone()
    packed = lz.PackedWeight(weight)
    locked_call(kernel, x, weight, bias, packed=packed)
    if way == "numpy":
        pytest.importorskip("numpy")
        weight.numpy()[:] *= 2
    elif way == "data":
        weight.data += 0.5
    else:
        with torch.inference_mode():
            weight.mul_(2)
    assert packed.is_stale
    packed.refresh()
    close(locked_call(kernel, x, weight, bias, packed=packed), x, weight, bias)


def test_memory_that_is_not_the_weights_alone_is_not_looked_into():
    weight = torch.randn(16, 32)[:, ::2]
    packed = lz.PackedWeight(weight)
    weight.data.mul_(2)
    assert packed.kind_for(weight) == "packed"


def test_memory_of_less_than_a_word_is_looked_into():
    """The second scale of nvfp4 has 4 bytes: it was never looked at."""
    weight = lz.quantize_weight(torch.randn(64, 64), "nvfp4")
    packed, scale = weight.packed, weight.fields[-1]
    assert scale.nbytes == 4
    scale.data.mul_(2)
    assert packed.is_stale


@pytest.mark.parametrize("numbers", [1, 1025])
def test_weights_of_a_model_need_not_be_whole_words_or_parts(numbers):
    weight = torch.randn(numbers)
    glances = Glances([weight])
    assert not glances.differ
    weight.data[-1] *= 2
    assert any(glances.differ for _ in range(LOOKS))


def test_another_memory_under_the_same_weight_is_seen():
    _, weight, _ = made()
    packed = lz.PackedWeight(weight)
    weight.data = weight.data.clone()
    assert packed.kind_for(weight) == "stale"
    packed.refresh()
    layer = nn.Linear(96, 64)
    packed = lz.PackedWeight(layer.weight)
    layer.load_state_dict(layer.state_dict())
    assert packed.kind_for(layer.weight) == "stale"
    packed.refresh()
    layer.to(torch.bfloat16)
    assert packed.kind_for(layer.weight) == "stale"


def test_a_packed_weight_of_another_tensor_is_refused(path):
    x, weight, bias = made()
    packed = lz.PackedWeight(weight)
    for other in (weight.clone(), weight.view(64, 96), weight.detach()):
        assert packed.kind_for(other) == "foreign"
        with pytest.raises(lz.InvalidCallError, match="got that of another; make one of this"):
            lz.linear(x, other, bias, packed=packed)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_was_packed_goes_with_the_weight(kernel):
    x, weight, bias = made(torch.bfloat16)
    packed, gone = lz.PackedWeight(weight), weakref.ref(weight)
    locked_call(kernel, x, weight, bias, packed=packed)
    assert packed.bytes > 0
    del weight
    gc.collect()
    assert gone() is None
    assert packed.bytes == 0
    assert packed.kind_for(x) == "foreign"
    assert "gone" in repr(packed)
    with pytest.raises(lz.InvalidCallError, match="got one that is gone"):
        packed.weight  # noqa: B018


@pytest.mark.parametrize("wrong", [torch.randn(3), torch.ones(3, 3).int(), [[1.0]], torch.randn(3, 3).to_sparse()])
def test_only_a_dense_matrix_of_floats_or_int8_is_packed(wrong):
    with pytest.raises(lz.InvalidCallError, match="PackedWeight: weight: wanted a dense floating or int8 tensor"):
        lz.PackedWeight(wrong)


def test_a_model_that_holds_one_is_copied_and_pickled_with_its_weight():
    layer = nn.Linear(96, 64)
    layer.packed = lz.PackedWeight(layer.weight)
    twin = copy.deepcopy(layer)
    assert twin.packed.weight is twin.weight
    assert twin.packed is not layer.packed
    again = pickle.loads(pickle.dumps(layer))
    assert again.packed.weight is again.weight
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert read.packed.kind_for(read.weight) == "packed"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_weight_packed_in_inference_mode_serves_outside_of_it(kernel):
    x, weight, bias = made(torch.bfloat16)
    packed = lz.PackedWeight(weight)
    with torch.inference_mode():
        locked_call(kernel, x, weight, bias, packed=packed)
    close(locked_call(kernel, x, weight, bias, packed=packed), x, weight, bias)
    with torch.inference_mode():
        mine = made(torch.bfloat16)
        close(locked_call(kernel, *mine, packed=lz.PackedWeight(mine[1])), *mine)


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_pack_one_form_between_them(kernel):
    x, weight, bias = made(torch.bfloat16)
    packed = lz.PackedWeight(weight)
    reasons = lz.explain("linear", x, weight, bias, packed=packed).reasons(kernel)
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))

    def work(_):
        return locked_call(kernel, x, weight, bias, packed=packed)

    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(work, range(16)):
            close(got, x, weight, bias)
    assert "1 packed" in repr(packed)


def test_without_a_packed_weight_the_kernels_say_what_to_pass():
    x, weight, bias = made()
    for kernel in KERNELS:
        reasons = lz.explain("linear", x, weight, bias).reasons(kernel)
        assert any("Pass packed=layerzero.PackedWeight(weight)" in str(reason) for reason in reasons)


def test_a_kernel_that_has_no_use_for_it_leaves_it_be(path):
    x, weight, bias = made(torch.float64)
    packed = lz.PackedWeight(weight)
    close(lz.linear(x, weight, bias, packed=packed), x, weight, bias)
    assert packed.bytes == 0


@pytest.mark.filterwarnings("ignore:lz.linear. packed= has no effect in compiled code")
def test_in_compiled_code_it_changes_nothing():
    x, weight, bias = made()
    packed = lz.PackedWeight(weight)
    compiled = torch.compile(lambda a: lz.linear(a, weight, bias, packed=packed), fullgraph=True, backend="aot_eager")
    close(compiled(x), x, weight, bias)
    assert packed.bytes == 0


def test_it_belongs_to_the_key_of_a_call(path):
    """A plan of a packed kernel is not found by a call that brings none."""
    x, weight, bias = made()
    packed = lz.PackedWeight(weight)
    for _ in range(3):
        close(lz.linear(x, weight, bias, packed=packed), x, weight, bias)
        close(lz.linear(x, weight, bias), x, weight, bias)
    assert CALLS["linear"].key_of(x, weight, bias, None, None, packed)[-4:] != CALLS["linear"].key_of(
        x, weight, bias, None, None, None
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_of_an_axis_with_one_element_mean_nothing(kernel):
    x, weight, bias = made(rows=(3,), inputs=1)
    weight = weight.as_strided((64, 1), (1, 7))
    packed = lz.PackedWeight(weight)
    close(locked_call(kernel, x, weight, bias, packed=packed), x, weight, bias)


def test_a_weight_that_is_gone_is_not_looked_into():
    weight = torch.randn(2048, 2048)  # of memory that goes back to the system at once
    packed = lz.PackedWeight(weight)
    del weight
    packed.refresh()
    assert not packed.is_stale
    assert packed.is_gone


def test_a_weight_that_is_gone_takes_its_memory_along():
    """What is compared in its memory kept that, as long as the packed weight lived."""
    weight = torch.randn(64, 64)
    packed, memory = lz.PackedWeight(weight), weight.untyped_storage()._weak_ref()
    del weight
    assert packed.is_gone
    assert torch.UntypedStorage._expired(memory)
    torch.UntypedStorage._free_weak_ref(memory)


def test_a_weight_whose_memory_is_exchanged_meanwhile_is_looked_into_safely():
    weight = torch.randn(1024, 1024)
    packed = lz.PackedWeight(weight)

    def exchange():
        for _ in range(200):
            weight.data = torch.zeros(1024, 1024)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(exchange)
        while not done.done():
            packed.refresh()
            assert packed.is_stale in (True, False)
        done.result()
    packed.refresh()
    assert not packed.is_stale
    weight.data.fill_(3.0)
    assert packed.is_stale
    weight.untyped_storage().resize_(0)  # as sharding does between two uses
    packed.is_stale  # noqa: B018  # it lies nowhere


class OnGpu(torch.Tensor):
    """A tensor that says it lies elsewhere."""

    is_cuda = True


def test_a_form_is_whole_before_another_stream_reads_it(monkeypatch):
    order = []
    stream = types.SimpleNamespace(synchronize=lambda: order.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = torch.randn(4, 8).as_subclass(OnGpu)
    packed = lz.PackedWeight(weight)

    def pack(dense):
        order.append("packed")
        return dense.clone(), dense.nbytes

    assert packed.form("one", pack) is packed.form("one", pack)
    assert order == ["packed", "waited"]
    packed.refresh()
    packed.form("one", pack)
    assert order == ["packed", "waited"] * 2

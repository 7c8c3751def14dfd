"""Libraries that quantize on GPUs which are not here: what they are given, and which are vetted before they run."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.backends.torch import quantized_linear
from layerzero.backends.torch.elementwise import e2m1_by_bits
from layerzero.backends.vllm import grouped_linear
from layerzero.backends.vllm import library as library_of_vllm
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.ops import OPERATIONS
from layerzero.ops.calls import function_for, routed
from layerzero.ops.quantize.formats import e2m1_codes

LIBRARIES = {"torch": "2.11.0", "vllm": "0.20.0"}
LINEAR = ("mlp.linear.quant.int8", "mlp.linear.quant.fp8_e4m3")
OF = {
    "vllm.quantize_rows": "quantize.int8",
    "vllm.quantize_by_one": "quantize.int8",
    "vllm.int8_linear": LINEAR[0],
    "torch.cuda.int_mm": LINEAR[0],
    "torch.cuda.scaled_mm": LINEAR[1],
}
PRODUCTS = [kernel for kernel, name in OF.items() if name in LINEAR]


def call(kernel, dtype=torch.bfloat16):
    """A call that the kernel takes, on the CPU."""
    x = torch.randn(2, 32, 64).to(dtype)
    if OF[kernel] == "quantize.int8":
        given = {"per": "row"} if kernel.endswith("rows") else {"scale": torch.tensor(0.02)}
        return {"input": x, "dtype": "int8", **given}
    name = OF[kernel].rpartition(".")[2]
    weight, scale = lz.quantize(torch.randn(48, 64) / 8, name, per="row")
    return {"input": x, "weight": weight, "weight_scale": scale, "bias": torch.randn(48).to(dtype), "activations": name}


def facts_of(kernel, arguments):
    operation = OPERATIONS[OF[kernel]]
    found = routed(function_for(operation), arguments)
    return found, FactsBuilder(operation).of_valid(found.arguments, device=Device.named("H200"))


@pytest.mark.parametrize("kernel", OF)
def test_what_was_right_on_an_h200_waits_for_no_verdict(kernel):
    function = function_for(OF[kernel]).name
    arguments = {name: each.to("meta") if hasattr(each, "to") else each for name, each in call(kernel).items()}
    found = lz.explain(function, **arguments, device="H200", libraries=LIBRARIES)
    assert not found.reasons(kernel)


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
        assert weight_scale.is_contiguous()
        assert weight_scale.data_ptr() % 16 == 0
        assert weight_scale.shape in ((1,), (weight.shape[1],))
        output.copy_((codes.float() @ weight.float()) * scale * weight_scale + bias)


@pytest.fixture
def library(monkeypatch):
    stand = {"dynamic_scaled_int8_quant": Operators.rows, "static_scaled_int8_quant": Operators.given}
    names = {name: types.SimpleNamespace(default=function) for name, function in stand.items()}
    product = {"cutlass_scaled_mm": types.SimpleNamespace(default=Operators.product)}
    libraries = {"_C.abi3.so": names, "_C_stable_libtorch.abi3.so": product}
    monkeypatch.setattr(grouped_linear, "operators", lambda name, *_: types.SimpleNamespace(**libraries[name]))


@pytest.mark.parametrize("kernel", [each for each in OF if each.startswith("vllm")])
def test_vllm_gets_rows_and_gives_what_the_reference_does(library, monkeypatch, kernel):
    arguments = call(kernel)
    arguments["input"][0, 3] = 0.0
    found, facts = facts_of(kernel, arguments)
    declared = next(each for each in grouped_linear.KERNELS if each.id == kernel)
    operation, looked_at = found.operation, []
    monkeypatch.setattr(grouped_linear, "_for_sixteen", lambda rows: looked_at.append(rows) or rows)
    given = {name: found.arguments[name] for name in declared.accepts if found.arguments.get(name) is not None}
    got = declared.load(facts)(*[found.arguments[each.name] for each in operation.schema.required], **given)
    wanted = operation.reference(*[found.arguments[each.name] for each in operation.schema.required], **given)
    assert len(looked_at) == 1, "rows may begin where a GPU's operator stores off a boundary"
    if isinstance(got, tuple):
        assert torch.equal(got[0], wanted[0])
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=0.0)
        assert (got[1] > 0).all()
    else:
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


class OnGpu(torch.Tensor):
    """A tensor that says it lies elsewhere."""

    is_cpu = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_begin_where_a_gpu_may_store_sixteen_codes_at_once(dtype):
    """What starts at 16 bytes is taken; the operator's stores are off by half a vector then."""
    numbers = torch.randn(4 * 64 + 32).to(dtype)
    step = 16 // dtype.itemsize
    for start in range(0, 32, step):
        rows = numbers[start : start + 4 * 64].view(4, 64)
        found = grouped_linear._for_sixteen(rows.as_subclass(OnGpu))
        assert (found.data_ptr() == rows.data_ptr()) is (start % 16 == 0)
        assert found.data_ptr() % (16 * dtype.itemsize) == 0
        assert torch.equal(found.as_subclass(torch.Tensor), rows)
        assert grouped_linear._for_sixteen(rows) is rows


def test_codes_of_one_row_are_dense_where_the_row_steps_over_more(library, monkeypatch):
    """The stride of a single row may be any; before Hopper a product reads it (scaled_mm_c2x.cuh of vllm 0.20.0)."""
    seen = []

    def product(output, codes, *given):
        seen.append(codes.stride())
        Operators.product(output, codes, *given)

    monkeypatch.setattr(grouped_linear.operators("_C_stable_libtorch.abi3.so").cutlass_scaled_mm, "default", product)
    arguments = call("vllm.int8_linear") | {"input": torch.randn(1, 72).to(torch.bfloat16)[:, :64]}
    found, facts = facts_of("vllm.int8_linear", arguments)
    declared = next(each for each in grouped_linear.KERNELS if each.id == "vllm.int8_linear")
    tensors = [found.arguments[each.name] for each in found.operation.schema.required]
    assert tensors[0].stride() == (72, 1)
    declared.load(facts)(*tensors, bias=found.arguments["bias"])
    assert seen == [(64, 1)]


def odd(tensor):
    """The same numbers from an odd place on."""
    return torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)


@pytest.fixture
def products(monkeypatch):
    """Stand for torch's products on CUDA, which take rows by columns and dense scales from a boundary on."""

    def of_rows_and_columns(codes, weight):
        assert codes.is_contiguous()
        assert weight.stride(0) == 1
        assert codes.dtype is weight.dtype
        return codes.float() @ weight.float()

    def scaled(codes, weight, scale, of_weight, bias, *, out_dtype):
        assert codes.dtype is torch.float8_e4m3fn
        assert (scale.shape, of_weight.shape) == ((len(codes), 1), (1, 48))
        assert scale.is_contiguous()
        assert of_weight.is_contiguous()
        assert of_weight.data_ptr() % 16 == 0
        return (of_rows_and_columns(codes, weight) * scale * of_weight + bias).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(torch, "_int_mm", lambda codes, weight: of_rows_and_columns(codes, weight).int())


FORMS = {
    "as it is": {},
    "columns": {"input": lambda x: x.flatten(0, 1).t().contiguous().t()},
    "a scale off the boundary": {"weight_scale": lambda scale: odd(scale.reshape(-1))},
    "scales with steps": {"weight_scale": lambda scale: scale.repeat(1, 2)[:, :1]},
    "one scale": {"weight_scale": lambda scale: scale.mean()},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products_get_rows_columns_and_scales_on_a_boundary(library, products, kernel, form):
    arguments = call(kernel)
    for name, change in FORMS[form].items():
        arguments[name] = change(arguments[name])
    if kernel.startswith("vllm"):  # its limits have the input copied
        arguments["input"] = arguments["input"].contiguous()
    found, facts = facts_of(kernel, arguments)
    declared = next(each for each in (*quantized_linear.KERNELS, *grouped_linear.KERNELS) if each.id == kernel)
    tensors = [found.arguments[each.name] for each in found.operation.schema.required]
    given = {name: found.arguments.get(name) for name in declared.accepts}
    got = declared.load(facts)(*tensors, **given)
    wanted = found.operation.reference(*tensors, bias=found.arguments["bias"])
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", PRODUCTS)
@pytest.mark.parametrize("changed", ["weight", "bias with steps", "bias off the boundary"])
def test_a_weight_off_the_boundary_is_refused_and_a_bias_copied(kernel, changed):
    arguments = call(kernel)
    weight, bias = arguments["weight"], arguments["bias"]
    arguments |= {
        "weight": {"weight": odd(weight.view(torch.uint8)).view(weight.dtype)},
        "bias with steps": {"bias": bias.repeat(2).view(48, 2)[:, 0]},
        "bias off the boundary": {"bias": odd(bias)},
    }[changed]
    with lz.scope(require_vetting=False):
        found = lz.explain("quantized_linear", **arguments, device="H200", libraries=LIBRARIES)
    (judged,) = [each for each in found.candidates if each.kernel.id == kernel]
    refused = [reason.message for reason in judged.reasons]
    if changed == "weight":
        assert refused == ["every row of weight must start at a multiple of 16 bytes, they start at 1 bytes"]
    else:
        copied = [] if kernel == "torch.cuda.int_mm" else ["copy bias into contiguous memory"]
        assert (refused, [each.text for each in judged.adaptations]) == ([], copied)


def test_narrow_rows_of_a_weight_need_no_more_than_they_are_read_by():
    weight, scale = lz.quantize(torch.randn(48, 8), "int8", per="row")
    for start, wanted in (
        (8, []),
        (4, ["every row of weight must start at a multiple of 8 bytes, they start at 4 bytes"]),
    ):
        moved = torch.cat((weight.new_zeros(start), weight.flatten()))[start:].view(48, 8)
        with lz.scope(require_vetting=False):
            found = lz.explain(
                *("quantized_linear", torch.randn(64, 8), moved, scale),
                activations="int8",
                device="H200",
                libraries=LIBRARIES,
            )
        assert [reason.message for reason in found.reasons("torch.cuda.int_mm")] == wanted


def test_products_come_from_the_second_library_whatever_owns_the_name_space(monkeypatch, tmp_path):
    loaded = []
    (tmp_path / "_C_stable_libtorch.abi3.so").touch()
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(library_of_vllm.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: loaded.append(path.rpartition("/")[2]))
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel", lambda name: name == "_C::rms_norm")
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: bool(loaded))
    product = types.SimpleNamespace(default=Operators.product)
    monkeypatch.setattr(torch.ops._C, "cutlass_scaled_mm", product, raising=False)
    monkeypatch.setattr(grouped_linear, "_operator", lambda *_: None)
    monkeypatch.setattr(grouped_linear, "operators", library_of_vllm.operators.__wrapped__)  # without its memory
    _, facts = facts_of("vllm.int8_linear", call("vllm.int8_linear"))
    grouped_linear._load_linear(facts)
    assert loaded == ["_C_stable_libtorch.abi3.so"]

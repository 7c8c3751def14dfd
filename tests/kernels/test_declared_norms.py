"""The CUDA norm kernels on devices that are not here: which calls each is offered, and the codes that refuse the rest.

What they compute is tested where there is a GPU, by test_kernels.py and the conformance suite.
"""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends import liger, quack
from layerzero.backends.flashinfer import rows as flashinfer_norm
from layerzero.backends.norm_limits import RowsAligned
from layerzero.backends.vllm import library as vllm_library
from layerzero.backends.vllm import rows as vllm_norm
from layerzero.core.device import Device
from layerzero.core.fact_reads import EVERYTHING, reads_of
from layerzero.core.facts import FactsBuilder
from layerzero.core.reasons import ReasonCode
from layerzero.engine.legality import limit_findings
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS

LIBRARIES = {
    "torch": "2.11.0",
    "flashinfer-python": "0.7.2.post1",
    "vllm": "0.20.0",
    "quack-kernels": "0.6.5",
    "nvidia-cutlass-dsl": "4.8.1",
    "liger-kernel": "0.8.5",
    "apex": "0.1",
}
RMS = ("flashinfer.rms_norm", "vllm.rms_norm", "quack.rms_norm", "liger.rms_norm", "apex.rms_norm")
ADD = ("flashinfer.add_rms_norm", "vllm.add_rms_norm", "quack.add_rms_norm", "liger.add_rms_norm")
LAYER = ("quack.layer_norm", "liger.layer_norm", "apex.layer_norm")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WRONG, DTYPE, STRIDE = ReasonCode.CONSTRAINT_FAILED, ReasonCode.DTYPE_UNSUPPORTED, ReasonCode.NOT_CONTIGUOUS


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call(kernel, rows=64, hidden=4096, dtype=BF16, affine=True):
    """The arguments of a plain call to the kernel's operation."""
    (operation,) = REGISTRY.kernel(kernel).operations
    input_, vector = meta(rows, hidden, dtype=dtype), meta(hidden, dtype=dtype)
    if operation == "norm.layer":
        return {"input": input_, "normalized_shape": (hidden,)} | ({"weight": vector, "bias": vector} if affine else {})
    residual = {"residual": torch.empty_like(input_)} if operation == "norm.add_rms" else {}
    return {"input": input_, **residual, "weight": vector}


def explained(kernel, arguments, device="H200", libraries=LIBRARIES):
    (operation,) = REGISTRY.kernel(kernel).operations
    function = {"norm.add_rms": "add_residual_rms_norm_"}.get(operation, operation.removeprefix("norm.") + "_norm")
    with lz.scope(require_vetting=False, allow_jit_compile=True):
        return lz.explain(function, **arguments, device=device, libraries=libraries)


def codes(kernel, arguments, device="H200", libraries=LIBRARIES):
    return {reason.code for reason in explained(kernel, arguments, device, libraries).reasons(kernel)}


def found(kernel, arguments, device="H200"):
    """What the limits say, repairs and all."""
    declared = REGISTRY.kernel(kernel)
    operation = OPERATIONS[declared.operations[0]]
    facts = FactsBuilder(operation).of_valid(
        {**operation.schema.neutral, **arguments}, device=Device.named(device), layout=None
    )
    return {
        (finding.reason.code, finding.repair and finding.repair.argument) for finding in limit_findings(declared, facts)
    }


@at_once("kernel", [*RMS, *ADD, *LAYER])
def test_a_plain_call_on_hopper_is_legal(kernel):
    dtype = F32 if kernel == "apex.layer_norm" else BF16
    assert codes(kernel, call(kernel, dtype=dtype)) == set()


@at_once("kernel, dtypes", [
    ("flashinfer.rms_norm", {F16, BF16}), ("flashinfer.add_rms_norm", {F16, BF16}),
    ("vllm.rms_norm", {F32, F16, BF16}), ("vllm.add_rms_norm", {F32, BF16}),
    ("quack.rms_norm", {F32, F16, BF16}), ("quack.add_rms_norm", {F32, F16, BF16}),
    ("liger.rms_norm", {F32, F16, BF16}), ("liger.add_rms_norm", {F32, F16, BF16}),
    ("quack.layer_norm", {F32, F16, BF16}), ("liger.layer_norm", {F32, F16, BF16}),
    ("apex.rms_norm", {F32, F16, BF16}), ("apex.layer_norm", {F32}),
])  # fmt: skip
def test_dtypes(kernel, dtypes):
    for dtype in (F64, F32, F16, BF16):
        assert codes(kernel, call(kernel, dtype=dtype)) == (set() if dtype in dtypes else {DTYPE}), dtype


@at_once("kernel, hidden, expected", [
    ("flashinfer.rms_norm", 1, {WRONG}), ("flashinfer.rms_norm", 2, set()), ("flashinfer.rms_norm", 1031, set()),
    ("vllm.rms_norm", 1, {WRONG}), ("vllm.rms_norm", 100, set()), ("vllm.add_rms_norm", 1, {WRONG}),
    ("quack.rms_norm", 8, set()), ("quack.rms_norm", 100, {WRONG}), ("quack.rms_norm", 65536, set()),
    ("quack.rms_norm", 65544, {WRONG}), ("quack.add_rms_norm", 16384, set()), ("quack.add_rms_norm", 16392, {WRONG}),
    ("liger.rms_norm", 1, set()), ("liger.rms_norm", 65536, set()), ("liger.rms_norm", 65537, {WRONG}),
    ("liger.add_rms_norm", 511, {WRONG}), ("liger.add_rms_norm", 512, set()), ("liger.layer_norm", 65537, {WRONG}),
    ("apex.rms_norm", 1, set()),
])  # fmt: skip
def test_row_lengths(kernel, hidden, expected):
    assert codes(kernel, call(kernel, hidden=hidden)) == expected


@pytest.mark.parametrize(("kernel", "power"), [
    ("flashinfer.rms_norm", 32), ("flashinfer.add_rms_norm", 32), ("vllm.rms_norm", 32), ("vllm.add_rms_norm", 32),
    ("apex.rms_norm", 31), ("quack.rms_norm", None), ("liger.rms_norm", None), ("liger.add_rms_norm", None),
])  # fmt: skip
def test_tensors_beyond_an_offset_of_32_bits(kernel, power):
    rows = 2 ** ((power or 34) - 13)
    assert codes(kernel, call(kernel, rows=rows, hidden=8192)) == ({WRONG} if power else set())
    assert codes(kernel, call(kernel, rows=rows - 1, hidden=8192)) == set()


@pytest.mark.parametrize(("vocab", "dtype", "device"), [
    (16384, BF16, "H200"), (16392, BF16, "H200"), (65536, F16, "H200"), (65544, F16, "H200"), (100352, BF16, "H200"),
    (128256, BF16, "H200"), (151936, BF16, "H200"), (151936, F32, "H200"), (201088, BF16, "B200"),
    (262144, BF16, "H200"), (262152, F32, "H200"), (102400, BF16, "H200"), (151936, BF16, "RTX5090"),
])  # fmt: skip
def test_rows_whose_cut_leaves_a_warp_without_a_class(vocab, dtype, device):
    """What quack cuts a row into, warp by warp."""
    logits = torch.empty(2, vocab, dtype=dtype, device="meta")
    target = torch.empty(2, dtype=torch.int64, device="meta")
    with lz.scope(require_vetting=False, allow_jit_compile=True):
        report = lz.explain("cross_entropy", logits, target, device=device, libraries=LIBRARIES)
    small = device == "RTX5090"
    bounds = (2**14, 2**15, 2**16, 2**17) if small or dtype is not F32 else (2**14, 2**16, 2**17, 2**18)
    blocks = next((2**number for number, most in enumerate(bounds) if vocab <= most), 8 if small else 16)
    vector, threads = 16 // dtype.itemsize, 256 if vocab > 2**14 else 128
    vectors = -(-vocab // (vector * threads * blocks))
    firsts = (block * vectors * threads * vector + warp * 32 * vector
              for block in range(blocks) for warp in range(threads // 32))  # fmt: skip
    idle = any(first >= vocab for first in firsts)
    assert {reason.code for reason in report.reasons("quack.cross_entropy")} == ({WRONG} if idle else set())


@at_once("kernel, device, expected", [
    ("flashinfer.rms_norm", "A100", set()), ("flashinfer.rms_norm", "T4", {ReasonCode.SM_TOO_OLD}),
    ("vllm.rms_norm", "A100", set()), ("vllm.add_rms_norm", "T4", {ReasonCode.SM_TOO_OLD}),
    ("quack.rms_norm", "A100", {ReasonCode.SM_TOO_OLD}), ("quack.layer_norm", "B200", set()),
    ("liger.rms_norm", "T4", {ReasonCode.SM_TOO_OLD}), ("liger.rms_norm", "MI300X", set()),
    ("liger.add_rms_norm", "MI300X", set()),
    ("flashinfer.rms_norm", "MI300X", {ReasonCode.PLATFORM_MISMATCH}),
    ("vllm.rms_norm", "CPU", {ReasonCode.PLATFORM_MISMATCH}),
    ("liger.layer_norm", "CPU", {ReasonCode.PLATFORM_MISMATCH}),
    ("quack.add_rms_norm", "MI300X", {ReasonCode.PLATFORM_MISMATCH}),
    ("apex.rms_norm", "MI300X", {ReasonCode.PLATFORM_MISMATCH}),
])  # fmt: skip
def test_devices(kernel, device, expected):
    assert codes(kernel, call(kernel), device) == expected


@pytest.mark.parametrize(("kernel", "changed"), [
    ("flashinfer.rms_norm", {"flashinfer-python": "0.7.5"}), ("flashinfer.rms_norm", {"flashinfer-python": "0.7.1"}),
    ("vllm.rms_norm", {"vllm": "0.21.0"}), ("vllm.rms_norm", {"torch": "2.12.0"}),
    ("quack.rms_norm", {"quack-kernels": "0.6.6"}), ("quack.rms_norm", {"nvidia-cutlass-dsl": "4.6.0"}),
    ("liger.rms_norm", {"liger-kernel": "0.8.6"}), ("apex.rms_norm", {"apex": "0.9.10.dev0"}),
])  # fmt: skip
def test_other_versions_are_refused(kernel, changed):
    assert codes(kernel, call(kernel), libraries=LIBRARIES | changed) == {ReasonCode.VERSION_UNSUPPORTED}


@at_once("kernel", [*RMS, *ADD, *LAYER])
def test_absent_libraries_say_how_to_install_them(kernel):
    (reason,) = explained(kernel, call(kernel, dtype=F32 if kernel.startswith("apex") else BF16), libraries={}).reasons(
        kernel
    )
    assert reason.code == ReasonCode.NOT_INSTALLED
    assert "nstall" in reason.hint


def test_pypis_apex_is_told_apart():
    (reason,) = explained("apex.rms_norm", call("apex.rms_norm"), libraries={"apex": "0.9.10.dev0"}).reasons(
        "apex.rms_norm"
    )
    assert "PyPI's apex is another project" in str(reason)


@pytest.mark.parametrize("kernel", LAYER)
def test_layer_norm_without_weight_and_bias(kernel):
    dtype = F32 if kernel == "apex.layer_norm" else BF16
    expected = set() if kernel == "quack.layer_norm" else {WRONG}
    assert codes(kernel, call(kernel, dtype=dtype, affine=False)) == expected


@at_once("kernel", [*RMS, *ADD, *LAYER])
def test_gradients_are_refused(kernel):
    arguments = call(kernel, dtype=F32 if kernel == "apex.layer_norm" else BF16)
    arguments["weight"].requires_grad_()
    assert codes(kernel, arguments) == {ReasonCode.GRAD_UNSUPPORTED}


@pytest.mark.parametrize(("kernel", "expected"), [
    ("flashinfer.rms_norm", {(STRIDE, "input")}), ("vllm.rms_norm", set()), ("quack.rms_norm", {(STRIDE, "input")}),
    ("liger.rms_norm", {(STRIDE, "input")}), ("apex.rms_norm", {(STRIDE, "input")}),
])  # fmt: skip
def test_slices_of_wider_rows(kernel, expected):
    wider = meta(64, 3 * 128)
    assert found(kernel, {"input": wider[:, 128:256], "weight": meta(128)}) == expected


@at_once("kernel", RMS[:3])
@at_once("hidden, offset, aligned", [
    (128, 0, True), (128, 8, True), (128, 4, False), (128, 1, False), (100, 4, True), (100, 2, False), (7, 1, True),
])  # fmt: skip
def test_rows_start_where_vector_loads_may(kernel, hidden, offset, aligned):
    memory = torch.empty(hidden * 4 + 64, dtype=BF16)
    start = -memory.data_ptr() // 2 % 8 + offset
    input_ = memory[start : start + 4 * hidden].view(4, hidden)
    misaligned = (ReasonCode.MISALIGNED, "input") in found(kernel, {"input": input_, "weight": meta(hidden)})
    assert misaligned is not aligned


@at_once("shape, offset, aligned", [
    ((2, 100), 0, True), ((2, 100), 1, False), ((2, 100), 4, False), ((2, 2, 2), 0, True),
])  # fmt: skip
def test_rows_over_several_axes_start_where_the_whole_row_does(shape, offset, aligned):
    """A copy would begin where they do: its plan would not satisfy the limit that it was made for."""
    hidden = math.prod(shape)
    memory = torch.empty(hidden * 4 + 64, dtype=BF16)
    start = -memory.data_ptr() // 2 % 8 + offset
    input_ = memory[start : start + 4 * hidden].view(4, *shape)
    arguments = {"input": input_, "normalized_shape": shape, "weight": meta(*shape), "bias": meta(*shape)}
    assert found("quack.layer_norm", arguments) == (set() if aligned else {(ReasonCode.MISALIGNED, "input")})
    facts = FactsBuilder(OPERATIONS["norm.layer"]).of_valid({**arguments, "eps": 1e-5}, device=Device.named("H200"))
    assert EVERYTHING not in reads_of(RowsAligned(("input",)).check, facts), "calls of other sizes share a plan"


@pytest.mark.parametrize("kernel", ADD)
def test_a_strided_residual_is_never_copied(kernel):
    rows = meta(64, 2 * 4096)[:, ::2]
    arguments = {"input": meta(64, 4096), "residual": rows, "weight": meta(4096)}
    refused = {reason.code for reason in explained(kernel, arguments).reasons(kernel)}
    assert refused & {STRIDE, ReasonCode.STRIDE_LAST_DIM}


@pytest.mark.parametrize("kernel", ["flashinfer.rms_norm", "quack.rms_norm", "liger.rms_norm"])
def test_what_compiles_waits_for_warmup(kernel):
    with lz.scope(unmeasured="priority"):
        report = lz.explain("rms_norm", meta(64, 4096), meta(4096), device="H200", libraries=LIBRARIES)
    assert {reason.code for reason in report.reasons(kernel)} == {ReasonCode.JIT_DISABLED}
    assert report.kernel_id == "vllm.rms_norm"


def test_without_evidence_priorities_follow_the_measured_order():
    ranked = sorted(RMS, key=lambda name: -REGISTRY.kernel(name).priority)
    assert ranked == list(RMS)
    assert REGISTRY.kernel("apex.rms_norm").priority > REGISTRY.kernel("torch.rms_norm").priority


def facts_of(call_, operation):
    return FactsBuilder(operation).of_valid(
        {**operation.schema.neutral, **call_}, device=Device.named("H200"), layout=None
    )


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 5, 64), (2, 3, 5, 64), (2, 1, 3, 5, 64)], ids=len)
def test_the_callables_give_what_the_library_is_asked_for(monkeypatch, shape):
    """The binding alone, with torch in the library's place: argument order, views, the residual in place."""

    def operator(output, input, weight, eps, overlap=True):
        assert (input.ndim == 2) if overlap is True else input.ndim <= 4
        output.copy_(torch.nn.functional.rms_norm(input, weight.shape, weight, eps))

    library = types.SimpleNamespace(rmsnorm=operator)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.norm", types.SimpleNamespace(get_norm_module=lambda: library))
    rms_norm = types.SimpleNamespace(default=lambda *arguments: operator(*arguments, None))
    monkeypatch.setattr(vllm_norm, "operators", lambda *_: types.SimpleNamespace(rms_norm=rms_norm))
    input_, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(64)
    plain, added = OPERATIONS["norm.rms"], OPERATIONS["norm.add_rms"]
    for name, module in (("flashinfer", flashinfer_norm), ("vllm", vllm_norm)):
        facts = facts_of({"input": input_, "weight": weight}, plain)
        result = module._load_rms_norm(facts)(input_, weight, eps=1e-6)
        torch.testing.assert_close(result, plain.reference(input_, weight))
        mine, theirs, before = residual.clone(), residual.clone(), input_.clone()
        facts = facts_of({"input": input_, "residual": mine, "weight": weight}, added)
        result = REGISTRY.kernel(f"{name}.add_rms_norm").load(facts)(input_, mine, weight, eps=1e-6)
        torch.testing.assert_close(result, added.reference(input_, theirs, weight))
        assert torch.equal(mine, theirs)
        assert torch.equal(input_, before)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_quack_gets_gradients_from_16_bytes_on(monkeypatch, name):
    """The gradient of a part of a joined tensor lies where the part does."""
    began = []

    def norm(rows, weight, *_, **__):
        return rows * weight, None, None

    def back(rows, weight, gradient, *_):
        began.append(gradient.data_ptr() % 16)
        assert gradient.is_contiguous()
        return gradient * weight, (gradient * rows).sum(0), gradient.sum(0)

    module = types.ModuleType("quack.rmsnorm")
    module.rmsnorm_fwd, module.rmsnorm_bwd, module.layernorm_bwd = norm, back, back
    module._rmsnorm_fwd = lambda rows, weight, output, *_, **__: output.copy_(rows * weight)
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", module)
    given = {"input": torch.randn(3, 16, requires_grad=True), "weight": torch.randn(16)}
    if name == "layer_norm":
        given |= {"normalized_shape": (16,), "bias": torch.zeros(16)}
    operation = OPERATIONS[f"norm.{name.removesuffix('_norm')}"]
    run = getattr(quack, f"_load_{name}_grad")(facts_of(given, operation))
    input_ = given.pop("input")
    torch.cat((torch.zeros(1), run(input_, **given, eps=1e-6).flatten())).backward(torch.ones(49))
    assert began == [0]
    torch.testing.assert_close(input_.grad, given["weight"].expand(3, 16))


def test_another_owner_of_vllms_name_space_is_told_apart(monkeypatch):
    """vLLM's build for CPUs registers the same operator; loading a second owner would end the process."""
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel", lambda name: True)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    vllm_library.operators.cache_clear()
    with pytest.raises(ImportError, match="another library's"):
        vllm_library.operators("_C.abi3.so", "_C")


def test_liger_builds_another_kernel_for_many_short_rows():
    key = REGISTRY.kernel("liger.rms_norm").build_key
    for hidden, other in ((128, True), (256, True), (512, False)):
        few, many = (key(facts_of(call("liger.rms_norm", rows, hidden), OPERATIONS["norm.rms"]))
                     for rows in (2**14, 2**15))  # fmt: skip
        assert (few != many) is other


def test_liger_gets_a_float_where_triton_would_make_a_constant(monkeypatch):
    module = types.ModuleType("liger_kernel.ops.rms_norm")
    seen = []
    module.rms_norm_forward = lambda *arguments: seen.append(arguments) or (arguments[0],)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x, w = torch.randn(2, 8), torch.randn(8)
    liger._load_rms_norm(facts_of({"input": x, "weight": w}, OPERATIONS["norm.rms"]))(x, w, eps=0)
    ((_, _, eps, *others),) = seen
    assert isinstance(eps, float)
    assert math.isclose(eps, 0.0)
    assert others == [0.0, "gemma", None]


@at_once("kernel", ["liger.rms_norm", "quack.rms_norm", "liger.layer_norm", "quack.layer_norm"])
def test_a_backward_pass_is_another_kernel_behind_torchs_own_which_were_faster(kernel):
    arguments = call(kernel)
    assert codes(f"{kernel}.grad", arguments) == set()
    arguments["input"].requires_grad_()
    assert (codes(kernel, arguments), codes(f"{kernel}.grad", arguments)) == ({ReasonCode.GRAD_UNSUPPORTED}, set())
    (operation,) = REGISTRY.kernel(kernel).operations
    with lz.scope(allow_jit_compile=True):
        function = f"{operation.removeprefix('norm.')}_norm"
        report = lz.explain(function, **arguments, device="H200", libraries=LIBRARIES)
    assert not report.reasons(f"{kernel}.grad")
    legal = [each.kernel.id for each in report.candidates if each.legal]
    assert legal[0].startswith("torch.")
    assert f"{kernel}.grad" in legal


def test_a_backward_pass_that_never_ran_waits_for_its_verdict():
    query = torch.randn(1, 64, 4, 128).to(torch.bfloat16).requires_grad_()
    with lz.scope(allow_jit_compile=True):
        report = lz.explain(
            *("attention", query, query, query),
            layout="BSHD",
            device="B200",
            libraries={"torch": "2.11.0+cu130", "flash-attn-4": "4.0.0b36"},
        )
    assert {each.code for each in report.reasons("flash_attn.v4.grad")} == {ReasonCode.NOT_VETTED}


@pytest.mark.parametrize(("device", "wanted"), [("H100", set()), ("MI300X", {ReasonCode.NOT_VETTED})])
def test_backward_passes_that_ran_on_nvidias_gpus_alone_are_vetted_first_on_amds(device, wanted):
    rows, weight = torch.randn(64, 512, requires_grad=True), torch.randn(1000, 512, requires_grad=True)
    libraries = {"torch": "2.11.0+rocm6.4" if wanted else "2.11.0+cu130", "liger-kernel": "0.8.5"}
    calls = {
        "liger.linear_cross_entropy": ("linear_cross_entropy", rows, weight, torch.zeros(64, dtype=torch.int64)),
        "liger.rms_norm.grad": ("rms_norm", rows, weight[0]),
    }
    with lz.scope(allow_jit_compile=True):
        for name, call in calls.items():
            report = lz.explain(*call, device=device, libraries=libraries)
            assert {each.code for each in report.reasons(name)} == wanted, name

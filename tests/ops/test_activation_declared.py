"""The CUDA kernels of gates on devices that are not here: what each is offered, and how its library is called."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from layerzero.backends import liger
from layerzero.backends.flashinfer import rows as flashinfer
from layerzero.backends.vllm import rows as vllm
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.reasons import ReasonCode
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS

LIBRARIES = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1", "vllm": "0.20.0", "liger-kernel": "0.8.5"}
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GATES = {
    ("silu_mul", "none"): lambda gate, up: functional.silu(gate) * up,
    ("gelu_mul", "none"): lambda gate, up: functional.gelu(gate) * up,
    ("gelu_mul", "tanh"): lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
}


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def codes(kernel, device="H200", dtype=BF16, features=1024, *, together=True, offset=0, **arguments):
    shape = (8, 2 * features) if together else (8, features)
    given = {name: meta(*shape, dtype=dtype) for name in (("input",) if together else ("input", "up"))}
    with lz.scope(allow_jit_compile=True):
        report = lz.explain(kernel.split(".")[1], **given, **arguments, device=device, libraries=LIBRARIES)
    return {reason.code for reason in report.reasons(kernel)} - {ReasonCode.NOT_INSTALLED}


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize(
    ("library", "dtypes"), [("flashinfer", {F16, BF16}), ("vllm", {F32, F16, BF16}), ("liger", {F32, F16, BF16})]
)
def test_dtypes(library, dtypes, name):
    together = (library, name) != ("liger", "gelu_mul")
    arguments = {} if together else {"approximate": "tanh"}
    for dtype in (BF16, F16, F32, F64):
        refused = codes(f"{library}.{name}", dtype=dtype, together=together, **arguments)
        assert refused == (set() if dtype in dtypes else {ReasonCode.DTYPE_UNSUPPORTED})


@pytest.mark.parametrize("kernel", ["flashinfer.silu_mul", "vllm.silu_mul"])
def test_rows_have_to_begin_at_sixteen_bytes(kernel):
    assert codes(kernel, features=1024) == set()
    assert codes(kernel, features=1021) == {ReasonCode.CONSTRAINT_FAILED, ReasonCode.MISALIGNED}


def test_devices():
    assert codes("liger.silu_mul", device="MI300X") == set()
    assert codes("flashinfer.silu_mul", device="MI300X") == {ReasonCode.PLATFORM_MISMATCH}
    assert codes("vllm.silu_mul", device="T4") == {ReasonCode.SM_TOO_OLD}
    assert codes("liger.silu_mul", features=65537) == {ReasonCode.CONSTRAINT_FAILED}
    assert codes("liger.gelu_mul", together=False) == {ReasonCode.CONSTRAINT_FAILED}


def facts_of(operation, arguments):
    given = {**OPERATIONS[operation].schema.neutral, **arguments}
    return FactsBuilder(OPERATIONS[operation]).of_valid(given, device=Device.named("H200"))


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16)], ids=str)
@pytest.mark.parametrize(("name", "approximate"), GATES)
def test_joined_gates_are_called_as_their_libraries_want_them(monkeypatch, name, approximate, shape):
    """The binding alone, with torch in the library's place."""
    asked = []

    def operator(activation, *, overlaps):
        def run(output, input, *overlap):
            asked.append(activation)
            assert len(overlap) == overlaps
            key = ("silu_mul", "none") if activation == "silu" else ("gelu_mul", activation.partition("_")[2] or "none")
            output.copy_(GATES[key](*input.chunk(2, -1)))

        return run

    monkeypatch.setattr(flashinfer, "_function", lambda activation: operator(activation, overlaps=1))
    library = types.SimpleNamespace(**{
        f"{activation}_and_mul": types.SimpleNamespace(default=operator(activation, overlaps=0))
        for activation in ("silu", "gelu", "gelu_tanh")
    })  # fmt: skip
    monkeypatch.setattr(vllm, "operators", lambda *_: library)
    given = torch.randn(shape)
    params = {"approximate": approximate} if name == "gelu_mul" else {}
    facts = facts_of(f"mlp.{name}.joined", {"input": given, **params})
    for load in (flashinfer._load, REGISTRY.kernel("vllm.silu_mul").load):
        torch.testing.assert_close(load(facts)(given, **params), GATES[name, approximate](*given.chunk(2, -1)))
    assert set(asked) == {"silu" if name == "silu_mul" else "gelu_tanh" if approximate == "tanh" else "gelu"}


def test_ligers_functions_give_their_last_result(monkeypatch):
    modules = {name: types.ModuleType(f"liger_kernel.ops.{name}") for name in ("swiglu", "geglu")}
    modules["swiglu"].swiglu_forward = lambda gate, up: (gate, up, GATES["silu_mul", "none"](gate, up))
    modules["swiglu"].swiglu_fused_gate_up_forward = lambda y: (y, GATES["silu_mul", "none"](*y.chunk(2, -1)))
    modules["geglu"].geglu_forward = lambda gate, up: (gate, up, GATES["gelu_mul", "tanh"](gate, up))
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    together = torch.cat((gate, up), -1)
    run = liger._load_silu_mul(facts_of("mlp.silu_mul", {"input": gate, "up": up}))
    torch.testing.assert_close(run(gate, up), functional.silu(gate) * up)
    run = liger._load_silu_mul(facts_of("mlp.silu_mul.joined", {"input": together}))
    torch.testing.assert_close(run(together), functional.silu(gate) * up)
    params = {"approximate": "tanh"}
    run = liger._load_gelu_mul(facts_of("mlp.gelu_mul", {"input": gate, "up": up, **params}))
    torch.testing.assert_close(run(gate, up, **params), functional.gelu(gate, **params) * up)

"""Compiled code computes what a compiler fuses by torch's own expressions, unless somebody wishes for a kernel."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

import layerzero as lz
from drawing import examples
from layerzero.engine.functions import CALLS
from layerzero.engine.fusion import FUSING
from layerzero.ops import FUNCTIONS
from layerzero.testing import compare
from layerzero.testing.generate import random_call

FUSED = sorted(name for name, each in FUNCTIONS.items() if all(operation.fuses for operation in each.operations))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Seen:
    """A compiler that keeps the operators of what it gets, and computes it as it is."""

    def __init__(self):
        self.graphs = []
        self.backend = aot_autograd(fw_compiler=self._take)

    def _take(self, graph, _):
        self.graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    @property
    def ours(self):
        return [sorted(each for each in graph if each.startswith("layerzero.")) for graph in self.graphs]


def test_which_functions_are_fused():
    assert {"rms_norm", "layer_norm", "silu_mul", "gelu", "softmax"} <= set(FUSED)
    assert not {"add_residual_rms_norm_", "add_rms_norm_", "attention", "linear", "rope"} & set(FUSED)


ROUNDED = {"swiglu_oai"}
"""What has so many steps that rounding after each, as no compiler does, is too far in half precision."""


@pytest.mark.parametrize("name", FUSED)
def test_what_is_computed_in_its_place_is_the_same(name):
    function = functools.partial(CALLS[name].fast)
    for number in range(examples(8)):
        call = random_call(11, number, function=name, dtype=torch.float32 if name in ROUNDED else None)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
        with torch.no_grad():
            assert compare.check(call, compiled) == [], call.text


def is_negated(value):
    """What Inductor reads as if it were not: torch's own compiled functions, too (torch 2.13)."""
    return isinstance(value, torch.Tensor) and value.is_neg()


@pytest.mark.slow  # a C++ compiler for each
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of torch, where Inductor begins
@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed:UserWarning")
@pytest.mark.parametrize("name", FUSED)
def test_what_inductor_makes_of_it_is_the_same(name):
    calls = (random_call(11, number, function=name, dtype=torch.bfloat16) for number in range(20))
    call = next(call for call in calls if not any(map(is_negated, call.arguments.values())))
    compiled = torch.compile(functools.partial(CALLS[name].fast), fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert compare.check(call, compiled) == [], call.text


@pytest.mark.parametrize("name", FUSED)
def test_nothing_of_ours_is_left_for_plain_calls(name):
    seen = Seen()
    arguments = random_call(3, 1, function=name, dtype=torch.float32).arguments
    compiled = torch.compile(CALLS[name].fast, backend=seen.backend, fullgraph=True)
    with torch.no_grad():
        compiled(**arguments)
    assert seen.ours == [[]]


def normed(rows, weight):
    return lz.rms_norm(rows, weight) * 2


def given():
    return torch.randn(3, 8), torch.randn(8)


OPERATOR = "layerzero.rms_norm.default"


def test_a_lock_keeps_the_operator_and_code_is_compiled_twice_at_most():
    seen, pair = Seen(), given()
    compiled = torch.compile(normed, backend=seen.backend, fullgraph=True)
    with torch.no_grad():
        wanted = normed(*pair)
        for _ in range(2):
            torch.testing.assert_close(compiled(*pair), wanted)
            lz.lock("norm.rms", "reference.norm.rms")
            torch.testing.assert_close(compiled(*pair), wanted)
            lz.unlock("norm.rms")
    assert seen.ours == [[], [OPERATOR]]


def test_a_scope_keeps_it_as_long_as_it_holds():
    seen, pair = Seen(), given()
    compiled = torch.compile(normed, backend=seen.backend, fullgraph=True)
    with torch.no_grad():
        with lz.prefer("torch"):
            compiled(*pair)
        compiled(*pair)
    assert seen.ours == [[OPERATOR], []]


def test_a_scope_that_names_no_kernel_changes_nothing():
    seen, pair = Seen(), given()
    compiled = torch.compile(normed, backend=seen.backend, fullgraph=True)
    with torch.no_grad():
        compiled(*pair)
        with lz.scope(allow_jit_compile=True):  # as whoever builds behind the program does
            compiled(*pair)
    assert seen.ours == [[]]


@pytest.mark.parametrize(
    "wish",
    [
        {"deny": ["zentorch"]},
        {"debug": True},
        {"deterministic": True},
        {"unmeasured": "priority"},
        {"strict_mode": True},
        {"allow_adaptation": False},
        {"rules": [{"match": {"rows": ">4"}, "prefer": ["torch"]}]},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_a_setting_that_names_kernels_or_asks_for_more_keeps_it(wish):
    assert not FUSING.wish
    lz.configure(**wish)
    assert FUSING.wish


def test_frozen_choices_and_own_kernels_keep_it():
    lz.silu(torch.randn(4))
    lz.freeze()
    assert FUSING.wish
    lz.thaw()
    assert not FUSING.wish

    @lz.register_kernel("norm.rms", "mine.rms")
    def rms(input, weight, *, eps):
        return functional.rms_norm(input, weight.shape, weight, eps)

    assert FUSING.wish


def test_the_environment_may_wish(monkeypatch):
    from layerzero.engine.call import Call
    from layerzero.engine.config import CONFIGURATION

    monkeypatch.setenv("LAYERZERO_LOCK", "norm.rms=torch.rms_norm")
    CONFIGURATION.reset()
    Call(FUNCTIONS["rms_norm"])
    assert FUSING.wish


def test_wrong_arguments_are_refused_as_everywhere():
    compiled = torch.compile(lz.silu_mul, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="silu_mul: up"):
        compiled(torch.randn(3, 8), torch.randn(3, 4))


def test_what_torch_would_give_in_another_dtype_stays_ours():
    rows, weight = given()
    seen = Seen()
    compiled = torch.compile(normed, backend=seen.backend, fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = normed(rows, weight)
        got = compiled(rows, weight)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted)


def test_gradients_flow_through_it():
    rows, weight = (each.requires_grad_() for each in given())
    compiled = torch.compile(normed, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(rows, weight).sum(), (rows, weight))
    wanted = torch.autograd.grad((functional.rms_norm(rows, (8,), weight, 1e-6) * 2).sum(), (rows, weight))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_an_explanation_says_which():
    assert "torch.compile computes torch's own expression" in str(lz.explain(lz.rms_norm, *given()))
    with lz.prefer("torch"):
        assert "torch.compile keeps the operator" in str(lz.explain(lz.rms_norm, *given()))


def test_an_exported_program_keeps_the_operators_alone():
    class Normed(torch.nn.Module):
        def forward(self, rows, weight):
            return normed(rows, weight)

    program = torch.export.export(Normed(), given(), strict=True)
    named = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert named == {OPERATOR, "aten.mul.Tensor"}


def test_a_temperature_overflows_nothing_in_half_precision():
    rows = torch.full((2, 8), 6e4, dtype=torch.float16)
    compiled = torch.compile(lambda rows: lz.softmax(rows, temperature=0.5), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows), torch.full_like(rows, 1 / 8))


def test_the_engine_may_be_imported_first_within_a_scope():
    within = "with SCOPES.scope({'debug': True}): import layerzero.engine.fusion"
    code = f"from layerzero.engine.config import SCOPES\n{within}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

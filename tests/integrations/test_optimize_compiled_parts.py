"""Models that torch compiled before, whole or in parts: what compiled runs is theirs, and they still run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from optimized_models import made
from torch import Tensor, nn

import layerzero as lz
from decoders import output, tokens
from layerzero.core.eager_state import uncompiled
from layerzero.integrations.optimize.times.module_times import compiled_parts

pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.act(self.up(rows)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(16), Feed()

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.feed(self.norm(rows))


def in_place(module: nn.Module) -> nn.Module:
    module.compile(fullgraph=True, backend="eager")
    return module


def by_forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward, fullgraph=True, backend="eager")
    return module


def wrapped(module: nn.Module) -> nn.Module:
    return torch.compile(module, fullgraph=True, backend="eager")


def by_class(module: nn.Module) -> nn.Module:
    """Of which each call is compiled, as with a decorator in its class."""
    forward = torch.compile(type(module).forward, fullgraph=True, backend="eager")
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})
    return module


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("compiled", [in_place, by_forward, wrapped, by_class])
@torch.no_grad()
def test_compiled_code_stays_and_runs_as_before(
    compiled: Callable[[nn.Module], nn.Module], part: bool, inputs: bool
) -> None:
    """With hooks ``fullgraph=True`` raised; once it was called among them, a part raised at the next call."""
    torch._dynamo.reset()
    rows, model = torch.randn(3, 16), Layer().eval()
    expected = model(rows)
    if part:
        model.feed = compiled(model.feed)
    else:
        model = compiled(model)
    report = lz.optimize(model, rows, rounds=1, isolate=False) if inputs else lz.optimize(model)
    assert not [each for each in report.replaced if "feed" in each.path or not part]
    for many in (rows, torch.cat([rows, rows])):
        torch.testing.assert_close(model(many)[:3], expected)
    report.undo()
    torch.testing.assert_close(model(rows), expected)


@torch.no_grad()
def test_a_compiled_function_that_a_module_calls_is_compiled_afterwards() -> None:
    """One that was first called while ``lz.optimize`` looked at its module ran as it is for good."""
    torch._dynamo.reset()
    graphs = []
    doubled = torch.compile(lambda rows: rows + rows, backend=lambda graph, _: graphs.append(graph) or graph)

    class Calls(Layer):
        def forward(self, rows: Tensor) -> Tensor:
            return doubled(super().forward(rows))

    rows, model = torch.randn(3, 16), Calls().eval()
    lz.optimize(model)
    model(rows)
    assert graphs


@torch.no_grad()
def test_the_error_is_of_compiled_runs_on_both_sides() -> None:
    torch._dynamo.reset()
    model = Layer().eval()
    model.feed.compile(backend=lambda graph, _: lambda *given: [each * 1.01 for each in graph(*given)])
    report = lz.optimize(model, torch.randn(64, 16), rounds=1, isolate=False)
    assert report.error is not None
    assert report.error < 1e-5


def test_a_module_that_torch_is_not_to_compile_counts_as_none() -> None:
    model = Layer().eval()
    model.feed.forward = torch.compiler.disable(model.feed.forward)
    assert compiled_parts(model) == ()


def test_blocks_without_compiled_code_may_end_in_any_order() -> None:
    """Torch has one setting for all threads: with two of them it stayed for good."""
    torch._dynamo.reset()
    graphs: list[object] = []
    compiled = torch.compile(lambda rows: rows + 1, backend=lambda graph, _: graphs.append(graph) or graph)
    one, other = uncompiled(), uncompiled()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    compiled(torch.ones(2))
    assert not graphs
    other.__exit__(None, None, None)
    compiled(torch.ones(2))
    assert graphs


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning")
@pytest.mark.parametrize("inputs", [False, True])
def test_compiled_layers_of_a_decoder_are_left_and_the_report_says_so(inputs: bool) -> None:
    torch._dynamo.reset()
    model = made("llama")
    expected = output(model)
    for each in model.model.layers:
        in_place(each)
    report = lz.optimize(model, {"input_ids": tokens()}, rounds=1, isolate=False) if inputs else lz.optimize(model)
    assert not [each for each in report.replaced if "layers." in each.path]
    assert inputs or "its calls run what torch.compile made of its own code" in str(report)
    torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_torch_has_not_compiled_needs_no_compiler() -> None:
    """Torch's import of its compiler was 2.2 of 3.7 s of a first call (Zen 4, torch 2.13)."""
    code = (
        "import sys, torch, layerzero as lz; "
        "lz.optimize(torch.nn.Sequential(torch.nn.Linear(8, 8)).eval()); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)

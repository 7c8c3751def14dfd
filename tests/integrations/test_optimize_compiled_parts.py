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


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("compiled", [in_place, by_forward, wrapped])
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

"""``lz.optimize`` on mixtures of experts: found by what they compute, and packed weights follow their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given, settings
from mixed_experts import EACH, Mixed, call_of
from mixtures import experts_of, made
from torch import nn

import layerzero as lz
from drawing import examples
from layerzero.integrations.optimize.modules.experts import experts
from layerzero.integrations.optimize.swaps.candidate import Candidate
from layerzero.integrations.optimize.swaps.stamp import Stamp
from layerzero.ops.moe.experts import GATES

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
pytest.importorskip("transformers.integrations.moe", reason="needs its interface for experts")


pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
]


@settings(max_examples=examples(30), deadline=None)
@given(
    wide=some.tuples(some.integers(1, 4), some.integers(1, 40), some.integers(1, 40)),
    activation=some.sampled_from(GATES),
    transposed=some.booleans(),
    biased=some.booleans(),
    numbers=some.sampled_from([(1.702, 7.0), (1.0, 0.5)]),
)
def test_experts_are_told_by_their_values(
    wide: tuple[int, int, int], activation: str, transposed: bool, biased: bool, numbers: tuple[float, float]
) -> None:
    torch.manual_seed(0)
    module = Mixed(wide, activation, transposed=transposed, biased=biased, numbers=numbers).eval()
    found = experts(module)
    assert isinstance(found, Candidate)
    form = found.swap.state.form
    assert (form.gate_up, form.down, form.activation) == ("first", "second", activation)
    assert (form.gate_up_bias, form.down_bias) == (("three", "four") if biased else (None, None))
    call = call_of(module)
    with torch.no_grad():
        expected = module(*call)
        found.swap.on()
        got = module(*call)
    torch.testing.assert_close(got, expected, atol=1e-5 * max(1.0, expected.abs().max().item()), rtol=1e-4)


class Doubled(Mixed):
    def forward(self, *call: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(*call)


class Cut(Mixed):
    """Like silu where values are small."""

    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, -1)
        return nn.functional.silu(gate.clamp(max=50.0)) * up.clamp(-50.0, 50.0)


class Quick(Mixed):
    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, -1)
        return gate * torch.sigmoid(1.702 * gate) * up


class Rows(Mixed):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return rows @ self.first[0].mT @ self.second[0].new_ones(64, 64)


class Gateless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 32, 64)), nn.Parameter(torch.randn(2, 64, 32))


def infinite() -> Mixed:
    module = Mixed()
    nn.init.constant_(module.first, torch.inf)
    return module


def parallel() -> Mixed:
    module = Mixed()
    module._is_expert_parallel = True
    return module


def hooked() -> Mixed:
    module = Mixed()
    module.register_forward_hook(lambda *_: None)
    return module


LEFT = {
    Doubled: "its output is none of lz.moe_experts' formulas",
    Cut: "its output is none of lz.moe_experts' formulas",
    Quick: "its output is none of lz.moe_experts' formulas",
    Rows: "it does not compute on rows, ids and shares: TypeError",
    Gateless: "its experts have no gate",
    infinite: "its weights are zero or infinite",
    parallel: "its experts are divided among ranks",
    hooked: "it has hooks, which wait for its calls",
}


@pytest.mark.parametrize("plant", LEFT, ids=lambda each: each.__name__)
def test_what_cannot_be_proved_is_left_with_a_reason(plant: Any) -> None:
    model = nn.Sequential(plant()).eval()
    report = lz.optimize(model)
    assert not report.replaced
    assert [each.path for each in report.left if LEFT[plant] in each.why] == ["0"]


def test_a_model_that_is_saved_keeps_its_proofs(tmp_path: Path) -> None:
    """Transformers notes the model's dtype in a configuration that has none, as it writes it."""
    model = made("Mixtral")
    model.config.dtype = None
    stamps = [Stamp(each) for each in experts_of(model)]
    model.save_pretrained(tmp_path)
    assert model.config.dtype in {torch.float32, "float32"}
    assert stamps
    assert all(each.holds() for each in stamps)


def test_where_torchs_own_kernel_would_run_they_are_left() -> None:
    with lz.scope(locks={"moe.experts": EACH}):
        report = lz.optimize(nn.Sequential(Mixed()).eval())
    assert not report.replaced
    assert "no time says that another is faster" in report.left[0].why

"""Codes of int8 within tensors of a class of their own, and what a report says of tokens."""

from __future__ import annotations

import pytest
import torch
from coded_modules import DTYPES, Blocks, OfCodes, off, taken
from torch import Tensor, nn
from torch.nn import functional

import layerzero as lz
from decoders import made, tokens


class Int8Tensor(OfCodes):
    """A weight as torchao has it: codes, scales and zero points within a tensor's own class."""

    PARTS = ("codes", "scale", "zero")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.PARTS), None

    def numbers(self) -> Tensor:
        return self.codes * self.scale


def test_codes_within_a_tensors_own_class_are_found() -> None:
    model, rows = nn.Sequential(nn.Linear(64, 48)).eval(), torch.randn(7, 64)
    codes, scale = lz.quantize(model[0].weight.detach(), "int8", per="row")
    zero = torch.zeros(48, 1, dtype=torch.int8)
    model[0].weight = nn.Parameter(Int8Tensor(codes, scale, zero), requires_grad=False)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model)
        assert taken(report) == {"0": "lz.quantized_linear with int8 weights and rows as they are"}
        assert off(model(rows), own) < 1e-5
        codes.neg_()
        assert off(model(rows), 2 * model[0].bias - own) < 1e-5
        model[0].weight = nn.Parameter(Int8Tensor(-codes, scale, zero), requires_grad=False)
        assert off(model(rows), own) < 1e-5


@DTYPES
@pytest.mark.parametrize(("config", "how"), [
    ("Int8WeightOnlyConfig", "rows as they are"),
    ("Int8DynamicActivationInt8WeightConfig", "rows int8"),
])  # fmt: skip
def test_torchaos_int8_is_found(config: str, how: str, dtype: torch.dtype) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model, rows = Blocks().eval().to(dtype), torch.randn(7, 64).to(dtype)
    with torch.no_grad():
        exact = model(rows)
        quantization.quantize_(model, getattr(quantization, config)())
        own = model(rows)
        report = lz.optimize(model)
        assert taken(report) == dict.fromkeys(["up", "down"], f"lz.quantized_linear with int8 weights and {how}")
        got = model(rows)
        report.undo()
        assert torch.equal(model(rows), own)
    assert off(got, exact) < 1.5 * off(own, exact)


def test_a_report_says_the_perplexity_of_the_inputs_tokens(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.integrations.optimize import selection

    monkeypatch.setattr(selection, "_keep_what_gains", lambda *_: None)
    model, ids = made(), tokens()
    mask = torch.ones_like(ids)
    mask[:, :2] = 0

    def wanted() -> float:
        logits, next_ = model(ids, attention_mask=mask).logits.float()[:, 2:-1], ids[:, 3:]
        return functional.cross_entropy(logits.flatten(0, 1), next_.flatten()).exp().item()

    with torch.no_grad():
        before = wanted()
        report = lz.optimize(model, {"input_ids": ids, "attention_mask": mask}, weights="int4", accuracy=0.5)
        assert report.perplexity == (pytest.approx(before, rel=1e-4), pytest.approx(wanted(), rel=1e-3))
        assert report.perplexity[0] != report.perplexity[1]
    assert "perplexity of the inputs' tokens: " in str(report)
    report.undo()
    assert lz.optimize(model, lambda: model(ids), weights="int8").perplexity is None
    blocks = Blocks().eval()
    assert lz.optimize(blocks, torch.randn(3, 64), weights="int8").perplexity is None

"""``lz.optimize`` on a CPU that emulates half precision: what is widened, and what keeps its own code."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import GELU, Linear, Module, Sequential

import layerzero as lz
from layerzero.core import device as devices
from layerzero.core import emulation
from layerzero.engine.dispatch import ENGINE
from layerzero.integrations.optimize import entrance

ROWS = torch.randn(16, 64)


@pytest.fixture(autouse=True)
def laptop(monkeypatch):
    """This CPU with AVX2 alone."""
    poorer = replace(devices.cpu_of_this_machine(), name="laptop", instruction_sets=frozenset({"avx2"}))
    monkeypatch.setattr(devices, "_detect", lambda *_: poorer)
    emulation.forget()
    ENGINE.bump()
    yield
    monkeypatch.undo()
    emulation.forget()
    ENGINE.bump()


class Mixed(Module):
    """Half in bfloat16, half in float32."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(64, 48).bfloat16(), Linear(48, 32)

    def forward(self, rows):
        return self.second(self.first(rows.bfloat16()).float())


def plain(dtype=torch.bfloat16):
    return Sequential(Linear(64, 96), GELU(), Linear(96, 64)).eval().to(dtype)


def ran(model, rows):
    """The output, and the kernels that ran."""
    kernels = []
    ENGINE.watch(watcher := lambda _, plan: kernels.append(plan.kernel.id))
    try:
        return model(rows), kernels
    finally:
        ENGINE.unwatch(watcher)


def same(got, expected):
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_a_prompt_is_widened_and_the_report_says_so():
    stock = plain()
    report = lz.optimize(model := copy.deepcopy(stock), budget_s=None)
    assert "this CPU has no bfloat16 products" in str(report)
    with torch.no_grad():
        got, kernels = ran(model, ROWS.bfloat16())
        same(got, stock(ROWS.bfloat16()))
    assert kernels
    assert all("_widened" in each for each in kernels)
    report.undo()
    assert torch.equal(model(ROWS.bfloat16()), stock(ROWS.bfloat16()))
    assert "products" not in lz.optimize(plain(torch.float32)).emulated


def test_a_model_half_in_float32_is_widened_where_it_is_not():
    stock = Mixed().eval()
    lz.optimize(model := copy.deepcopy(stock), budget_s=None)
    with torch.no_grad():
        got, kernels = ran(model, ROWS)
        same(got, stock(ROWS))
    assert "_widened" in kernels[0]
    assert not any("_widened" in each for each in kernels[1:])


def test_a_float32_twin_of_the_same_values_stays_as_it_is():
    model = plain()
    twin = copy.deepcopy(model).float()
    lz.optimize(model, budget_s=None)
    with torch.no_grad():
        expected = twin(ROWS)
        same(model(ROWS.bfloat16()).float(), expected)
        assert torch.equal(twin(ROWS), expected)


def test_no_memory_is_taken_beside_the_weights():
    report = lz.optimize(model := plain(torch.float16), memory_limit=0, budget_s=None)
    with torch.no_grad():
        _, kernels = ran(model, ROWS.half())
    assert all("_widened" in each for each in kernels)
    assert report.extra_bytes == 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
def test_weights_are_kept_in_float32_where_half_of_the_free_memory_holds_them(monkeypatch):
    for free, kept in ((1e9, True), (2e4, False)):
        monkeypatch.setattr(entrance, "available_bytes", lambda free=free: free)
        report = lz.optimize(model := plain(), budget_s=None)
        with torch.no_grad():
            for _ in range(2):
                _, kernels = ran(model, ROWS.bfloat16())
        assert ("_packed_widened" in "".join(kernels)) == kept
        assert (report.extra_bytes >= 4 * 2 * 64 * 96) == kept
        assert ("had no room in half of the memory that was free" in str(report)) != kept


def test_autocast_and_gradients_run_the_modules_own_code():
    stock = plain()
    lz.optimize(model := copy.deepcopy(stock), budget_s=None)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, kernels = ran(model, ROWS)
        same(got, stock(ROWS))
    assert kernels == []
    got, kernels = ran(model, ROWS.bfloat16())
    got.float().sum().backward()
    stock(ROWS.bfloat16()).float().sum().backward()
    assert kernels == []
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_model_that_is_cast_later_is_followed(dtype):
    stock = plain()
    lz.optimize(model := copy.deepcopy(stock), budget_s=None)
    with torch.no_grad():
        model(ROWS.bfloat16())
        got, kernels = ran(model.to(dtype), ROWS.to(dtype))
        same(got, stock.to(dtype)(ROWS.to(dtype)))
    assert ("_widened" in "".join(kernels)) == (dtype is torch.float16)


def test_experts_whose_rows_bring_more_are_looked_at():
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64}
    config = transformers.Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    stock = transformers.Qwen3MoeForCausalLM(config).eval().bfloat16()
    lz.optimize(model := copy.deepcopy(stock), budget_s=None)
    with torch.no_grad():
        got, kernels = ran(lambda ids: model(ids).logits, torch.arange(32)[None])
        assert got.dtype is torch.bfloat16
    assert any("_widened" in each for each in kernels)

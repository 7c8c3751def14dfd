"""Torch's norms, called below torch.nn.functional: the same bits, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from drawing import at_once

SHAPES = {
    "vector": lambda: torch.randn(64),
    "rows": lambda: torch.randn(5, 64),
    "strided": lambda: torch.randn(3, 5, 128)[..., ::2],
    "negated": lambda: torch._neg_view(torch.randn(4, 64)),
    "four axes": lambda: torch.randn(2, 3, 4, 64).transpose(1, 2),
    "channels last": lambda: torch.randn(2, 64, 3, 4).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.randn(2, 64, 4, 3, 5).to(memory_format=torch.channels_last_3d),
}

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


def results(norm, tensors, *, grad):
    leaves = [each.detach().requires_grad_(grad) for each in tensors]
    result = norm(*leaves)
    if not grad:
        return [result]
    result.backward(torch.ones_like(result))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


@pytest.fixture(params=["fused", "without it"])
def torchs(request, monkeypatch):
    """Torch with, and an imaginary one without, the operator behind rms_norm."""
    if request.param != "fused":
        monkeypatch.delattr(torch, "_fused_rms_norm")


@pytest.mark.usefixtures("torchs")
@at_once("grad", [False, True])
@at_once("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_give_the_bits_of_torchs_functions(shape, dtype, grad):
    torch.manual_seed(0)
    tensor = SHAPES[shape]().to(dtype)
    hidden = tensor.shape[-1:]
    weight, bias = torch.randn(hidden).to(dtype), torch.randn(hidden).to(dtype)
    pairs = [
        (
            (tensor, weight),
            lambda x, w: lz.rms_norm(x, w, eps=1e-6),
            lambda x, w: functional.rms_norm(x, hidden, w, 1e-6),
        ),
        (
            (tensor, weight, bias),
            lambda x, w, b: lz.layer_norm(x, hidden, w, b, eps=1e-5),
            lambda x, w, b: functional.layer_norm(x, hidden, w, b, 1e-5),
        ),
    ]
    with lz.scope(locks={"norm.rms": "torch.rms_norm", "norm.layer": "torch.layer_norm"}):
        for tensors, ours, theirs in pairs:
            got, wanted = results(ours, tensors, grad=grad), results(theirs, tensors, grad=grad)
            assert len(got) == (1 + len(tensors) if grad else 1)
            assert all(map(torch.equal, got, wanted))


NVIDIA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NVIDIA)])
@pytest.mark.parametrize("kernel", ["torch.all_reduce_add_rms_norm", "layerzero.tree_all_reduce_add_rms_norm"])
def test_an_infinity_of_float64_leaves_zeros_beside_it(monkeypatch, kernel, device):
    """On a GPU torch's own makes the whole row NaN (H200, torch 2.11); on a CPU this stands for it."""
    if device == "cpu":
        monkeypatch.setattr(functional, "rms_norm", lambda input, *_: torch.full_like(input, torch.nan))
    rows = torch.ones(3, 96, dtype=torch.float64, device=device)
    rows[2, -1] = torch.inf
    with lz.scope(locks={"all_reduce_add_rms_norm": kernel}, fallback_enabled=False):
        output, total = lz.all_reduce_add_rms_norm(rows, rows, torch.ones_like(rows[0]), group=lz.Ranks.alone())
    assert torch.equal(total, rows + rows)
    assert output[:2].isfinite().all()
    assert not output[2, :-1].any()
    assert output[2, -1].isnan()

"""GELU by tanh compiled ahead of time: refused until built, then right for every size; and ONNX Runtime's."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch.nn.functional import gelu

import layerzero as lz
from layerzero.backends.shape_cache import GRAIN
from layerzero.testing.generate import RandomCall

COMPILED = "inductor.gelu_tanh"
SHAPES = [(1, 8), (3, 5, 64), (GRAIN // 64 - 1, 64), (GRAIN // 64, 64), (65, 1024)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def compare(kernel, shape, dtype):
    input = torch.randn(shape) * 4
    input.view(-1)[:3] = torch.tensor([math.inf, -math.inf, math.nan])
    input = input.to(dtype)
    with lz.scope(locks={"activation.gelu": kernel}):
        output = lz.gelu(input, approximate="tanh")
    wanted = gelu(input.double(), approximate="tanh").to(dtype)
    torch.testing.assert_close(output, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler to build with")
@pytest.mark.skipif(
    not torch.__version__.startswith(("2.13.", "2.14.", "2.15.")), reason="VERSION_UNSUPPORTED: this torch"
)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_build_serves_every_size(dtype):
    call = RandomCall("gelu", {"input": torch.randn(4, 64).to(dtype), "approximate": "tanh"})
    report = lz.explain(call.function, **call.arguments)
    assert [str(reason.code) for reason in report.reasons(COMPILED)] == ["JIT_DISABLED"]
    kernel = next(each.kernel for each in report.candidates if each.kernel.id == COMPILED)
    kernel.load(report.facts)
    assert kernel.prebuilt(report.facts)
    for shape in SHAPES:
        compare(COMPILED, shape, dtype)


@pytest.mark.parametrize("kernel", [COMPILED, "onnxruntime.gelu"])
def test_by_erf_torch_has_the_quickest(kernel):
    reasons = lz.explain("gelu", torch.randn(4, 64)).reasons(kernel)
    assert any("approximate" in str(reason) for reason in reasons) or "installed" in str(reasons[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onnx_runtimes(dtype):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    for shape in SHAPES:
        compare("onnxruntime.gelu", shape, dtype)

"""Launch grids and dead contexts on an NVIDIA GPU: what the limits say is what the device does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import layerzero as lz
from layerzero.engine.dispatch import ENGINE
from layerzero.ops.attention.reference import attention_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = [(65535, 1), (65536, 1), (70000, 2), (1, 65535), (1, 65536), (2, 70000), (1024, 65)]


def qkv(batch, heads):
    torch.manual_seed(0)
    return [torch.randn(batch, 2, heads, 8, device="cuda", dtype=torch.float16) for _ in range(3)]


@pytest.mark.parametrize(("batch", "heads"), SHAPES)
@pytest.mark.parametrize("kernel", ["torch.sdpa.flash", "torch.sdpa.efficient", "torch.sdpa.cudnn", "torch.sdpa.math"])
def test_what_is_legal_launches_and_is_right(kernel, batch, heads):
    tensors = qkv(batch, heads)
    with lz.scope(locks={"attention": kernel}, allow_adaptation=False):
        try:
            got = lz.attention(*tensors, causal=False, layout="BSHD")
        except lz.NoKernelFoundError as refused:
            codes = {reason.code for reason in refused.failures[kernel]}
            assert codes == {lz.ReasonCode.CUDA_GRID_DIM_EXCEEDED}
            return
    want = attention_reference(*(tensor.float() for tensor in tensors), causal=False)
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("batch", "heads"), [(65536, 1), (1, 65536)])
def test_what_flash_refuses_does_not_launch(batch, heads):
    tensors = [tensor.transpose(1, 2) for tensor in qkv(batch, heads)]
    with pytest.raises(RuntimeError, match="invalid"):
        torch.ops.aten._scaled_dot_product_flash_attention.default(*tensors, 0.0, False, False)
        torch.cuda.synchronize()


def test_a_split_on_flash_is_right():
    tensors = qkv(70000, 2)
    with (
        lz.scope(locks={"attention": "torch.sdpa.flash"}),
        pytest.warns(lz.LayerZeroPerformanceWarning, match="chunks of 65520"),
    ):
        got = lz.attention(*tensors, causal=False, layout="BSHD")
    want = attention_reference(*(tensor.float() for tensor in tensors), causal=False)
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3)


def test_a_capture_that_a_kernel_loses_leaves_the_device_and_everybody_else_usable():
    x, w = torch.randn(8, 64, device="cuda"), torch.randn(64, device="cuda")

    @lz.register_kernel("norm.rms", "planted.waits", priority=100, platform="cuda", graph_safe=True)
    def waits(input, weight, *, eps=1e-6):
        torch.cuda.synchronize()  # what no capture allows
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    want = torch.nn.functional.rms_norm(x, (64,), w, 1e-6)
    lz.layer_norm(x, (64,))
    torch.testing.assert_close(lz.rms_norm(x, w), want)
    for _ in range(2):  # a hit, then a choice inside the capture
        with pytest.raises(RuntimeError):  # torch's own, at the end of the capture
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                with pytest.raises(lz.KernelExecutionError, match="the CUDA graph capture is lost"):
                    lz.rms_norm(x, w)
        ENGINE.health.reset()
        ENGINE.bump()
    assert not ENGINE.ledger.suspects()
    torch.cuda.synchronize()
    torch.testing.assert_close(lz.rms_norm(x, w), want)
    lz.unregister_kernel("planted.waits")
    graph = torch.cuda.CUDAGraph()
    lz.rms_norm(x, w)
    with torch.cuda.graph(graph):
        captured = lz.rms_norm(x, w)
    graph.replay()
    torch.testing.assert_close(captured, want)


def test_debug_mode_waits_for_no_device_inside_a_capture():
    x, w = torch.randn(8, 64, device="cuda"), torch.randn(64, device="cuda")
    with lz.scope(debug=True):
        lz.rms_norm(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = lz.rms_norm(x, w)
    graph.replay()
    torch.testing.assert_close(captured, torch.nn.functional.rms_norm(x, (64,), w, 1e-6))


KERNEL = """
import torch
import layerzero as lz

@lz.register_kernel("norm.rms", "planted.rms_norm", priority=100, platform="cuda")
def planted(input, weight, *, eps=1e-6):
    beyond = torch.full((1,), 10**9, device="cuda")
    input.view(-1)[beyond]  # a device-side assertion: the context is dead
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
"""
CALL = """
import torch, layerzero as lz
import planted_cuda
x, w = torch.randn(4, 64, device="cuda"), torch.randn(64, device="cuda")
try:
    lz.rms_norm(x, w)
    print(lz.which("rms_norm", x, w)["kernel_id"])
except lz.KernelExecutionError as error:
    print(error)
"""


def test_a_dead_context_is_confirmed_in_a_child(tmp_path):
    (tmp_path / "planted_cuda.py").write_text(KERNEL)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "LAYERZERO_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    said = run("-c", CALL)
    assert "planted.rms_norm for norm.rms float32" in said
    assert "layerzero doctor --confirm" in said
    assert "planted.rms_norm" not in run("-c", CALL), "the next process goes around it"
    (confirmed,) = json.loads(run("-m", "layerzero", "doctor", "--confirm", "--module", "planted_cuda", "--json"))[
        "confirmed"
    ]
    assert confirmed["verdict"] == "crashed"

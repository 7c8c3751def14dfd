"""Bound callables and frozen choices on a GPU: captures, and a current device that is not the tensors'."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.engine.dispatch import ENGINE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def call():
    return torch.randn(8, 256, device="cuda"), torch.randn(256, device="cuda")


def reference(x, w):
    return torch.nn.functional.rms_norm(x, (256,), w, 1e-6)


@pytest.mark.parametrize("guard", [True, False])
def test_a_captured_bound_call_replays_with_new_values(call, guard):
    x, w = call
    with lz.scope(locks={"rms_norm": "torch.rms_norm"}), torch.no_grad():
        rms = lz.bind(lz.rms_norm, x, w, guard=guard)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            rms(x, w)
            rms(x, w)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = rms(x, w)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(captured, reference(x, w))


def test_a_kernel_that_is_not_graph_safe_is_not_captured_by_a_binding(call):
    x, w = call

    def unsafe(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel("norm.rms", "user.unsafe", platform="cuda", priority=100)(unsafe)
    lz.configure(allow=["user", "torch"])
    guarded, blind = lz.bind(lz.rms_norm, x, w), lz.bind(lz.rms_norm, x, w, guard=False)
    for each in (guarded, blind):
        each(x, w)
        assert each.plan.kernel_id == "user.unsafe"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = guarded(x, w)
        with pytest.raises(lz.CudaGraphUnsafeError, match=r"user\.unsafe"):
            blind(x, w)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(captured, reference(x, w))


def test_a_frozen_choice_holds_in_a_capture(call):
    x, w = call
    with torch.no_grad():
        for _ in range(2):
            lz.rms_norm(x, w)
        torch.cuda.synchronize()
        lz.freeze()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = lz.rms_norm(x, w)
            x.normal_()
            graph.replay()
            torch.testing.assert_close(captured, reference(x, w), rtol=1e-4, atol=1e-4)
        finally:
            lz.thaw()
    assert ENGINE.frozen is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_tensors_device_counts_and_not_the_current_one():
    """Warm and cold, found and bound: nothing runs on the wrong device, and the current one stays."""
    for device in ("cuda:0", "cuda:1"):
        x, w = torch.randn(8, 256, device=device), torch.randn(256, device=device)
        other = torch.device("cuda:1" if device == "cuda:0" else "cuda:0")
        with torch.cuda.device(other):
            rms = lz.bind(lz.rms_norm, x, w)
            for _ in range(2):
                for result in (lz.rms_norm(x, w), rms(x, w)):
                    assert result.device == x.device
                    torch.testing.assert_close(result, reference(x, w), rtol=1e-4, atol=1e-4)
            assert torch.cuda.current_device() == other.index
        with pytest.raises(lz.InvalidCallError, match="device"):
            lz.rms_norm(x, w.to(other))

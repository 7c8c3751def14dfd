"""Fixtures of tests of this folder."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from agreeing_ranks import torch_norm


@pytest.fixture
def _two_kernels():
    for name in ("mine.one", "mine.two"):
        lz.register_kernel("norm.rms", name, supported_dtypes=["float32"])(torch_norm)
    yield
    if lz.frozen() is not None:
        lz.thaw()
    for name in ("mine.one", "mine.two"):
        lz.unregister_kernel(name)


@pytest.fixture
def two_norms():
    """Which kernel ran; two are there, and the second is as good but for its priority."""
    ran = []

    def register(name, priority):
        def kernel(input, weight, *, eps=1e-6):
            ran.append(name)
            if input.numel() and input.flatten()[0] == 666:
                raise ValueError("planted")
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

        lz.register_kernel("norm.rms", f"user.{name}", priority=priority, grad=True)(kernel)

    register("second", 99)
    register("first", 100)
    return ran

"""Fixtures of tests of this folder."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.engine.dispatch import ENGINE


@pytest.fixture
def norm():
    return torch.randn(4, 32), torch.randn(32)


@pytest.fixture
def norm_twice():
    """Which kernel ran for a norm, and its plans."""
    ran = []

    def first(input, weight, *, eps=1e-6):
        ran.append("user.first")
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel("norm.rms", "user.first", priority=100, deterministic=False, grad=True)(first)
    lz.rms_norm(torch.ones(2, 3), torch.ones(3))
    ENGINE.bump()
    ran.clear()
    return ran


@pytest.fixture
def attention():
    query, key = torch.randn(2, 16, 8, 32), torch.randn(2, 16, 2, 32)
    return query, key, key.clone()

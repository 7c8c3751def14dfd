"""Fixtures of tests of this folder."""

from __future__ import annotations

import pytest
from one_time import right

import layerzero as lz
from layerzero.engine.registry import REGISTRY


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    return tmp_path


@pytest.fixture
def kernel():
    lz.register_kernel("norm.rms", "user.a", priority=50)(right)
    return REGISTRY.kernel("user.a")

"""Each test starts with a process that was just born: no settings, scopes, failures, extra kernels or told warnings."""

from __future__ import annotations

import os

import pytest

from layerzero.core import layouts
from layerzero.core.ledger import MemoryLedger
from layerzero.engine import config, failing, probe
from layerzero.engine.descriptors import DESCRIPTORS
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import BUILT
from layerzero.engine.registry import REGISTRY

os.environ["LAYERZERO_CACHE_DIR"] = ""  # neither tests nor their children touch the user's files


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    for variable in [name for name in config.os.environ if name.startswith("LAYERZERO_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", "")
    ENGINE.ledger = MemoryLedger()
    before = {kernel.id for kernel in REGISTRY.kernels()}
    yield
    for variable in [name for name in config.os.environ if name.startswith("LAYERZERO_")]:
        monkeypatch.delenv(variable)
    config.CONFIGURATION.reset()
    DESCRIPTORS.clear()
    for kernel in REGISTRY.kernels():
        if kernel.id not in before:
            REGISTRY.unregister_kernel(kernel.id)
    ENGINE.ledger = MemoryLedger()
    ENGINE.recent.clear()
    ENGINE.health.reset()
    BUILT.clear()
    probe.reset_broken()
    failing.forget_told()
    layouts.forget_warnings()

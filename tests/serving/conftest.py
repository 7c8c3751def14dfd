"""Fixtures of tests of this folder: kernels that a call builds behind itself."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest
import torch

import layerzero as lz
from background_calls import LIMIT_S, compiling
from layerzero.serving import background_builds


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(background_builds, "GATHER_S", 0.0)
    monkeypatch.setattr(background_builds, "LOOK_S", 0.01)


@pytest.fixture
def here():
    """A kernel that compiles in this process, when the test lets it; and which thread built what."""

    class Here:
        def __init__(self):
            self.may, self.began, self.builds, self.error = threading.Event(), threading.Event(), [], None

    state = Here()

    def load(facts):
        state.builds.append((threading.current_thread().name, facts.size("hidden")))
        state.began.set()
        assert state.may.wait(LIMIT_S)
        if state.error is not None:
            raise state.error

        def rms_norm(input, weight, *, eps):
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

        return rms_norm

    lz.register_backend([compiling("test.compiles", load, accepts=("eps",), priority=50)])
    yield state
    state.may.set()


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """A kernel that a child builds: its artefact is a file in a folder."""
    monkeypatch.setenv("BACKGROUND_KERNELS", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sys.modules.pop("background_kernels", None)
    importlib.import_module("background_kernels")

    return tmp_path

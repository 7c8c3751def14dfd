"""Kernels to vet: planted, of a plugin, and of libraries with known dangers."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import pytest
import torch

import layerzero as lz
from layerzero.core.device import Device
from layerzero.engine import probe

CALL = torch.randn(4, 64), torch.randn(64)
PLUGIN = """
import torch
import layerzero as lz
from layerzero.core.kernel import Backend, Kernel, Trust

MODE = "right"

def load(facts):
    def run(input, weight, *, eps):
        output = torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
        return output + 1 if MODE == "wrong" else output
    return run

KERNEL = Kernel(
    id="plug.rms", operations=("norm.rms",), backend=Backend(name="plug", summary="a plugin", origin="plugin"),
    trust=Trust.PLUGIN, load=load, accepts=("eps",), priority=100,
)
lz.register_backend([KERNEL])
"""


def registered(monkeypatch, folder, name, source=None):
    """Import a module that registers kernels, here and for child processes."""
    if source is not None:
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def found(kernel, operation="norm.rms", **asked):
    """What vetting says about one kernel and class."""
    (each,) = lz.vet(operation, kernels=[kernel], **asked)
    return each


def absent(backend):
    return probe.this_machine().state(backend, Device.detect("cpu")).reason


def installed(backend):
    return pytest.mark.skipif(absent(backend) is not None, reason=str(absent(backend)))


# the dangers

"""Calls of one function behind which kernels are built, and kernels that compile: for the tests of such builds."""

from __future__ import annotations

import torch

import layerzero as lz
from layerzero.serving.background_builds import BUILDS

CALL = torch.ones(4, 32), torch.ones(32)
LIMIT_S = 600.0
"""How long a test waits for what it expects. Builds are niced: one took over 120 s beside eight busy processes."""


def compiling(kernel_id, load, **more):
    """A kernel for the call that needs a build."""
    backend = lz.Backend("test", kernel_id, origin="code")
    return lz.Kernel(id=kernel_id, operations=("norm.rms",), backend=backend, load=load, jit=True, **more)


def run(*call):
    """Call, and wait for what is built behind it."""
    lz.rms_norm(*(call or CALL))
    assert BUILDS.idle.wait(LIMIT_S)


def build(**more):
    """As :func:`run`, where builds go on in the background."""
    lz.configure(jit="background", **more)
    run()


def chosen(*call):
    return lz.which("rms_norm", *(call or CALL))["kernel_id"]


def codes(kernel, *call):
    return [str(each.code) for each in lz.explain("rms_norm", *(call or CALL)).reasons(kernel)]


def told(folder):
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return [(what, name) for _, what, name in lines]


def without_compiler():
    raised = RuntimeError("\n".join(["backend='inductor' raised:", *["many lines"] * 40, "Set TORCHDYNAMO_VERBOSE=1"]))
    raised.__cause__ = FileNotFoundError(2, "No such file or directory", "/usr/bin/g++")
    return raised

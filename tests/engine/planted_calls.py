"""Calls that tests of the engine make, kernels that they plant, and plans that they look at."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from layerzero.engine import accelerator
from layerzero.engine.functions import CALLS

NAN, INF = math.nan, math.inf


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def attention(**changes):
    query, key, value = zeros(2, 4, 4, 8), zeros(2, 6, 2, 8), zeros(2, 6, 2, 8)
    return "attention", {"query": query, "key": key, "value": value, "layout": "BSHD", **changes}


def rms(**changes):
    return "rms_norm", {"input": zeros(3, 8), "weight": zeros(8), **changes}


def register(function, kernel_id="user.planted", operation="norm.rms", **declared):
    lz.register_kernel(operation, kernel_id, priority=100, **declared)(function)
    return kernel_id


def breaks(error):
    def broken(input, weight, *, eps=1e-6):
        raise error

    return broken


def right(x, w):
    return torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)


native_only = pytest.mark.skipif(accelerator.HOT is None, reason=accelerator.ABSENT or "built")
both = pytest.mark.usefixtures("path")


def plans(function="rms_norm"):
    return CALLS[function].dispatcher.cache.current


def copied(text):
    """An equal text that is another object."""
    return bytes(text, "ascii").decode()


def chosen(*tensors, **call):
    return lz.which("attention" if tensors[0].ndim == 4 else "rms_norm", *tensors, **call)["kernel_id"]

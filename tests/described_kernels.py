"""Descriptors of kernels, and what calls get under them."""

from __future__ import annotations

import torch

import layerzero as lz
import layerzero.core
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.descriptors import exported

CPU_FLASH = "torch.sdpa.cpu_flash"


def described(kernel_id, /, **changes):
    """A descriptor of one kernel as it is declared, with changes to its entry."""
    kernel = REGISTRY.kernel(kernel_id).declared
    data = exported(kernel.backend, [kernel])
    data["ops"][kernel.operations[0]][0] |= changes
    return data


def entry_in(data):
    return next(each for entries in data["ops"].values() for each in entries if isinstance(each, dict))


def qkv(head_dim=64, seq=8, **kind):
    return [torch.randn(1, seq, 4, head_dim, **kind) for _ in range(3)]


def reasons(kernel_id, *tensors, **call):
    with lz.scope(require_vetting=False):
        return lz.explain("attention", *tensors, layout="BSHD", **call).reasons(kernel_id)

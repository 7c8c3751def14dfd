"""What a build is found by: the same for a call in any layout, since kernels are built for their own."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.engine.registry import REGISTRY

KERNELS = [each for each in REGISTRY.kernels() if each.build_key is not None and each.layout is not None]


def dense(layout):
    tensors = (torch.randn(2, 64, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    return lz.explain(
        "attention", *(each if layout == "BSHD" else each.transpose(1, 2) for each in tensors), layout=layout
    )


@pytest.mark.parametrize("name", [each.id for each in KERNELS if "attention.standard.prefill" in each.operations])
def test_a_build_serves_a_call_in_either_layout(name):
    kernel = REGISTRY.kernel(name)
    keys = [kernel.build_key(dense(layout).facts) for layout in ("BSHD", "BHSD")]
    assert keys[0] == keys[1]

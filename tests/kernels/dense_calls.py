"""Dense calls of attention: facts of a device that is not here, small tensors, and what comes beside what should."""

from __future__ import annotations

import torch

from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine.registry import REGISTRY


def facts_of(query, key, value, *, device="H100", operation="attention.gqa.prefill", **arguments):
    built = FactsBuilder(REGISTRY.operation(operation))
    return built.build(query, key, value, device=Device.named(device), layout="BSHD", **arguments)


def tensors(seq_q=6, seq_k=9):
    torch.manual_seed(0)
    return (torch.randn(2, seq_q, 4, 8), torch.randn(2, seq_k, 2, 8), torch.randn(2, seq_k, 2, 8))


def compare(got, wanted):
    for left, right in zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, wanted)), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)

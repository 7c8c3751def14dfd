"""Ctrl-C leaves nothing half done: what is loaded, registered or in force is whole or not there."""

from __future__ import annotations

import itertools

import pytest
import torch

import layerzero as lz
from layerzero import backends
from layerzero.engine.registry import REGISTRY, Registry


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_load_is_made_again(monkeypatch, interruption):
    registry = Registry(entry_points=False)
    builtin = backends.builtin_kernels

    def interrupted():
        yield from itertools.islice(builtin(), 5)
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(backends, "builtin_kernels", interrupted)
        with pytest.raises(interruption):
            registry.kernels()
    ours = {each.id for each in REGISTRY.kernels() if each.backend.origin == "builtin" and not each.is_reference}
    assert {each.id for each in registry.kernels() if not each.is_reference} == ours  # tests add operations


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupted_registration_is_whole_or_not_there(monkeypatch, moment):
    steps = iter(range(moment))

    def interrupted(*_):
        if next(steps, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(REGISTRY, "_listeners", [*REGISTRY._listeners, interrupted])
    for number in range(2):
        try:
            lz.register_kernel("norm.rms", f"user.k{number}")(lambda input, weight, eps: input)
            lz.unregister_kernel(f"user.k{number}")
        except KeyboardInterrupt:
            pass
    monkeypatch.undo()
    for kernel in [each for each in lz.list_kernels("norm.rms") if each.source == "user"]:
        lz.unregister_kernel(kernel.id)
    assert not [each for each in lz.list_kernels() if each.source == "user"]
    lz.rms_norm(torch.randn(4, 8), torch.randn(8))

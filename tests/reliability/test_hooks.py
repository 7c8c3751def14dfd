"""Exceptions of torch's own machinery and of signal handlers pass through; no kernel is blamed for them."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import layerzero as lz
from layerzero.engine.dispatch import ENGINE

pytestmark = pytest.mark.usefixtures("path")

LINEAR = torch.nn.Linear(64, 64)
WEIGHT = torch.nn.Parameter(torch.randn(64))


def heads(x):
    return x.view(2, 4, 4, 16)


def paged(x):
    tables, lens = torch.arange(2, dtype=torch.int32).view(2, 1), torch.tensor([5, 9], dtype=torch.int32)
    caches = torch.cat([x, x, x, x]).view(2, 16, 4, 16)
    return lz.paged_attention(x[:2].view(2, 1, 4, 16), caches, caches, tables, lens)


def append(x):
    cache = torch.zeros(2, 16, 4, 16)
    lz.append_paged_kv_(x.view(8, 4, 16), x.view(8, 4, 16), cache, cache.clone(), torch.arange(8))
    return x + cache.sum()


BLOCKS = {
    "attention": lambda x: lz.attention(*(heads(LINEAR(x)),) * 3, layout="BSHD").reshape(8, 64),
    "rms_norm": lambda x: x + lz.rms_norm(LINEAR(x), WEIGHT),
    "layer_norm": lambda x: x + lz.layer_norm(LINEAR(x), (64,), WEIGHT),
    "add_residual_rms_norm_": lambda x: sum(lz.add_residual_rms_norm_(LINEAR(x), x.clone(), WEIGHT)),
    "paged_attention": lambda x: x[:2] + paged(x).reshape(2, 64),
    "append_paged_kv_": lambda x: append(LINEAR(x).detach()) + LINEAR(x),
}


def gradients(run):
    x = torch.linspace(-1, 1, 512).view(8, 64).requires_grad_()
    WEIGHT.grad = LINEAR.weight.grad = None
    run(x).square().sum().backward()
    return [each.grad.clone() for each in (x, WEIGHT, LINEAR.weight) if each.grad is not None]


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")  # gradients over a cache: the reference
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_checkpointing_gives_the_same_gradients(block, reentrant):
    for _ in range(2):  # chosen, then found
        again = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
        torch.testing.assert_close(again, gradients(block), rtol=1e-4, atol=1e-4)  # forward: another kernel
    assert ENGINE.health.breakers() == {}


def test_a_hook_that_raises_is_the_programs_own():
    def pack(_tensor):
        raise RuntimeError("no room to offload")

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with pytest.raises(RuntimeError, match="no room"):
            lz.rms_norm(torch.randn(8, 64, requires_grad=True), WEIGHT)
    assert ENGINE.health.breakers() == {}
    assert ENGINE.ledger.failures() == {}


def test_a_signal_handler_that_raises_is_the_programs_own():
    def planted(input, weight, *, eps=1e-6):
        os.kill(os.getpid(), signal.SIGUSR1)
        return input * 1  # the handler has run by now

    def handler(_number, _frame):
        raise TimeoutError("the program's own limit")

    lz.register_kernel("norm.rms", "user.slow", priority=100)(planted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="own limit"):
            lz.rms_norm(torch.randn(8, 64), WEIGHT.detach())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ENGINE.health.breakers() == {}

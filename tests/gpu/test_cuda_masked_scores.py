"""Softcap and sinks beside a mask on a GPU, where only this kernel takes them: values, and a captured step."""

from __future__ import annotations

import math

import pytest
import torch

from layerzero.backends.torch.softcap import scored
from layerzero.ops.attention.reference import attention_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def call(name, dtype, seq_q):
    torch.manual_seed(seq_q)
    query = torch.randn(3, 8, seq_q, 128, device="cuda").to(dtype)
    key, value = (torch.randn(3, 2, 300, 128, device="cuda").to(dtype) for _ in range(2))
    mask = torch.zeros(3, 1, 1, 300, device="cuda", dtype=dtype)
    mask[0, ..., :100], mask[1, ..., :] = -math.inf, -math.inf
    more = {}
    if "softcap" in name:
        more["softcap"] = 50.0
    if "sinks" in name:
        more["sinks"] = torch.randn(8, device="cuda")
    if "bool" in name:
        mask = mask == 0
    return (query, key, value), {"attn_mask": mask, **more}


@pytest.mark.parametrize("name", ["softcap", "sinks", "softcap, bool", "sinks, bool", "softcap and sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seq_q", [1, 70])
def test_it_gives_what_the_formula_gives(name, dtype, seq_q):
    tensors, more = call(name, dtype, seq_q)
    got, lse = scored(*tensors, return_lse=True, **more)
    floats = {key for key, each in more.items() if isinstance(each, torch.Tensor) and each.is_floating_point()}
    wide = {key: each.double() if key in floats else each for key, each in more.items()}
    lie = [each.double().transpose(1, 2) for each in tensors]
    wanted, wanted_lse = attention_reference(*lie, return_lse=True, **wide)
    off = 1e-4 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), wanted.transpose(1, 2), atol=off, rtol=off)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=off, rtol=off)


@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_it_is_captured_and_reads_nothing_on_the_host(name):
    tensors, more = call(name, torch.bfloat16, 1)
    wanted = scored(*tensors, **more)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        scored(*tensors, **more)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = scored(*tensors, **more)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)

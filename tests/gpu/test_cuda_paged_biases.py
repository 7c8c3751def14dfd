"""Sinks and slopes over pages on a GPU: contexts that are split, queries that see no key, captures, windows."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.engine.probe import this_machine
from layerzero.engine.registry import REGISTRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # libraries warn of each other when they are imported
]

PAGE, DIM = 16, 64
SINKS = ["vllm.flash_attn.v3.paged_tokens_sinks", "vllm.flash_attn.v3.paged_split_sinks"]
ALIBI = "vllm.flash_attn.v2.paged_tokens_alibi"
OPERATION = "attention.gqa.mixed.paged"


def usable(kernel):
    found = REGISTRY.kernel(kernel)
    reason = this_machine().state(found.backend, lz.Device.detect("cuda")).reason
    if reason is not None:
        pytest.skip(str(reason))
    if kernel in SINKS and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for sm 9.x")
    return kernel


def mixed(lens=(4000, 37, 300, 5), tokens=(1, 1, 200, 9), heads=16, kv_heads=2):
    """Two decodes, of which one has a context worth splitting, a chunk, and more queries than a context has tokens."""
    torch.manual_seed(0)
    blocks = -(-max(lens) // PAGE)
    pages = len(lens) * blocks
    caches = [torch.randn(pages, PAGE, kv_heads, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return {
        "query": torch.randn(sum(tokens), heads, DIM, device="cuda", dtype=torch.bfloat16),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": torch.randperm(pages, device="cuda").int().view(len(lens), blocks),
        "context_lens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
        "cu_seqlens_q": torch.tensor([0, *tokens], device="cuda").cumsum(0, dtype=torch.int32),
        "max_seqlen_q": max(tokens),
        "decodes": 2,
    }


def locked(kernel, **call):
    with lz.scope(locks={OPERATION: kernel}, allow_jit_compile=True):
        return lz.paged_attention(**call)


def compared(kernel, **call):
    got, wanted = locked(kernel, **call), locked(f"reference.{OPERATION}", **call)
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("named", [{}, {"window": (127, 0)}, {"causal": False}, {"softcap": 20.0, "scale": 0.3}])
@pytest.mark.parametrize("kernel", SINKS)
def test_sinks_count_once_and_alone_where_a_query_sees_no_key(kernel, named):
    sinks = 3 * torch.randn(16, device="cuda").bfloat16()
    compared(usable(kernel), **mixed(), **named, sinks=sinks, return_lse=True)


@pytest.mark.parametrize("kernel", SINKS)
def test_a_whole_tile_of_queries_before_the_first_key_has_the_sinks(kernel):
    call = mixed(lens=(5, 7, 3), tokens=(1, 1, 400))
    compared(usable(kernel), **call, sinks=torch.randn(16, device="cuda").bfloat16(), return_lse=True)


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("named", [{}, {"window": (127, 0)}, {"causal": False, "return_lse": True}])
def test_slopes_lower_what_is_far(named, by_sequence):
    slopes = lz.alibi_slopes(16, device="cuda")
    slopes = slopes * torch.rand(4, 1, device="cuda") if by_sequence else slopes
    compared(usable(ALIBI), **mixed(), **named, alibi_slopes=slopes)


@pytest.mark.parametrize("kernel", [*SINKS, ALIBI])
def test_a_captured_call_follows_lengths_and_biases_that_change(kernel):
    name = "alibi_slopes" if usable(kernel) == ALIBI else "sinks"
    bias = torch.rand(16, device="cuda", dtype=torch.float32 if name == "alibi_slopes" else torch.bfloat16)
    call = mixed() | {name: bias}
    locked(kernel, **call)
    graph = torch.cuda.CUDAGraph()
    with lz.scope(locks={OPERATION: kernel}, allow_jit_compile=True), torch.cuda.graph(graph):
        output = lz.paged_attention(**call)
    bias.mul_(2)
    call["context_lens"].sub_(4)
    graph.replay()
    torch.testing.assert_close(output, locked(f"reference.{OPERATION}", **call), rtol=0.02, atol=0.02)

"""Experts on 2 and 4 ranks of gloo make of each token what all experts on one rank make of it."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from ranks_of_gloo import two_ranks

RANK = """
import sys, torch, layerzero as lz
from datetime import timedelta
from torch import distributed as dist
rank, store, ranks = int(sys.argv[1]), sys.argv[2], int(sys.argv[4])
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
)
def compare(counts, ids, dtype):
    here, (tokens, hidden, top) = 2, (counts[rank], 32, 3)
    gate_up = (torch.randn(here * ranks, 48, hidden, generator=data) / 6).to(dtype)
    down = (torch.randn(here * ranks, hidden, 24, generator=data) / 5).to(dtype)
    drawn = [torch.randn(each, hidden, generator=data).to(dtype) for each in counts]
    shares = [torch.rand(each, top, generator=data) for each in counts]
    x, chosen, weights = drawn[rank], ids(tokens, top, here * ranks), shares[rank]
    mine = slice(rank * here, (rank + 1) * here)
    got = lz.moe_experts_of_ranks(x, gate_up[mine], down[mine], chosen, weights, activation="gelu")
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        got, lz.moe_experts(x, gate_up, down, chosen, weights, activation="gelu"), rtol=near, atol=near
    )
    again = lz.moe_experts_of_ranks(x, gate_up[mine], down[mine], chosen, weights, activation="gelu")
    assert torch.equal(got, again)
def any_of(tokens, top, experts):  # some of which add nothing, and some tokens have an expert twice
    return torch.randint(-1, experts, (tokens, top))
def one(tokens, top, experts):  # the last rank's alone, so that the others' experts have no token
    return torch.full((tokens, top), experts - 1, dtype=torch.int32)
with torch.no_grad():
    for dtype in (torch.float32, torch.bfloat16):
        for ids in (any_of, one):
            for counts in ([5, 1, 9, 3], [0, 7, 2, 0], [4, 0, 0, 0], [0, 0, 0, 0]):
                data = torch.Generator().manual_seed(len(counts) + sum(counts))
                compare(counts[:ranks], ids, dtype)
    dist.barrier()
dist.destroy_process_group()
print("alike")
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_of_ranks_make_what_all_experts_of_one_rank_make(tmp_path, ranks):
    assert two_ranks(tmp_path, RANK, "", ranks) == [["alike"]] * ranks


def test_an_expert_that_no_rank_has_is_named():
    x, gate_up, down = torch.ones(2, 8), torch.ones(4, 12, 8), torch.ones(4, 8, 6)
    ids, weights = torch.tensor([[0, 4], [1, 2]]), torch.ones(2, 2)
    with pytest.raises(lz.InvalidCallError, match="wanted experts below 4, 4 on each of 1 ranks, got 4"):
        lz.moe_experts_of_ranks(x, gate_up, down, ids, weights, group=lz.Ranks.alone())

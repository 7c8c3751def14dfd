"""A Llama's shape, its weights shared by 1, 2 and 4 ranks: with ``require_tp_invariant`` logits have the same bits."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from ranks_of_gloo import two_ranks

RANK = """
import hashlib, sys, torch, layerzero as lz
from datetime import timedelta
from torch import distributed as dist
rank, store, case, ranks = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
)
data = torch.Generator().manual_seed(7)
rows, gate, up, down = (torch.randn(*each, generator=data) / 30 for each in ((5, 96), *((1024, 96),) * 2, (96, 1024)))
gate, up, down = gate.chunk(ranks)[rank], up.chunk(ranks)[rank], down.chunk(ranks, 1)[rank]
with lz.scope(require_tp_invariant=True):
    output = lz.all_reduce(lz.linear(lz.silu_mul(lz.linear(rows, gate), lz.linear(rows, up)), down))
print(hashlib.sha256(output.numpy().tobytes()).hexdigest())
dist.destroy_process_group()
"""

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCAB, LAYERS = 1024, 1024, 8, 4, 128, 515, 1


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(0)

    def made(outputs, inputs):
        return torch.randn(outputs, inputs, generator=generator) / inputs**0.5

    layers = [
        {
            "query": made(HEADS * WIDTH, HIDDEN),
            "key": made(KV_HEADS * WIDTH, HIDDEN),
            "value": made(KV_HEADS * WIDTH, HIDDEN),
            "output": made(HIDDEN, HEADS * WIDTH),
            "gate": made(INNER, HIDDEN),
            "up": made(INNER, HIDDEN),
            "down": made(HIDDEN, INNER),
        }
        for _ in range(LAYERS)
    ]
    return {"layers": layers, "embedding": made(VOCAB, HIDDEN), "head": made(VOCAB, HIDDEN)}


def _logits(weights, ids, ranks, dtype):
    """What so many ranks compute, one after the other; their parts are summed up as the collective does."""
    ones = torch.ones(HIDDEN, dtype=dtype)

    def share(weight, rank, axis):
        return weight.to(dtype).chunk(ranks, axis)[rank]

    def summed(parts):
        return lz.tree_sum(parts).to(dtype)

    wide = None if dtype is torch.float32 else torch.float32
    rows = weights["embedding"].to(dtype)[ids]
    angles = torch.arange(ids.shape[1]).unsqueeze(1) / 1e4 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
    for layer in weights["layers"]:
        normed, parts = lz.rms_norm(rows, ones), []
        for rank in range(ranks):
            query, key, value = (lz.linear(normed, share(layer[name], rank, 0)) for name in ("query", "key", "value"))
            query, key, value = (each.unflatten(-1, (-1, WIDTH)) for each in (query, key, value))
            query, key = lz.rope(query, key, angles.cos(), angles.sin(), layout="BSHD")
            attended = lz.attention(query, key, value, causal=True, layout="BSHD").flatten(2)
            parts.append(lz.linear(attended, share(layer["output"], rank, 1), out_dtype=wide))
        rows = rows + summed(parts)
        normed, parts = lz.rms_norm(rows, ones), []
        for rank in range(ranks):
            gate, up = (lz.linear(normed, share(layer[name], rank, 0)) for name in ("gate", "up"))
            parts.append(lz.linear(lz.silu_mul(gate, up), share(layer["down"], rank, 1), out_dtype=wide))
        rows = rows + summed(parts)
    return lz.linear(lz.rms_norm(rows, ones), weights["head"].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_1_2_and_4_ranks_have_the_same_bits(weights, dtype):
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), lz.scope(require_tp_invariant=True):
        one, two, four = (_logits(weights, ids, ranks, dtype) for ranks in (1, 2, 4))
    assert torch.equal(one, two)
    assert torch.equal(one, four)
    with torch.no_grad():
        stock = [_logits(weights, ids, ranks, dtype) for ranks in (1, 2)]
    torch.testing.assert_close(stock[0], one, rtol=0.1, atol=0.1 if dtype is torch.bfloat16 else 1e-3)


def test_a_row_has_the_same_bits_in_every_batch_and_on_every_number_of_ranks(weights):
    ids = torch.randint(0, VOCAB, (5, 7), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), lz.scope(require_tp_invariant=True, batch_invariant=True):
        whole = _logits(weights, ids, 4, torch.float32)
        assert torch.equal(_logits(weights, ids[3:4], 1, torch.float32), whole[3:4])


@pytest.mark.slow
def test_processes_that_share_a_block_get_the_bits_of_one(tmp_path):
    said = set()
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        said |= {line for each in two_ranks(folder, RANK, "block", ranks) for line in each}
    assert len(said) == 1

"""Small calls over pages, with NaN wherever nobody wrote, for the tests of several operations."""

from __future__ import annotations

import math

import torch

PAGE = 4


def starts(*lengths):
    return torch.tensor([sum(lengths[:count]) for count in range(len(lengths) + 1)], dtype=torch.int32)


def paged(queries=(1, 3, 0, 8), lens=(5, 7, 2, 8), *, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, garbage=-1):
    """Queries, caches full of NaN beyond what was written, tables with garbage at their ends, lengths, starts."""
    torch.manual_seed(0)
    blocks, pages = 2, len(lens) * 2 + 1
    keys, values = (torch.full((pages, PAGE, kv_heads, head_dim), math.nan, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages)[: len(lens) * blocks].view(len(lens), blocks).int()
    for sequence, length in enumerate(lens):
        for position in range(length):
            page = table[sequence, position // PAGE]
            keys[page, position % PAGE] = torch.randn(kv_heads, head_dim, dtype=dtype)
            values[page, position % PAGE] = torch.randn(kv_heads, head_dim, dtype=dtype)
        table[sequence, -(-length // PAGE) :] = garbage
    query = torch.randn(sum(queries), heads, head_dim, dtype=dtype)
    return query, keys, values, table, torch.tensor(lens, dtype=torch.int32), starts(*queries)


def decoding(lens=(5, 1, 8), **more):
    """As :func:`paged`, of one token a sequence: queries (B, 1, H, D), and no starts."""
    query, *call, _ = paged((1,) * len(lens), lens, **more)
    return query.unsqueeze(1), *call

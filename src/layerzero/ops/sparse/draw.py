"""Random block patterns: rows without a block, blocks of one token, every block."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from layerzero.ops.draw import Draw
from layerzero.ops.ragged.draw import starts_of
from layerzero.ops.sparse.pattern import BlockPattern


def sparse_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.sparse_attention``."""
    block_rows, block_cols = draw.of((1, 2, 16, 64), (1, 1, 5, 2)), draw.of((1, 3, 16, 64), (1, 1, 5, 2))
    rows, columns = draw.of((0, 1, 3, 5), (1, 6, 8, 4)), draw.of((1, 2, 4, 7))
    kv_heads = draw.of((1, 2, 3))
    heads, dim = kv_heads * draw.of((1, 2, 4), (6, 2, 2)), draw.of((7, 16, 32, 64, 128), (1, 2, 2, 4, 3))
    value_dim = draw.of((8, 64)) if draw.chance(0.1) else dim
    counts = [draw.stream.randint(0, columns) for _ in range(rows)]
    chosen = [sorted(draw.stream.sample(range(columns), count)) for count in counts]
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((rows * block_rows, heads, dim), dtype)),
        "key": draw.laid_out(draw.normal((columns * block_cols, kv_heads, dim), dtype)),
        "value": draw.laid_out(draw.normal((columns * block_cols, kv_heads, value_dim), dtype)),
        "block_indptr": starts_of(draw, counts),
        "block_indices": torch.tensor([*chain(*chosen)], dtype=torch.int32, device=draw.device),
        "block_rows": block_rows,
        "block_cols": block_cols,
    }
    if draw.chance(0.15):
        arguments["scale"] = draw.of((0.25, 3.0)) * dim**-0.5
    if draw.chance(0.2):
        arguments["return_lse"] = True
    if draw.chance(0.4):
        arguments["block_pattern"] = BlockPattern(arguments["block_indptr"], arguments["block_indices"])
    return arguments


def variable_sparse_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.variable_sparse_attention``: blocks without a token, rows that see nothing."""
    kv_heads, rows, columns = draw.of((1, 2, 3)), draw.of((1, 2, 5)), draw.of((1, 3, 6))
    heads, dim = kv_heads * draw.of((1, 2, 4), (6, 2, 2)), draw.of((7, 16, 32, 64, 128), (1, 2, 2, 4, 3))
    tokens, kv_tokens = draw.of((1, 5, 33, 64)), draw.of((1, 7, 40, 96))
    sizes = []
    for count, total in ((rows, tokens), (columns, kv_tokens)):
        cuts = [sorted(draw.stream.randint(0, total) for _ in range(count - 1)) for _ in range(kv_heads)]
        lengths = [[b - a for a, b in zip([0, *each], [*each, total], strict=True)] for each in cuts]
        sizes.append(torch.tensor(lengths, dtype=torch.int32, device=draw.device))
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((tokens, heads, dim), dtype)),
        "key": draw.laid_out(draw.normal((kv_tokens, kv_heads, dim), dtype)),
        "value": draw.laid_out(draw.normal((kv_tokens, kv_heads, dim), dtype)),
        "seen_blocks": draw.uniform((kv_heads, rows, columns), torch.float32) < draw.of((0.3, 0.8)),
        "row_sizes": sizes[0],
        "col_sizes": sizes[1],
    }
    if draw.chance(0.15):
        arguments["scale"] = draw.of((0.25, 3.0)) * dim**-0.5
    if draw.chance(0.2):
        arguments["return_lse"] = True
    return arguments

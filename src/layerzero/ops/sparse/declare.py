"""Block-sparse attention: queries and keys in blocks of fixed sizes, each block of queries sees some blocks of keys.

    attention.sparse.block   one sequence; the pattern is compressed sparse rows of blocks (BSR)

Within a block every query sees every key. A window with the first blocks always visible is such a pattern, and so are
the pages that a selection leaves of a long context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import REQUIRED, Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.core.values import Check
from layerzero.ops.attention.declare import (
    ALIASES,
    HEAD_DIMS,
    LENGTH,
    RETURN_LSE,
    SCALE,
    TOLERANCE,
    TOLERANCE_REASON,
)
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.attention.sweep import extent_of
from layerzero.ops.ragged.declare import INT32
from layerzero.ops.ragged.starts import spread
from layerzero.ops.sparse.pattern import BlockPattern, block_mask, checks, guard

NAME = "attention.sparse.block"


def sparse_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indptr: Tensor,
    block_indices: Tensor,
    *,
    block_rows: int,
    block_cols: int,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write the pattern as a mask of all queries and keys, then attend by definition.

    Shapes: query (M, H, D), key (N, K, D), value (N, K, D_v), block_indptr (M / block_rows + 1,), block_indices (Z,) →
    (M, H, D_v); log-sum-exp (H, M). A query that sees no key gives 0 and -inf.
    Dtype: computes in float32, or float64 for float64; returns query.dtype; log-sum-exp float32, natural logarithm.
    Units: block_rows in queries, block_cols in keys. Source: block-sparse attention of FlashInfer, arXiv:2501.01005.
    """
    mask = block_mask(block_indptr, block_indices, len(key) // block_cols)
    mask = mask.repeat_interleave(block_rows, 0).repeat_interleave(block_cols, 1)
    dense = (each.unsqueeze(0) for each in (query, key, value))
    result = attention_reference(*dense, attn_mask=mask, scale=scale, return_lse=return_lse)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


def _fake(
    query: Tensor, key: Tensor, value: Tensor, *_: object, return_lse: bool = False, **__: object
) -> Tensor | tuple[Tensor, Tensor]:
    tokens, heads, _dim = query.shape
    output = query.new_empty((tokens, heads, value.shape[-1]))
    return (output, query.new_empty((heads, tokens), dtype=torch.float32)) if return_lse else output


def _check_values(
    key: Tensor, block_indptr: Tensor, block_indices: Tensor, block_cols: int, **_: object
) -> list[Check]:
    """Values on the device: rows that follow each other, columns of blocks that exist, each once in a row."""
    return checks(block_indptr, block_indices, len(key) // block_cols)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    return {"group": values["heads"] // values["kv_heads"]}


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over the blocks that are seen; every tensor once."""
    pairs = facts["nonzero_blocks"] * facts["block_rows"] * facts["block_cols"]
    dims = facts["head_dim"] + facts["value_dim"]
    elements = dims * (facts["tokens"] * facts["heads"] + facts["kv_tokens"] * facts["kv_heads"])
    return Work(2.0 * facts["heads"] * pairs * dims, float(elements * facts["dtype"].itemsize))


def make_pattern(
    rows: int, columns: int, nonzero: int, device: torch.device | str, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """A random pattern with so many blocks, as many in each row as in the next, nearly; as far as they have room."""
    rows = max(rows, 0)
    starts = spread(min(nonzero, rows * columns), rows, columns)
    where = torch.device("cpu") if generator is None else generator.device
    order = torch.rand((rows, columns), generator=generator, device=where).cpu().argsort(1)
    taken = [order[row, : int(starts[row + 1] - starts[row])].sort().values for row in range(rows)]
    indices = torch.cat(taken) if taken else order.flatten()
    return {"block_indptr": starts.to(device), "block_indices": indices.to(device, torch.int32)}


def _examples(case: Case, _: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict[str, Any]:
    size, blocks = case.sizes, {name: int(str(case.params[name])) for name in ("block_rows", "block_cols")}
    rows, columns = size["block_starts"] - 1, size["kv_tokens"] // blocks["block_cols"]
    return make_pattern(rows, columns, size["nonzero_blocks"], device, generator)


def _case(
    name: str, tokens: int, kv_tokens: int, blocks: tuple[int, int], nonzero: int, heads: tuple[int, int, int]
) -> Case:
    sizes = {"tokens": tokens, "kv_tokens": kv_tokens, "block_starts": tokens // blocks[0] + 1}
    sizes |= {"nonzero_blocks": nonzero, "heads": heads[0], "kv_heads": heads[1]}
    sizes |= {"head_dim": heads[2], "value_dim": heads[2]}
    return Case(name, sizes, {"block_rows": blocks[0], "block_cols": blocks[1]})


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Prefills of one sequence whose blocks see a quarter of the keys."""
    extent, block = extent_of(device, narrow), 64 if device == "cuda" else 32
    for heads in extent.heads[:2]:
        for length in extent.lengths:
            tokens = length // block * block
            if tokens and length <= 16384:
                count = max(tokens // block * (tokens // block) // 4, 1)
                shape = (heads.heads, heads.kv_heads, heads.head_dim)
                yield _case(f"S{tokens} blocks of {block} ({heads})", tokens, tokens, (block, block), count, shape)


def _block(name: str) -> Param:
    return Param(name, int, REQUIRED, example=16)


BLOCK_SPARSE = Operation(
    schema=OperationSchema(
        operation=NAME,
        inputs=(
            TensorSchema("query", ("tokens", "heads", "head_dim"), FLOATING),
            TensorSchema("key", ("kv_tokens", "kv_heads", "head_dim"), FLOATING),
            TensorSchema("value", ("kv_tokens", "kv_heads", "value_dim"), FLOATING),
            TensorSchema("block_indptr", ("block_starts",), INT32, same_dtype=False, counts=("nonzero_blocks",)),
            TensorSchema("block_indices", ("nonzero_blocks",), INT32, same_dtype=False, indexes=("kv_tokens",)),
        ),
        outputs=(
            TensorSchema("output", ("tokens", "heads", "value_dim")),
            TensorSchema("lse", ("heads", "tokens"), frozenset({torch.float32}), when="return_lse"),
        ),
        params=(
            _block("block_rows"),
            _block("block_cols"),
            SCALE,
            RETURN_LSE,
            Param(
                "block_pattern",
                BlockPattern,
                None,
                Role.HANDLE,
                made_of=("block_indptr", "block_indices"),
                make=lambda given, _: BlockPattern(given["block_indptr"], given["block_indices"]),
            ),
        ),
        axes=(
            Axis("tokens", scales=True, live=True, codes=LENGTH),
            Axis("kv_tokens", scales=True, live=True, codes=LENGTH),
            Axis("block_starts", live=True, implied=True),
            Axis("nonzero_blocks", scales=True, live=True),
            Axis("kv_heads", scales=True, beside=True, apart=True, carries=("heads",)),
            Axis("heads", scales=True, beside=True),
            Axis("group", implied=True),
            *HEAD_DIMS,
        ),
    ),
    summary="Attention of blocks of queries to some blocks of keys",
    reference=sparse_reference,
    fake=_fake,
    cases=(
        _case("small", 64, 96, (16, 16), 9, (4, 2, 64)),
        _case("llama3_8b_t8192_quarter", 8192, 8192, (64, 64), 4096, (32, 8, 128)),
    ),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    aliases={each: fact for each, fact in ALIASES.items() if fact in ("heads", "kv_heads")},
    derive=_derive,
    derived=("group",),
    derived_from={"group": ("heads", "kv_heads")},
    work=_work,
    check_values=_check_values,
    guard=guard,
    examples=_examples,
    scratch=lambda sizes: sizes["heads"] * sizes["kv_tokens"] * max(sizes["tokens"], sizes["head_dim"]),
    sweep=_sweep,
)
OPERATIONS = (BLOCK_SPARSE,)

"""``lz.sparse_attention``: its signature, the checks of a call, and the route."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.checks import check_dense
from layerzero.ops.paged.problems import shape_problems
from layerzero.ops.sparse.declare import BLOCK_SPARSE, OPERATIONS
from layerzero.ops.sparse.draw import sparse_attention as draw
from layerzero.ops.sparse.pattern import BlockPattern, entry_problems, pattern_problems

NAME = "sparse_attention"


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indptr: Tensor,
    block_indices: Tensor,
    block_rows: int,
    block_cols: int,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    block_pattern: BlockPattern | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from blocks of queries to some blocks of keys, all of a block or nothing of it.

    Shapes: query (M, H, D), key (N, K, D), value (N, K, D_v), H a multiple of K, M a multiple of ``block_rows`` and N
        of ``block_cols``; block_indptr (M / block_rows + 1,), block_indices (Z,) → (M, H, D_v).
    Dtype: query, key and value the same floating dtype; the pattern int32, on the same device.
    Args:
        block_indptr: where each row's blocks begin: 0, then the end of each row. Rows may be empty.
        block_indices: the columns of blocks that rows see, each once in a row, in any order.
        block_rows, block_cols: queries and keys of a block.
        scale: factor on the scores, 1/sqrt(D) by default.
        return_lse: also return the log-sum-exp of the scores, float32 (H, M), natural logarithm.
        block_pattern: the :class:`layerzero.BlockPattern` of these two, so that kernels which plan do so once.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; on a
        CPU and in debug mode for a pattern that leads beyond the keys, decreases, or names a block twice.
    Source: BlockSparseAttentionWrapper of FlashInfer, arXiv:2501.01005.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(NAME, arguments)
    indptr, indices = arguments["block_indptr"], arguments["block_indices"]
    problems = shape_problems(arguments, ("query", "key", "value"), 3) + pattern_problems(indptr, indices)
    sizes = [arguments[name] for name in ("block_rows", "block_cols")]
    for name, size in zip(("block_rows", "block_cols"), sizes, strict=True):
        if type(size) is not int or not 1 <= size < 2**31:
            problems.append(f"{name}: wanted a number of at least 1, got {told(size)}")
    if problems:
        raise InvalidCallError(NAME, problems)
    query, key = arguments["query"], arguments["key"]
    heads, kv_heads = query.shape[1], key.shape[1]
    if not heads or not kv_heads or not query.shape[2]:
        raise InvalidCallError(NAME, [f"wanted heads and head dim above 0, got {query.shape} and {key.shape}"])
    if heads % kv_heads:
        problem = f"query heads must be a multiple of kv heads: got {heads} query heads and {kv_heads} kv heads"
        raise InvalidCallError(NAME, [problem], ReasonCode.GQA_HEADS_MISMATCH)
    rows = len(indptr) - 1
    if len(query) != rows * sizes[0]:
        problems.append(f"query: wanted {rows} rows of {sizes[0]} queries as block_indptr says, got {len(query)}")
    if len(key) % sizes[1]:
        problems.append(f"key: wanted whole blocks of {sizes[1]} keys, got {len(key)}")
    if indptr.is_cpu and type(indptr) is Tensor and not problems:
        problems += entry_problems(indptr, indices, len(key) // sizes[1])
    pattern, scale = arguments["block_pattern"], arguments["scale"]
    if isinstance(scale, (int, float)) and not math.isfinite(scale):
        problems.append(f"scale: wanted a finite number, got {scale}")
    belongs = pattern.kind_for(indptr, indices) if isinstance(pattern, BlockPattern) else ""
    if belongs in ("foreign", "stale"):
        wanted = "the BlockPattern of these two" if belongs == "foreign" else "advance() after they changed"
        problems.append(f"block_pattern: wanted {wanted}, got a {belongs} one")
    canonical = dict(arguments)
    if isinstance(scale, (int, float)) and math.isclose(scale, query.shape[2] ** -0.5, rel_tol=1e-7):
        canonical["scale"] = None  # the default, spelled out: kernels without a scale argument stay legal
    problems += BLOCK_SPARSE.schema.validate(**canonical)
    if problems:
        raise InvalidCallError(NAME, problems)
    return Routed(BLOCK_SPARSE, canonical, varies=("nonzero_blocks",))


SPARSE_ATTENTION = Function(
    name=NAME,
    signature=sparse_attention,
    route=_route,
    operations=OPERATIONS,
    draw=draw,
    weight=1,
    state=frozenset({"sdpa"}),
)
FUNCTIONS = (SPARSE_ATTENTION,)

"""``lz.mla_attention``: its signature, the checks of a call, and the route."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.latent.declare import MLA_DECODE_PAGED, OPERATIONS
from layerzero.ops.latent.draw import mla_attention as draw
from layerzero.ops.paged.problems import shape_problems
from layerzero.ops.paged.step import StepMetadata, table_problems

NAME = "mla_attention"


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest tokens of each sequence to a paged latent cache, with absorbed projections.

    Shapes: q_nope (B, S, H, C), q_pe (B, S, H, R), ckv_cache (P, N, C), kpe_cache (P, N, R), block_tables
        (B, max_blocks), context_lens (B,) → (B, S, H, C). DeepSeek has C = 512 and R = 64.
    Dtype: queries and cache the same floating dtype; tables and lengths int32, on the same device.
    Args:
        q_nope: queries times the keys' up-projection of their head, so that they meet latent vectors.
        q_pe: the rotated part of the queries.
        ckv_cache: latent vectors, keys and values at once.
        kpe_cache: the rotated part of the keys, shared by all heads. Planes that are columns of one tensor
            (P, N, C + R) have more kernels.
        block_tables: the pages of each sequence in order; what lies beyond its last one is not read.
        context_lens: tokens of each sequence, these included: query i of S sees the keys below ``length - S + 1 + i``.
        scale: factor on the scores. It has no default: the width of a key before its projection was absorbed decides
            it (192 in DeepSeek-V3), which no tensor here has.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, S), natural logarithm.
        max_context_len: upper bound of ``context_lens`` that the caller knows.
        step: the :class:`layerzero.StepMetadata` of these tables and lengths, so that kernels plan once for all layers.
    Returns: the output, still latent, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got.
    Source: DeepSeek-V2, arXiv:2405.04434. Prefill with projected keys and values is ``lz.ragged_attention``.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(NAME, arguments)
    tables, step = (arguments["block_tables"], arguments["context_lens"]), arguments["step"]
    problems = table_problems(*tables)
    problems += shape_problems(arguments, ("q_nope", "q_pe"), 4) + shape_problems(arguments, _PLANES, 3)
    if problems:
        raise InvalidCallError(NAME, problems)
    q_nope, planes = arguments["q_nope"], [arguments[name] for name in _PLANES]
    if not q_nope.shape[2] or not planes[0].shape[1] or not all(each.shape[2] for each in planes):
        shapes = f"q_nope {tuple(q_nope.shape)}, caches {tuple(planes[0].shape)} and {tuple(planes[1].shape)}"
        raise InvalidCallError(NAME, [f"wanted heads, widths and page size above 0, got {shapes}"])
    scale = arguments["scale"]
    if isinstance(scale, (int, float)) and not math.isfinite(scale):
        problems.append(f"scale: wanted a finite number, got {scale}")
    belongs = step.kind_for(*tables) if isinstance(step, StepMetadata) else ""
    if belongs == "foreign":
        problems.append("step: wanted the StepMetadata of these block_tables and context_lens, got that of others")
    if belongs == "stale":
        problems.append("step: wanted advance() after block_tables or context_lens changed, got a step of old values")
    problems += MLA_DECODE_PAGED.schema.validate(**arguments)
    if problems:
        raise InvalidCallError(NAME, problems)
    return Routed(MLA_DECODE_PAGED, arguments, varies=("batch", "max_blocks", "pages"))


_PLANES = ("ckv_cache", "kpe_cache")

MLA_ATTENTION = Function(
    name=NAME,
    signature=mla_attention,
    route=_route,
    operations=OPERATIONS,
    draw=draw,
    state=frozenset({"sdpa"}),
)
FUNCTIONS = (MLA_ATTENTION,)

"""``lz.merge_attention_states`` and ``lz.cascade_attention``: their signatures, the checks of a call, the routes."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.cascade import draw
from layerzero.ops.cascade.declare import CASCADE
from layerzero.ops.cascade.merge import MERGE_STATES
from layerzero.ops.checks import check_dense, score_problems
from layerzero.ops.paged import written
from layerzero.ops.paged.problems import head_problems, layout_problems, shape_problems
from layerzero.ops.paged.step import StepMetadata, table_problems


def merge_attention_states(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Make attention over two parts of the keys attention over both.

    Shapes: output_a, output_b (T, H, D_v), lse_a, lse_b (H, T) → (T, H, D_v), (H, T), as ``lz.ragged_attention`` and
        ``lz.paged_attention`` with ``cu_seqlens_q`` return them; each part has keys of its own.
    Dtype: both outputs the same floating dtype, which the result has; log-sum-exps float32, natural logarithm.
    Returns: the output and its log-sum-exp. A part that saw no key (0 and -inf, as attention gives it) has no share;
        neither saw one: 0 and -inf.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit.
    Source: online softmax, arXiv:1805.02867.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    shared_blocks: int,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest token of each sequence, where all sequences begin with the same pages.

    The result is that of ``lz.paged_attention``; kernels that read the shared pages once for all sequences are
    candidates, and so are those that do not, where they are faster.

    Shapes: query (B, 1, H, D); caches, block_tables and context_lens as in ``lz.paged_attention`` → (B, 1, H, D_v).
    Dtype: query and caches the same floating dtype; tables and lengths int32, on the same device.
    Args:
        shared_blocks: a promise that the first so many pages of every table are the same, and full. Found broken on a
            CPU by kernels that rely on it, and in debug mode.
        scale, layout, window, softcap, max_context_len, step: as in ``lz.paged_attention``.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1), natural logarithm.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got.
    Source: cascade inference of FlashInfer, arXiv:2501.01005.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route_merge(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "merge_attention_states"
    check_dense(name, arguments)
    problems = MERGE_STATES.schema.validate(**arguments)
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(MERGE_STATES, arguments, varies=("tokens",))


def _route_cascade(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "cascade_attention"
    check_dense(name, arguments)
    layout, step = arguments["layout"], arguments["step"]
    tables = arguments["block_tables"], arguments["context_lens"]
    problems = table_problems(*tables)
    problems += shape_problems(arguments, ("query", "key_cache", "value_cache"), 4)
    problems += layout_problems(layout)
    if problems:
        raise InvalidCallError(name, problems)
    query, key_cache = arguments["query"], arguments["key_cache"]
    if query.shape[1] != 1:
        raise InvalidCallError(name, [f"query: wanted one token a sequence (B, 1, H, D), got {tuple(query.shape)}"])
    written.check(name, {each: arguments[each] for each in ("key_cache", "value_cache")}, layout)
    problems, uneven = head_problems(query, key_cache, layout)
    if problems:
        raise InvalidCallError(name, problems, ReasonCode.GQA_HEADS_MISMATCH if uneven else None)
    problems = score_problems(arguments)
    shared, most = arguments["shared_blocks"], tables[0].shape[1]
    if type(shared) is not int or not 1 <= shared <= most:
        problems.append(f"shared_blocks: wanted 1 to {most}, the pages of a table, got {told(shared)}")
    belongs = step.kind_for(*tables) if isinstance(step, StepMetadata) else ""
    if belongs == "foreign":
        problems.append("step: wanted the StepMetadata of these block_tables and context_lens, got that of others")
    if belongs == "stale":
        problems.append("step: wanted advance() after block_tables or context_lens changed, got a step of old values")
    canonical = {each: value for each, value in arguments.items() if each != "layout"}
    window, scale = canonical["window"], canonical["scale"]
    if not problems and window is not None:  # nothing lies to the right of the newest token
        canonical["window"] = None if window[0] < 0 else (window[0], 0)
    if isinstance(scale, (int, float)) and math.isclose(scale, query.shape[3] ** -0.5, rel_tol=1e-7):
        canonical["scale"] = None  # the default, spelled out: kernels without a scale argument stay legal
    problems += CASCADE.schema.validate(layout=layout, **canonical)
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(CASCADE, canonical, layout, varies=("batch", "pages"))


MERGE_ATTENTION_STATES = Function(
    name="merge_attention_states",
    signature=merge_attention_states,
    route=_route_merge,
    operations=(MERGE_STATES,),
    draw=draw.merge_states,
    weight=1,
)
CASCADE_ATTENTION = Function(
    name="cascade_attention",
    signature=cascade_attention,
    route=_route_cascade,
    operations=(CASCADE,),
    draw=draw.cascade_attention,
    weight=1,
    state=frozenset({"sdpa"}),
)
FUNCTIONS = (MERGE_ATTENTION_STATES, CASCADE_ATTENTION)

"""``lz.paged_attention`` and ``lz.append_paged_kv``: their signatures, the checks of a call, and the routes."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.checks import check_dense, overlaps, score_problems
from layerzero.ops.paged import draw, written
from layerzero.ops.paged.declare import APPEND_PAGED, CACHE_LAYOUTS, GQA_DECODE_PAGED, STANDARD_DECODE_PAGED
from layerzero.ops.paged.step import StepMetadata, table_problems


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest token of each sequence to all its tokens in a paged cache.

    Shapes: query (B, 1, H, D); key_cache (P, N, K, D) and value_cache (P, N, K, D_v) in NHD, axes 1 and 2 swapped in
        HND; H a multiple of K; block_tables (B, max_blocks); context_lens (B,) → (B, 1, H, D_v).
    Dtype: query and caches the same floating dtype; tables and lengths int32, on the same device.
    Args:
        block_tables: the pages of each sequence, in order; entries beyond its last page may hold anything.
        context_lens: tokens of each sequence that are in the cache, the query's own included. 0 gives 0 and -inf.
        scale: factor on the scores, 1/sqrt(D) by default.
        layout: ``"NHD"`` or ``"HND"``.
        window: (left, right) as in ``lz.attention``; only left counts, since nothing is to the right.
        softcap: ``c * tanh(score / c)`` on the scores.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1), natural logarithm.
        max_context_len: an upper bound of context_lens that the caller knows; what the tables hold if None. Kernels
            size their work by it. A length above it is the caller's mistake: found on a CPU and in debug mode.
        step: the :class:`layerzero.StepMetadata` of these tables and lengths, so that kernels that plan on the host
            do so once for all layers.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; in
        debug mode and on a CPU for pages and lengths out of range, too. NoKernelFoundError if policy leaves no kernel.
    Source: PagedAttention, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def append_paged_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place.

    Shapes: key (T, K, D), value (T, K, D_v); caches as in ``lz.paged_attention``; slot_mapping (T,).
    Dtype: keys, values and caches the same floating dtype; slot_mapping int64, on the same device.
    Args:
        slot_mapping: ``page * page_size + offset`` of each token, -1 for padding; each slot at most once.
            ``StepMetadata.slot_mapping`` makes it from tables and lengths.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share memory with the new
        tokens or with each other; on a CPU and in debug mode for slots beyond the cache, too.
    Source: reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route_attention(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "paged_attention"
    check_dense(name, arguments)
    query, key_cache, step = arguments["query"], arguments["key_cache"], arguments["step"]
    problems = table_problems(arguments["block_tables"], arguments["context_lens"])
    problems += _shape_problems(arguments, ("query", "key_cache", "value_cache"), 4)
    problems += _layout_problems(arguments["layout"])
    if problems:
        raise InvalidCallError(name, problems)
    if query.shape[1] != 1:
        problem = f"query: wanted one token a sequence (B, 1, H, D), got {tuple(query.shape)}"
        raise InvalidCallError(name, [problem])
    layout = arguments["layout"]
    written.check(name, {each: arguments[each] for each in ("key_cache", "value_cache")}, layout)
    heads, kv_heads = query.shape[2], key_cache.shape[1 + layout.index("H")]
    if not heads or not kv_heads or not query.shape[3] or not key_cache.shape[1 + layout.index("N")]:
        shapes = f"query {tuple(query.shape)} and key_cache {tuple(key_cache.shape)} in {layout}"
        raise InvalidCallError(name, [f"wanted heads, head dim and page size above 0, got {shapes}"])
    if heads % kv_heads:
        problem = (
            f"query heads must be a multiple of kv heads: got {heads} query heads and {kv_heads} kv heads in {layout} "
            f"(key_cache {tuple(key_cache.shape)}); pass layout= if the axes are the other way round"
        )
        raise InvalidCallError(name, [problem], ReasonCode.GQA_HEADS_MISMATCH)
    problems = score_problems(arguments)
    tables = arguments["block_tables"], arguments["context_lens"]
    belongs = step.kind_for(*tables) if isinstance(step, StepMetadata) else ""
    if belongs == "foreign":
        problems.append("step: wanted the StepMetadata of these block_tables and context_lens, got that of others")
    if belongs == "stale":
        problems.append("step: wanted advance() after block_tables or context_lens changed, got a step of old values")
    operation = STANDARD_DECODE_PAGED if heads == kv_heads else GQA_DECODE_PAGED
    canonical = {each: value for each, value in arguments.items() if each != "layout"}
    window, scale = canonical["window"], canonical["scale"]
    if not problems and window is not None:  # nothing lies to the right of the newest token
        canonical["window"] = None if window[0] < 0 else (window[0], 0)
    if isinstance(scale, (int, float)) and math.isclose(scale, query.shape[3] ** -0.5, rel_tol=1e-7):
        canonical["scale"] = None  # the default, spelled out: kernels without a scale argument stay legal
    problems += operation.schema.validate(layout=layout, **canonical)
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(operation, canonical, layout, varies=("batch", "max_blocks", "pages"))


def _route_append(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "append_paged_kv"
    check_dense(name, arguments)
    problems = _shape_problems(arguments, ("key", "value"), 3)
    problems += _shape_problems(arguments, ("key_cache", "value_cache"), 4)
    problems += _layout_problems(arguments["layout"])
    if problems:
        raise InvalidCallError(name, problems)
    layout = arguments["layout"]
    written.check(name, {each: arguments[each] for each in ("key_cache", "value_cache")}, layout)
    canonical = {each: value for each, value in arguments.items() if each != "layout"}
    problems = APPEND_PAGED.schema.validate(layout=layout, **canonical)
    keys, values = arguments["key_cache"], arguments["value_cache"]
    for cache in ("key_cache", "value_cache"):
        tensor = arguments[cache]
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            problems.append(f"{cache}: wanted memory of its own, got an expanded view with strides {tensor.stride()}")
        for new in ("key", "value", "slot_mapping"):
            if isinstance(arguments[new], Tensor) and overlaps(tensor, arguments[new]):
                problems.append(f"{cache}: wanted memory of its own, got memory that it shares with {new}")
    if keys.device.type != "meta" and overlaps(keys, values) and not _side_by_side(keys, values):
        problems.append("value_cache: wanted memory of its own, got that of key_cache")
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(APPEND_PAGED, canonical, layout, varies=("tokens", "pages"))


def _side_by_side(left: Tensor, right: Tensor) -> bool:
    """Whether two caches alternate page by page in one tensor, as views of (P, 2, N, K, D) do."""
    if left.stride() != right.stride() or left.shape != right.shape:
        return False
    apart = abs(int(left.storage_offset()) - int(right.storage_offset()))
    inner = 1 + sum((size - 1) * step for size, step in zip(left.shape[1:], left.stride()[1:], strict=True))
    return inner <= apart and apart + inner <= left.stride(0)


def _shape_problems(arguments: dict[str, Any], names: tuple[str, ...], ndim: int) -> list[str]:
    problems = []
    for name in names:
        tensor = arguments[name]
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif tensor.ndim != ndim:
            problems.append(f"{name}: wanted a {ndim}D tensor, got {tensor.ndim}D {tuple(tensor.shape)}")
    return problems


def _layout_problems(layout: object) -> list[str]:
    fits = isinstance(layout, str) and layout in CACHE_LAYOUTS
    return [] if fits else [f"layout: wanted {' or '.join(CACHE_LAYOUTS)}, got {told(layout)}"]


PAGED_ATTENTION = Function(
    name="paged_attention",
    signature=paged_attention,
    route=_route_attention,
    operations=(STANDARD_DECODE_PAGED, GQA_DECODE_PAGED),
    draw=draw.paged_attention,
    state=frozenset({"sdpa"}),
)
APPEND_PAGED_KV = Function(
    name="append_paged_kv",
    signature=append_paged_kv,
    route=_route_append,
    operations=(APPEND_PAGED,),
    draw=draw.append_paged_kv,
    weight=1,
    may_share_storage=frozenset({frozenset({"key_cache", "value_cache"})}),
)
FUNCTIONS = (PAGED_ATTENTION, APPEND_PAGED_KV)

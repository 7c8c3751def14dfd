"""``lz.ragged_attention``: its signature, the checks of a call, and the route."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.checks import check_dense, score_problems
from layerzero.ops.ragged.declare import GQA_RAGGED, OPERATIONS, STANDARD_RAGGED
from layerzero.ops.ragged.draw import ragged_attention as draw
from layerzero.ops.ragged.starts import shape_problems, value_problems
from layerzero.ops.ragged.step import RaggedMetadata

NAME = "ragged_attention"


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = True,
    scale: float | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    step: RaggedMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within sequences of unlike lengths that lie one after the other, without padding between them.

    Shapes: query (T, H, D), key (T_k, K, D), value (T_k, K, D_v), H a multiple of K; cu_seqlens_q and cu_seqlens_k
        (B + 1,) → (T, H, D_v).
    Dtype: query, key and value the same floating dtype; starts int32, on the same device.
    Args:
        cu_seqlens_q: where each sequence's queries begin: 0, then the end of each. Sequences may be empty.
        cu_seqlens_k: the same of its keys; the same tensor where both are of one length.
        causal: hide keys in the future; the last query of a sequence is aligned with its last key.
        scale: factor on the scores, 1/sqrt(D) by default.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths that the caller knows; all tokens together if None.
            Kernels size their work by them. A longer sequence is the caller's mistake: found in debug mode.
        window: (left, right) keys around the query's own position that it sees, as in ``lz.attention``.
        softcap: ``c * tanh(score / c)`` on the scores.
        sinks: (H,), one extra logit a head.
        alibi_slopes: (H,) or (B, H).
        return_lse: also return the log-sum-exp of the scores, float32 (H, T), natural logarithm.
        step: the :class:`layerzero.RaggedMetadata` of these starts, so that kernels that plan on the host do so once
            for all layers.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf (with sinks, the sink).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; on a
        CPU and in debug mode for starts that do not begin at 0, decrease, or end elsewhere than the tokens.
        NoKernelFoundError if policy leaves no kernel.
    Source: flash_attn_varlen_func of FlashAttention, arXiv:2205.14135.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    """Check a call and choose the operation by head counts."""
    check_dense(NAME, arguments)
    shapes = _shapes(arguments)
    (_tokens, heads, head_dim), kv_heads = shapes[0], shapes[1][1]
    if not heads or not kv_heads or not head_dim:
        raise _invalid(f"wanted heads and head dim above 0, got query {shapes[0]} and key {shapes[1]}")
    if heads % kv_heads:
        problem = f"query heads must be a multiple of kv heads: got {heads} query heads and {kv_heads} kv heads"
        raise _invalid(f"{problem} (query {shapes[0]}, key {shapes[1]})", ReasonCode.GQA_HEADS_MISMATCH)
    canonical = dict(arguments)
    problems = score_problems(arguments) + _start_problems(arguments)
    if not isinstance(arguments["causal"], bool):
        problems.append(f"causal: wanted bool, got {told(arguments['causal'])}")
    slopes, sequences = arguments["alibi_slopes"], len(arguments["cu_seqlens_q"]) - 1 if not problems else 0
    if isinstance(slopes, Tensor) and not problems and tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        wanted = f"({heads},) or ({sequences}, {heads})"
        problems.append(f"alibi_slopes: wanted shape {wanted}, got {tuple(slopes.shape)}")
    if not problems and canonical["window"] is not None:
        canonical["window"] = None if tuple(canonical["window"]) == (-1, -1) else tuple(canonical["window"])
    scale = canonical["scale"]
    if isinstance(scale, (int, float)) and math.isclose(scale, head_dim**-0.5, rel_tol=1e-7):
        canonical["scale"] = None  # the default, spelled out: kernels without a scale argument stay legal
    operation = STANDARD_RAGGED if heads == kv_heads else GQA_RAGGED
    problems += operation.schema.validate(**canonical)
    if problems:
        raise InvalidCallError(NAME, problems)
    by_sequence = slopes is not None and slopes.ndim == 2
    return Routed(operation, canonical, varies=("tokens", "kv_tokens") if by_sequence else _VARIES)


_VARIES = ("tokens", "kv_tokens", "starts")


def _start_problems(arguments: dict[str, Any]) -> list[str]:
    starts, others = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    problems = shape_problems("cu_seqlens_q", starts, tokens=len(arguments["query"]))
    problems += shape_problems("cu_seqlens_k", others, None if problems else len(starts), len(arguments["key"]))
    step = arguments["step"]
    if problems:
        return problems
    for name, of in (("cu_seqlens_q", "query"), ("cu_seqlens_k", "key")):
        if arguments[name].is_cpu and type(arguments[name]) is Tensor:
            problems += value_problems(name, arguments[name], len(arguments[of]))
    if isinstance(step, RaggedMetadata):
        if step.is_stale:
            problems.append("step: wanted advance() after cu_seqlens changed, got a step of old values")
        elif not step.belongs(starts, others):
            problems.append("step: wanted the RaggedMetadata of these cu_seqlens, got that of others")
    return problems


def _invalid(problem: str, code: ReasonCode | None = None) -> InvalidCallError:
    return InvalidCallError(NAME, [problem], code)


def _shapes(arguments: dict[str, Any]) -> list[tuple[int, ...]]:
    problems = []
    for name in ("query", "key", "value"):
        tensor = arguments[name]
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif tensor.ndim != 3:
            wanted = "a 3D tensor (tokens, heads, head dim)"
            problems.append(f"{name}: wanted {wanted}, got {tensor.ndim}D {tuple(tensor.shape)}")
    if problems:
        raise InvalidCallError(NAME, problems)
    return [tuple(arguments[name].shape) for name in ("query", "key", "value")]


RAGGED_ATTENTION = Function(
    name=NAME,
    signature=ragged_attention,
    route=route,
    operations=OPERATIONS,
    draw=draw,
    weight=3,
    state=frozenset({"sdpa"}),
)
FUNCTIONS = (RAGGED_ATTENTION,)

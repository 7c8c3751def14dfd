"""``lz.split_qkv_norm_rope_append_``: its signature, the checks of a call, and the route."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.paged import written
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.rope.normed import norm_problems
from layerzero.ops.rope.split import parts
from layerzero.ops.rope_append import draw
from layerzero.ops.rope_append.route import CACHES, memory_problems, size_problems, varying
from layerzero.ops.rope_append.split import SPLIT_APPEND, SPLIT_APPEND_PAGED

_NAME = "split_qkv_norm_rope_append_"
_READ = ("qkv", "cos", "sin", "positions", "slot_mapping", "q_weight", "k_weight")


def split_qkv_norm_rope_append_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
    layout: str = "NHD",
) -> Tensor:
    """Take a joined product apart, norm and rotate queries and keys, write keys and values into a cache in place.

    ``lz.split_qkv_norm_rope`` and an append as one call: all that lies between ``lz.linear`` with joined weights and
    the attention over a cache.

    Shapes: paged: qkv (T, (H + 2 K) * D), a token's queries first, then its keys, then its values, positions and
        slot_mapping (T,), caches (P, N, K, D) in NHD → (T, H, D); contiguous: qkv (B, S, (H + 2 K) * D), positions
        (B, S), (1, S) or (S,), caches (B, L, K, D) in NHD → (B, S, H, D). Axes 1 and 2 of caches are swapped in HND.
        cos and sin (P, R/2), R at most D; q_weight and k_weight (D,). K and D are the cache's, H is what is left.
    Dtype: qkv, weights and caches the same floating dtype; cos, sin and positions as of ``lz.rope``; slot_mapping
        int64.
    Units: eps in x^2.
    Args:
        positions, slot_mapping, layout: as of ``lz.rope_append_``.
        q_weight, k_weight, eps, plus_one, interleaved: as of ``lz.split_qkv_norm_rope``.
    Returns: the queries. Keys and values are in the cache alone.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for a width that leaves no queries, for one
        weight without the other, for caches that share elements with what is read or with each other, before anything
        is written; on a CPU and in debug mode for positions and slots that lead nowhere or are
        named twice, too.
    Source: Qwen3, arXiv:2505.09388; RoFormer, arXiv:2104.09864; reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(_NAME, arguments)
    paged, layout = arguments["slot_mapping"] is not None, arguments["layout"]
    operation = SPLIT_APPEND_PAGED if paged else SPLIT_APPEND
    problems = _rank_problems(arguments, 2 if paged else 3)
    if not isinstance(layout, str) or layout not in CACHE_LAYOUTS:
        problems.append(f"layout: wanted {' or '.join(CACHE_LAYOUTS)}, got {told(layout)}")
    problems = problems or _part_problems(arguments, layout)
    if problems:
        raise InvalidCallError(_NAME, problems)
    written.check(_NAME, {each: arguments[each] for each in CACHES}, layout)
    canonical = {
        name: value for name, value in arguments.items() if name != "layout" and (paged or name != "slot_mapping")
    }
    problems = operation.schema.validate(layout=layout, **canonical)
    if problems:
        raise InvalidCallError(_NAME, problems)
    kv_heads = arguments["key_cache"].shape[1 + layout.index("H")]
    heads = arguments["qkv"].shape[-1] // arguments["key_cache"].shape[-1] - 2 * kv_heads
    views = dict(zip(("query", "key", "value"), parts(arguments["qkv"], heads, kv_heads), strict=True))
    problems = size_problems(arguments | views, layout) + norm_problems(arguments)
    problems = problems or memory_problems(arguments, _READ)
    if problems:
        raise InvalidCallError(_NAME, problems)
    return Routed(operation, canonical, layout, varies=varying(arguments | views, layout))


def _rank_problems(arguments: dict[str, Any], ndim: int) -> list[str]:
    """What is wrong with the numbers of axes, by which everything else is read."""
    problems = []
    wanted = "(tokens, features)" if ndim == 2 else "(batch, sequence, features) without slot_mapping"
    for name in ("qkv", *CACHES, "cos", "sin", "positions"):
        tensor = arguments[name]
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif name == "qkv" and tensor.ndim != ndim:
            problems.append(f"{name}: wanted {wanted}, got {tensor.ndim}D {tuple(tensor.shape)}")
        elif name in CACHES and tensor.ndim != 4:
            problems.append(f"{name}: wanted a 4D tensor, got {tensor.ndim}D {tuple(tensor.shape)}")
    return problems


def _part_problems(arguments: dict[str, Any], layout: str) -> list[str]:
    """What is wrong with the parts of the product, whose width and number the cache tells."""
    width, cache = arguments["qkv"].shape[-1], arguments["key_cache"].shape
    head_dim, kv_heads = cache[-1], cache[1 + layout.index("H")]
    problems = []
    if not head_dim or not kv_heads:
        problems.append(f"key_cache: wanted heads and widths above 0, got {tuple(cache)} in {layout}")
    elif width % head_dim or width // head_dim <= 2 * kv_heads:
        wanted = f"a multiple of the cache's head_dim {head_dim}, of more than 2 * {kv_heads} heads"
        problems.append(f"qkv: wanted {wanted} in the last axis, got {width}")
    given = [name for name in ("q_weight", "k_weight") if arguments[name] is not None]
    if len(given) == 1:
        problems.append(f"wanted both q_weight and k_weight or none of them, got {given[0]} alone")
    return problems


SPLIT_FUNCTION = Function(
    name=_NAME,
    signature=split_qkv_norm_rope_append_,
    route=_route,
    operations=(SPLIT_APPEND, SPLIT_APPEND_PAGED),
    draw=draw.split_qkv_norm_rope_append_,
    renamed={"split_qkv_norm_rope_append": _NAME},
    may_share_storage=frozenset({frozenset(CACHES)}),
)

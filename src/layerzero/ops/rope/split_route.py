"""``lz.split_qkv_norm_rope``: its signature, the checks of a call, and the route."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.rope import draw
from layerzero.ops.rope.normed import norm_problems
from layerzero.ops.rope.route import size_problems, varying
from layerzero.ops.rope.split import SPLIT_QKV_NORM_ROPE, parts

_NAME = "split_qkv_norm_rope"


def split_qkv_norm_rope(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take a joined product apart into queries, keys and values; norm and rotate queries and keys.

    What lies between ``lz.linear`` with joined weights and the attention, as one call: ``lz.qk_norm_rope`` where there
    are weights, ``lz.rope`` where there are none.

    Shapes: qkv (T, (H + 2 K) * D) or (B, S, (H + 2 K) * D), a token's queries first, then its keys, then its values;
        cos and sin (P, R/2), R at most D; positions (T,), or (B, S), (1, S) or (S,); q_weight and k_weight (D,)
        → (T, H, D), (T, K, D), (T, K, D), or with B and S in place of T.
    Dtype: qkv and weights the same floating dtype, returned; cos, sin and positions as of ``lz.rope``.
    Units: eps in x^2.
    Args:
        heads, kv_heads: H and K; D is what is left.
        q_weight, k_weight: scale the root mean square norm of each head; both or none. eps and plus_one do nothing
            without them.
        eps, plus_one: as of ``lz.qk_norm_rope``.
        positions, interleaved: as of ``lz.rope``.
    Returns: queries, keys and values; none of them shares memory with qkv, all three may lie in one tensor.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for a width that is no multiple of
        H + 2 K, for one weight without the other; on a CPU and in debug mode for positions beyond the table, too.
    Source: Qwen3, arXiv:2505.09388; RoFormer, arXiv:2104.09864.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(_NAME, arguments)
    problems = _qkv_problems(arguments)
    problems = problems or SPLIT_QKV_NORM_ROPE.schema.validate(**arguments)
    if problems:
        raise InvalidCallError(_NAME, problems)
    query, key, _ = parts(*(arguments[name] for name in ("qkv", "heads", "kv_heads")))
    views = {"query": query, "key": key, **{name: arguments[name] for name in ("cos", "sin", "positions")}}
    problems = size_problems(views, "BSHD") + norm_problems(arguments)
    weight, width = arguments["q_weight"], query.shape[-1]
    if weight is not None and weight.shape[0] != width:
        problems.append(f"q_weight: wanted head_dim {width}, of which qkv has as many heads, got {weight.shape[0]}")
    if problems:
        raise InvalidCallError(_NAME, problems)
    return Routed(SPLIT_QKV_NORM_ROPE, arguments, varies=varying(views, "BSHD"))


def _qkv_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with what everything else is read by."""
    qkv, heads, kv_heads = (arguments[name] for name in ("qkv", "heads", "kv_heads"))
    problems = [
        f"{name}: wanted a number above 0, got {told(count)}"
        for name, count in (("heads", heads), ("kv_heads", kv_heads))
        if type(count) is not int or count < 1
    ]
    if not isinstance(qkv, Tensor):
        return [*problems, f"qkv: wanted a tensor, got {type(qkv).__name__}"]
    if qkv.ndim not in (2, 3):
        wanted = "(tokens, features) or three axes with a batch first"
        return [*problems, f"qkv: wanted {wanted}, got {qkv.ndim}D {tuple(qkv.shape)}"]
    if not problems and (qkv.shape[-1] % (heads + 2 * kv_heads) or not qkv.shape[-1]):
        wanted = f"{heads} + 2 * {kv_heads} heads of one width in the last axis"
        problems.append(f"qkv: wanted {wanted}, a multiple of {heads + 2 * kv_heads}, got {qkv.shape[-1]}")
    given = [name for name in ("q_weight", "k_weight") if arguments[name] is not None]
    if len(given) == 1:
        problems.append(f"wanted both q_weight and k_weight or none of them, got {given[0]} alone")
    return problems


FUNCTIONS = (Function(_NAME, split_qkv_norm_rope, _route, (SPLIT_QKV_NORM_ROPE,), draw=draw.split_qkv_norm_rope),)

"""``lz.qk_norm_rope``: its signature, the checks of a call, and the route."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.rope import draw
from layerzero.ops.rope.normed import QK_NORM_ROPE, norm_problems
from layerzero.ops.rope.route import routed


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
    layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys by its root mean square, scale it by a weight, then rotate it.

    ``lz.rope(lz.rms_norm(query, q_weight), lz.rms_norm(key, k_weight), cos, sin, positions)`` as one call.

    Shapes: query, key, cos, sin and positions as of ``lz.rope``; q_weight and k_weight (D,) → query's and key's. The
        norm takes all D entries of a head, the rotation the first R.
    Dtype: query, key and both weights the same floating dtype, returned; cos and sin as of ``lz.rope``. Computes in
        float32 or wider; kernels may round between norm and rotation.
    Units: eps in x^2.
    Args:
        plus_one: scale by ``1 + weight``, as Gemma's models do.
        positions, interleaved, layout: as of ``lz.rope``.
    Returns: the normalised and rotated query and key.
    Raises: InvalidCallError as ``lz.rope``, and for weights of another width, or an eps that is negative or not finite.
    Source: Qwen3, arXiv:2505.09388; RoFormer, arXiv:2104.09864.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    found = routed("qk_norm_rope", QK_NORM_ROPE, arguments, default_layout)
    problems = norm_problems(arguments)
    if problems:
        raise InvalidCallError("qk_norm_rope", problems)
    return found


FUNCTIONS = (Function("qk_norm_rope", qk_norm_rope, _route, (QK_NORM_ROPE,), draw=draw.qk_norm_rope),)

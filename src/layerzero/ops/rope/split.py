"""A joined product taken apart into queries, keys and values, normed and rotated: posenc.split_qkv_norm_rope.

Libraries that have a norm and a rotation alone compose them here: two norms into new memory, rotated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.core.arguments import Axis, Param, told
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Random, Routed, Work
from layerzero.ops.attention.declare import HEAD_DIM
from layerzero.ops.declaration import check_dense, eps_problems, operation, tensor
from layerzero.ops.rope import draw, normed, stock
from layerzero.ops.rope.declare import COS_SIN, INTERLEAVED, OF_TABLE, POSITIONS, cos_sin, of_table, rotated, wide_dtype
from layerzero.ops.rope.route import size_problems, varying
from layerzero.ops.rope.stock import parts


def split_qkv_norm_rope_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take a joined product apart; normalise queries and keys by head where there are weights; rotate both.

    Shapes: qkv (..., S, (H + 2 K) * D), queries first, then keys, then values; cos, sin and positions as of
    ``posenc.rope``; q_weight and k_weight (D,) → (..., S, H, D), (..., S, K, D), (..., S, K, D)
    Dtype, units and source: as of ``posenc.qk_norm_rope``; values are copied.
    """
    wide = wide_dtype(qkv, cos, sin)
    rows = [each.to(wide) for each in stock.rows_of(cos, sin, positions, qkv.shape[-2])]
    query, key, value = parts(qkv, heads, kv_heads)
    turned = []
    for each, weight in ((query, q_weight), (key, k_weight)):
        before = each.to(wide) if weight is None else normed.normed(each, weight, eps, plus_one, wide)
        turned.append(rotated(before, *rows, interleaved=interleaved, wide=wide).to(qkv.dtype))
    return turned[0], turned[1], value.clone(memory_format=torch.contiguous_format)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    count = arguments["heads"] + 2 * arguments["kv_heads"]
    return {**of_table(arguments, values), "head_dim": values["features"] // count}


def _case(
    name: str,
    tokens: tuple[int, int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    half: int = 0,
    *,
    norm: bool = False,
    **params: object,
) -> Case:
    sizes = {"batch": tokens[0], "seq": tokens[1], "features": (heads + 2 * kv_heads) * head_dim}
    sizes |= {"rotary_half": half or head_dim // 2, "table": 64 if name.startswith("small") else 4096}
    weights = ("q_weight", "k_weight") if norm else ()
    return Case(name, sizes, {"heads": heads, "kv_heads": kv_heads, **params}, ("positions", *weights))


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """A table of real angles, and the weights of norms that a case brings."""
    size, params = case.sizes, case.params
    cos, sin = cos_sin(size["table"], size["rotary_half"], device)
    if "q_weight" not in case.given:
        return {"cos": cos, "sin": sin}
    heads: Any = params["heads"]
    kv_heads: Any = params["kv_heads"]
    width = size["features"] // (heads + 2 * kv_heads)
    return {"cos": cos, "sin": sin, **normed.norm_examples(case, dtype, device, generator, width)}


def _work(facts: Mapping[str, Any]) -> Work:
    """All read and written once; six operations a rotated pair, four an element that is normalised."""
    tokens, turned = facts["batch"] * facts["seq"], facts["heads"] + facts["kv_heads"]
    moved = 2.0 * tokens * facts["features"] * facts["dtype"].itemsize
    norm = 0.0 if facts["q_weight"] == "none" else 4.0 * facts["head_dim"]
    return Work(tokens * turned * (6.0 * facts["rotary_half"] + norm), moved + 4.0 * tokens * facts["rotary_dim"])


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """By tokens, with and without norms, for head counts of models; none where other sizes are named."""
    tokens = (1, 8, 64, 512, 4096, 16384) if device == "cuda" else (1, 8, 64, 512)
    for heads, kv_heads, head_dim in ((32, 8, 128), (16, 2, 128), (16, 16, 64)) if not narrow else ():
        for each in tokens:
            for norm in (False, True):
                name = f"{each} tokens ({heads}/{kv_heads}/{head_dim}){' normed' if norm else ''}"
                yield _case(name, (each, 1), heads, kv_heads, head_dim, norm=norm)


SPLIT_QKV_NORM_ROPE = operation(
    "posenc.split_qkv_norm_rope",
    "Queries, keys and values out of a joined product, with norms and rotary positions",
    split_qkv_norm_rope_reference,
    inputs=(
        "qkv: ... seq features",
        *COS_SIN,
        POSITIONS,
        tensor("q_weight: head_dim", required=False),
        tensor("k_weight: head_dim", required=False),
    ),
    outputs=("query: ... seq heads head_dim", "key: ... seq kv_heads head_dim", "value: ... seq kv_heads head_dim"),
    params=(
        Param("heads", int, example=4),
        Param("kv_heads", int, example=2),
        INTERLEAVED,
        normed.EPS,
        normed.PLUS_ONE,
    ),
    axes=(
        Axis("batch", scales=True, live=True, beside=True, apart=True, leading=True),
        Axis("seq", scales=True, live=True),
        Axis("features", scales=True, implied=True),
        Axis("table", live=True, works=False),
        Axis("head_dim", codes=HEAD_DIM),
    ),
    cases=(
        _case("small", (2, 7), 4, 2, 64, norm=True),
        _case("small_plain", (2, 7), 4, 2, 64),
        _case("small_interleaved", (1, 9), 4, 4, 64, norm=True, interleaved=True),
        _case("small_partial_plus_one", (2, 5), 4, 2, 80, 16, norm=True, plus_one=True),
        _case("llama3_8b_decode_b1", (1, 1), 32, 8, 128),
        _case("qwen3_8b_decode_b64", (64, 1), 32, 8, 128, norm=True),
        _case("qwen3_8b_s512", (1, 512), 32, 8, 128, norm=True),
    ),
    tolerance=normed.TOLERANCE,
    tolerance_reason=normed.TOLERANCE_REASON,
    judge=normed.judged_by_pairs(split_qkv_norm_rope_reference, ("query", "key")),
    derive=_derive,
    derived_from={**OF_TABLE, "head_dim": ("features",)},
    examples=_examples,
    work=_work,
    sweep=_sweep,
    stock=stock.split_qkv_norm_rope,
)


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
    refuse(_NAME, problems)
    query, key, _ = parts(*(arguments[name] for name in ("qkv", "heads", "kv_heads")))
    views = {"query": query, "key": key, **{name: arguments[name] for name in ("cos", "sin", "positions")}}
    problems = size_problems(views, "BSHD") + eps_problems(arguments)
    weight, width = arguments["q_weight"], query.shape[-1]
    if weight is not None and weight.shape[0] != width:
        problems.append(f"q_weight: wanted head_dim {width}, of which qkv has as many heads, got {weight.shape[0]}")
    refuse(_NAME, problems)
    return Routed(SPLIT_QKV_NORM_ROPE, arguments, None, *varying(views, "BSHD"))


def _qkv_problems(arguments: dict[str, Any]) -> list[str]:
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
    problems += normed.both_weights(arguments)
    return problems


FUNCTIONS = (Function(_NAME, split_qkv_norm_rope, _route, (SPLIT_QKV_NORM_ROPE,), draw=draw.split_qkv_norm_rope),)


Norm = Callable[[Tensor, Tensor, float], Tensor]
"""Of contiguous heads (..., H, D) with a weight (D,) and eps, into new contiguous memory."""

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]]
"""Of query, key, cos, sin, positions, interleaved; it may write over query and key and return them."""

ACCEPTS = ("positions", "interleaved", "eps")
"""What such a kernel honours; libraries that add one to the weight say so themselves."""


SPLIT_ACCEPTS = ("heads", "kv_heads", "positions", "q_weight", "k_weight", "interleaved", "eps")
"""The same of one that takes a joined product apart first."""


def rope(rotate: Callable[..., object], *, in_place: bool) -> Callable[..., tuple[Tensor, Tensor] | None]:
    """What a kernel of posenc.rope calls, or of posenc.rope.inplace, whose rotation writes over query and key."""
    dense = torch.contiguous_format

    def run(
        *tensors: Tensor, positions: Tensor | None = None, interleaved: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        query, key, cos, sin = tensors
        if in_place:
            rotate(query, key, cos, sin, positions, interleaved)
            increment_version((query, key))  # as libraries' operators should
            return None
        query, key = query.clone(memory_format=dense), key.clone(memory_format=dense)
        rotate(query, key, cos, sin, positions, interleaved)
        return query, key

    return run


def norm_then_rope(norm: Norm, rotate: Rotate) -> Callable[..., tuple[Tensor, Tensor]]:
    """What a kernel of posenc.qk_norm_rope calls."""

    def run(
        *tensors: Tensor, positions: Tensor | None = None, interleaved: bool = False, eps: float
    ) -> tuple[Tensor, Tensor]:
        query, key, q_weight, k_weight, cos, sin = tensors
        return rotate(norm(query, q_weight, eps), norm(key, k_weight, eps), cos, sin, positions, interleaved)

    return run


def split_then_norm_rope(norm: Norm, rotate: Rotate) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """What a kernel of posenc.split_qkv_norm_rope calls whose library wants each part in memory of its own."""
    dense = torch.contiguous_format

    def run(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        kv_heads: int,
        positions: Tensor | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        interleaved: bool = False,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (each.clone(memory_format=dense) for each in parts(qkv, heads, kv_heads))
        if q_weight is not None and k_weight is not None:
            query, key = norm(query, q_weight, eps), norm(key, k_weight, eps)
        return *rotate(query, key, cos, sin, positions, interleaved), value

    return run

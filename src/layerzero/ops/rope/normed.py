"""Norm and rotation of queries and keys in one: posenc.qk_norm_rope.

Math: ``rotate(x / sqrt(mean(x^2) + eps) * weight)`` over the features of each head; see :func:`qk_norm_rope`.

Rotary positions of one tensor: posenc.rope.one, for keys that are rotated apart from queries or shared by heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param
from layerzero.core.errors import refuse
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Function, Random, Routed, Tolerance, Work
from layerzero.ops.attention.declare import HEAD_DIM
from layerzero.ops.declaration import check_dense, eps_problems, operation, tensor
from layerzero.ops.rope import declare, draw, stock
from layerzero.ops.rope.route import layout_of, routed, shape_problems, size_problems, varying

TOLERANCE = {
    torch.float64: Tolerance(1e-5, 1e-5),
    torch.float32: Tolerance(1e-5, 2e-5),
    torch.float16: Tolerance(1e-3, 6e-3),
    torch.bfloat16: Tolerance(1e-2, 5e-2),
}
TOLERANCE_REASON = (
    "kernels round between the norm and the rotation, whose two products may cancel: normalised numbers times their "
    "weights reach 8 in calls that are drawn, where half a unit of bfloat16 is 0.016, and both of a pair are rounded, "
    "so that an entry is off by a part of its pair's length (one of 16,777,216 by 0.060 where -0.70 was right, by "
    "FlashInfer's norm before its rotation and by vLLM's; H200, 2026-11-22)"
)

EPS = Param("eps", float, 1e-6, example=0.1)
PLUS_ONE = Param("plus_one", bool, False, example=True, works=False)


def normed(tensor: Tensor, weight: Tensor, eps: float, plus_one: bool, wide: torch.dtype) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in the wide dtype."""
    tensor, weight = tensor.to(wide), weight.to(wide)
    scaled = tensor * torch.rsqrt(tensor.square().mean(-1, keepdim=True) + eps)
    return scaled * (weight + 1.0 if plus_one else weight)


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
    wide = declare.wide_dtype(query, cos, sin)
    rows = [each.to(wide) for each in stock.rows_of(cos, sin, positions, query.shape[-3])]

    def one(tensor: Tensor, weight: Tensor) -> Tensor:
        scaled = normed(tensor, weight, eps, plus_one, wide)
        return declare.rotated(scaled, *rows, interleaved=interleaved, wide=wide).to(tensor.dtype)

    return one(query, q_weight), one(key, k_weight)


def lengths_of_pairs(tensor: Tensor, rotary_half: int, *, interleaved: bool) -> Tensor:
    """For each entry of rotated heads the length of its pair, which no rotation changes; of the others their own."""
    turned, rest = tensor[..., : 2 * rotary_half], tensor[..., 2 * rotary_half :]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    lengths = torch.hypot(first, second)
    joined = lengths.repeat_interleave(2, -1) if interleaved else torch.cat((lengths, lengths), -1)
    return torch.cat((joined, rest.abs()), -1)


def judged_by_pairs(reference: Callable[..., Sequence[Tensor]], names: Sequence[str]) -> dict[str, Elementwise]:
    """A judge for each of the first results of a reference that rotates what it rounds before."""

    def summed(place: int) -> Callable[[Mapping[str, Any]], Tensor]:
        def lengths(arguments: Mapping[str, Any]) -> Tensor:
            given = {name: value for name, value in arguments.items() if value is not None}
            half, interleaved = arguments["cos"].shape[-1], arguments["interleaved"]
            return lengths_of_pairs(reference(**given)[place], half, interleaved=interleaved)

        return lengths

    return {name: Elementwise(TOLERANCE, TOLERANCE_REASON, summed(place)) for place, name in enumerate(names)}


def norm_examples(
    case_: Case, dtype: torch.dtype, device: torch.device, generator: Random, width: int
) -> dict[str, Tensor]:
    """Weights of norms as trained ones are: near 1, where one is not added to them."""
    if device.type == "meta":
        return {name: torch.empty(width, dtype=dtype, device=device) for name in ("q_weight", "k_weight")}
    middle = 0.0 if case_.params.get("plus_one") else 1.0

    def weight() -> Tensor:
        where = device if generator is None else generator.device
        return (torch.randn(width, generator=generator, device=where) * 0.2 + middle).to(device, dtype)

    return {"q_weight": weight(), "k_weight": weight()}


def _examples(case_: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    made = declare.examples(case_, dtype, device, generator)
    return made | norm_examples(case_, dtype, device, generator, case_.sizes["head_dim"])


def _work(facts: Mapping[str, Any]) -> Work:
    """What a rotation does, and four operations an element."""
    rotation = declare.work(facts)
    elements = facts["batch"] * facts["seq"] * (facts["heads"] + facts["kv_heads"]) * facts["head_dim"]
    return Work(rotation.flops + 4.0 * elements, rotation.bytes)


def both_weights(arguments: Mapping[str, Any]) -> list[str]:
    """What is wrong where there is one of two weights."""
    given = [name for name in ("q_weight", "k_weight") if arguments[name] is not None]
    return [f"wanted both q_weight and k_weight or none of them, got {given[0]} alone"] if len(given) == 1 else []


QK_NORM_ROPE = operation(
    "posenc.qk_norm_rope",
    "Root mean square norm of each head of queries and keys, then rotary positions",
    qk_norm_rope,
    inputs=(*declare.PAIR, "q_weight: head_dim", "k_weight: head_dim", *declare.COS_SIN, declare.POSITIONS),
    outputs=declare.PAIR_OUT,
    params=(declare.INTERLEAVED, EPS, PLUS_ONE),
    axes=declare.AXES,
    layouts=declare.LAYOUTS,
    cases=(
        declare.case("small", 2, 7, 4, 2, 64),
        declare.case("small_interleaved", 1, 9, 4, 4, 64, interleaved=True),
        declare.case("small_partial_plus_one", 2, 5, 4, 2, 80, 16, plus_one=True),
        declare.case("qwen3_8b_decode_b1", 1, 1, 32, 8, 128),
        declare.case("qwen3_8b_decode_b64", 64, 1, 32, 8, 128),
        declare.case("qwen3_8b_s512", 1, 512, 32, 8, 128),
    ),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    judge=judged_by_pairs(qk_norm_rope, ("query_out", "key_out")),
    derive=declare.of_table,
    derived_from=declare.OF_TABLE,
    examples=_examples,
    complete=declare.complete,
    work=_work,
    sweep=declare.sweep,
    stock=stock.qk_norm_rope,
)


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    found = routed("qk_norm_rope", QK_NORM_ROPE, arguments, default_layout)
    refuse("qk_norm_rope", eps_problems(arguments))
    return found


def rope_one(
    input: Tensor,  # torch's name
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: str | None = None,
) -> Tensor:
    """Rotate one tensor by the angles of its positions, as ``lz.rope`` rotates queries and keys.

    For keys that are rotated apart from their queries, and for the part of latent attention's keys that heads share.

    Shapes: input (T, H, D), positions (T,); or input (B, S, H, D), positions (B, S), (1, S) or (S,), axes 1 and 2 of
        input swapped in BHSD; cos and sin (P, R/2), R at most D → input's. Entries of a head from R on pass through.
    Dtype: input floating, returned; the rest as of ``lz.rope``.
    Args:
        cos, sin, positions, interleaved: as of ``lz.rope``.
        layout: ``"BSHD"`` or ``"BHSD"``, for four axes; by default the configured one, else what strides and positions
            say, else BSHD with a warning. Of three axes the first are tokens.
    Raises: InvalidCallError as ``lz.rope``.
    Source: RoFormer, arXiv:2104.09864.
    """
    wide = declare.wide_dtype(input, cos, sin)
    rows = [each.to(wide) for each in stock.rows_of(cos, sin, positions, input.shape[-3])]
    return declare.rotated(input, *rows, interleaved=interleaved, wide=wide)


def _complete_one(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """What follows where the tensor is all that is known: full rotation, a table as long as the sequence."""
    return {"batch": 1, "rotary_half": sizes["head_dim"] // 2, "table": max(sizes["seq"], 1)}


def _alone(of: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(
        Case(
            each.name, {name: size for name, size in each.sizes.items() if name != "kv_heads"}, each.params, each.given
        )
        for each in of
    )


def _examples_of_one(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    pair = Case(case.name, {**case.sizes, "kv_heads": 1}, case.params, case.given)
    made = declare.examples(pair, dtype, device, generator)
    return {"input": made["query"], **{name: made[name] for name in ("cos", "sin", "positions")}}


ROPE_ONE = operation(
    "posenc.rope.one",
    "Rotary positions of one tensor",
    rope_one,
    inputs=(tensor(f"input: {' '.join(declare.QUERY)}", has_layout=True), *declare.COS_SIN, declare.POSITIONS),
    outputs=(tensor(f"output: {' '.join(declare.QUERY)}", has_layout=True),),
    params=(declare.INTERLEAVED,),
    axes=(
        Axis("batch", scales=True, live=True, beside=True, apart=True, leading=True),
        Axis("seq", scales=True, live=True),
        Axis("heads", scales=True, apart=True),
        Axis("table", live=True, works=False),
        Axis("head_dim", codes=HEAD_DIM),
    ),
    layouts=declare.LAYOUTS,
    cases=_alone(declare.CASES),
    tolerance=declare.TOLERANCE,
    tolerance_reason=declare.TOLERANCE_REASON,
    derive=declare.of_table,
    derived_from=declare.OF_TABLE,
    examples=_examples_of_one,
    complete=_complete_one,
    work=declare.work,
    sweep=lambda device, narrow: _alone(declare.sweep(device, narrow)),
    stock=stock.rope_one,
)


_ONE = "rope_one"


def _route_one(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(_ONE, arguments)
    views = {"query": arguments["input"], "key": arguments["input"], **arguments}
    problems = [each.replace("query:", "input:", 1) for each in shape_problems(views) if not each.startswith("key:")]
    refuse(_ONE, problems)
    tensor, (layout, fixed) = arguments["input"], layout_of(_ONE, views, default_layout)
    canonical = {name: value for name, value in arguments.items() if name != "layout"}
    problems = ROPE_ONE.schema.validate(layout=layout, **canonical)
    if not problems and not tensor.shape[-2 if layout == "BSHD" else -3]:
        problems = [f"input: wanted heads above 0, got {tuple(tensor.shape)} in {layout}"]
    problems = problems or size_problems(views, layout)
    refuse(_ONE, problems)
    return Routed(ROPE_ONE, canonical, layout, *(varying(views, layout) if fixed else ()))


FUNCTIONS = (
    Function(_ONE, rope_one, _route_one, (ROPE_ONE,), draw=draw.rope_one, weight=1),
    Function("qk_norm_rope", qk_norm_rope, _route, (QK_NORM_ROPE,), draw=draw.qk_norm_rope),
)

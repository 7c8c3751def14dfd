"""``lz.moe_route``: its signature, the checks of a call, and random calls."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.draw import Draw
from layerzero.ops.moe.routing import ROUTE, SCORINGS

NAME = "moe_route"


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    expert_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by a router's logits, and weigh them.

    Shapes: logits (T, E), bias (E,) → weights (T, k), experts (T, k), the best first. Of experts whose scores are equal
        any may come first.
    Dtype: logits and bias floating; computes in float32; weights float32, experts int32.
    Args:
        top_k: experts of a token, 1 to E.
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        renormalize: divide the weights of a token by their sum. A softmax over the chosen logits alone, as gpt-oss has
            it, is the softmax over all, renormalised.
        bias: added to the scores for the choice; weights are without it (DeepSeek-V3).
        expert_groups, top_groups: choose within so many of so many groups of neighbours alone, those whose two best
            experts have the largest sum. Both or neither.
        scale: what weights are multiplied by, last.
    Returns: (weights, experts). A row with NaN, with ``inf``, or with ``-inf`` alone may name any experts, each once.
    Raises: InvalidCallError for what does not fit, with wanted and got.
    Source: arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437; gpt-oss, arXiv:2508.10925.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(NAME, arguments)
    canonical = dict(arguments)
    if canonical["expert_groups"] is not None and canonical["expert_groups"] == canonical["top_groups"]:
        canonical |= {"expert_groups": None, "top_groups": None}  # all groups: none is shut
    problems = ROUTE.schema.validate(**canonical)
    if not problems:
        problems = _group_problems(arguments, arguments["logits"].shape[1]) + _problems(arguments)
    if problems:
        raise InvalidCallError(NAME, problems)
    return Routed(ROUTE, canonical, varies=("tokens",))


def _problems(arguments: dict[str, Any]) -> list[str]:
    top_k, experts = arguments["top_k"], arguments["logits"].shape[1]
    problems = []
    if not 1 <= top_k <= experts:
        problems.append(f"top_k: wanted 1 to the {experts} experts of logits, got {top_k}")
    if arguments["scoring"] not in SCORINGS:
        problems.append(f"scoring: wanted one of {', '.join(SCORINGS)}, got {told(arguments['scoring'])}")
    if not math.isfinite(arguments["scale"]):
        problems.append(f"scale: wanted a finite number, got {arguments['scale']}")
    return problems


def _group_problems(arguments: dict[str, Any], experts: int) -> list[str]:
    groups, top = arguments["expert_groups"], arguments["top_groups"]
    if groups is None and top is None:
        return []
    if groups is None or top is None:
        missing, there = ("expert_groups", "top_groups") if groups is None else ("top_groups", "expert_groups")
        return [f"{missing}: wanted a number beside {there}, got None: pass both or neither"]
    if groups < 1 or experts % groups or experts // groups < 2:
        wanted = f"a divisor of the {experts} experts that leaves a group two or more"
        return [f"expert_groups: wanted {wanted}, got {groups}"]
    if not 1 <= top <= groups:
        return [f"top_groups: wanted 1 to the {groups} of expert_groups, got {top}"]
    room = top * (experts // groups)
    if arguments["top_k"] > room:
        return [f"top_k: wanted at most the {room} experts of {top} groups, got {arguments['top_k']}"]
    return []


def draw_route(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.moe_route``: scores apart, near each other and, where few digits tell them, equal."""
    tokens = draw.of((0, 1, 2, 5, 17, 40), (1, 6, 3, 3, 3, 2))
    groups, each = draw.of((1, 2, 4, 8)), draw.of((2, 3, 4, 8, 16))
    experts = groups * each
    logits = draw.normal((tokens, experts), torch.float32) * draw.of((1.0, 3.0, 0.05))
    arguments: dict[str, Any] = {"logits": draw.laid_out(logits.to(dtype), expand=False)}
    top = draw.stream.randint(1, groups)
    if draw.chance(0.4):
        arguments |= {"expert_groups": groups, "top_groups": top}
    room = top * each if "top_groups" in arguments else experts
    arguments["top_k"] = draw.stream.randint(1, min(room, 10))
    if draw.chance(0.5):
        arguments["scoring"] = draw.of(SCORINGS)
    if draw.chance(0.4):
        arguments["renormalize"] = draw.chance(0.3)
    if draw.chance(0.3):
        arguments["scale"] = draw.of((2.5, 1.0, 0.5, 3))
    if draw.chance(0.4):
        width = draw.of((0.1, 1.0))
        bias = draw.normal((experts,), draw.of((dtype, torch.float32))) * width
        arguments["bias"] = draw.laid_out(bias)
    return arguments


MOE_ROUTE = Function(NAME, moe_route, _route, (ROUTE,), draw=draw_route, weight=1)

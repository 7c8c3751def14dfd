"""The choice of experts: moe.route, from a router's logits to the experts of each token and their weights.

A kernel scores in float32. Where two scores lie that near to each other either may come first, and where the scores of
two groups do, either group may be searched: of such a row only its own consistency counts.

softmax, renormalised       Mixtral; gpt-oss, whose softmax over the chosen is the same; Qwen3-MoE with norm_topk_prob
softmax, as it is           Qwen3-MoE without
sigmoid, bias, groups       DeepSeek-V3: the bias is for the choice alone, a group counts by its two best
sqrt_softplus, bias         DeepSeek-V4
sigmoid, as it is           Llama 4, which multiplies the rows of its one expert with it, and not what comes out

Experts that are divided among ranks: tokens go to the ranks of their experts, and what these make comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import REQUIRED, Axis, Param, told
from layerzero.core.errors import InvalidCallError
from layerzero.core.judge import Elementwise, Given, Indices, Judge, Property, Tolerance
from layerzero.core.operation import Case, Work
from layerzero.ops.comm.ranks import ProcessGroup, Ranks, ranks_of
from layerzero.ops.declaration import function, operation, tensor, wide
from layerzero.ops.draw import Draw

NOTHING = 1e-20
"""What is added to a sum that is divided by, as in DeepSeek-V3: sigmoids may all be 0."""


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """The score of each expert, in the dtype of the logits. Shapes: (T, E) → (T, E)."""
    if scoring == "sqrt_softplus":
        return functional.softplus(logits).sqrt()
    return logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()


def group_scores(choice: Tensor, expert_groups: int) -> Tensor:
    """The sum of the two best of each group. Shapes: (T, E) → (T, groups)."""
    return choice.view(len(choice), expert_groups, choice.shape[-1] // expert_groups).topk(2, -1).values.sum(-1)


def within_groups(choice: Tensor, expert_groups: int, top_groups: int) -> Tensor:
    """What is chosen by, ``-inf`` outside the best groups. Shapes: (T, E) → (T, E)."""
    best = group_scores(choice, expert_groups).topk(top_groups, -1).indices
    shut = torch.ones((len(choice), expert_groups), dtype=torch.bool, device=choice.device).scatter(1, best, False)
    return choice.masked_fill(shut.repeat_interleave(choice.shape[-1] // expert_groups, -1), -math.inf)


def weighed(chosen: Tensor, scale: float, *, renormalize: bool) -> Tensor:
    """The weights of experts with these scores. Shapes: (T, k) → (T, k)."""
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + NOTHING)
    return chosen if scale == 1.0 else chosen * scale


def routed(
    logits: Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    expert_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The weights and places of the chosen experts; computes in the dtype of the logits.

    Shapes: logits (T, E), bias (E,) → (T, k), (T, k)
    """
    scores = scores_of(logits, scoring)
    choice = scores if bias is None else scores + bias
    if expert_groups is not None and top_groups is not None:
        choice = within_groups(choice, expert_groups, top_groups)
    chosen, places = choice.topk(top_k, -1)
    if choice is not scores:
        chosen = scores.gather(-1, places)
    return weighed(chosen, scale, renormalize=renormalize), places


_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = dict.fromkeys(_DTYPES, Tolerance(2e-5, 1e-6))
TOLERANCE_REASON = (
    "weights are float32, whatever the dtype of the logits: an exponential whose argument is 80 has an error of 5e-6, "
    "a sum of two hundred of them no more"
)

NEAR = 1e-5
"""How near two scores are whose order float32 may change; sums of a probability and a bias are of order 1."""

_LOWEST = -80.0
"""Logits so far below the largest have a probability of about 0 in float32, and tie."""

_UNCOUNTED = 1e30
"""The error that a weight may have where another expert may have been chosen."""


def _choice(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What experts are chosen by, in float64, and the rows where it cannot tell which."""
    logits, bias = arguments["logits"], arguments.get("bias")
    groups, top = arguments.get("expert_groups"), arguments.get("top_groups")
    unsure = logits.isnan().any(-1) | (logits == torch.inf).any(-1) | (logits == -torch.inf).all(-1)
    if bias is not None:
        unsure = unsure | ~bias.isfinite().all()
    choice = scores_of(logits, arguments.get("scoring", "softmax"))
    choice = choice if bias is None else choice + bias
    if groups is not None and top is not None:
        ordered = group_scores(choice, groups).sort(-1, descending=True).values
        gap = ordered[:, top - 1] - ordered[:, top] if top < groups else torch.ones_like(ordered[:, 0])
        unsure = unsure | ~(gap > NEAR * (1.0 + ordered[:, 0].abs()))
        choice = within_groups(choice, groups, top)
    elif bias is None and arguments.get("scoring", "softmax") == "softmax":
        choice = (logits - logits.amax(-1, keepdim=True)).clamp(min=_LOWEST)
    return choice, unsure


def _places(arguments: Mapping[str, Any]) -> Tensor:
    choice, unsure = _choice(arguments)
    return choice.masked_fill(unsure.unsqueeze(-1), 0.0)


def _slack(arguments: Mapping[str, Any]) -> Tensor:
    """Of each weight, nothing, or any number where another expert may stand in its place."""
    choice, unsure = _choice(arguments)
    top_k = int(arguments["top_k"])
    if arguments.get("bias") is not None:  # equal sums of a score and a bias have other scores
        ordered = choice.sort(-1, descending=True).values
        gaps = ordered[:, :top_k] - ordered[:, 1 : top_k + 1] if top_k < choice.shape[-1] else -ordered.diff(dim=-1)
        unsure = unsure | ~(gaps > NEAR * (1.0 + ordered[:, :1].abs())).all(-1)
    return (unsure * _UNCOUNTED).to(torch.float64).unsqueeze(-1).expand(-1, top_k)


def _consistent(results: Sequence[tuple[Tensor, ...]], truth: tuple[Tensor, ...], given: Given) -> str:
    arguments = given.basis
    weights, places = results[0]
    scores = scores_of(arguments["logits"], arguments.get("scoring", "softmax")).gather(-1, places.long())
    kept = arguments.get("renormalize", True), float(arguments.get("scale", 1.0))
    want = weighed(scores, kept[1], renormalize=kept[0])
    apart = (weights.to(want.dtype) - want).abs() > TOLERANCE[torch.float32].atol + TOLERANCE[torch.float32].rtol * (
        want.abs() + abs(kept[1])
    )
    if not apart.any():
        return ""
    row, slot = apart.nonzero()[0].tolist()
    wanted, got = f"the weight {want[row, slot]:.8g} of expert {places[row, slot]}", f"{weights[row, slot]:.8g}"
    return f"({row}, {slot}): wanted {wanted}, got {got}"


JUDGES: Mapping[str, Judge] = {
    "expert_weights": Elementwise(TOLERANCE, TOLERANCE_REASON, _slack),
    "expert_ids": Indices(
        _places,
        "float32 may order two scores otherwise that differ in their last digits; of rows with NaN any",
        dict.fromkeys(_DTYPES, Tolerance(1e-6, NEAR)),
    ),
}
CONSISTENT = Property("weights are those of their experts", _consistent, "they are read together")


SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")


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
        scoring: ``"softmax"`` over all experts, or of each ``"sigmoid"`` or ``"sqrt_softplus"`` (DeepSeek-V4).
        renormalize: divide the weights of a token by their sum. A softmax over the chosen logits alone, as gpt-oss has
            it, is the softmax over all, renormalised.
        bias: added to the scores for the choice; weights are without it (DeepSeek-V3).
        expert_groups, top_groups: choose within so many of so many groups of neighbours alone, those whose two best
            experts have the largest sum. Both or neither.
        scale: what weights are multiplied by, last.
    Returns: (weights, experts). A row with NaN, with ``inf``, or with ``-inf`` alone may name any experts, each once,
        by weights that are NaN or 0.
    Raises: InvalidCallError for what does not fit, with wanted and got.
    Source: arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437; gpt-oss, arXiv:2508.10925.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, places = routed(
        logits.to(wide),
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        bias=None if bias is None else bias.to(wide),
        expert_groups=expert_groups,
        top_groups=top_groups,
        scale=scale,
    )
    return weights.to(torch.float32), places.to(torch.int32)


def _work(facts: Mapping[str, Any]) -> Work:
    """Each logit read once, a weight and a place of each choice written; an exponential and a sum of each logit."""
    elements, chosen = facts["tokens"] * facts["experts"], facts["tokens"] * facts["top_k"]
    return Work(4.0 * elements, float(elements * facts["dtype"].itemsize + 8 * chosen))


_DEEPSEEK = {"scoring": "sigmoid", "expert_groups": 8, "top_groups": 4, "scale": 2.5}
_MODELS: dict[str, tuple[int, dict[str, object]]] = {
    "mixtral": (8, {"top_k": 2}),
    "qwen3": (128, {"top_k": 8}),
    "deepseek_v3": (256, {"top_k": 8, **_DEEPSEEK}),
}
"""Experts and parameters of models."""


def _case(name: str, model: str, tokens: int) -> Case:
    experts, params = _MODELS[model]
    given = ("bias",) if "expert_groups" in params else ()
    return Case(f"{name}_t{tokens}", {"tokens": tokens, "experts": experts}, params, given)


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    counts = (1, 8, 64, 512, 4096) if device == "cuda" else (1, 16, 256)
    for model in _MODELS if narrow.keys() <= {"tokens"} else ():
        for tokens in narrow.get("tokens", counts):
            yield _case(model, model, tokens)


ROUTE = operation(
    "moe.route",
    "The experts of each token, and what they weigh",
    moe_route,
    inputs=("logits: tokens experts", tensor("bias: experts", required=False, same_dtype=False)),
    outputs=(
        tensor("expert_weights: tokens top_k", frozenset({torch.float32})),
        tensor("expert_ids: tokens top_k", frozenset({torch.int32})),
    ),
    params=(
        Param("top_k", int, REQUIRED, example=2),
        Param("scoring", str, "softmax", example="sigmoid"),
        Param("renormalize", bool, True, example=False, works=False),
        Param("expert_groups", int, None, example=4),
        Param("top_groups", int, None, example=2),
        Param("scale", float, 1.0, example=2.5, works=False),
    ),
    axes=(Axis("tokens", scales=True, live=True, apart=True), Axis("experts", scales=True)),
    cases=(
        Case("small", {"tokens": 33, "experts": 16}, {"top_k": 4}),
        Case("plain", {"tokens": 33, "experts": 60}, {"top_k": 4, "renormalize": False}),
        Case(
            "groups",
            {"tokens": 17, "experts": 32},
            {"top_k": 4, "scoring": "sigmoid", "expert_groups": 4, "top_groups": 2, "scale": 2.5},
            ("bias",),
        ),
        _case("qwen3", "qwen3", 1),
        _case("deepseek_v3", "deepseek_v3", 64),
    ),
    judge=JUDGES,
    properties=(CONSISTENT,),
    work=_work,
    sweep=_sweep,
)


def _problems(arguments: dict[str, Any]) -> list[str]:
    top_k, experts = arguments["top_k"], arguments["logits"].shape[1]
    problems = _group_problems(arguments, experts)
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
        return [f"{missing}: wanted a number with {there}, got None: pass both or neither"]
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
    arguments |= draw.maybe(0.5, scoring=lambda: draw.of(SCORINGS))
    arguments |= draw.maybe(0.4, renormalize=lambda: draw.chance(0.3))
    arguments |= draw.maybe(0.3, scale=lambda: draw.of((2.5, 1.0, 0.5, 3)))
    if draw.chance(0.4):
        width = draw.of((0.1, 1.0))
        bias = draw.normal((experts,), draw.of((dtype, torch.float32))) * width
        arguments["bias"] = draw.laid_out(bias)
    return arguments


def _open_groups(arguments: dict[str, Any]) -> None:
    """Where all groups are searched, none is shut."""
    if arguments["expert_groups"] == arguments["top_groups"]:
        arguments |= {"expert_groups": None, "top_groups": None}


MOE_ROUTE = function(
    "moe_route", ROUTE, varies=("tokens",), fits=_problems, canonical=_open_groups, draw=draw_route, weight=1
)


def moe_experts_of_ranks(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    group: ProcessGroup | Ranks | None = None,
    **options: Any,
) -> Tensor:
    """Send each token through its experts, a part of which each rank has, and add up what they make of it.

    Each rank calls it with its own tokens, any number of them, and its own experts: rank r has the experts from
    ``r * E`` to ``(r + 1) * E - 1``. Of each token a rank gets one row, however many of its experts the token has.

    Shapes: input (T, D), gate_up_weight (E, 2 F, D), down_weight (E, D, F), expert_ids and expert_weights (T, k) →
        (T, D). T differs between ranks and may be 0; E is the same on all.
    Dtype: as :func:`layerzero.moe_experts`; each rank's share is rounded to it, and shares are added up in float32.
    Args:
        expert_ids: of all ranks' experts, from 0; -1 adds nothing.
        group: whose ranks; the default group if None.
        options: of :func:`layerzero.moe_experts`, about this rank's experts.
    Raises: InvalidCallError for experts that no rank has, on this rank alone, and as :func:`layerzero.moe_experts` and
        :func:`layerzero.all_to_all` do.
    Source: arXiv:2006.16668.
    """
    from layerzero import all_to_all, moe_experts

    ranks, here = ranks_of(group), gate_up_weight.shape[0]
    if expert_ids.numel() and int(expert_ids.max()) >= here * ranks.size:
        wanted = f"wanted experts below {here * ranks.size}, {here} on each of {ranks.size} ranks"
        raise InvalidCallError("moe_experts_of_ranks", [f"expert_ids: {wanted}, got {int(expert_ids.max())}"])
    home = expert_ids.div(here, rounding_mode="floor")  # of -1, no rank
    goes = (home == torch.arange(ranks.size, device=home.device).view(-1, 1, 1)).any(-1)
    tokens, counts = goes.nonzero()[:, 1], goes.sum(1)  # those for rank 0 first
    send, receive = counts.tolist(), all_to_all(counts, group=group).tolist()

    def sent(rows: Tensor) -> Tensor:
        return all_to_all(rows[tokens], send, receive, group)

    ids = sent(expert_ids) - ranks.rank * here
    ids = ids.where((ids >= 0) & (ids < here), -1)
    made = moe_experts(sent(input), gate_up_weight, down_weight, ids, sent(expert_weights), **options)
    total = torch.zeros_like(input, dtype=wide(input.dtype))
    back = all_to_all(made, receive, send, group)
    for places, rows in zip(torch.split(tokens, send), torch.split(back, send), strict=True):
        total[places] += rows  # a token once a rank, so that the order of the sums is that of the ranks
    return total.to(input.dtype)

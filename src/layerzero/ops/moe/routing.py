"""The choice of experts: moe.route, from a router's logits to the experts of each token and what they weigh.

softmax, renormalised       Mixtral; gpt-oss, whose softmax over the chosen is the same; Qwen3-MoE with norm_topk_prob
softmax, as it is           Qwen3-MoE without
sigmoid, bias, groups       DeepSeek-V3: the bias is for the choice alone, a group counts by its two best
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import REQUIRED, Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.moe.formulas import routed
from layerzero.ops.moe.judging import CONSISTENT, JUDGES

SCORINGS = ("softmax", "sigmoid")


def reference(logits: Tensor, *, bias: Tensor | None = None, **params: Any) -> tuple[Tensor, Tensor]:
    """Scores, the ``top_k`` best of them in order, and their weights.

    Shapes: logits (T, E), bias (E,) → weights (T, k), experts (T, k)
    Dtype: computes in float32 (float64 for float64); returns float32 and int32.
    Source: DeepSeek-V3, arXiv:2412.19437; arXiv:1701.06538.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, places = routed(logits.to(wide), bias=None if bias is None else bias.to(wide), **params)
    return weights.to(torch.float32), places.to(torch.int32)


def _fake(logits: Tensor, *, top_k: int, **_: object) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def stock(logits: Tensor, bias: Tensor | None = None, **params: Any) -> Any:
    """The expressions of Transformers' routers."""

    def run() -> tuple[Tensor, Tensor]:
        weights, places = routed(logits.float(), bias=bias, **params)
        return weights.float(), places.int()

    return run


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


ROUTE = Operation(
    schema=OperationSchema(
        operation="moe.route",
        inputs=(
            TensorSchema("logits", ("tokens", "experts"), FLOATING),
            TensorSchema("bias", ("experts",), FLOATING, required=False, same_dtype=False),
        ),
        outputs=(
            TensorSchema("expert_weights", ("tokens", "top_k"), frozenset({torch.float32})),
            TensorSchema("expert_ids", ("tokens", "top_k"), frozenset({torch.int32})),
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
    ),
    summary="The experts of each token, and what they weigh",
    reference=reference,
    fake=_fake,
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
    stock=stock,
)

"""What the chosen experts make of each token: moe.experts, two products with a gate between, weighed and added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.calls import drawn
from layerzero.ops.linear.examples import deviation
from layerzero.ops.linear.fused import FEW, TOLERANCE, TOLERANCE_REASON
from layerzero.ops.linear.packed import packed_param
from layerzero.ops.moe.products import ALPHA, LIMIT, gated, reference, summed

IDS = frozenset({torch.int32, torch.int64})
PACKED_OF = {"packed_gate_up": "gate_up_weight", "packed_down": "down_weight"}
"""The packed weights of a call, and what each is made of."""


def _fake(input: Tensor, *_: object, **__: object) -> Tensor:
    return input.new_empty(input.shape)


def _stock(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float = LIMIT,
    **_: object,
) -> Callable[[], Tensor]:
    """A loop over the experts that have tokens, as models' code has it."""

    def run() -> Tensor:
        total = torch.zeros_like(input)
        for number in torch.unique(expert_ids).tolist():
            if number >= 0:
                tokens, slots = (expert_ids == number).nonzero(as_tuple=True)
                bias = None if gate_up_bias is None else gate_up_bias[number]
                joined = functional.linear(input[tokens], gate_up_weight[number], bias)
                bias = None if down_bias is None else down_bias[number]
                made = functional.linear(gated(joined, activation, alpha, limit), down_weight[number], bias)
                made = made * expert_weights[tokens, slots].unsqueeze(-1)
                total.index_add_(0, tokens, made.to(total.dtype))
        return total

    return run


def _work(facts: Mapping[str, Any]) -> Work:
    """Three products of an expert for each choice; each expert that may be chosen read once."""
    tokens, chosen = facts["tokens"], facts["tokens"] * facts["top_k"]
    each = facts["hidden"] * (facts["joined_features"] + facts["inner_features"])
    moved = min(facts["experts"], chosen) * each + 2 * tokens * facts["hidden"]
    return Work(2.0 * chosen * each, float(moved * facts["dtype"].itemsize))


def choices(tokens: int, experts: int, top_k: int, generator: torch.Generator | None, device: Any) -> Tensor:
    """Experts of each token, no one twice where there are enough; -1 where there are none."""
    if experts < top_k:
        return torch.randint(-1, max(experts, 0), (tokens, top_k), generator=generator, device=device)
    return torch.rand((tokens, experts), generator=generator, device=device).argsort(-1)[:, :top_k]


def _examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Weights whose products are of order 1, and experts that differ, each with a share."""
    names = ("experts", "joined_features", "inner_features", "hidden", "tokens", "top_k")
    experts, joined, inner, hidden, tokens, top_k = (case.sizes[name] for name in names)
    made: dict[str, Tensor] = {}
    for name, shape in (("gate_up_weight", (experts, joined, hidden)), ("down_weight", (experts, hidden, inner))):
        made[name] = drawn(TensorSchema(name), shape, dtype, device, {}, generator)
        if device.type != "meta":
            made[name] = made[name].mul_(deviation(shape[-1], FEW))
    if device.type == "meta":
        whole = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
        return made | {"expert_ids": whole, "expert_weights": torch.empty((tokens, top_k), device=device)}
    where = device if generator is None else generator.device
    shares = torch.randn((tokens, top_k), generator=generator, device=where).softmax(-1)
    made["expert_ids"] = choices(tokens, experts, top_k, generator, where).to(device, torch.int32)
    return made | {"expert_weights": shares.to(device)}


def _complete(sizes: Mapping[str, int]) -> Mapping[str, int]:
    return {"inner_features": sizes["joined_features"] // 2}


def _case(name: str, tokens: int, model: tuple[int, int, int, int], *given: str, **params: object) -> Case:
    experts, hidden, inner, top_k = model
    sizes = {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden, "inner_features": inner}
    return Case(name, sizes | {"joined_features": 2 * inner}, params, given)


_MODELS = {
    "cuda": {"mixtral": (8, 4096, 14336, 2), "qwen3": (128, 2048, 768, 8), "gpt_oss": (32, 2880, 2880, 4)},
    "cpu": {"olmoe": (64, 2048, 1024, 8), "small": (8, 512, 1024, 2)},
}
"""Experts, hidden and inner features, experts of a token: Mixtral 8x7B, Qwen3-30B-A3B, gpt-oss 20B, OLMoE 7B."""
_TOKENS = {"cuda": (1, 8, 64, 512, 4096), "cpu": (1, 4, 16, 128)}


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    kind = device if device in _MODELS else "cpu"
    for name, model in _MODELS[kind].items() if narrow.keys() <= {"tokens"} else ():
        for tokens in narrow.get("tokens", _TOKENS[kind]):
            yield _case(f"{name}_t{tokens}", tokens, model)


EXPERTS = Operation(
    schema=OperationSchema(
        operation="moe.experts",
        inputs=(
            TensorSchema("input", ("tokens", "hidden"), FLOATING),
            TensorSchema("gate_up_weight", ("experts", "joined_features", "hidden"), FLOATING, resident=True),
            TensorSchema("down_weight", ("experts", "hidden", "inner_features"), FLOATING, resident=True),
            TensorSchema("expert_ids", ("tokens", "top_k"), IDS, same_dtype=False, indexes=("experts",), holes=True),
            TensorSchema("expert_weights", ("tokens", "top_k"), FLOATING, same_dtype=False, one_by_one=True),
            TensorSchema("gate_up_bias", ("experts", "joined_features"), FLOATING, required=False),
            TensorSchema("down_bias", ("experts", "hidden"), FLOATING, required=False),
        ),
        outputs=(TensorSchema("output", ("tokens", "hidden"), FLOATING),),
        params=(
            Param("activation", str, "silu", example="gelu_tanh", works=False),
            Param("alpha", float, ALPHA, works=False),
            Param("limit", float, LIMIT, works=False),
            *(packed_param(each, of) for each, of in PACKED_OF.items()),
        ),
        axes=(
            Axis("tokens", scales=True, live=True, apart=True),
            Axis("experts", scales=True),
            Axis("top_k", scales=True),
            Axis("hidden", scales=True),
            Axis("joined_features", scales=True, implied=True),
            Axis("inner_features", scales=True),
        ),
    ),
    summary="What the chosen experts make of each token, added up",
    reference=reference,
    fake=_fake,
    cases=(
        _case("small", 17, (5, 64, 96, 2)),
        _case("biased", 9, (4, 64, 32, 3), "gate_up_bias", "down_bias", activation="swiglu_oai", limit=2.0),
        _case("gelu", 9, (4, 64, 32, 2), "gate_up_bias", activation="gelu_tanh"),
        _case("qwen3_t1", 1, (128, 2048, 768, 8)),
        _case("mixtral_t16", 16, (8, 4096, 14336, 2)),
    ),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    judge=Elementwise(TOLERANCE, TOLERANCE_REASON, summed),
    complete=_complete,
    examples=_examples,
    work=_work,
    scratch=lambda sizes: sizes["hidden"] * sizes["joined_features"] * 2 + sizes["tokens"] * sizes["joined_features"],
    sweep=_sweep,
    stock=_stock,
)

"""Attention over two parts of the keys, made attention over both: the outputs weighted by their log-sum-exps.

    attention.merge_states

With ``w = exp(lse_a) / (exp(lse_a) + exp(lse_b))`` the output is ``w a + (1 - w) b`` and the log-sum-exp
``log(exp(lse_a) + exp(lse_b))``: what one softmax over all keys would have given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.operation import Case, Work
from layerzero.ops.attention.declare import HEAD_DIM, TOLERANCE
from layerzero.ops.attention.sweep import extent_of
from layerzero.ops.declaration import function, operation
from layerzero.ops.draw import Draw

_FLOAT32 = frozenset({torch.float32})


def merge_attention_states(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Make attention over two parts of the keys attention over both.

    Shapes: output_a, output_b (T, H, D_v), lse_a, lse_b (H, T) → (T, H, D_v), (H, T), as ``lz.ragged_attention`` and
        ``lz.paged_attention`` with ``cu_seqlens_q`` return them; each part has keys of its own.
    Dtype: both outputs the same floating dtype, which the result has; log-sum-exps float32, natural logarithm.
    Returns: the output and its log-sum-exp. A part that saw no key (0 and -inf, as attention gives it) has no share;
        neither saw one: 0 and -inf.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit.
    Source: online softmax, arXiv:1805.02867.
    """
    compute = torch.promote_types(output_a.dtype, torch.float32)
    first, second = lse_a.to(compute), lse_b.to(compute)
    lse = torch.logaddexp(first, second)
    outputs = torch.zeros((), dtype=compute, device=output_a.device)
    for output, part in ((output_a, first), (output_b, second)):
        weight = (part - lse).exp().masked_fill(part == -torch.inf, 0.0).t().unsqueeze(-1)
        outputs = outputs + (weight * output.to(compute)).masked_fill(weight == 0, 0.0)
    return outputs.to(output_a.dtype), lse.float()


def _work(facts: Mapping[str, Any]) -> Work:
    """Two outputs read, one written, and three numbers a head and token."""
    rows = facts["tokens"] * facts["heads"]
    return Work(3.0 * rows * facts["value_dim"], float(rows * (3 * facts["value_dim"] * facts["dtype"].itemsize + 12)))


def _case(name: str, tokens: int, heads: int, value_dim: int) -> Case:
    return Case(name, {"tokens": tokens, "heads": heads, "value_dim": value_dim})


def _sweep(device: str, narrow: Mapping[str, Any]) -> list[Case]:
    heads = [each for each in extent_of(device, narrow).heads[:2] if "seq_lens" not in narrow]
    return [
        _case(f"{tokens} tokens ({each})", tokens, each.heads, each.head_dim)
        for each in heads
        for tokens in (1, 64, 2048)
    ]


MERGE_STATES = operation(
    "attention.merge_states",
    "Make attention over two parts of the keys attention over both",
    merge_attention_states,
    inputs=(
        "output_a: tokens heads value_dim",
        TensorSchema("lse_a", ("heads", "tokens"), _FLOAT32, same_dtype=False),
        "output_b: tokens heads value_dim",
        TensorSchema("lse_b", ("heads", "tokens"), _FLOAT32, same_dtype=False),
    ),
    outputs=(
        TensorSchema("output", ("tokens", "heads", "value_dim")),
        TensorSchema("lse", ("heads", "tokens"), _FLOAT32),
    ),
    axes=(
        Axis("tokens", scales=True, live=True, apart=True),
        Axis("heads", scales=True, apart=True),
        Axis("value_dim", codes=HEAD_DIM),
    ),
    cases=(_case("small", 5, 4, 64), _case("llama3_8b_b64", 64, 32, 128), _case("llama3_8b_t2048", 2048, 32, 128)),
    tolerance=TOLERANCE,
    tolerance_reason="two products and a sum in float32, one rounding",
    work=_work,
    sweep=_sweep,
    stock=None,
)
OPERATIONS = (MERGE_STATES,)


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.merge_attention_states``: parts that saw no key among them, and parts that weigh nothing."""
    tokens, heads, dim = draw.of((0, 1, 2, 5, 33)), draw.of((1, 2, 3, 8)), draw.of((1, 7, 16, 32, 64, 128, 256))
    arguments: dict[str, Any] = {}
    for part in "ab":
        output = draw.normal((tokens, heads, dim), dtype)
        lse = draw.normal((heads, tokens), torch.float32) * draw.of((1.0, 20.0))
        if draw.chance(0.4):
            blind = draw.uniform((heads, tokens), torch.float32) < 0.4
            lse, output = lse.masked_fill(blind, -torch.inf), output.masked_fill(blind.t().unsqueeze(-1), 0.0)
        arguments |= {
            f"output_{part}": draw.laid_out(output, expand=False),
            f"lse_{part}": draw.laid_out(lse, expand=False),
        }
    return arguments


MERGE_ATTENTION_STATES = function("merge_attention_states", MERGE_STATES, varies=("tokens",), draw=_draw, weight=1)
FUNCTIONS = (MERGE_ATTENTION_STATES,)

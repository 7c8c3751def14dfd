"""``lz.embedding``: its signature, the checks of a call, the route, and random calls."""

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
from layerzero.ops.embedding.declare import LOOKUP, LOOKUP_SHARD


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    vocab_start: int | None = None,
) -> Tensor:
    """Look up rows of a table by ids: ``weight[ids] * scale``.

    Shapes: ids (*), weight (V, D) → (*, D)
    Dtype: ids int32 or int64; weight floating, returned; a scale multiplies in float32 or wider and is rounded once.
    Args:
        scale: factor on every row, as Gemma's models have it.
        padding_idx: the row of this id gets no gradient, as in ``torch.nn.functional.embedding``; from the end where
            it is negative. The result is what the row holds.
        vocab_start: declares the table a shard, which holds rows ``vocab_start`` to ``vocab_start + V - 1`` of a
            vocabulary: ids of other rows give zeros, so that the results of all shards add up to the whole table's.
            padding_idx is an id of the vocabulary, of 0 and above, then. None for a whole table.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, and for a padding_idx that no row has.
        Without a shard ids that no row has are the caller's mistake: an error on a CPU, and in debug mode elsewhere.
    Source: shards as in Megatron-LM, arXiv:1909.08053.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("embedding", arguments)
    shard = arguments["vocab_start"] is not None
    operation = LOOKUP_SHARD if shard else LOOKUP
    given = {name: value for name, value in arguments.items() if shard or name != "vocab_start"}
    problems = operation.schema.validate(**given)
    problems = problems or _value_problems(given, shard)
    if problems:
        raise InvalidCallError("embedding", problems)
    if not shard and given["padding_idx"] is not None:
        given["padding_idx"] %= given["weight"].shape[0]
    return Routed(operation, given, varies=("...",))


def _value_problems(arguments: dict[str, Any], shard: bool) -> list[str]:
    problems = []
    weight, scale, padding = (arguments[name] for name in ("weight", "scale", "padding_idx"))
    if scale is not None and not math.isfinite(scale):
        problems.append(f"scale: wanted a finite number, got {told(scale)}")
    if weight.shape[1] == 0:
        problems.append(f"weight: wanted rows of a width above 0, got shape {tuple(weight.shape)}")
    vocab = weight.shape[0]
    if not shard and not vocab and arguments["ids"].numel():
        problems.append(f"weight: wanted a row for each id, got shape {tuple(weight.shape)}")
    if padding is not None and shard and padding < 0:
        problems.append(
            f"padding_idx: wanted an id of the vocabulary, 0 and above beside vocab_start, got {told(padding)}"
        )
    if padding is not None and not shard and not -vocab <= padding < vocab:
        problems.append(f"padding_idx: wanted {-vocab} to {vocab - 1}, a row of weight, got {told(padding)}")
    return problems


def draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: ids of any shape, a whole table or a shard that has some of them."""
    vocab = draw.of((1, 2, 7, 64, 300))
    features = draw.of((1, 3, 8, 32, 64, 257))
    shape = tuple(draw.of((1, 2, 5, 17)) for _ in range(draw.of((0, 1, 2, 3), (1, 5, 4, 1))))
    shape = (0, *shape) if draw.chance(0.02) else shape
    arguments: dict[str, Any] = {"weight": draw.laid_out(draw.normal((vocab, features), dtype))}
    most = vocab - 1
    if draw.chance(0.45):
        arguments["vocab_start"] = draw.of((0, vocab, 2 * vocab, 5))
        most = 3 * vocab
    ids = draw.integers(shape, most, draw.of((torch.int64, torch.int32), (3, 1)))
    arguments["ids"] = draw.laid_out(ids, expand=False)
    if draw.chance(0.3):
        arguments["scale"] = draw.of((2.5, 0.125, 33.9411255))
    if draw.chance(0.3):
        arguments["padding_idx"] = draw.of((0, most))
    draw.poison(arguments, ("weight",))
    return arguments


FUNCTIONS = (Function("embedding", embedding, _route, (LOOKUP, LOOKUP_SHARD), draw=draw, weight=1),)

"""``lz.qkv_linear``: its signature, the checks of a call, the route, and random calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.draw import Draw
from layerzero.ops.linear.draw import FEATURES, leading, weight
from layerzero.ops.linear.packed import PackedWeight, packed_problems
from layerzero.ops.linear.qkv import BIASES, QKV, QKV_JOINED, QKV_PACKED_OF, WEIGHTS


def qkv_linear(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    kv_features: int | None = None,
    packed_q: PackedWeight | None = None,
    packed_k: PackedWeight | None = None,
    packed_v: PackedWeight | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply one input with the weights of queries, keys and values: ``input @ weight^T + bias`` for each.

    Shapes: input (*, K), q_weight (N_q, K), k_weight (N_k, K), v_weight (N_v, K), biases as many as their weight has
        rows → (*, N_q), (*, N_k), (*, N_v). Or q_weight (N_q + 2 kv_features, K) alone, and q_bias as many, which hold
        queries, keys and values one after the other, as ``torch.cat((q_weight, k_weight, v_weight))``: one product.
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Args:
        kv_features: of a joined weight, the rows of keys, and of values; None for three weights.
        packed_q, packed_k, packed_v: the :class:`layerzero.PackedWeight` of each weight, as for
            :func:`layerzero.linear`; kernels that want them want all. They change no result.
    Returns: queries, keys and values; of a joined weight they may be views of one product, whose rows have gaps then.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for one of k_weight and v_weight without
        the other, for kv_features beside three weights or none beside one, and for a packed weight of another tensor
        or of one that was written into since.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("qkv_linear", arguments)
    apart = arguments["k_weight"] is not None or arguments["v_weight"] is not None
    if apart:
        operation, without = QKV, {"kv_features"}
        problems = [f"{name}: wanted a tensor, got None" for name in WEIGHTS if arguments[name] is None]
        if arguments["kv_features"] is not None:
            problems.append(f"kv_features: wanted None beside three weights, got {told(arguments['kv_features'])}")
    else:
        operation, without = QKV_JOINED, {*WEIGHTS[1:], *BIASES[1:], "packed_k", "packed_v"}
        problems = [
            f"{name}: wanted None without {QKV_PACKED_OF.get(name, name.replace('bias', 'weight'))}, got one"
            for name in sorted(without)
            if arguments[name] is not None
        ]
        problems += _joined_problems(arguments)
    given = {name: value for name, value in arguments.items() if name not in without}
    problems = problems or operation.schema.validate(**given) + packed_problems(given, QKV_PACKED_OF)
    if problems:
        raise InvalidCallError("qkv_linear", problems)
    return Routed(operation, given, varies=("...",))


def _joined_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with how a joined weight is to be taken apart."""
    count, joined = arguments["kv_features"], arguments["q_weight"]
    if type(count) is not int or count < 1:
        return [f"kv_features: wanted the rows of keys in q_weight, or k_weight and v_weight, got {told(count)}"]
    if isinstance(joined, Tensor) and joined.ndim == 2 and joined.shape[0] <= 2 * count:
        return [
            f"q_weight: wanted more than 2 * {told(count)} rows, queries before keys and values, got {joined.shape[0]}"
        ]
    return []


def draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: three weights or one, some biases, packed weights now and then."""
    inputs, query, key = (draw.of(FEATURES) for _ in range(3))
    joined = draw.chance(0.5)
    value = key if joined or draw.chance(0.8) else draw.of(FEATURES)
    sizes = {"q": query + 2 * key} if joined else {"q": query, "k": key, "v": value}
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal((*leading(draw), inputs), dtype))}
    biased, packs = draw.chance(0.5), draw.chance(0.4)
    for letter, size in sizes.items():
        made = weight(draw, (size, inputs), dtype)
        arguments[f"{letter}_weight"] = draw.laid_out(made, expand=False)
        if biased and draw.chance(0.8):
            arguments[f"{letter}_bias"] = draw.laid_out(draw.normal((size,), dtype))
        if packs:
            arguments[f"packed_{letter}"] = PackedWeight(arguments[f"{letter}_weight"])
    if joined:
        arguments["kv_features"] = key
    draw.poison(arguments, ("input",))
    return arguments


FUNCTIONS = (
    Function("qkv_linear", qkv_linear, _route, (QKV, QKV_JOINED), draw=draw, weight=1, state=frozenset({"matmul"})),
)

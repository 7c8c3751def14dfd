"""Queries, keys and values out of one input: mlp.qkv with three weights, mlp.qkv.joined with one that holds all rows.

A joined weight has the rows of queries, then of keys, then of values, so that one product gives all three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, told
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Operation, Random, Routed, Work
from layerzero.ops.declaration import check_dense, operation, tensor, wide
from layerzero.ops.draw import Draw
from layerzero.ops.linear import stock
from layerzero.ops.linear.declare import ALIASES, AXES, TOLERANCE, TOLERANCE_REASON, judged_by_products, scaled
from layerzero.ops.linear.packed import PackedWeight, packed_param, packed_problems
from layerzero.ops.linear.route import FEATURES, leading
from layerzero.ops.linear.route import random_weight as weight

WEIGHTS = ("q_weight", "k_weight", "v_weight")
BIASES = ("q_bias", "k_bias", "v_bias")
QKV_PACKED_OF = {f"packed_{name[0]}": name for name in WEIGHTS}
"""The packed weights of a call, and what each is made of."""

Three = tuple[Tensor, Tensor, Tensor]


def pieces(product: Tensor, kv_features: int) -> Three:
    """The results in a joined product, as views."""
    first = product.shape[-1] - 2 * kv_features
    return (
        product.narrow(-1, 0, first),
        product.narrow(-1, first, kv_features),
        product.narrow(-1, first + kv_features, kv_features),
    )


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = wide(input.dtype)
    output = functional.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return output.to(input.dtype)


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
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for one of k_weight and v_weight without the
        other, for kv_features with three weights or none with one, and for a packed weight of another tensor or of one
        that was written into since.
    """
    if k_weight is None or v_weight is None:
        return pieces(_product(input, q_weight, q_bias), kv_features or 0)
    query, key, value = (
        _product(input, weight, bias) for weight, bias in ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias))
    )
    return query, key, value


def _outputs(facts: Mapping[str, Any]) -> int:
    if "joined_features" in facts:
        return int(facts["joined_features"])
    return int(facts["q_features"] + facts["k_features"] + facts["v_features"])


def _work(facts: Mapping[str, Any]) -> Work:
    rows, inputs, outputs = facts["rows"], facts["in_features"], _outputs(facts)
    moved = rows * inputs + outputs * inputs + rows * outputs
    return Work(2.0 * rows * inputs * outputs, float(moved * facts["dtype"].itemsize))


def _derive_joined(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    return {"q_features": values["joined_features"] - 2 * arguments["kv_features"]}


def _case(name: str, rows: int, inputs: int, query: int, kv: int, *, joined: bool, biased: bool = False) -> Case:
    sizes = {"rows": rows, "in_features": inputs}
    if joined:
        given = ("q_bias",) if biased else ()
        return Case(name, sizes | {"joined_features": query + 2 * kv}, {"kv_features": kv}, given)
    return Case(name, sizes | {"q_features": query, "k_features": kv, "v_features": kv}, {}, BIASES if biased else ())


_ROWS = {"cuda": (1, 4, 16, 64, 256, 1024, 4096), "cpu": (1, 4, 16, 64, 256)}
_MODELS = {
    "cuda": ((4096, 4096, 1024), (3584, 3584, 512), (8192, 8192, 1024)),
    "cpu": ((384, 384, 384), (2048, 2048, 512)),
}
"""(in_features, features of queries, of keys and of values)"""


def _operation(name: str, summary: str, *, joined: bool) -> Operation:
    shapes = {"q_weight": "joined_features"} if joined else {each: f"{each[0]}_features" for each in WEIGHTS}
    packed = {each: of for each, of in QKV_PACKED_OF.items() if of in shapes}

    def examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
        inputs = case.sizes["in_features"]
        return {
            each: scaled(each, (case.sizes[axis], inputs), dtype, device, generator) for each, axis in shapes.items()
        }

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        kind = device if device in _ROWS else "cpu"
        for inputs, query, kv in _MODELS[kind] if narrow.keys() <= {"rows"} else ():
            for rows in narrow.get("rows", _ROWS[kind]):
                yield _case(f"{rows}x{inputs}x{query}+2x{kv}", rows, inputs, query, kv, joined=joined)

    return operation(
        name,
        summary,
        qkv_linear,
        inputs=(
            "input: ... in_features",
            *(tensor(f"{each}: {axis} in_features", resident=True) for each, axis in shapes.items()),
            *(tensor(f"{each[0]}_bias: {axis}", required=False) for each, axis in shapes.items()),
        ),
        outputs=(
            "query: ... q_features",
            f"key: ... {'kv' if joined else 'k'}_features",
            f"value: ... {'kv' if joined else 'v'}_features",
        ),
        params=(
            *((Param("kv_features", int, example=32),) if joined else ()),
            *(packed_param(each, of) for each, of in packed.items()),
        ),
        axes=(*AXES, *(Axis(each, scales=True, shared=not joined) for each in shapes.values())),
        cases=(
            _case("small", 33, 96, 64, 32, joined=joined, biased=True),
            _case("minilm", 1024, 384, 384, 384, joined=joined, biased=True),
            _case("llama3_8b_b1", 1, 4096, 4096, 1024, joined=joined),
            _case("qwen25_7b_b16", 16, 3584, 3584, 512, joined=joined, biased=True),
        ),
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        judge={
            name: judged_by_products(qkv_linear, TOLERANCE, TOLERANCE_REASON, place)
            for place, name in enumerate(("query", "key", "value"))
        },
        derive=_derive_joined if joined else None,
        derived_from={"q_features": ("joined_features",)} if joined else {},
        aliases=ALIASES,
        examples=examples,
        work=_work,
        sweep=sweep,
        stock=stock.qkv_linear,
    )


QKV = _operation("mlp.qkv", "Products of one input with the weights of queries, keys and values", joined=False)
QKV_JOINED = _operation("mlp.qkv.joined", "Queries, keys and values of one product with a joined weight", joined=True)
OPERATIONS = (QKV, QKV_JOINED)


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("qkv_linear", arguments)
    apart = arguments["k_weight"] is not None or arguments["v_weight"] is not None
    if apart:
        operation, without = QKV, {"kv_features"}
        problems = [f"{name}: wanted a tensor, got None" for name in WEIGHTS if arguments[name] is None]
        if arguments["kv_features"] is not None:
            problems.append(f"kv_features: wanted None with three weights, got {told(arguments['kv_features'])}")
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
    refuse("qkv_linear", problems)
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
    return draw.poison(arguments, ("input",))


FUNCTIONS = (
    Function("qkv_linear", qkv_linear, _route, (QKV, QKV_JOINED), draw=draw, weight=1, state=frozenset({"matmul"})),
)

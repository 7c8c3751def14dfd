"""Queries, keys and values out of one input: mlp.qkv with three weights, mlp.qkv.joined with one that holds all rows.

A joined weight has the rows of queries, then of keys, then of values, so that one product gives all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.linear import stock
from layerzero.ops.linear.declare import ALIASES, AXES, DERIVED_FROM, TOLERANCE, TOLERANCE_REASON, derive, wide
from layerzero.ops.linear.examples import scaled
from layerzero.ops.linear.packed import packed_param
from layerzero.ops.linear.sums import judged_by_products

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
    return functional.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def qkv_reference(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
) -> Three:
    """``input @ weight^T + bias`` for each of three weights.

    Shapes: input (*, K), q_weight (N_q, K), k_weight (N_k, K), v_weight (N_v, K), biases as many as their weight has
    rows → (*, N_q), (*, N_k), (*, N_v)
    Dtype: computes in float32 (float64 for float64) and rounds once; returns input.dtype.
    """
    pairs = (q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias)
    query, key, value = (_product(input, weight, bias).to(input.dtype) for weight, bias in pairs)
    return query, key, value


def qkv_joined_reference(
    input: Tensor,
    q_weight: Tensor,
    *,
    kv_features: int,
    q_bias: Tensor | None = None,
) -> Three:
    """The same of a weight (N_q + 2 kv_features, K) that holds queries, keys and values one after the other."""
    return pieces(_product(input, q_weight, q_bias).to(input.dtype), kv_features)


def _fake(input: Tensor, *weights: Tensor, **_: object) -> Three:
    query, key, value = (input.new_empty((*input.shape[:-1], each.shape[0])) for each in weights[:3])
    return query, key, value


def _joined_fake(input: Tensor, q_weight: Tensor, *, kv_features: int, **_: object) -> Three:
    sizes = q_weight.shape[0] - 2 * kv_features, kv_features, kv_features
    query, key, value = (input.new_empty((*input.shape[:-1], each)) for each in sizes)
    return query, key, value


def _outputs(facts: Mapping[str, Any]) -> int:
    if "joined_features" in facts:
        return int(facts["joined_features"])
    return int(facts["q_features"] + facts["k_features"] + facts["v_features"])


def _work(facts: Mapping[str, Any]) -> Work:
    """One product into the features of all three; every tensor once."""
    rows, inputs, outputs = facts["rows"], facts["in_features"], _outputs(facts)
    moved = rows * inputs + outputs * inputs + rows * outputs
    return Work(2.0 * rows * inputs * outputs, float(moved * facts["dtype"].itemsize))


def _derive_joined(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    first = values["joined_features"] - 2 * arguments["kv_features"]
    return {**derive(arguments, values), "q_features": first}


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
    reference: Callable[..., Three] = qkv_joined_reference if joined else qkv_reference

    def examples(
        case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        inputs = case.sizes["in_features"]
        return {
            each: scaled(each, (case.sizes[axis], inputs), dtype, device, generator) for each, axis in shapes.items()
        }

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        kind = device if device in _ROWS else "cpu"
        for inputs, query, kv in _MODELS[kind] if narrow.keys() <= {"rows"} else ():
            for rows in narrow.get("rows", _ROWS[kind]):
                yield _case(f"{rows}x{inputs}x{query}+2x{kv}", rows, inputs, query, kv, joined=joined)

    return Operation(
        schema=OperationSchema(
            operation=name,
            inputs=(
                TensorSchema("input", ("...", "in_features"), FLOATING),
                *(TensorSchema(each, (axis, "in_features"), FLOATING, resident=True) for each, axis in shapes.items()),
                *(
                    TensorSchema(each.replace("weight", "bias"), (axis,), FLOATING, required=False)
                    for each, axis in shapes.items()
                ),
            ),
            outputs=tuple(
                TensorSchema(each, ("...", axis), FLOATING)
                for each, axis in (
                    ("query", "q_features"),
                    ("key", "kv_features" if joined else "k_features"),
                    ("value", "kv_features" if joined else "v_features"),
                )
            ),
            params=(
                *((Param("kv_features", int, example=32),) if joined else ()),
                *(packed_param(each, of) for each, of in packed.items()),
            ),
            axes=(*AXES, *(Axis(each, scales=True) for each in shapes.values())),
        ),
        summary=summary,
        reference=reference,
        fake=_joined_fake if joined else _fake,
        cases=(
            _case("small", 33, 96, 64, 32, joined=joined, biased=True),
            _case("minilm", 1024, 384, 384, 384, joined=joined, biased=True),
            _case("llama3_8b_b1", 1, 4096, 4096, 1024, joined=joined),
            _case("qwen25_7b_b16", 16, 3584, 3584, 512, joined=joined, biased=True),
        ),
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        judge={
            name: judged_by_products(reference, TOLERANCE, TOLERANCE_REASON, place)
            for place, name in enumerate(("query", "key", "value"))
        },
        derive=_derive_joined if joined else derive,
        derived=("rows", "input_ndim", *(("q_features",) if joined else ())),
        derived_from={**DERIVED_FROM, **({"q_features": ("joined_features",)} if joined else {})},
        aliases=ALIASES,
        examples=examples,
        work=_work,
        sweep=sweep,
        stock=stock.qkv_linear,
    )


QKV = _operation("mlp.qkv", "Products of one input with the weights of queries, keys and values", joined=False)
QKV_JOINED = _operation("mlp.qkv.joined", "Queries, keys and values of one product with a joined weight", joined=True)
OPERATIONS = (QKV, QKV_JOINED)

"""Numbers that are only moved, into memory of their own.

tensor.transpose_head_token   (..., heads, tokens, head dim) as (..., tokens, heads, head dim)
tensor.transpose_token_head   the way back
tensor.split_qkv              a joined product as queries, keys and values
tensor.copy_slice             one slice written over another
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.judge import Exact
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.linear.qkv import pieces
from layerzero.ops.tensor import stock

_MOVED = Exact("numbers are only moved")


def _bytes(*sizes: str) -> Callable[[Mapping[str, Any]], Work]:
    """Every number read once and written once."""

    def work(facts: Mapping[str, Any]) -> Work:
        return Work(0.0, 2.0 * math.prod(facts[name] for name in sizes) * facts["dtype"].itemsize)

    return work


# tensor.transpose_head_token, tensor.transpose_token_head

_TOKENS_FIRST, _HEADS_FIRST = ("tokens", "heads"), ("heads", "tokens")
_SHAPES = {"small": (2, 7, 4, 64), "decode_b64": (64, 1, 32, 128), "prefill": (1, 512, 32, 128)}


def _derive_batch(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    return {"batch": math.prod(arguments["input"].shape[:-3])}


def transpose_reference(input: Tensor) -> Tensor:  # noqa: A002  # torch's name
    """Tokens and heads change places. Shapes: (..., A, B, D) → (..., B, A, D), contiguous. Dtype: any, returned."""
    return input.transpose(-2, -3).clone(memory_format=torch.contiguous_format)


def _transpose_fake(input: Tensor) -> Tensor:  # noqa: A002
    *lead, first, second, width = input.shape
    return input.new_empty((*lead, second, first, width))


def _transpose(name: str, summary: str, before: tuple[str, str], after: tuple[str, str]) -> Operation:
    return Operation(
        schema=OperationSchema(
            operation=f"tensor.{name}",
            inputs=(TensorSchema("input", ("...", *before, "head_dim"), FLOATING),),
            outputs=(TensorSchema("output", ("...", *after, "head_dim"), FLOATING),),
            axes=(
                Axis("batch", scales=True, live=True, apart=True, leading=True),
                Axis("tokens", scales=True, live=True),
                Axis("heads", scales=True),
                Axis("head_dim", scales=True),
            ),
        ),
        summary=summary,
        reference=transpose_reference,
        fake=_transpose_fake,
        cases=tuple(
            Case(label, dict(zip(("batch", "tokens", "heads", "head_dim"), sizes, strict=True)))
            for label, sizes in _SHAPES.items()
        ),
        judge=_MOVED,
        derive=_derive_batch,
        derived=("batch",),
        derived_from={"batch": ("...",)},
        work=_bytes("batch", "tokens", "heads", "head_dim"),
        stock=stock.transpose,
    )


TRANSPOSE_HEAD_TOKEN = _transpose(
    "transpose_head_token", "Heads before tokens written as tokens before heads", _HEADS_FIRST, _TOKENS_FIRST
)
TRANSPOSE_TOKEN_HEAD = _transpose(
    "transpose_token_head", "Tokens before heads written as heads before tokens", _TOKENS_FIRST, _HEADS_FIRST
)


# tensor.split_qkv

_ROWS = Axis("rows", scales=True, live=True, apart=True, leading=True)
KV_FEATURES = Param("kv_features", int, example=32)


def _derive_rows(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    tensor = arguments["qkv"] if "qkv" in arguments else arguments["destination"]
    return {"rows": math.prod(tensor.shape[:-1])}


def _derive_parts(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    queries = values["joined_features"] - 2 * arguments["kv_features"]
    return {**_derive_rows(arguments, values), "q_features": queries}


def split_qkv_reference(qkv: Tensor, *, kv_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each part in memory of its own. Shapes: (..., N + 2 M) → (..., N), (..., M), (..., M). Dtype: any, returned."""
    query, key, value = (each.clone(memory_format=torch.contiguous_format) for each in pieces(qkv, kv_features))
    return query, key, value


def _split_fake(qkv: Tensor, *, kv_features: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (qkv.new_empty(each.shape) for each in pieces(qkv, kv_features))
    return query, key, value


def _split_case(name: str, rows: int, queries: int, kv_features: int) -> Case:
    return Case(name, {"rows": rows, "joined_features": queries + 2 * kv_features}, {"kv_features": kv_features})


SPLIT_QKV = Operation(
    schema=OperationSchema(
        operation="tensor.split_qkv",
        inputs=(TensorSchema("qkv", ("...", "joined_features"), FLOATING),),
        outputs=(
            TensorSchema("query", ("...", "q_features"), FLOATING),
            TensorSchema("key", ("...", "kv_features"), FLOATING),
            TensorSchema("value", ("...", "kv_features"), FLOATING),
        ),
        params=(KV_FEATURES,),
        axes=(_ROWS, Axis("joined_features", scales=True)),
    ),
    summary="Queries, keys and values out of a joined product, each in memory of its own",
    reference=split_qkv_reference,
    fake=_split_fake,
    cases=(
        _split_case("small", 33, 64, 32),
        _split_case("llama3_8b_decode_b64", 64, 4096, 1024),
        _split_case("llama3_8b_s512", 512, 4096, 1024),
    ),
    judge=_MOVED,
    derive=_derive_parts,
    derived=("rows", "q_features"),
    derived_from={"rows": ("...",), "q_features": ("joined_features",)},
    work=_bytes("rows", "joined_features"),
    stock=stock.split_qkv,
)


# tensor.copy_slice


def copy_slice_reference(destination: Tensor, input: Tensor) -> None:  # noqa: A002
    """One slice written over another. Shapes: (..., D), (..., D), the same. Dtype: any, the same."""
    destination.copy_(input)


def _nothing(*_: object, **__: object) -> None:
    return None


COPY_SLICE = Operation(
    schema=OperationSchema(
        operation="tensor.copy_slice",
        inputs=(
            TensorSchema("destination", ("...", "features"), FLOATING, mutated=True),
            TensorSchema("input", ("...", "features"), FLOATING),
        ),
        outputs=(),
        axes=(_ROWS, Axis("features", scales=True)),
    ),
    summary="One slice written over another",
    reference=copy_slice_reference,
    fake=_nothing,
    cases=tuple(
        Case(name, {"rows": rows, "features": features})
        for name, (rows, features) in {"small": (33, 96), "decode": (1, 4096), "prefill": (512, 4096)}.items()
    ),
    judge=_MOVED,
    derive=_derive_rows,
    derived=("rows",),
    derived_from={"rows": ("...",)},
    work=_bytes("rows", "features"),
    stock=stock.copy_slice,
)

OPERATIONS = (TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD, SPLIT_QKV, COPY_SLICE)

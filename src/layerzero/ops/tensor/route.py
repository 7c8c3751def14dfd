"""The public functions that move numbers: signatures, the checks of a call, routes, random calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.checks import check_dense, write_problems
from layerzero.ops.draw import Draw
from layerzero.ops.tensor.declare import COPY_SLICE, SPLIT_QKV, TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD


def transpose_head_token(input: Tensor) -> Tensor:  # noqa: A002  # torch's name
    """Write heads before tokens as tokens before heads, into memory of its own.

    Where a view will do, ``input.transpose(-2, -3)`` costs nothing; kernels that want dense memory want this.

    Shapes: input (*, H, T, D) → (*, T, H, D), contiguous
    Dtype: floating, returned.
    Raises: InvalidCallError for other dtypes, and for fewer than three axes.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def transpose_token_head(input: Tensor) -> Tensor:  # noqa: A002
    """Write tokens before heads as heads before tokens, into memory of its own.

    Shapes: input (*, T, H, D) → (*, H, T, D), contiguous
    Dtype: floating, returned.
    Raises: InvalidCallError for other dtypes, and for fewer than three axes.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def split_qkv(qkv: Tensor, kv_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take a joined product apart into queries, keys and values, each in memory of its own.

    ``lz.split_qkv_norm_rope`` does so and rotates, ``lz.qkv_linear`` makes the parts at once.

    Shapes: qkv (*, N + 2 M), queries first, then keys, then values → (*, N), (*, M), (*, M), contiguous
    Dtype: floating, returned.
    Args:
        kv_features: M, the numbers of a token's keys, and of its values.
    Raises: InvalidCallError for other dtypes, and for parts that leave no queries.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def copy_slice_(destination: Tensor, input: Tensor) -> None:  # noqa: A002
    """Write one slice over another: ``lz.copy_slice_(cache[:, 3:7], new)``.

    Shapes: destination and input (*, D), the same; views say which part of a tensor is meant.
    Dtype: floating, the same for both.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a destination that needs gradients as a
        leaf, that overlaps itself in memory, or that shares memory with the input.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route_transpose(name: str, operation: Operation) -> Callable[..., Routed]:
    def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
        check_dense(name, arguments)
        problems = operation.schema.validate(**arguments)
        if problems:
            raise InvalidCallError(name, problems)
        return Routed(operation, arguments, varies=("...", "tokens"))

    return route


def _route_split(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("split_qkv", arguments)
    problems = SPLIT_QKV.schema.validate(**arguments)
    if not problems:
        width, kv_features = arguments["qkv"].shape[-1], arguments["kv_features"]
        if not 0 < 2 * kv_features < width:
            wanted = f"1 to {(width - 1) // 2}, so that queries are left of {width}"
            problems.append(f"kv_features: wanted {wanted}, got {told(kv_features)}")
    if problems:
        raise InvalidCallError("split_qkv", problems)
    return Routed(SPLIT_QKV, arguments, varies=("...",))


def _route_copy(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("copy_slice_", arguments)
    problems = COPY_SLICE.schema.validate(**arguments)
    if not problems:
        wanted, got = (tuple(arguments[name].shape) for name in ("destination", "input"))
        if got != wanted:
            problems.append(f"input: wanted shape {wanted} like destination, got {got}")
        problems += write_problems(arguments, ("destination",), ("input",))
    if problems:
        raise InvalidCallError("copy_slice_", problems)
    return Routed(COPY_SLICE, arguments, varies=("...",))


_WIDTHS = (1, 2, 3, 7, 8, 16, 33, 64, 100, 257)


def _leading(draw: Draw) -> tuple[int, ...]:
    rows = tuple(draw.of((1, 2, 3, 5, 17)) for _ in range(draw.of((0, 1, 2), (3, 6, 2))))
    return (0, *rows) if draw.chance(0.02) else rows


def _draw_transpose(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    shape = (*_leading(draw), draw.of((0, 1, 2, 7, 33), (1, 6, 6, 6, 3)), draw.of((1, 2, 4, 9)), draw.of(_WIDTHS))
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal(shape, dtype))}
    draw.poison(arguments, ("input",))
    return arguments


def _draw_split(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    queries, kv_features = draw.of(_WIDTHS), draw.of(_WIDTHS)
    qkv = draw.laid_out(draw.normal((*_leading(draw), queries + 2 * kv_features), dtype))
    arguments: dict[str, Any] = {"qkv": qkv, "kv_features": kv_features}
    draw.poison(arguments, ("qkv",))
    return arguments


def _draw_copy(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    shape = (*_leading(draw), draw.of(_WIDTHS))
    arguments: dict[str, Any] = {
        "destination": draw.laid_out(draw.normal(shape, dtype), expand=False),
        "input": draw.laid_out(draw.normal(shape, dtype)),
    }
    draw.poison(arguments, ("input",))
    return arguments


FUNCTIONS = (
    *(
        Function(operation.name.partition(".")[2], signature, route, (operation,), draw, 1)
        for signature, operation, route, draw in (
            (
                transpose_head_token,
                TRANSPOSE_HEAD_TOKEN,
                _route_transpose("transpose_head_token", TRANSPOSE_HEAD_TOKEN),
                _draw_transpose,
            ),
            (
                transpose_token_head,
                TRANSPOSE_TOKEN_HEAD,
                _route_transpose("transpose_token_head", TRANSPOSE_TOKEN_HEAD),
                _draw_transpose,
            ),
            (split_qkv, SPLIT_QKV, _route_split, _draw_split),
        )
    ),
    Function("copy_slice_", copy_slice_, _route_copy, (COPY_SLICE,), _draw_copy, 1),
)

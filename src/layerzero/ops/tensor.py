"""Numbers that are only moved, into memory of their own.

tensor.transpose_head_token   (..., heads, tokens, head dim) as (..., tokens, heads, head dim)
tensor.transpose_token_head   the way back
tensor.split_qkv              a joined product as queries, keys and values
tensor.copy_slice             one slice written over another
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, told
from layerzero.core.judge import Exact
from layerzero.ops.declaration import cases, function, operation, same_shape, tensor
from layerzero.ops.draw import Draw
from layerzero.ops.linear.qkv import pieces

_MOVED = Exact("numbers are only moved")
_DENSE = torch.contiguous_format


def transpose_head_token(input: Tensor) -> Tensor:
    """Write heads before tokens as tokens before heads, into memory of its own.

    Where a view will do, ``input.transpose(-2, -3)`` costs nothing; kernels that want dense memory want this.

    Shapes: input (*, H, T, D) → (*, T, H, D), contiguous
    Dtype: floating, returned.
    Raises: InvalidCallError for other dtypes, and for fewer than three axes.
    """
    return input.transpose(-2, -3).clone(memory_format=_DENSE)


def transpose_token_head(input: Tensor) -> Tensor:
    """Write tokens before heads as heads before tokens, into memory of its own.

    Shapes: input (*, T, H, D) → (*, H, T, D), contiguous
    Dtype: floating, returned.
    Raises: InvalidCallError for other dtypes, and for fewer than three axes.
    """
    return input.transpose(-2, -3).clone(memory_format=_DENSE)


def split_qkv(qkv: Tensor, kv_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take a joined product apart into queries, keys and values, each in memory of its own.

    ``lz.split_qkv_norm_rope`` does so and rotates, ``lz.qkv_linear`` makes the parts at once.

    Shapes: qkv (*, N + 2 M), queries first, then keys, then values → (*, N), (*, M), (*, M), contiguous
    Dtype: floating, returned.
    Args:
        kv_features: M, the numbers of a token's keys, and of its values.
    Raises: InvalidCallError for other dtypes, and for parts that leave no queries.
    """
    query, key, value = (each.clone(memory_format=_DENSE) for each in pieces(qkv, kv_features))
    return query, key, value


def copy_slice_(destination: Tensor, input: Tensor) -> None:
    """Write one slice over another: ``lz.copy_slice_(cache[:, 3:7], new)``.

    Shapes: destination and input (*, D), the same; views say which part of a tensor is meant.
    Dtype: floating, the same for both.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a destination that needs gradients as a
        leaf, that is an expanded view, or that shares memory with the input.
    """
    destination.copy_(input)


_BATCH, _ROWS = (Axis(name, scales=True, live=True, apart=True, leading=True) for name in ("batch", "rows"))
_HEADS = (_BATCH, Axis("tokens", scales=True, live=True), Axis("heads", scales=True), Axis("head_dim", scales=True))
_TRANSPOSES = {"small": (2, 7, 4, 64), "decode_b64": (64, 1, 32, 128), "prefill": (1, 512, 32, 128)}

TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD = (
    operation(
        f"tensor.{reference.__name__}",
        summary,
        reference,
        inputs=(f"input: ... {before} head_dim",),
        outputs=(f"output: ... {after} head_dim",),
        axes=_HEADS,
        cases=cases("batch tokens heads head_dim", _TRANSPOSES),
        judge=_MOVED,
    )
    for reference, summary, before, after in (
        (transpose_head_token, "Heads before tokens written as tokens before heads", "heads tokens", "tokens heads"),
        (transpose_token_head, "Tokens before heads written as heads before tokens", "tokens heads", "heads tokens"),
    )
)
SPLIT_QKV = operation(
    "tensor.split_qkv",
    "Queries, keys and values out of a joined product, each in memory of its own",
    split_qkv,
    inputs=("qkv: ... joined_features",),
    outputs=("query: ... q_features", "key: ... kv_features", "value: ... kv_features"),
    params=(Param("kv_features", int, example=32),),
    axes=(_ROWS, Axis("joined_features", scales=True)),
    cases=cases(
        "rows joined_features | kv_features",
        {"small": (33, 128, 32), "llama3_8b_decode_b64": (64, 6144, 1024), "llama3_8b_s512": (512, 6144, 1024)},
    ),
    derive=lambda arguments, sizes: {"q_features": sizes["joined_features"] - 2 * arguments["kv_features"]},
    derived_from={"q_features": ("joined_features",)},
    judge=_MOVED,
)
COPY_SLICE = operation(
    "tensor.copy_slice",
    "One slice written over another",
    copy_slice_,
    inputs=(tensor("destination: ... features", mutated=True), "input: ... features"),
    axes=(_ROWS, Axis("features", scales=True)),
    cases=cases("rows features", {"small": (33, 96), "decode": (1, 4096), "prefill": (512, 4096)}),
    judge=_MOVED,
)


def _queries_problems(arguments: dict[str, Any]) -> list[str]:
    width, kv_features = arguments["qkv"].shape[-1], arguments["kv_features"]
    if 0 < 2 * kv_features < width:
        return []
    wanted = f"1 to {(width - 1) // 2}, so that queries are left of {width}"
    return [f"kv_features: wanted {wanted}, got {told(kv_features)}"]


_WIDTHS = (1, 2, 3, 7, 8, 16, 33, 64, 100, 257)


def _leading(draw: Draw) -> tuple[int, ...]:
    return draw.leading((0, 1, 2), (3, 6, 2))


def _draw_transpose(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    shape = (*_leading(draw), draw.of((0, 1, 2, 7, 33), (1, 6, 6, 6, 3)), draw.of((1, 2, 4, 9)), draw.of(_WIDTHS))
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal(shape, dtype))}
    return draw.poison(arguments, ("input",))


def _draw_split(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    queries, kv_features = draw.of(_WIDTHS), draw.of(_WIDTHS)
    qkv = draw.laid_out(draw.normal((*_leading(draw), queries + 2 * kv_features), dtype))
    arguments: dict[str, Any] = {"qkv": qkv, "kv_features": kv_features}
    return draw.poison(arguments, ("qkv",))


def _draw_copy(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    shape = (*_leading(draw), draw.of(_WIDTHS))
    arguments: dict[str, Any] = {
        "destination": draw.laid_out(draw.normal(shape, dtype), expand=False),
        "input": draw.laid_out(draw.normal(shape, dtype)),
    }
    return draw.poison(arguments, ("input",))


OPERATIONS = (TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD, SPLIT_QKV, COPY_SLICE)
FUNCTIONS = (
    *(
        function(each.reference.__name__, each, varies=("...", "tokens"), draw=_draw_transpose, weight=1)
        for each in (TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD)
    ),
    function("split_qkv", SPLIT_QKV, fits=_queries_problems, draw=_draw_split, weight=1),
    function("copy_slice_", COPY_SLICE, fits=same_shape("input", "destination"), draw=_draw_copy, weight=1),
)

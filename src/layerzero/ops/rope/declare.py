"""Rotary positions: posenc.rope, and posenc.rope.inplace, which writes over what it is given.

Tokens come first: (tokens, heads, head dim) is what serving engines have, and (batch, sequence, heads, head dim) is the
same memory: BSHD with a batch or without. BHSD is what lies heads first, as Transformers' tensors do, and has a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING, INDEX, dtype_name
from layerzero.core.operation import Case, Random, Work
from layerzero.ops.attention.declare import HEAD_DIM
from layerzero.ops.declaration import ROUNDED_TWICE, operation, tensor
from layerzero.ops.rope import stock


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """What a rotation is computed in: float32, or what is wider of the tensors."""
    dtype = torch.float32
    for each in tensors:
        dtype = torch.promote_types(dtype, each.dtype)
    return dtype


def rotated(tensor: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, wide: torch.dtype) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` entries of each head; the rest passes through.

    Shapes: tensor (..., S, H, D), cos and sin (..., S, 1, R/2) → tensor's
    """
    width = 2 * cos.shape[-1]
    turned, rest = tensor[..., :width].to(wide), tensor[..., width:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined.to(tensor.dtype), rest), -1)


def rope(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions; ``lz.rope_one`` rotates one tensor.

    Shapes: query (T, H, D), key (T, K, D), positions (T,); or query (B, S, H, D), key (B, S, K, D), positions (B, S),
        (1, S) or (S,), axes 1 and 2 of query and key swapped in BHSD; cos and sin (P, R/2), R at most D → query's and
        key's. Entries of a head from R on pass through.
    Dtype: query and key the same floating dtype, returned; cos and sin floating, the same for both, float32 at best;
        positions int32 or int64. Computes in float32 or wider.
    Args:
        cos, sin: a row for each position. ``lz.rope_table`` makes them side by side in one tensor, which kernels that
            want them joined read without a copy.
        positions: the row of each token; 0 to S-1 if None. Rows beyond the table are the caller's mistake: an error on
            a CPU, and in debug mode elsewhere.
        interleaved: pairs are entries 2i and 2i + 1 (GPT-J, GGUF files), not i and i + R/2 (GPT-NeoX, Transformers).
        layout: ``"BSHD"`` or ``"BHSD"``, for four axes; by default what shapes and positions say, an error where
            both fit. Of three axes the first are tokens.
    Returns: the rotated query and key.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for a sequence longer than the table without
        positions; on a CPU and in debug mode for positions beyond it, too.
    Source: RoFormer, arXiv:2104.09864.
    """
    wide = wide_dtype(query, cos, sin)
    rows = [each.to(wide) for each in stock.rows_of(cos, sin, positions, query.shape[-3])]
    query, key = (rotated(each, *rows, interleaved=interleaved, wide=wide) for each in (query, key))
    return query, key


def rope_(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: str | None = None,
) -> None:
    """Rotate queries and keys in place, as ``lz.rope`` does; views of one projection's output may be given.

    Shapes, dtypes, arguments and source as of ``lz.rope``. Writes over the first R entries of each head of query and
    key, and returns nothing.
    Raises: InvalidCallError as ``lz.rope``, and for a query or key that needs gradients as a leaf, that is an expanded
        view, or that shares elements with the other or with the table.
    """
    results = rope(query, key, cos, sin, positions=positions, interleaved=interleaved)
    width = 2 * cos.shape[-1]
    for each, result in zip((query, key), results, strict=True):
        each[..., :width] = result[..., :width]


def cos_sin(table: int, half: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A plain table of base 10,000 that lies as kernels want it: cosines, then sines, in each row of one tensor."""
    if device.type == "meta":
        joined = torch.empty(table, 2 * half, dtype=dtype, device=device)
    else:
        inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
        angles = torch.outer(torch.arange(table, dtype=torch.float64), inverse)
        joined = torch.cat((angles.cos(), angles.sin()), -1).to(device, dtype)
    return joined[:, :half], joined[:, half:]


def examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """Tokens in the middle of their sequences: positions are shuffled rows of a table of real angles."""
    size = case.sizes
    tokens = (size["batch"], size["seq"])
    cos, sin = cos_sin(size["table"], size["rotary_half"], device)

    def normal(heads: int) -> Tensor:
        shape = (*tokens, heads, size["head_dim"])
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        if generator is None:  # the same numbers are not needed everywhere: drawn where they are needed
            return torch.randn(shape, device=device, dtype=dtype)
        return torch.randn(shape, generator=generator).to(device, dtype)

    positions = torch.randint(0, max(size["table"], 1), tokens, generator=generator).to(device)
    return {
        "query": normal(size["heads"]),
        "key": normal(size["kv_heads"]),
        "cos": cos,
        "sin": sin,
        "positions": positions,
    }


def case(
    name: str, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, half: int = 0, **params: object
) -> Case:
    """A case with a table of 4096 rows, or of 64 where it is small."""
    sizes = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    table = 64 if name.startswith("small") else 4096
    return Case(name, sizes | {"rotary_half": half or head_dim // 2, "table": table}, params, ("positions",))


CASES = (
    case("small", 2, 7, 4, 2, 64),
    case("small_interleaved", 1, 9, 4, 4, 64, interleaved=True),
    case("small_partial", 2, 5, 4, 2, 80, 16),
    case("llama3_8b_decode_b1", 1, 1, 32, 8, 128),
    case("llama3_8b_decode_b64", 64, 1, 32, 8, 128),
    case("llama3_8b_s512", 1, 512, 32, 8, 128),
    case("llama3_8b_s4096", 1, 4096, 32, 8, 128),
)


def sweep(device: str, narrow: Mapping[str, Any]) -> list[Case]:
    """By tokens, for the head counts of models from 1 to 70 billion weights; none where other sizes are named."""
    if narrow:
        return []
    tokens = (1, 8, 64, 512, 4096, 16384) if device == "cuda" else (1, 8, 64, 512)
    shapes = ((32, 8, 128, 64), (16, 2, 128, 64), (64, 8, 128, 64), (16, 16, 64, 32), (32, 32, 80, 16))
    return [
        case(f"{each} tokens ({heads}/{kv_heads}/{head_dim})", each, 1, heads, kv_heads, head_dim, half)
        for heads, kv_heads, head_dim, half in shapes
        for each in tokens
    ]


LAYOUTS = ("BSHD", "BHSD")
"""Attention's; the batch is any number of leading axes, and only tokens first may do without it."""

TOLERANCE = ROUNDED_TWICE
TOLERANCE_REASON = "twice the rounding of the output; both products and their sum are in float32"

INTERLEAVED = Param("interleaved", bool, False, example=True)

AXES = (
    Axis("batch", scales=True, live=True, beside=True, apart=True, leading=True),
    Axis("seq", scales=True, live=True),
    Axis("heads", scales=True, beside=True),
    Axis("kv_heads", scales=True, beside=True, apart=True, carries=("heads",)),
    Axis("table", live=True, works=False),
    Axis("head_dim", codes=HEAD_DIM),
)
QUERY, KEY = ("...", "seq", "heads", "head_dim"), ("...", "seq", "kv_heads", "head_dim")
COS_SIN = (
    TensorSchema("cos", ("table", "rotary_half"), FLOATING, same_dtype=False),
    TensorSchema("sin", ("table", "rotary_half"), FLOATING, same_dtype=False),
)
POSITIONS = TensorSchema("positions", ("...", "seq"), INDEX, required=False, same_dtype=False, indexes=("table",))


_FIRST = ("query", "input", "qkv")


def of_table(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    """Facts that all rotations have besides those of their leading axes."""
    positions = arguments.get("positions")
    return {
        "rotary_dim": 2 * values["rotary_half"],
        "input_ndim": next(arguments[name] for name in _FIRST if name in arguments).ndim,
        "table_dtype": dtype_name(arguments["cos"].dtype),
        "position_dtype": "none" if positions is None else dtype_name(positions.dtype),
    }


OF_TABLE: Mapping[str, tuple[str, ...]] = {
    "rotary_dim": ("rotary_half",),
    "input_ndim": (),
    "table_dtype": (),
    "position_dtype": (),
}


def work(facts: Mapping[str, Any]) -> Work:
    """Six operations a pair; queries and any keys read and written, two rows of the table for each token."""
    tokens, heads = facts["batch"] * facts["seq"], facts["heads"] + facts.get("kv_heads", 0)
    moved = 2.0 * tokens * heads * facts["head_dim"] * facts["dtype"].itemsize
    return Work(6.0 * tokens * heads * facts["rotary_half"], moved + 4.0 * tokens * facts["rotary_dim"])


def complete(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """What follows where queries and keys are all that is known: full rotation, a table as long as the sequence."""
    found = {"batch": 1, "kv_heads": sizes["heads"], "rotary_half": sizes["head_dim"] // 2}
    return found | {"table": max(sizes["seq"], 1)}


_COMMON: dict[str, Any] = {
    "params": (INTERLEAVED,),
    "axes": AXES,
    "layouts": LAYOUTS,
    "cases": CASES,
    "tolerance": TOLERANCE,
    "tolerance_reason": TOLERANCE_REASON,
    "derive": of_table,
    "derived_from": OF_TABLE,
    "examples": examples,
    "complete": complete,
    "work": work,
    "sweep": sweep,
}
PAIR = (tensor(f"query: {' '.join(QUERY)}", has_layout=True), tensor(f"key: {' '.join(KEY)}", has_layout=True))
PAIR_OUT = tuple(
    replace(each, name=f"{each.name}_out", dtype_from=source) for each, source in zip(PAIR, ("", "key"), strict=True)
)

ROPE = operation(
    "posenc.rope",
    "Rotary positions of queries and keys",
    rope,
    inputs=(*PAIR, *COS_SIN, POSITIONS),
    outputs=PAIR_OUT,
    stock=stock.rope,
    **_COMMON,
)
ROPE_INPLACE = operation(
    "posenc.rope.inplace",
    "Rotary positions written over queries and keys",
    rope_,
    inputs=(*(replace(each, mutated=True) for each in PAIR), *COS_SIN, POSITIONS),
    stock=stock.rope_,
    **_COMMON,
)

OPERATIONS = (ROPE, ROPE_INPLACE)

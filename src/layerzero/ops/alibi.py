"""Attention with linear biases: the slopes of heads, and posenc.alibi, the bias that they make.

Math: ``-slope * |i + kv_len - q_len - j|`` for query i and key j, so that the last query stands at the last key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Case, Tolerance
from layerzero.ops.declaration import function, operation, out_dtype_problems, tensor, wide
from layerzero.ops.draw import Draw

TOLERANCE = {
    torch.float64: Tolerance(1e-6, 1e-6),
    torch.float32: Tolerance(1e-6, 1e-6),
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(8e-3, 1e-5),
}
MOST = 2**24
"""Tokens that a length may have: float32 holds every distance up to there."""


def alibi_slopes(heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
    """Make the slopes for ``lz.alibi_bias``: a geometric sequence from ``2^(-8/n)`` to ``2^-8`` for n heads.

    Where n is no power of two, p is the next below. The slopes are then those of p heads, and every second of 2 p
    heads, as in the paper's own code.

    Shapes: → (heads,)
    Dtype: ``dtype``, rounded once from float64.
    Raises: InvalidCallError for a number of heads below 1.
    Source: arXiv:2108.12409.
    """
    if type(heads) is not int or heads < 1:
        raise InvalidCallError("alibi_slopes", [f"heads: wanted a number of at least 1, got {told(heads)}"])
    whole = 1 << (heads.bit_length() - 1)
    between = _of_power(2 * whole)[::2][: heads - whole]
    return torch.cat((_of_power(whole), between)).to(device=device, dtype=dtype)


def _of_power(heads: int) -> Tensor:
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))


def alibi_bias(
    slopes: Tensor, q_len: int, kv_len: int, *, causal: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Make the bias of attention with linear biases, for ``lz.attention(..., attn_mask=bias, causal=False)``.

    ``-slope * |i + kv_len - q_len - j|`` for query i and key j: the last query stands at the last key, as causal masks
    of ``lz.attention`` are aligned.

    Shapes: slopes (H,) → (H, q_len, kv_len), which broadcasts over a batch.
    Dtype: slopes floating; computes in float32 or wider; returns out_dtype, or that of slopes. The device is theirs.
    Units: q_len and kv_len in tokens.
    Args:
        slopes: one for each head; ``lz.alibi_slopes(heads)`` makes those of the paper, for any number of heads.
        causal: -inf at keys beyond the query, since a mask comes in place of ``causal=True`` there.
        out_dtype: a floating dtype of at least 16 bits.
    Raises: InvalidCallError for other shapes or dtypes, and for lengths below 1 or above 2**24.
    Source: arXiv:2108.12409.
    """
    queries = torch.arange(kv_len - q_len, kv_len, device=slopes.device).unsqueeze(1)
    ahead = queries - torch.arange(kv_len, device=slopes.device)
    bias = -slopes.to(wide(slopes.dtype)).view(-1, 1, 1) * ahead.abs()
    if causal:
        bias = bias.masked_fill(ahead < 0, -torch.inf)
    return bias.to(out_dtype or slopes.dtype)


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step and a prefill for head counts of models; none where other sizes are named."""
    for heads in narrow.get("heads", (12, 32)) if narrow.keys() <= {"heads"} else ():
        for q_len, kv_len in ((1, 2048), (512, 512)):
            yield Case(f"{heads} heads {q_len}x{kv_len}", {"heads": heads}, {"q_len": q_len, "kv_len": kv_len})


ALIBI = operation(
    "posenc.alibi",
    "Bias of attention with linear biases",
    alibi_bias,
    inputs=("slopes: heads",),
    outputs=(tensor("bias: heads q_len kv_len", dtype_from="out_dtype"),),
    params=(
        Param("causal", bool, False, example=True, works=False),
        Param("out_dtype", torch.dtype, None, example=torch.float32),
        Param("q_len", int, role=Role.PASSED, least=1, most=MOST, example=5),
        Param("kv_len", int, role=Role.PASSED, least=1, most=MOST, example=9),
    ),
    axes=(Axis("heads", scales=True, apart=True),),
    cases=(
        Case("small", {"heads": 4}, {"q_len": 5, "kv_len": 9}),
        Case("small_causal", {"heads": 6}, {"q_len": 7, "kv_len": 7, "causal": True}),
        Case("small_wide", {"heads": 4}, {"q_len": 3, "kv_len": 5, "out_dtype": torch.float32}),
        Case("bloom_decode", {"heads": 32}, {"q_len": 1, "kv_len": 2048}),
        Case("mpt_prefill", {"heads": 32}, {"q_len": 512, "kv_len": 512, "causal": True}),
    ),
    tolerance=TOLERANCE,
    tolerance_reason="twice the rounding of the output; one product, of a distance that float32 holds",
    work=None,  # what is written depends on lengths that are passed
    sweep=_sweep,
)


def _spell_default(arguments: dict[str, Any]) -> None:
    if arguments["out_dtype"] == arguments["slopes"].dtype:
        arguments["out_dtype"] = None


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: any slopes, few queries or many, fewer keys than queries now and then."""
    heads = draw.of((0, 1, 3, 4, 8, 12), (1, 4, 4, 4, 4, 4))
    arguments: dict[str, Any] = {
        "slopes": draw.laid_out(draw.uniform((heads,), dtype)),
        "q_len": draw.of((1, 2, 7, 16, 33)),
        "kv_len": draw.of((1, 3, 8, 17, 64)),
    }
    arguments |= draw.maybe(0.4, causal=lambda: True)
    arguments |= draw.maybe(0.2, out_dtype=lambda: torch.promote_types(dtype, torch.float32))
    return draw.poison(arguments, ("slopes",))


OPERATIONS = (ALIBI,)
FUNCTIONS = (
    function(
        *("alibi_bias", ALIBI),
        varies=("heads",),
        values=out_dtype_problems,
        canonical=_spell_default,
        draw=_draw,
        weight=1,
    ),
)
EXPORTS = ("alibi_slopes",)

"""The bias of attention with linear biases: posenc.alibi.

Math: ``-slope * |i + kv_len - q_len - j|`` for query i and key j, so that the last query stands at the last key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Tolerance
from layerzero.core.schema import OperationSchema

TOLERANCE = {
    torch.float64: Tolerance(1e-6, 1e-6),
    torch.float32: Tolerance(1e-6, 1e-6),
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(8e-3, 1e-5),
}
MOST = 2**24
"""Tokens that a length may have: float32 holds every distance up to there."""

TOLERANCE_REASON = "twice the rounding of the output; one product, of a distance that float32 holds"


def alibi_reference(
    slopes: Tensor, *, q_len: int, kv_len: int, causal: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``-slope * |i + kv_len - q_len - j|``; -inf at keys beyond the query if causal.

    Shapes: slopes (H,) → (H, q_len, kv_len)
    Dtype: computes in float32 (float64 for float64); returns out_dtype, or that of slopes.
    Source: arXiv:2108.12409; aligned as ``lz.attention`` aligns causal masks.
    """
    wide = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    queries = torch.arange(kv_len - q_len, kv_len, device=slopes.device).unsqueeze(1)
    ahead = queries - torch.arange(kv_len, device=slopes.device)
    bias = -wide.view(-1, 1, 1) * ahead.abs()
    if causal:
        bias = bias.masked_fill(ahead < 0, -torch.inf)
    return bias.to(out_dtype or slopes.dtype)


def _fake(
    slopes: Tensor, *, q_len: int, kv_len: int, causal: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    return slopes.new_empty((slopes.shape[0], q_len, kv_len), dtype=out_dtype or slopes.dtype)


def stock(
    slopes: Tensor, q_len: int, kv_len: int, *, causal: bool = False, out_dtype: torch.dtype | None = None
) -> Callable[[], Tensor]:
    """The expression that models write, which is the reference's."""
    return lambda: alibi_reference(slopes, q_len=q_len, kv_len=kv_len, causal=causal, out_dtype=out_dtype)


def _case(name: str, heads: int, q_len: int, kv_len: int, **params: object) -> Case:
    return Case(name, {"heads": heads}, {"q_len": q_len, "kv_len": kv_len, **params})


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step and a prefill for head counts of models; none where other sizes are named."""
    for heads in narrow.get("heads", (12, 32)) if narrow.keys() <= {"heads"} else ():
        for q_len, kv_len in ((1, 2048), (512, 512)):
            yield _case(f"{heads} heads {q_len}x{kv_len}", heads, q_len, kv_len)


ALIBI = Operation(
    schema=OperationSchema(
        operation="posenc.alibi",
        inputs=(TensorSchema("slopes", ("heads",), FLOATING),),
        outputs=(TensorSchema("bias", ("heads", "q_len", "kv_len"), FLOATING, dtype_from="out_dtype"),),
        params=(
            Param("causal", bool, False, example=True, works=False),
            Param("out_dtype", torch.dtype, None, example=torch.float32),
            Param("q_len", int, role=Role.PASSED, least=1, most=MOST, example=5),
            Param("kv_len", int, role=Role.PASSED, least=1, most=MOST, example=9),
        ),
        axes=(Axis("heads", scales=True, apart=True),),
    ),
    summary="Bias of attention with linear biases",
    reference=alibi_reference,
    fake=_fake,
    cases=(
        _case("small", 4, 5, 9),
        _case("small_causal", 6, 7, 7, causal=True),
        _case("small_wide", 4, 3, 5, out_dtype=torch.float32),
        _case("bloom_decode", 32, 1, 2048),
        _case("mpt_prefill", 32, 512, 512, causal=True),
    ),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    sweep=_sweep,
    stock=stock,
)

OPERATIONS = (ALIBI,)

"""Attention on contiguous keys and values: four operations that differ in head counts and in the query's length.

    attention.standard.prefill   H == K, S_q > 1      attention.gqa.prefill   H == g * K, S_q > 1
    attention.standard.decode    H == K, S_q == 1     attention.gqa.decode    H == g * K, S_q == 1

Math: ``softmax(Q K^T * scale + bias) V``; see :func:`layerzero.ops.attention.reference.attention_reference`.
Decode has no ``causal``: with one query, aligned bottom-right, every key is in its past.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from layerzero.core.arguments import Axis, Param, SizeCodes, TensorSchema
from layerzero.core.dtypes import FLOATING, INDEX, dtype_name
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.reasons import ReasonCode
from layerzero.ops import declaration
from layerzero.ops.attention import layout
from layerzero.ops.attention.layout import LAYOUTS
from layerzero.ops.attention.limits import ADAPTERS, grouped, torch_alone
from layerzero.ops.attention.reference import (
    attention_fake,
    attention_reference,
    dropout_keeps_the_mean,
    parts,
    scratch,
)
from layerzero.ops.attention.sweep import Heads, sizes_of, sweep_of
from layerzero.ops.declaration import ROUNDED_TWICE

TOLERANCE = ROUNDED_TWICE
TOLERANCE_REASON = "the attention contract; twice the rounding of the output plus that of the probabilities"

SCALE = Param("scale", float, None, example=0.3, works=False)
WINDOW = Param("window", tuple, None, example=(3, 0), code=ReasonCode.WINDOW_UNSUPPORTED)
SOFTCAP = Param("softcap", float, None, example=5.0, code=ReasonCode.SOFTCAP_UNSUPPORTED)
RETURN_LSE = Param("return_lse", bool, False, example=True, code=ReasonCode.LSE_UNSUPPORTED)
CAUSAL = Param("causal", bool, False, example=True)
DROPOUT = Param("dropout_p", float, 0.0, example=0.5, code=ReasonCode.DROPOUT_UNSUPPORTED, random=True)

HEAD_DIM = SizeCodes(
    ReasonCode.HEAD_DIM_INVALID, too_large=ReasonCode.HEAD_DIM_TOO_LARGE, uneven=ReasonCode.HEAD_DIM_ALIGNMENT
)
LENGTH = SizeCodes(too_large=ReasonCode.SEQ_TOO_LONG)
HEAD_DIMS = (Axis("head_dim", codes=HEAD_DIM), Axis("value_dim", codes=HEAD_DIM))
"""Sizes of heads, which select code."""

HEADS = (
    Axis("kv_heads", scales=True, beside=True, apart=True, shared=True, carries=("heads",)),
    Axis("heads", scales=True, beside=True),
    Axis("group", implied=True),
)
GROUP = {"group": ("heads", "kv_heads")}

_OPTIONAL: dict[str, Any] = {"required": False, "same_dtype": False}
BIASES = (
    TensorSchema("sinks", ("heads",), FLOATING, **_OPTIONAL),
    TensorSchema("alibi_slopes", (), FLOATING, **_OPTIONAL),
)
PACKED = (
    TensorSchema("query", ("tokens", "heads", "head_dim"), FLOATING),
    TensorSchema("key", ("kv_tokens", "kv_heads", "head_dim"), FLOATING),
    TensorSchema("value", ("kv_tokens", "kv_heads", "value_dim"), FLOATING),
)
"""Sequences one after the other."""


def results(*rows: str, width: str = "value_dim", **more: Any) -> tuple[TensorSchema, TensorSchema]:
    """The output and its log-sum-exp, by the axes before the heads."""
    lse = (*rows[:-1], "heads", rows[-1])
    return (
        TensorSchema("output", (*rows, "heads", width), **more),
        TensorSchema("lse", lse, frozenset({torch.float32}), when="return_lse"),
    )


def group_of(_: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, object]:
    """Query heads that share a kv head."""
    return {"group": sizes["heads"] // sizes["kv_heads"]}


def work_of(facts: Mapping[str, Any], pairs: int, rows: int, kv_rows: int) -> Work:
    """Two products over pairs of a query and a key in every head; queries, keys, values and the output once."""
    heads, dims = facts["heads"], facts["head_dim"] + facts["value_dim"]
    elements = dims * (rows * heads + kv_rows * facts["kv_heads"])
    return Work(2.0 * heads * pairs * dims, float(elements * facts["dtype"].itemsize))


def has_bias_grad(arguments: Mapping[str, Any], *names: str) -> bool:
    """Whether any of the tensors that are added to scores wants gradients."""
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for name in names if (tensor := arguments.get(name)) is not None
    )


def _axes(decode: bool) -> tuple[Axis, ...]:
    """What sizes mean; one query fills no tile, so that decode's lengths are exact."""
    return (
        Axis("batch", scales=True, live=True, beside=True, apart=True),
        *HEADS,
        Axis("seq_q", scales=True, live=True, tiled=not decode, codes=LENGTH),
        Axis("seq_k", scales=True, live=True, tiled=not decode, codes=LENGTH),
        *HEAD_DIMS,
    )


ALIASES = {
    "batch_size": "batch",
    "seq_len": "seq_k",
    "seq_len_q": "seq_q",
    "seq_len_k": "seq_k",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "is_causal": "causal",
    "attn_mask_type": "attn_mask",
    "kv_cache_dtype": "dtype",  # of codes it is another, whose operations say so
}
"""The specification's names for facts of attention."""


def _mask_dtype(mask: torch.Tensor | None, dtype: torch.dtype) -> str:
    if mask is None:
        return "none"
    return "query" if mask.dtype == dtype else dtype_name(mask.dtype)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    mask = arguments.get("attn_mask")
    return {
        "bias_grad": has_bias_grad(arguments, "attn_mask", "alibi_slopes"),
        **group_of(arguments, values),
        "mask_ndim": 0 if mask is None else mask.ndim,
        "mask_dtype": _mask_dtype(mask, values["dtype"]),
    }


def visible_pairs(queries: int, keys: int, causal: bool, window: tuple[int, int] | None) -> int:
    """Pairs of a query and a key that it sees; the last query is aligned with the last key."""
    left, right = window if window is not None else (-1, -1)
    right = 0 if causal else right
    left, right = (keys if each < 0 else each for each in (left, right))
    if left >= keys and right >= keys:
        return queries * keys
    pairs = 0
    for row in range(queries) if queries < 2**16 else ():
        place = keys - queries + row
        pairs += max(min(keys - 1, place + right) - max(0, place - left) + 1, 0)
    return pairs if queries < 2**16 else queries * min(left + right + 1, keys)


def _work(facts: Mapping[str, Any]) -> Work:
    """All pairs that are not hidden."""
    batch, queries, keys = facts["batch"], facts["seq_q"], facts["seq_k"]
    pairs = batch * visible_pairs(queries, keys, bool(facts.get("causal", False)), facts["window"])
    return work_of(facts, pairs, batch * queries, batch * keys)


def _case(name: str, *sizes: int, given: tuple[str, ...] = (), **params: object) -> Case:
    """Sizes: batch, queries, keys, heads, kv heads, head dim."""
    batch, seq_q, seq_k, heads, kv_heads, head_dim = sizes
    return Case(name, sizes_of(Heads(heads, kv_heads, head_dim), batch, seq_q, seq_k), params, given)


def operation(name: str, summary: str, reference: Callable[..., Any], *, sibling: str = "", **more: Any) -> Operation:
    """Declare an operation of attention: its shapes, tolerance and aliases, unless others are said.

    Args:
        sibling: the operation with equal head counts, whose kernels serve this one once kv heads are repeated.
        more: as of :func:`layerzero.ops.declaration.operation`; without ``stock`` torch has no way of its own.
    """
    usual: dict[str, Any] = {
        "fake": attention_fake,
        "tolerance": TOLERANCE,
        "tolerance_reason": TOLERANCE_REASON,
        "unlike_sibling": grouped if sibling else None,
        "aliases": ALIASES,
        "stock": None,
    }
    return declaration.operation(name, summary, reference, sibling=sibling, **(usual | more))


def by_heads(
    make: Callable[..., Operation], form: str, what: str, equal: tuple[Case, ...], several: tuple[Case, ...]
) -> tuple[Operation, Operation]:
    """A form of attention as two operations: equal head counts, and several query heads a kv head, with their cases."""
    standard = make(f"attention.standard.{form}", f"{what}, equal head counts", equal)
    return standard, make(f"attention.gqa.{form}", f"{what}, several query heads a kv head", several, standard.name)


def _operation(name: str, summary: str, cases: tuple[Case, ...], sibling: str = "") -> Operation:
    decode = name.endswith("decode")
    return operation(
        name,
        summary,
        attention_reference,
        inputs=(
            declaration.tensor("query: batch seq_q heads head_dim", has_layout=True),
            declaration.tensor("key: batch seq_k kv_heads head_dim", has_layout=True),
            declaration.tensor("value: batch seq_k kv_heads value_dim", has_layout=True),
            TensorSchema(
                "attn_mask",
                (),
                FLOATING | {torch.bool},
                required=False,
                same_dtype=False,
                broadcast=("batch", "heads", "seq_q", "seq_k"),
                code=ReasonCode.ATTN_MASK_UNSUPPORTED,
            ),
            *BIASES,
            TensorSchema("kv_lens", ("batch",), INDEX, required=False, same_dtype=False, counts=("seq_k",)),
        ),
        outputs=results("batch", "seq_q", has_layout=True),
        params=(*(() if decode else (CAUSAL,)), SCALE, DROPOUT, WINDOW, SOFTCAP, RETURN_LSE),
        axes=_axes(decode),
        layouts=LAYOUTS,
        cases=cases,
        properties=(dropout_keeps_the_mean(TOLERANCE),),
        sibling=sibling,
        left_by_state=torch_alone,
        derive=_derive,
        derived_from={"bias_grad": (), **GROUP, "mask_ndim": (), "mask_dtype": ()},
        work=_work,
        adapters=ADAPTERS,
        fixed={"causal": False} if decode else {},
        scratch=scratch,
        parts=parts,
        sweep=functools.partial(sweep_of, name),
        stock=layout.stock,
    )


STANDARD_PREFILL, GQA_PREFILL = by_heads(
    _operation,
    "prefill",
    "Attention of many queries",
    (
        _case("minilm", 8, 128, 128, 12, 12, 32, causal=False),
        _case("small", 2, 64, 64, 8, 8, 64, causal=True),
        _case("medium", 8, 1024, 1024, 16, 16, 64, causal=True),
        _case("diffusion", 2, 4096, 4096, 24, 24, 128, causal=False),
        _case("encoder_lengths", 8, 128, 128, 12, 12, 64, given=("kv_lens",), causal=False),
    ),
    (
        _case("small", 2, 64, 64, 8, 2, 64, causal=True),
        _case("llama3_8b_s512", 1, 512, 512, 32, 8, 128, causal=True),
        _case("llama3_8b_s2048", 1, 2048, 2048, 32, 8, 128, causal=True),
        _case("gemma_d256", 2, 2048, 2048, 16, 4, 256, causal=True),
    ),
)
STANDARD_DECODE, GQA_DECODE = by_heads(
    _operation,
    "decode",
    "Attention of one query per sequence",
    (
        _case("small", 2, 1, 128, 8, 8, 64),
        _case("medium", 1, 1, 1024, 16, 16, 64),
        _case("cross_lengths", 8, 1, 1500, 20, 20, 64, given=("kv_lens",)),
    ),
    (
        _case("small", 2, 1, 128, 8, 2, 64),
        _case("llama3_8b_b1", 1, 1, 512, 32, 8, 128),
        _case("llama3_8b_b64", 64, 1, 2048, 32, 8, 128),
    ),
)

OPERATIONS = (STANDARD_PREFILL, STANDARD_DECODE, GQA_PREFILL, GQA_DECODE)
PREFILL = (STANDARD_PREFILL.name, GQA_PREFILL.name)
DECODE = (STANDARD_DECODE.name, GQA_DECODE.name)
ALL = (*PREFILL, *DECODE)

"""Attention of sequences that lie one after the other: queries of all of them in one tensor, keys in another.

    attention.standard.prefill.ragged   H == K
    attention.gqa.prefill.ragged        H == g * K

Where sequences begin lies on the device: nothing is read on the host, so a captured step replays with other lengths.
``max_seqlen_q`` and ``max_seqlen_k`` promise what the longest of them has; kernels size their launches by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.core.values import Check
from layerzero.ops.attention.declare import (
    ALIASES,
    CAUSAL,
    HEAD_DIMS,
    LENGTH,
    RETURN_LSE,
    SCALE,
    SOFTCAP,
    TOLERANCE,
    TOLERANCE_REASON,
    WINDOW,
    visible_pairs,
)
from layerzero.ops.attention.limits import grouped, torch_alone
from layerzero.ops.ragged import parts, stock
from layerzero.ops.ragged.reference import ragged_attention_reference, ragged_fake
from layerzero.ops.ragged.starts import bounds_of, checks, guard, spread
from layerzero.ops.ragged.step import RaggedMetadata
from layerzero.ops.ragged.sweep import sweep_of

INT32 = frozenset({torch.int32})

MAX_SEQLEN_Q = Param("max_seqlen_q", int, None, Role.BOUND)
MAX_SEQLEN_K = Param("max_seqlen_k", int, None, Role.BOUND)
"""They bound differences of neighbours and no values, so that only :func:`_check_starts` can hold them to it."""


def make_step(arguments: Mapping[str, Any], capturable: bool) -> RaggedMetadata:
    """The step of a call's starts."""
    return RaggedMetadata(arguments["cu_seqlens_q"], arguments["cu_seqlens_k"], capturable=capturable)


def _check_starts(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **_: object,
) -> list[Check]:
    """Values on the device: sequences that follow each other, end with the tokens, and are as short as promised."""
    return [
        *checks("cu_seqlens_q", cu_seqlens_q, len(query), max_seqlen_q),
        *checks("cu_seqlens_k", cu_seqlens_k, len(key), max_seqlen_k),
    ]


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    longest_q, longest_k = values["max_seqlen_q"], values["max_seqlen_k"]
    slopes = arguments.get("alibi_slopes")
    return {
        "bias_grad": torch.is_grad_enabled() and slopes is not None and slopes.requires_grad,
        "group": values["heads"] // values["kv_heads"],
        "longest_q": values["tokens"] if longest_q is None else min(longest_q, values["tokens"]),
        "longest_k": values["kv_tokens"] if longest_k is None else min(longest_k, values["kv_tokens"]),
    }


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over what is not hidden, as if all sequences were of one length; every tensor once."""
    batch = max(facts["starts"] - 1, 1)
    queries, keys = facts["tokens"], facts["kv_tokens"]
    heads, dims = facts["heads"], facts["head_dim"] + facts["value_dim"]
    pairs = batch * visible_pairs(-(-queries // batch), -(-keys // batch), bool(facts["causal"]), facts["window"])
    elements = dims * (queries * heads + keys * facts["kv_heads"])
    return Work(2.0 * heads * pairs * dims, float(elements * facts["dtype"].itemsize))


def _examples(case: Case, _: torch.dtype, device: torch.device, __: torch.Generator | None) -> dict[str, Any]:
    """Sequences of unlike lengths, an empty one among many; the longest lengths are told, as every caller does."""
    size, sequences = case.sizes, max(case.sizes["starts"] - 1, 0)
    promised: Mapping[str, Any] = case.params
    starts = {
        f"cu_seqlens_{of}": spread(size[name], sequences, promised.get(f"max_seqlen_{of}"))
        for of, name in (("q", "tokens"), ("k", "kv_tokens"))
    }
    longest = bounds_of(starts, promised, max_seqlen_q="cu_seqlens_q", max_seqlen_k="cu_seqlens_k")
    return {name: each.to(device) for name, each in starts.items()} | longest


def _scratch(sizes: Mapping[str, int]) -> int:
    """The larger of the scores and of the keys for every head, of sequences that are twice as long as the mean."""
    batch = max(sizes["starts"] - 1, 1)
    longest_q, longest_k = (min(2 * sizes[name] // batch + 1, sizes[name]) for name in ("tokens", "kv_tokens"))
    return batch * sizes["heads"] * longest_k * max(longest_q, sizes["head_dim"])


def _schema(name: str) -> OperationSchema:
    return OperationSchema(
        operation=name,
        inputs=(
            TensorSchema("query", ("tokens", "heads", "head_dim"), FLOATING),
            TensorSchema("key", ("kv_tokens", "kv_heads", "head_dim"), FLOATING),
            TensorSchema("value", ("kv_tokens", "kv_heads", "value_dim"), FLOATING),
            TensorSchema("cu_seqlens_q", ("starts",), INT32, same_dtype=False, counts=("tokens",)),
            TensorSchema("cu_seqlens_k", ("starts",), INT32, same_dtype=False, counts=("kv_tokens",)),
            TensorSchema("sinks", ("heads",), FLOATING, required=False, same_dtype=False),
            TensorSchema("alibi_slopes", (), FLOATING, required=False, same_dtype=False),
        ),
        outputs=(
            TensorSchema("output", ("tokens", "heads", "value_dim")),
            TensorSchema("lse", ("heads", "tokens"), frozenset({torch.float32}), when="return_lse"),
        ),
        params=(
            *(CAUSAL, SCALE, WINDOW, SOFTCAP, RETURN_LSE, MAX_SEQLEN_Q, MAX_SEQLEN_K),
            Param("step", RaggedMetadata, None, Role.HANDLE, made_of=("cu_seqlens_q", "cu_seqlens_k"), make=make_step),
        ),
        axes=(
            Axis("tokens", scales=True, live=True, tiled=True, codes=LENGTH),
            Axis("kv_tokens", scales=True, live=True, tiled=True, codes=LENGTH),
            Axis("starts", scales=True, live=True),
            Axis("kv_heads", scales=True, beside=True, apart=True, carries=("heads",)),
            Axis("heads", scales=True, beside=True),
            Axis("group", implied=True),
            Axis("longest_q", scales=True),
            Axis("longest_k", scales=True),
            *HEAD_DIMS,
        ),
    )


def _case(
    name: str, sequences: int, tokens: int, heads: int, kv_heads: int, head_dim: int, *, causal: bool = True
) -> Case:
    sizes = {"tokens": tokens, "kv_tokens": tokens, "starts": sequences + 1, "heads": heads, "kv_heads": kv_heads}
    return Case(name, sizes | {"head_dim": head_dim, "value_dim": head_dim}, {"causal": causal})


def _operation(name: str, summary: str, cases: tuple[Case, ...], sibling: str = "") -> Operation:
    return Operation(
        schema=_schema(name),
        summary=summary,
        reference=ragged_attention_reference,
        fake=ragged_fake,
        cases=cases,
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        sibling=sibling,
        unlike_sibling=grouped if sibling else None,
        left_by_state=torch_alone,
        aliases={each: fact for each, fact in ALIASES.items() if fact not in ("batch", "seq_q", "seq_k", "attn_mask")},
        derive=_derive,
        derived=("bias_grad", "group", "longest_q", "longest_k"),
        derived_from={
            "bias_grad": (),
            "group": ("heads", "kv_heads"),
            "longest_q": ("tokens",),
            "longest_k": ("kv_tokens",),
        },
        check_values=_check_starts,
        guard=guard(("cu_seqlens_q", "query"), ("cu_seqlens_k", "key")),
        examples=_examples,
        work=_work,
        scratch=_scratch,
        parts=parts.of_keys,
        sweep=sweep_of(name),
        stock=stock.attention,
    )


STANDARD_RAGGED = _operation(
    "attention.standard.prefill.ragged",
    "Attention of sequences one after the other, equal head counts",
    (
        _case("small", 3, 40, 4, 4, 32),
        _case("short", 5, 90, 6, 6, 64),
        _case("minilm", 16, 1024, 12, 12, 32, causal=False),
        _case("vision", 8, 8192, 16, 16, 64, causal=False),
    ),
)
GQA_RAGGED = _operation(
    "attention.gqa.prefill.ragged",
    "Attention of sequences one after the other, several query heads a kv head",
    (
        _case("small", 3, 40, 8, 2, 32),
        _case("short", 5, 90, 12, 3, 64),
        _case("llama3_8b_t4096", 8, 4096, 32, 8, 128),
    ),
    sibling="attention.standard.prefill.ragged",
)

OPERATIONS = (STANDARD_RAGGED, GQA_RAGGED)
RAGGED = (STANDARD_RAGGED.name, GQA_RAGGED.name)

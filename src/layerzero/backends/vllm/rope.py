"""vLLM's rotary embedding, loaded as an operator library beside an installed vllm, which is never imported.

Limits follow csrc/pos_encoding_kernels.cu of 0.20.0: it works in place, a block for each token, reads one joined table
in float32 (it would convert another one on every call, whole) and int64 positions, computes in float32, steps over the
heads of keys by the head stride of the query, and wants heads that are a multiple of kv heads.
Conforms on an H200 (torch 2.11, 2026-11-22).
Library: vllm 0.20, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.rotary import HEADS_DIVIDE, TABLE_IN_FLOAT32, HeadsDense, TokensInLine, table_and_places
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def _load_inplace(facts: Facts) -> Callable[..., Any]:
    rotate = operators("_C.abi3.so", "_C").rotary_embedding.default
    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))

    def run(
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        positions: Tensor | None = None,
        interleaved: bool = False,
    ) -> None:
        seq = query.shape[-3]
        batch = query.shape[0] if query.ndim == 4 else 1
        table, places = table_and_places(cos, sin, positions, batch, seq, torch.int64)
        tokens = batch * seq
        pair = query.view(tokens, heads, head_dim), key.view(tokens, kv_heads, head_dim)
        rotate(places, *pair, head_dim, table, not interleaved)
        increment_version((query, key))

    return run


def _load(facts: Facts) -> Callable[..., Any]:
    rotate, dense = _load_inplace(facts), torch.contiguous_format

    def run(
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        positions: Tensor | None = None,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        query, key = query.clone(memory_format=dense), key.clone(memory_format=dense)
        rotate(query, key, cos, sin, positions=positions, interleaved=interleaved)
        return query, key

    return run


_LIMITS = (
    limit.platform("cuda"),
    limit.arch(min=(8, 0)),
    limit.dtype("float32", "float16", "bfloat16"),
    TABLE_IN_FLOAT32,
    HEADS_DIVIDE,
)

KERNELS = (
    Kernel(
        id="vllm.rope",
        operations=("posenc.rope",),
        backend=VLLM,
        load=_load,
        layout="BSHD",
        accepts=("positions", "interleaved"),
        limits=_LIMITS,  # it works on copies of its own
        priority=75,
    ),
    Kernel(
        id="vllm.rope_inplace",
        operations=("posenc.rope.inplace",),
        backend=VLLM,
        load=_load_inplace,
        layout="BSHD",
        accepts=("positions", "interleaved"),
        limits=(
            *_LIMITS,
            limit.last_stride_one("query", "key"),
            HeadsDense(("query", "key")),
            TokensInLine(("query", "key")),
        ),
        priority=85,
    ),
)

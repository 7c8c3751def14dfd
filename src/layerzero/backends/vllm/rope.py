"""vLLM's rotary embedding, alone, behind its norm and with its append, by operators of a vllm that is never imported.

Limits follow csrc/pos_encoding_kernels.cu of 0.20.0: it works in place, a block for each token, reads one joined table
in float32 (it would convert another one on every call, whole) and int64 positions, computes in float32, steps over the
heads of keys by the head stride of the query, and wants heads that are a multiple of kv heads. Conforms on an H200
(torch 2.11, 2026-11-22). Its block is sized by heads, and no thread needs another's number: a token turns alike in
every batch, and vLLM's batch-invariant mode leaves it as it is.

The append, of ``paged.py``, reads dense tokens, so queries and keys are copied and rotated first: four launches.
FlashInfer's fused append of Q | K | V wants page tables in place of slots, for two pairs of head counts, and what it
has for float8 rounds queries, too (``ops/rope_append/packed_steps.py``): neither is one of these operations. Into a
cache of the queries' dtype it conforms on an H200 (torch 2.11, 2026-11-22); into one of float8 it was right in the few
random calls there that had one scale for all keys and one for all values (2026-11-23).

Norm and rotation of each head are one launch over a joined tensor, or its norm and its rotation, three launches. The
limits of that one follow csrc/fused_qknorm_rope_kernel.cu: a contiguous tensor (T, (H + K + V) * D) whose first H + K
heads it normalises and rotates in place, a warp a head, in float32 up to the store; float16 and bfloat16, heads of 64,
128 and 256 entries, weights of the dtype of the tensor, int64 positions, a joined table of any floating dtype; offsets
in 32 bits. Half-split pairs are exchanged by a shuffle that wants a whole warp, so only whole heads are rotated here.
Conforms on an H200 (torch 2.11, 2026-11-22).
Library: vllm 0.20, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.paged import SAME_STRIDES
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.rotary import HEADS_DIVIDE, TABLE_IN_FLOAT32, HeadsDense, TokensInLine, table_and_places
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.backends.vllm.paged import HEADS_FOR_WARPS, SCALES, load_append
from layerzero.backends.vllm.quantized import OF_CODES, load_append_codes
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Limit
from layerzero.ops.rope import split
from layerzero.ops.rope.stock import parts
from layerzero.ops.rope_append.packed_steps import rotate_then_append

_LIMITS = (limit.dtype("float32", "float16", "bfloat16"), TABLE_IN_FLOAT32, HEADS_DIVIDE)
_TOKENS: tuple[Limit, ...] = (
    *_LIMITS,
    limit.equal("value_dim", "head_dim"),
    HEADS_FOR_WARPS,
    limit.contiguous("value", "slot_mapping"),  # strides of a token's own axes are ignored in silence
    limit.last_stride_one("key_cache", "value_cache"),
    SAME_STRIDES,
    limit.aligned(16, "value", "key_cache", "value_cache"),  # a misaligned address otherwise
)


def _norming(facts: Facts) -> split.Norm:
    norm, head_dim = operators("_C.abi3.so", "_C").rms_norm.default, facts.size("head_dim")

    def normed(tensor: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = tensor.view(-1, head_dim)
        output = torch.empty_like(rows)
        norm(output, rows, weight, eps)
        return output.view(tensor.shape)

    return normed


def rotating(facts: Facts) -> split.Rotate:
    """Its rotation in place of contiguous tensors of their own."""
    rotate = operators("_C.abi3.so", "_C").rotary_embedding.default
    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))

    def rotated(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        seq, batch = query.shape[-3], query.shape[0] if query.ndim == 4 else 1
        table, places = table_and_places(cos, sin, positions, batch, seq, torch.int64)
        tokens = batch * seq
        pair = query.view(tokens, heads, head_dim), key.view(tokens, kv_heads, head_dim)
        rotate(places, *pair, head_dim, table, not interleaved)
        return query, key

    return rotated


def _load_fused_split(facts: Facts) -> Callable[..., Any]:
    """The operator on a copy of the product, whose parts are the results."""
    operator = operators("_C.abi3.so", "_C").fused_qk_norm_rope.default
    head_dim = facts.size("head_dim")

    def run(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        kv_heads: int,
        positions: Tensor | None = None,
        q_weight: Tensor,
        k_weight: Tensor,
        interleaved: bool,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        seq, batch = qkv.shape[-2], qkv.shape[0] if qkv.ndim == 3 else 1
        table, places = table_and_places(cos, sin, positions, batch, seq, torch.int64)
        joined = qkv.clone(memory_format=torch.contiguous_format)
        rows = joined.view(batch * seq, -1)
        operator(rows, heads, kv_heads, kv_heads, head_dim, eps, q_weight, k_weight, table, not interleaved, places)
        return parts(joined, heads, kv_heads)

    return run


def _load_fused(facts: Facts) -> Callable[..., Any]:
    operator = operators("_C.abi3.so", "_C").fused_qk_norm_rope.default
    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))

    def run(*tensors: Tensor, positions: Tensor | None = None, interleaved: bool, eps: float) -> tuple[Tensor, Tensor]:
        query, key, q_weight, k_weight, cos, sin = tensors
        seq, batch = query.shape[-3], query.shape[0] if query.ndim == 4 else 1
        table, places = table_and_places(cos, sin, positions, batch, seq, torch.int64)
        joined = torch.cat((query, key), -2)
        rows = joined.view(batch * seq, -1)
        operator(rows, heads, kv_heads, 0, head_dim, eps, q_weight, k_weight, table, not interleaved, places)
        return joined[..., :heads, :], joined[..., heads:, :]

    return run


FUSED_LIMITS = (
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", one_of=(64, 128, 256)),
    limit.equal("rotary_dim", "head_dim"),
    limit.contiguous("q_weight", "k_weight"),
)
"""What the fused operator demands, however its tensor is joined."""


KERNELS = (
    VLLM.kernel(
        "vllm.rope",
        "posenc.rope",
        lambda facts: split.rope(rotating(facts), in_place=False),
        layout="BSHD",
        accepts=("positions", "interleaved"),
        limits=_LIMITS,  # it works on copies of its own
        batch_invariant=True,
        priority=75,
    ),
    VLLM.kernel(
        "vllm.rope_inplace",
        "posenc.rope.inplace",
        lambda facts: split.rope(rotating(facts), in_place=True),
        *_LIMITS,
        limit.last_stride_one("query", "key"),
        HeadsDense(("query", "key")),
        TokensInLine(("query", "key")),
        layout="BSHD",
        accepts=("positions", "interleaved"),
        batch_invariant=True,
        priority=85,
    ),
    VLLM.kernel(
        "vllm.rope_append",
        "kv.rope_append.paged",
        lambda facts: rotate_then_append(rotating(facts), load_append(facts)),
        layout="NHD",
        accepts=("interleaved",),
        limits=(*_TOKENS, SCALES.before_capture("its scales", lambda facts: (facts.device.index,))),
        device_guard=False,
        priority=80,
    ),
    VLLM.kernel(
        "vllm.rope_append_codes",
        "kv.rope_append.quantized",
        lambda facts: rotate_then_append(rotating(facts), load_append_codes(facts)),
        layout="NHD",
        accepts=("interleaved",),
        limits=(*_TOKENS, *OF_CODES),
        device_guard=False,
        priority=80,
    ),
    VLLM.kernel(
        "vllm.qk_norm_rope",
        "posenc.qk_norm_rope",
        lambda facts: split.norm_then_rope(_norming(facts), rotating(facts)),
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("head_dim", min=2),
        TABLE_IN_FLOAT32,
        HEADS_DIVIDE,
        limit.contiguous("query", "key", "q_weight", "k_weight"),
        limit.aligned(16, "query", "key", "q_weight", "k_weight"),
        ElementsBelow(2**31, ("batch", "seq", "heads", "head_dim")),
        layout="BSHD",
        accepts=split.ACCEPTS,
        priority=65,
    ),
    VLLM.kernel(
        "vllm.fused_qk_norm_rope",
        "posenc.qk_norm_rope",
        _load_fused,
        *FUSED_LIMITS,
        HEADS_DIVIDE,
        ElementsBelow(2**30, ("batch", "seq", "heads", "head_dim")),  # and at most as many keys
        layout="BSHD",
        accepts=split.ACCEPTS,
        device_guard=False,  # it runs on the current device: an illegal access (0.20.0, two H200s, 2026-11-30)
        # it was the best at 1 to 16384 tokens of three shapes; FlashInfer's took 1.9 to 3.5 times as long at 16384
        # on an H200 in bfloat16, 2026-11-22
        priority=75,
    ),
    VLLM.kernel(
        "vllm.split_qkv_norm_rope",
        "posenc.split_qkv_norm_rope",
        lambda facts: split.split_then_norm_rope(_norming(facts), rotating(facts)),
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("head_dim", min=2),
        TABLE_IN_FLOAT32,
        HEADS_DIVIDE,
        limit.contiguous("q_weight", "k_weight"),
        limit.aligned(16, "q_weight", "k_weight"),
        ElementsBelow(2**31, ("batch", "seq", "features")),
        accepts=split.SPLIT_ACCEPTS,
        priority=65,
    ),
    VLLM.kernel(
        "vllm.fused_split_qkv_norm_rope",
        "posenc.split_qkv_norm_rope",
        _load_fused_split,
        accepts=split.SPLIT_ACCEPTS,
        limits=(*FUSED_LIMITS, ElementsBelow(2**31, ("batch", "seq", "features")), limit.one_of("q_weight", "float")),
        device_guard=False,
        priority=75,
    ),
)

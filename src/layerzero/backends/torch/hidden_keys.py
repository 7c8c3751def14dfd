"""Attention of which pairs are left out, in torch: by a pattern of blocks, or by the lengths of padded keys.

Of a pattern there are a mask of all pairs, a loop over rows of blocks, or rows as sequences of a batch. On a CPU each
row of blocks is a call of the operator behind ``F.scaled_dot_product_attention`` with what it sees, so that what is
hidden costs nothing; on NVIDIA the rows are sequences of torch's FlashAttention 2, their keys gathered.

Blocks of unlike sizes become a mask of all pairs. On NVIDIA each head gets keys of its own: see
:func:`layerzero.backends.torch.cuda_attention.own_heads`.

Padded keys are read by their lengths, without a mask: encoders' batches, and cross attention over them. On a CPU each
sequence is a call of that operator with the keys that it has; on NVIDIA torch's FlashAttention 2 reads each sequence
as far as its length says. What lies beyond is read by neither.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import FLOATS, POSITIVE_WITH_CAUSAL, always, cpu_attend, kernel, no_atomics
from layerzero.backends.torch.cuda_attention import aligned_rows, own_heads
from layerzero.backends.torch.varlen import FLASH, Slice, attend_each, flash
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import AlignedOnCuda, SdpaEnabled
from layerzero.ops.sparse.declare import NAME, block_mask, in_blocks
from layerzero.ops.sparse.variable import NAME as VARIABLE
from layerzero.ops.sparse.variable import variable_mask


def _by_sequence(found: Any, batch: int) -> Any:
    """Tokens one after the other as a batch: (B, S, H, D_v), and (B, H, S) of the log-sum-exp."""
    if isinstance(found, Tensor):
        return torch.unflatten(found, 0, (batch, -1))
    output, lse = found
    return output.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


def _load_cpu(facts: Facts) -> Callable[..., Any]:
    attend = cpu_attend(facts)

    def run(query: Tensor, key: Tensor, value: Tensor, *, kv_lens: Tensor, **scores: Any) -> Any:
        def sequences() -> Iterator[Slice]:
            for row, length in enumerate(kv_lens.tolist()):
                yield query[row], key[row, :length], value[row, :length], None

        found = attend_each(sequences(), query.flatten(0, 1), attend=attend, **scores)
        return _by_sequence(found, len(query))

    return run


def _read_to_lengths(query: Tensor, key: Tensor, value: Tensor, *, kv_lens: Tensor, **scores: Any) -> Any:
    batch, (queries, keys) = len(query), (query.shape[1], key.shape[1])
    rows = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    tokens = (query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
    lens = kv_lens.to(torch.int32).contiguous()  # one of expanded or sliced rows is refused
    found = flash(*tokens, rows * queries, rows * keys, queries, keys, lens=lens, **scores)
    return _by_sequence(found, batch)


_LENGTHS = limit.rule("kv_lens: the keys of each sequence", lambda facts: "kv_lens" in facts.tensors, got="none")
_ARGUMENTS = ("scale", "window", "kv_lens", "return_lse")


def _kernels(name: str, operations: tuple[str, ...], accepts: tuple[str, ...]) -> tuple[Kernel, ...]:
    return (
        kernel(
            f"torch.{name}_lengths_cpu",
            operations,
            _load_cpu,
            limit.platform("cpu"),
            FLOATS,
            limit.equal("value_dim", "head_dim"),
            _LENGTHS,
            POSITIVE_WITH_CAUSAL,
            SdpaEnabled("flash"),
            limit.last_stride_one("query", "key", "value"),
            layout="BSHD",
            accepts=accepts,
            graph_safe=False,
            priority=52,
        ),
        kernel(
            f"torch.{name}_lengths",
            operations,
            always(_read_to_lengths),
            *FLASH,
            _LENGTHS,
            limit.contiguous("query", "key", "value"),
            limit.aligned(16, "query", "key", "value"),
            layout="BSHD",
            accepts=accepts,
            deterministic=False,
            priority=58,
        ),
    )


def _load_masked(facts: Facts) -> Callable[..., Any]:
    grouped = facts["group"] != 1

    def run(query: Tensor, *rest: Tensor, block_rows: int, block_cols: int, scale: float | None = None) -> Tensor:
        key, value, block_indptr, block_indices = rest
        seen = block_mask(block_indptr, block_indices, len(key) // block_cols)
        mask = seen.repeat_interleave(block_rows, 0).repeat_interleave(block_cols, 1)
        q, k, v = (aligned_rows(each.transpose(0, 1).unsqueeze(0)) for each in (query, key, value))
        output = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return output[0].transpose(0, 1).masked_fill(~mask.any(1)[:, None, None], 0.0)

    return run


def _load_rows(facts: Facts) -> Callable[..., Any]:
    attend = cpu_attend(facts)

    def run(query: Tensor, *rest: Tensor, block_rows: int, block_cols: int, **scores: Any) -> Any:
        key, value, block_indptr, block_indices = rest
        keys, values = (in_blocks(each, block_cols) for each in (key, value))

        def rows() -> Iterator[Slice]:
            for row, (first, last) in enumerate(pairwise(block_indptr.tolist())):
                blocks = block_indices[first:last]
                key, value = (each[blocks].flatten(0, 1) for each in (keys, values))
                yield query[row * block_rows : (row + 1) * block_rows], key, value, None

        return attend_each(rows(), query, attend=attend, **scores)

    return run


def _as_sequences(query: Tensor, *rest: Tensor, block_rows: int, block_cols: int, **scores: Any) -> Any:
    key, value, block_indptr, block_indices = rest
    keys, values = (in_blocks(each, block_cols)[block_indices.long()].flatten(0, 1) for each in (key, value))
    starts = torch.arange(0, len(query) + 1, block_rows, dtype=torch.int32, device=query.device)
    return flash(query, keys, values, starts, block_indptr * block_cols, block_rows, max(len(key), 1), **scores)


def _mask_bytes(facts: Facts) -> int:
    """The mask, and scores where torch has no better way."""
    pairs = facts.size("tokens") * facts.size("kv_tokens")
    return pairs * (1 + facts.tensors["query"].dtype.itemsize * (1 + facts.size("heads")))


def _gathered_bytes(facts: Facts) -> int:
    """Keys and values of every block that is seen."""
    block: Any = facts["block_cols"]
    width = facts.size("kv_heads") * (facts.size("head_dim") + facts.size("value_dim"))
    return int(facts.size("nonzero_blocks") * block * width * facts.tensors["query"].dtype.itemsize)


_BLOCKS = ("block_rows", "block_cols", "scale")


def _load(facts: Facts) -> Callable[..., Any]:
    kv_heads, group, on_cuda = facts.size("kv_heads"), facts.size("group"), facts.device.platform == "cuda"

    def run(*tensors: Tensor, scale: float | None = None) -> Tensor:
        query, key, value, seen_blocks, row_sizes, col_sizes = tensors
        mask = variable_mask(seen_blocks, row_sizes, col_sizes, len(query), len(key))
        q = query.transpose(0, 1).reshape(kv_heads, group, *query.shape[::2])  # the heads of a key head as a batch
        k, v = (aligned_rows(each.transpose(0, 1).unsqueeze(1)).expand(-1, group, -1, -1) for each in (key, value))
        if on_cuda:
            k = own_heads(k, v)
        output = functional.scaled_dot_product_attention(
            aligned_rows(q), k, v, attn_mask=mask.unsqueeze(1), scale=scale
        )
        output = output.masked_fill(~mask.any(2)[:, None, :, None], 0.0)
        return output.flatten(0, 1).transpose(0, 1)

    return run


def _block_mask_bytes(facts: Facts) -> int:
    pairs = facts.size("tokens") * facts.size("kv_tokens")
    return pairs * (facts.size("kv_heads") + 2 * facts.tensors["query"].dtype.itemsize * facts.size("heads"))


KERNELS = (
    kernel(
        "torch.block_sparse_masked",
        NAME,
        _load_masked,
        limits=(FLOATS, limit.positive("scale"), AlignedOnCuda(("query", "key", "value"))),
        accepts=_BLOCKS,
        workspace_bytes=_mask_bytes,
        deterministic=no_atomics,
        graph_safe=False,
        priority=20,
    ),
    kernel(
        "torch.block_sparse_rows",
        NAME,
        _load_rows,
        limit.platform("cpu"),
        FLOATS,
        limit.equal("value_dim", "head_dim"),
        limit.positive("scale"),
        SdpaEnabled("flash"),
        limit.last_stride_one("query", "key", "value"),
        accepts=(*_BLOCKS, "return_lse"),
        graph_safe=False,
        priority=50,
    ),
    kernel(
        "torch.block_sparse_varlen",
        NAME,
        always(_as_sequences),
        *FLASH,
        limit.last_stride_one("query", "key", "value"),
        limit.aligned(16, "query", "key", "value"),
        limit.contiguous("block_indptr"),
        accepts=(*_BLOCKS, "return_lse"),
        workspace_bytes=_gathered_bytes,
        deterministic=False,
        priority=40,
    ),
    kernel(
        "torch.variable_sparse_masked",
        VARIABLE,
        _load,
        limits=(FLOATS, limit.positive("scale"), AlignedOnCuda(("query", "key", "value"))),
        accepts=("scale",),
        workspace_bytes=_block_mask_bytes,
        deterministic=no_atomics,
        graph_safe=False,
        priority=30,
    ),
    *_kernels("prefill", attention.PREFILL, ("causal", *_ARGUMENTS)),
    *_kernels("decode", attention.DECODE, _ARGUMENTS),
)

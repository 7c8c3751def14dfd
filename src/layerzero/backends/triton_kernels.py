"""Triton's code of the kernels in :mod:`layerzero.backends.layerzero_triton`; imported when one of them was chosen.

Everything is computed in float32. What a launch leaves out is a constant to the compiler, which drops it. The compiler
takes an annotation for a name of its language: arguments have none, but constants (``Any`` does not compile).
Library: triton 3.3 and later.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# ruff: noqa: ANN001

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_oai(gate, up, output, alpha, limit, count, by_turns: tl.constexpr, block: tl.constexpr) -> None:
    """``g * sigmoid(alpha * g) * (u + 1)``, g the gate up to the limit, u within it on both sides.

    Args:
        gate, up, output: ``count`` numbers each; with by_turns ``gate`` holds both by turns, and ``up`` is not read.
    """
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < count
    if by_turns:
        g = tl.load(gate + 2 * places, mask=inside).to(tl.float32)
        u = tl.load(gate + 2 * places + 1, mask=inside).to(tl.float32)
    else:
        g = tl.load(gate + places, mask=inside).to(tl.float32)
        u = tl.load(up + places, mask=inside).to(tl.float32)
    g = tl.where(g > limit, limit, g)  # NaN stays, where minimum and clamp would drop it
    u = tl.where(u > limit, limit, u)
    u = tl.where(u < -limit, -limit, u)
    found = g / (1.0 + tl.exp(-alpha * g)) * (u + 1.0)
    tl.store(output + places, found.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("left", "right", "columns", "tokens", "table_row", "tree_row"))  # they differ by call
def paged_tokens(
    query, key, value, tables, lengths, starts, owners, sinks, tree,
    output, lse,
    scale, softcap, left, right, columns, tokens,
    query_token, query_head, key_page, key_slot, key_head,
    value_page, value_slot, value_head, table_row, tree_row, heads,
    head_dim: tl.constexpr, value_dim: tl.constexpr, group: tl.constexpr, page_size: tl.constexpr,
    causal: tl.constexpr, has_softcap: tl.constexpr, has_left: tl.constexpr, has_right: tl.constexpr,
    has_sinks: tl.constexpr, has_tree: tl.constexpr, has_lse: tl.constexpr,
    group_block: tl.constexpr, key_block: tl.constexpr, head_block: tl.constexpr, value_block: tl.constexpr,
) -> None:  # fmt: skip
    """A query token and the heads that share a key head: all keys of its sequence that it sees, page by page.

    Shapes: as of ``lz.paged_attention``; owners (T,): each token's sequence.
    """
    token, key_of = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(owners + token)
    first, last = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    length = tl.load(lengths + sequence)
    old = length - (last - first)  # tokens that were in the cache before
    place = old + token - first
    member, dim, column = tl.arange(0, group_block), tl.arange(0, head_block), tl.arange(0, value_block)
    head, own = key_of * group + member, member < group
    asked = query + token.to(tl.int64) * query_token + head[:, None] * query_head + dim[None, :]
    q = tl.load(asked, mask=own[:, None] & (dim < head_dim)[None, :], other=0.0)
    most = tl.full((group_block,), float("-inf"), tl.float32)
    total = tl.zeros((group_block,), tl.float32)
    if has_sinks:
        most = tl.load(sinks + head, mask=own, other=0.0).to(tl.float32)
        total += 1.0
    summed = tl.zeros((group_block, value_block), tl.float32)
    own_columns = tl.where(last - first <= columns, columns, 0)  # a chain has none
    begin, end = 0, length
    if causal:
        end = tl.minimum(end, place + 1)
    if has_left:
        begin = tl.maximum(begin, place - left)
    if has_right:
        end = tl.minimum(end, place + right + 1)
    for step in range(begin // key_block, tl.cdiv(tl.maximum(end, begin), key_block)):
        keys = step * key_block + tl.arange(0, key_block)
        seen = (keys >= begin) & (keys < end)
        page = tl.load(tables + sequence.to(tl.int64) * table_row + keys // page_size, mask=seen, other=0).to(tl.int64)
        slot = keys % page_size
        of_keys = key + page * key_page + slot * key_slot + key_of * key_head
        k = tl.load(of_keys[None, :] + dim[:, None], mask=seen[None, :] & (dim < head_dim)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if has_softcap:
            bent = 2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0  # tanh
            scores = softcap * bent
        if has_tree:
            new = keys - old
            branch = seen & (new >= 0) & (new < own_columns)
            grown = tl.load(tree + token.to(tl.int64) * tree_row + new, mask=branch, other=1)
            seen = seen & (grown != 0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        above = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(above == float("-inf"), 0.0, above)
        shares = tl.exp(scores - base[:, None])
        kept = tl.exp(most - base)
        of_values = value + page * value_page + slot * value_slot + key_of * value_head
        v = tl.load(of_values[:, None] + column[None, :], mask=seen[:, None] & (column < value_dim)[None, :], other=0.0)
        summed = summed * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(shares, 1)
        most = above
    found = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    places = output + (token.to(tl.int64) * heads + head[:, None]) * value_dim + column[None, :]
    tl.store(places, found.to(output.dtype.element_ty), mask=own[:, None] & (column < value_dim)[None, :])
    if has_lse:
        tl.store(lse + head.to(tl.int64) * tokens + token, most + tl.log(total), mask=own)

"""Rotary positions as torch expressions: what Transformers' models do, without the copies that they make.

The halves of a head are views, and each result is written once where no gradient is recorded.

Norm and rotation of each head as torch expressions: torch's own norm in float32, rotated before it is rounded.

On a CPU both take so many tokens at a time that what lies between stays in its cache.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, kernel
from layerzero.backends.torch.norm import FINITE, rows_below
from layerzero.core.facts import Facts
from layerzero.ops.rope.declare import wide_dtype
from layerzero.ops.rope.split import SPLIT_ACCEPTS
from layerzero.ops.rope.stock import parts

_PIECE = 2**18
"""Elements that a CPU rotates at once: what lies between is in its cache then, and not in new memory of the system. 1 x
512 tokens of 32 heads of 128 take 1.6 ms in bfloat16 so, 14.3 as a whole (AMD EPYC, one thread, 2026-11-22)."""


def rows_for(facts: Facts, first: str = "query") -> Callable[..., tuple[Tensor, Tensor]]:
    """What gives each token its row of the table, in the dtype of the computation, shaped as the heads want it."""
    heads_axis = -3 if facts.layout == "BHSD" else -2
    seq_axis = -5 - heads_axis
    wide = wide_dtype(*(torch.empty(0, dtype=facts.tensors[name].dtype) for name in (first, "cos")))

    def rows(query: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        if positions is not None:
            cos, sin = torch.embedding(cos, positions), torch.embedding(sin, positions)  # (..., S, R/2) in one call
        elif (seq := query.shape[seq_axis]) != cos.shape[0]:
            cos, sin = cos.narrow(0, 0, seq), sin.narrow(0, 0, seq)
        if (heads_axis == -2 and cos.shape[0] != 1) or cos.ndim == 3:  # one row fits every head as it is
            cos, sin = cos.unsqueeze(heads_axis), sin.unsqueeze(heads_axis)
        return (cos, sin) if cos.dtype is wide else (cos.to(wide), sin.to(wide))

    return rows


def load_rope(facts: Facts) -> Callable[..., tuple[Tensor, Tensor]]:
    """What rotates queries and keys into new memory."""
    rows, turn = rows_for(facts), turning(facts)

    def run(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        pair = rows(query, cos, sin, positions)
        return turn(query, *pair, interleaved), turn(key, *pair, interleaved)

    return run


def _load_one(facts: Facts) -> Callable[..., Any]:
    rows, turn = rows_for(facts, "input"), turning(facts)

    def run(input: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool) -> Tensor:
        return turn(input, *rows(input, cos, sin, positions), interleaved)

    return run


Before = Callable[[Tensor], Tensor]
"""What a tensor goes through before it is rotated, piece by piece: into new memory, in the dtype of the computation."""


def turning(facts: Facts) -> Callable[..., Tensor]:
    """What rotates one tensor, given cosines, sines and whether pairs are interleaved, and what comes ``before``."""
    width, partial = facts.size("rotary_dim"), facts.size("rotary_dim") < facts.size("head_dim")
    on_cpu, seq_axis = facts.device.platform == "cpu", -2 if facts.layout == "BHSD" else -3

    def written(tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, before: Before | None = None) -> Tensor:
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        turn = fill if tensor.dtype == cos.dtype else converted
        for result, given, cosines, sines in _pieces((output, tensor, cos, sin), seq_axis, on_cpu):
            turn(result, given if before is None else before(given), cosines, sines, interleaved)
        return output

    def fill(output: Tensor, tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        first, second = _halves(tensor, width, interleaved)
        one, two = _halves(output, width, interleaved)
        torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=two).addcmul_(first, sin)
        if partial:
            output[..., width:] = tensor[..., width:]

    def converted(output: Tensor, tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        wide = tensor.to(cos.dtype)
        turned = torch.empty_like(wide)
        fill(turned, wide, cos, sin, interleaved)
        output.copy_(turned)

    def recorded(tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, before: Before | None = None) -> Tensor:
        dtype = tensor.dtype
        tensor = tensor if before is None else before(tensor)
        first, second = (each.to(cos.dtype) for each in _halves(tensor, width, interleaved))
        pair = first * cos - second * sin, second * cos + first * sin
        joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        joined = joined.to(dtype)
        return torch.cat((joined, tensor[..., width:].to(dtype)), -1) if partial else joined

    return recorded if facts["requires_grad"] else written


def _halves(tensor: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return tensor[..., 0:width:2], tensor[..., 1:width:2]
    return tensor[..., : width // 2], tensor[..., width // 2 : width]


def _load_inplace(facts: Facts) -> Callable[..., Any]:
    if facts["requires_grad"] or facts["interleaved"]:
        return _by_halves(facts)
    width, partial = facts.size("rotary_dim"), facts.size("rotary_dim") < facts.size("head_dim")
    on_cpu, seq_axis = facts.device.platform == "cpu", -2 if facts.layout == "BHSD" else -3
    by_rows, half = rows_for(facts), width // 2

    def run(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool
    ) -> None:
        cos, sin = by_rows(query, cos, sin, positions)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        for tensor in (query, key):
            for piece, cosines, sines in _pieces((tensor, cos, sin), seq_axis, on_cpu):
                turned = piece.narrow(-1, 0, width) if partial else piece
                swapped = turned.roll(half, -1)
                if turned.dtype is cosines.dtype:
                    turned.mul_(cosines).addcmul_(swapped, sines)
                else:  # torch widens what it multiplies
                    turned.copy_((turned * cosines).addcmul_(swapped, sines))

    return run


def _by_halves(facts: Facts) -> Callable[..., Any]:
    """In place with gradients, which want the halves as they were, and for pairs that lie side by side."""
    rows, width = rows_for(facts), facts.size("rotary_dim")
    on_cpu, seq_axis = facts.device.platform == "cpu", -2 if facts.layout == "BHSD" else -3
    recording = bool(facts["requires_grad"])

    def run(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool
    ) -> None:
        pair = rows(query, cos, sin, positions)
        for tensor in (query, key):
            for piece, cosines, sines in _pieces((tensor, *pair), seq_axis, on_cpu):
                one, two = _halves(piece, width, interleaved)
                # autograd keeps what a table's gradient needs: copies, since the tensor is written into
                first, second = (each.to(cosines.dtype, copy=recording) for each in (one, two))
                turned = (first * cosines).addcmul(second, sines, value=-1)
                two.copy_((second * cosines).addcmul(first, sines))
                if recording:  # a view that is older than a write of what needs gradients may not be written into
                    one, _ = _halves(piece, width, interleaved)
                one.copy_(turned)

    return run


def _pieces(tensors: tuple[Tensor, ...], seq_axis: int, cut: bool) -> Iterator[tuple[Tensor, ...]]:
    """The same tokens of each tensor, as many at a time as a CPU rotates at once."""
    count = -(-tensors[0].numel() // _PIECE) if cut else 1
    seq = tensors[0].shape[seq_axis]
    if count <= 1 or seq == 1:
        yield tensors
        return
    step = -(-seq // count)
    for start in range(0, seq, step):  # narrow: what split returns may not be written into where gradients are recorded
        yield tuple(each.narrow(seq_axis, start, min(step, seq - start)) for each in tensors)


def norming(weight: Tensor, eps: float, plus_one: bool, wide: torch.dtype) -> Before:
    """The norm of a head, in the wide dtype."""
    rms_norm, shape = torch.rms_norm, tuple(weight.shape)
    factor = weight.to(wide)
    factor = factor + 1.0 if plus_one else factor

    def run(tensor: Tensor) -> Tensor:
        return rms_norm(tensor.to(wide), shape, factor, eps)

    return run


def _load_normed_rope(facts: Facts) -> Callable[..., Any]:
    rows, turn = rows_for(facts), turning(facts)

    def run(
        *tensors: Tensor, positions: Tensor | None = None, interleaved: bool, eps: float, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        query, key, q_weight, k_weight, cos, sin = tensors
        pair = rows(query, cos, sin, positions)
        wide = pair[0].dtype
        return (
            turn(query, *pair, interleaved, norming(q_weight, eps, plus_one, wide)),
            turn(key, *pair, interleaved, norming(k_weight, eps, plus_one, wide)),
        )

    return run


def load_split(facts: Facts) -> Callable[..., Any]:
    """What takes a joined product ``qkv`` apart, norms and rotates its parts."""
    rows, turn = rows_for(facts, "qkv"), turning(facts)

    def run(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        kv_heads: int,
        positions: Tensor | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        interleaved: bool,
        eps: float,
        plus_one: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = parts(qkv, heads, kv_heads)
        pair = rows(query, cos, sin, positions)
        wide = pair[0].dtype
        turned = [
            turn(tensor, *pair, interleaved, None if weight is None else norming(weight, eps, plus_one, wide))
            for tensor, weight in ((query, q_weight), (key, k_weight))
        ]
        return turned[0], turned[1], value.clone(memory_format=torch.contiguous_format)

    return run


_ALIKE: dict[str, Any] = {"grad": True, "batch_invariant": True, "tp_invariant": True, "priority": 20}

KERNELS = (
    *(
        kernel(
            name,
            operation,
            load,
            FLOATS,
            accepts=("positions", "interleaved"),
            # torch 2.13 loses the sign where float32 is copied into a negated float16 view
            handles_negated=load is not _load_inplace,
            **_ALIKE,
        )
        for name, operation, load in (
            ("torch.rope", "posenc.rope", load_rope),
            ("torch.rope_one", "posenc.rope.one", _load_one),
            ("torch.rope_inplace", "posenc.rope.inplace", _load_inplace),
        )
    ),
    kernel(
        "torch.qk_norm_rope",
        "posenc.qk_norm_rope",
        _load_normed_rope,
        limits=(FLOATS, FINITE, rows_below("batch", "seq", "heads", "head_dim")),
        accepts=("positions", "interleaved", "eps", "plus_one"),
        handles_negated=True,
        **_ALIKE,
    ),
    kernel(
        "torch.split_qkv_norm_rope",
        "posenc.split_qkv_norm_rope",
        load_split,
        limits=(FLOATS, FINITE, rows_below("batch", "seq", "features")),
        accepts=(*SPLIT_ACCEPTS, "plus_one"),
        handles_negated=True,
        **_ALIKE,
    ),
)

"""FlashInfer's rotation by a joined table, called as the module that it compiles with nvcc on first use.

The module takes queries and keys and where to write them, so that both operations are one launch; the functions around
it (``apply_rope_with_cos_sin_cache``, ``..._inplace``) only make the outputs and check the table. Limits follow
csrc/rope.cu and include/flashinfer/pos_enc.cuh of 0.7.2: 16-bit numbers, a float32 table, loads of 16 bytes, head dims
of 64, 128 and 256 (others go through its FP8 quantisation kernel, 512 through wider loads: not declared), halves of
whole vectors. Its interleaved loop reads 16 bytes beyond the row that it needs, and beyond the table
in the last one: not declared. Conforms on an H200 (torch 2.11, 2026-11-22).
Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.flashinfer.attention import kernel, overlaps
from layerzero.backends.flashinfer.modules import of_modules
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.rotary import TABLE_IN_FLOAT32, TokensInLine, table_and_places
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.rope.split import SPLIT_ACCEPTS, Norm, Rotate, norm_then_rope, split_then_norm_rope


def _rotating(facts: Facts) -> Callable[..., None]:
    """Rotates what it is given into other tensors, or into the same."""
    from flashinfer.rope import get_rope_module

    rotate = get_rope_module().apply_rope_pos_ids_cos_sin_cache
    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))

    def run(tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
        query = tensors[0]
        seq = query.shape[-3]
        batch = query.shape[0] if query.ndim == 4 else 1
        table, places = table_and_places(cos, sin, positions, batch, seq)
        shapes = (batch * seq, heads, head_dim), (batch * seq, kv_heads, head_dim)
        rotate(*(each.view(shapes[number % 2]) for number, each in enumerate(tensors)), table, places, False)

    return run


def _load(facts: Facts) -> Callable[..., Any]:
    rotate, empty_like, dense = _rotating(facts), torch.empty_like, torch.contiguous_format

    def run(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        output = empty_like(query, memory_format=dense), empty_like(key, memory_format=dense)
        rotate((query, key, *output), cos, sin, positions)
        return output

    return run


def _load_inplace(facts: Facts) -> Callable[..., Any]:
    rotate = _rotating(facts)

    def run(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None) -> None:
        rotate((query, key, query, key), cos, sin, positions)
        increment_version((query, key))

    return run


def _pair_of(facts: Facts) -> tuple[Norm, Rotate]:
    """The norm of each head as a row, and the rotation in place of what it wrote."""
    from flashinfer.norm import get_norm_module

    module, rotate, width = get_norm_module(), _rotating(facts), facts.size("head_dim")
    operator = module.gemma_rmsnorm if facts["plus_one"] else module.rmsnorm
    overlap = overlaps(facts)

    def normed(tensor: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = tensor.view(-1, width)
        output = torch.empty_like(rows)
        operator(output, rows, weight, eps, overlap)
        return output.view(tensor.shape)

    def rotated(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        rotate((query, key, query, key), cos, sin, positions)
        return query, key

    return normed, rotated


def _without_flag(run: Callable[..., Any]) -> Callable[..., Any]:
    """Which norm is called was chosen when it was loaded."""

    def called(*tensors: Tensor, plus_one: bool, **arguments: Any) -> Any:
        return run(*tensors, **arguments)

    return called


def _load_normed(facts: Facts) -> Callable[..., Any]:
    return _without_flag(norm_then_rope(*_pair_of(facts)))


def _load_split(facts: Facts) -> Callable[..., Any]:
    return _without_flag(split_then_norm_rope(*_pair_of(facts)))


_SHAPES = (
    limit.dtype("float16", "bfloat16"),
    TABLE_IN_FLOAT32,
    limit.dim("head_dim", one_of=(64, 128, 256)),
    limit.dim("rotary_half", multiple=8),
)

_ROTATIONS = tuple(
    kernel(
        name,
        operation,
        load,
        *_SHAPES,
        limit.last_stride_one("query", "key"),
        TokensInLine(("query", "key")),
        limit.aligned(16, "query", "key", "cos"),
        layout="BSHD",
        accepts=("positions",),
        deterministic=True,
        **of_modules("rope"),
        priority=90,
    )
    for name, operation, load in (
        ("flashinfer.rope", "posenc.rope", _load),
        ("flashinfer.rope_inplace", "posenc.rope.inplace", _load_inplace),
    )
)

_NORMED = tuple(
    kernel(
        name,
        operation,
        load,
        *_SHAPES,
        limit.contiguous(*tensors, "q_weight", "k_weight"),
        limit.aligned(16, *tensors, "q_weight", "k_weight", "cos"),
        ElementsBelow(2**31, sizes),  # where a row starts is computed in 32 bits
        layout=layout,
        accepts=accepts,
        deterministic=True,
        **of_modules("rope", "norm"),
        priority=70,
    )
    for name, operation, load, layout, accepts, tensors, sizes in (
        (
            *("flashinfer.qk_norm_rope", "posenc.qk_norm_rope", _load_normed, "BSHD"),
            ("positions", "eps", "plus_one"),
            ("query", "key"),
            ("batch", "seq", "heads", "head_dim"),
        ),
        (
            *("flashinfer.split_qkv_norm_rope", "posenc.split_qkv_norm_rope", _load_split, None),
            tuple(each for each in (*SPLIT_ACCEPTS, "plus_one") if each != "interleaved"),
            (),
            ("batch", "seq", "features"),
        ),
    )
)

KERNELS = (*_ROTATIONS, *_NORMED)

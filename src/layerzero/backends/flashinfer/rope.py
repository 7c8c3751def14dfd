"""FlashInfer's rotation by a joined table, called as the module that it compiles with nvcc on first use.

The module takes queries and keys and where to write them, so that both operations are one launch; the functions around
it (``apply_rope_with_cos_sin_cache``, ``..._inplace``) only make the outputs and check the table. Limits follow
csrc/rope.cu and include/flashinfer/pos_enc.cuh of 0.7.2: 16-bit numbers, a float32 table, loads of 16 bytes, head dims
of 64, 128 and 256 (others go through its FP8 quantisation kernel, 512 through wider loads: not declared), halves of
whole vectors. Its interleaved loop reads 16 bytes beyond the row that it needs, and beyond the table
in the last one: not declared. Not run here yet.
Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.flashinfer.attention import FLASHINFER
from layerzero.backends.flashinfer.modules import is_shipped
from layerzero.backends.rotary import TABLE_IN_FLOAT32, TokensInLine, table_and_places
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def _module(facts: Facts) -> Hashable:
    """One module holds the rotations of every dtype and size."""
    return "rope"


def _prebuilt(facts: Facts) -> bool:
    return is_shipped("rope", facts)


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


KERNELS = tuple(
    Kernel(
        id=name,
        operations=(operation,),
        backend=FLASHINFER,
        load=load,
        layout="BSHD",
        accepts=("positions",),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float16", "bfloat16"),
            TABLE_IN_FLOAT32,
            limit.dim("head_dim", one_of=(64, 128, 256)),
            limit.dim("rotary_half", multiple=8),
            limit.last_stride_one("query", "key"),
            TokensInLine(("query", "key")),
            limit.aligned(16, "query", "key", "cos"),
        ),
        deterministic=True,
        graph_safe=True,
        jit=True,
        build_key=_module,
        prebuilt=_prebuilt,
        device_guard=True,
        priority=90,
    )
    for name, operation, load in (
        ("flashinfer.rope", "posenc.rope", _load),
        ("flashinfer.rope_inplace", "posenc.rope.inplace", _load_inplace),
    )
)

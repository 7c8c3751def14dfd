"""Blocks and projections out of the packed products that a library has: it brings two functions, and no block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.activation.formulas import FUNCTIONS
from layerzero.ops.linear.fused import PACKED_OF
from layerzero.ops.linear.packed import PackedWeight, belongs
from layerzero.ops.linear.qkv import BIASES as QKV_BIASES
from layerzero.ops.linear.qkv import QKV_PACKED_OF, Three, pieces

Product = Callable[[Tensor, PackedWeight, Tensor | None], Tensor]
"""Of rows with a packed weight and a bias, and what follows it."""

Times = Callable[[Tensor, PackedWeight, Tensor | None, Tensor], Tensor]
"""The same, times another tensor, which may be written over."""

BIASES = ("up_bias", "down_bias", "gate_bias")
ACCEPTS = ("activation", *BIASES[:2], "packed_up", "packed_down")
GATED_ACCEPTS = (*ACCEPTS, "gate_bias", "packed_gate")
_BELONG = tuple(belongs(name, PACKED_OF[name]) for name in ("packed_up", "packed_down"))
LIMITS = (limit.contiguous(*BIASES[:2]), *_BELONG)  # libraries ignore the strides of a bias
GATED_LIMITS = (limit.contiguous(*BIASES), *_BELONG, belongs("packed_gate", "gate_weight"))

PLAIN, GATED = ("mlp.fused", "mlp.fused.joined"), ("mlp.fused.gated",)


def block(facts: Facts, product: Callable[[str | None], Product], times: Times) -> Callable[..., Any]:
    """What a kernel of these operations calls.

    Args:
        product: the library's product with an activation after it.
        times: its product, times another tensor.
    """
    activation = str(facts["activation"])
    alone, activated, after = product(None), product(activation), FUNCTIONS[activation]

    def gated(
        input: Tensor,
        *_: Tensor,
        packed_up: PackedWeight,
        packed_down: PackedWeight,
        packed_gate: PackedWeight,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        gate_bias: Tensor | None = None,
        activation: str,
    ) -> Tensor:
        gate = activated(input, packed_gate, gate_bias)
        return alone(times(input, packed_up, up_bias, gate), packed_down, down_bias)

    def plain(
        input: Tensor,
        *_: Tensor,
        packed_up: PackedWeight,
        packed_down: PackedWeight,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: str,
    ) -> Tensor:
        return alone(activated(input, packed_up, up_bias), packed_down, down_bias)

    def joined(
        input: Tensor,
        *_: Tensor,
        packed_up: PackedWeight,
        packed_down: PackedWeight,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: str,
    ) -> Tensor:
        gate, up = alone(input, packed_up, up_bias).chunk(2, -1)
        return alone(after(gate).mul_(up), packed_down, down_bias)

    blocks: dict[str, Callable[..., Any]] = {
        "mlp.fused": plain,
        "mlp.fused.gated": gated,
        "mlp.fused.joined": joined,
    }
    return blocks[str(facts["operation"])]


QKV_ACCEPTS = (*QKV_BIASES, *QKV_PACKED_OF)
QKV_JOINED_ACCEPTS = ("kv_features", "q_bias", "packed_q")


def projections(facts: Facts, product: Product) -> Callable[..., Three]:
    """What a kernel of mlp.qkv and mlp.qkv.joined calls, whose library has a product with a packed weight."""

    def apart(
        input: Tensor,
        *_: Tensor,
        packed_q: PackedWeight,
        packed_k: PackedWeight,
        packed_v: PackedWeight,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Three:
        return product(input, packed_q, q_bias), product(input, packed_k, k_bias), product(input, packed_v, v_bias)

    def joined(
        input: Tensor,
        *_: Tensor,
        kv_features: int,
        packed_q: PackedWeight,
        q_bias: Tensor | None = None,
    ) -> Three:
        return pieces(product(input, packed_q, q_bias), kv_features)

    return joined if facts["operation"] == "mlp.qkv.joined" else apart


def qkv_variants() -> tuple[tuple[str, str, tuple[str, ...], tuple[limit.Limit, ...]], ...]:
    """Of such a kernel: an ending of its id, its operation, what it accepts and demands."""
    each = tuple(belongs(name, of) for name, of in QKV_PACKED_OF.items())
    return (
        ("", "mlp.qkv", QKV_ACCEPTS, (limit.contiguous(*QKV_BIASES), *each)),
        (".joined", "mlp.qkv.joined", QKV_JOINED_ACCEPTS, (limit.contiguous("q_bias"), each[0])),
    )


def variants() -> tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[limit.Limit, ...]], ...]:
    """Of a block's kernel: an ending of its id, its operations, what it accepts and demands."""
    return (("", PLAIN, ACCEPTS, LIMITS), (".gated", GATED, GATED_ACCEPTS, GATED_LIMITS))

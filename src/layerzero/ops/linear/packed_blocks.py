"""Products, blocks and projections out of the packed products that a library has: it brings two functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.formulas import FUNCTIONS
from layerzero.ops.linear.fused import PACKED_OF
from layerzero.ops.linear.packed import BELONGS, PackedWeight, belongs
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
LIMITS = (limit.contiguous(*BIASES[:2]), *_BELONG)
GATED_LIMITS = (limit.contiguous(*BIASES), *_BELONG, belongs("packed_gate", "gate_weight"))

PLAIN, GATED = ("mlp.fused", "mlp.fused.joined"), ("mlp.fused.gated",)
QKV = ("mlp.qkv", "mlp.qkv.joined")


def _block(facts: Facts, product: Callable[[str | None], Product], times: Times) -> Callable[..., Any]:
    activation, is_joined = str(facts["activation"]), facts["operation"] == "mlp.fused.joined"
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
        if not is_joined:
            return alone(activated(input, packed_up, up_bias), packed_down, down_bias)
        gate, up = alone(input, packed_up, up_bias).chunk(2, -1)
        return alone(after(gate).mul_(up), packed_down, down_bias)

    return gated if facts["operation"] == "mlp.fused.gated" else plain


QKV_ACCEPTS = (*QKV_BIASES, *QKV_PACKED_OF)
QKV_JOINED_ACCEPTS = ("kv_features", "q_bias", "packed_q")


def _projections(facts: Facts, product: Product) -> Callable[..., Three]:
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
        input: Tensor, *_: Tensor, kv_features: int, packed_q: PackedWeight, q_bias: Tensor | None = None
    ) -> Three:
        return pieces(product(input, packed_q, q_bias), kv_features)

    return joined if facts["operation"] == "mlp.qkv.joined" else apart


def _linear(product: Product) -> Callable[..., Tensor]:
    def run(
        input: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: str | None, packed: PackedWeight
    ) -> Tensor:
        return product(input, packed, bias)

    return run


def _load(
    product: Callable[[Facts, str | None], Product], times: Callable[[Facts], Times], facts: Facts
) -> Callable[..., Any]:
    if facts["operation"] == "mlp.linear":
        return _linear(product(facts, facts["activation"]))  # type: ignore[arg-type]  # a name or None
    if facts["operation"] in QKV:
        return _projections(facts, product(facts, None))
    return _block(facts, functools.partial(product, facts), times(facts))


_OF_QKV = tuple(belongs(name, of) for name, of in QKV_PACKED_OF.items())
_KERNELS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[limit.Limit, ...]], ...] = (
    ("linear_packed", ("mlp.linear",), ("bias", "activation", "packed"), (limit.contiguous("bias"), BELONGS)),
    ("mlp_packed", PLAIN, ACCEPTS, LIMITS),
    ("mlp_packed.gated", GATED, GATED_ACCEPTS, GATED_LIMITS),
    ("qkv_packed", QKV[:1], QKV_ACCEPTS, (limit.contiguous(*QKV_BIASES), *_OF_QKV)),
    ("qkv_packed.joined", QKV[1:], QKV_JOINED_ACCEPTS, (limit.contiguous("q_bias"), _OF_QKV[0])),
)
"""An ending of the id, operations, what such a kernel accepts and demands: libraries ignore the strides of a bias."""


def kernels(
    beginning: str,
    product: Callable[[Facts, str | None], Product],
    times: Callable[[Facts], Times],
    limits: tuple[limit.Limit, ...],
    more: Mapping[str, tuple[limit.Limit, ...]] = MappingProxyType({}),
    **fields: Any,
) -> tuple[Kernel, ...]:
    """A product with a packed weight, and blocks and projections out of it.

    Args:
        beginning: of the ids.
        product: the library's product for a call, with an activation after it.
        times: its product for a call, times another tensor.
        limits: what all of them demand; ``more`` by the operation.
        fields: of each kernel.
    """
    load = functools.partial(_load, product, times)
    return tuple(
        Kernel(
            id=f"{beginning}{ending}",
            operations=operations,
            load=load,
            accepts=accepts,
            limits=(*limits, *more.get(operations[0], ()), *own),
            **fields,
        )
        for ending, operations, accepts, own in _KERNELS
    )

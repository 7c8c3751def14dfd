"""Products with weights, and two of them with an activation between."""

from __future__ import annotations

import numpy as np

from oracles.activation import gelu, halves, silu

ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "silu": silu,
}


def product(x, weight, bias=None):
    out = np.einsum("...k,nk->...n", x, weight)
    return out if bias is None else out + bias


def _linear(c):
    return (ACTIVATIONS[c.get("activation")](product(c["input"], c["weight"], c.get("bias"))),)


def _fused(c, kind):
    up = product(c["input"], c["up_weight"], c.get("up_bias"))
    act = ACTIVATIONS[c["activation"]]
    if kind == "gated":
        inner = act(product(c["input"], c["gate_weight"], c.get("gate_bias"))) * up
    elif kind == "joined":
        inner = act(halves(up)[0]) * halves(up)[1]
    else:
        inner = act(up)
    return (product(inner, c["down_weight"], c.get("down_bias")),)


ORACLES = {
    "mlp.linear": _linear,
    "mlp.fused": lambda c: _fused(c, "plain"),
    "mlp.fused.gated": lambda c: _fused(c, "gated"),
    "mlp.fused.joined": lambda c: _fused(c, "joined"),
}

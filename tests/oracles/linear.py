"""Products with weights, and two of them with an activation between."""

from __future__ import annotations

import numpy as np

from oracles import quantize
from oracles.activation import gelu, halves, silu

ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "silu": silu,
    "relu2": lambda x: np.maximum(x, 0) ** 2,
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


def _qkv(c):
    return tuple(product(c["input"], c[f"{each}_weight"], c.get(f"{each}_bias")) for each in "qkv")


def _qkv_joined(c):
    joined, kv = product(c["input"], c["q_weight"], c.get("q_bias")), c["kv_features"]
    return (
        joined[..., : joined.shape[-1] - 2 * kv],
        joined[..., -2 * kv : -kv or None],
        joined[..., joined.shape[-1] - kv :],
    )


def _quantized(c, name=None):
    x, scales = c["input"], np.broadcast_to(c["weight_scale"].reshape(-1), c["weight"].shape[:1])
    if name is not None:
        scale = quantize.computed(x, name, "row")
        x = quantize.nearest(x / scale, name) * np.float64(scale)
    return (product(x, np.float64(c["weight"]) * scales[:, None], c.get("bias")),)


ORACLES = {
    "mlp.linear.quant": _quantized,
    "mlp.linear.quant.int8": lambda c: _quantized(c, "int8"),
    "mlp.linear.quant.fp8_e4m3": lambda c: _quantized(c, "fp8_e4m3"),
    "mlp.qkv": _qkv,
    "mlp.qkv.joined": _qkv_joined,
    "mlp.linear": _linear,
    "mlp.fused": lambda c: _fused(c, "plain"),
    "mlp.fused.gated": lambda c: _fused(c, "gated"),
    "mlp.fused.joined": lambda c: _fused(c, "joined"),
}

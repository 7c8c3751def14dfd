"""Activations, by their formulas."""

from __future__ import annotations

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[float])


def gelu(x, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def silu(x):
    return x / (1 + np.exp(-x))


def relu2(x):
    return np.maximum(x, 0) ** 2


def oai(gate, up, alpha, limit):
    gate, up = np.minimum(gate, limit), np.minimum(np.maximum(up, -limit), limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + 1)


def halves(x):
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def turns(x):
    return x[..., 0::2], x[..., 1::2]


def _oai_of(c, pair):
    return (oai(*pair, c.get("alpha", 1.702), c.get("limit", 7.0)),)


def _gelu_of(c, pair):
    return (gelu(pair[0], c.get("approximate", "none")) * pair[1],)


ORACLES = {
    "activation.gelu": lambda c: (gelu(c["input"], c.get("approximate", "none")),),
    "activation.silu": lambda c: (silu(c["input"]),),
    "activation.relu2": lambda c: (relu2(c["input"]),),
    "mlp.silu_mul": lambda c: (silu(c["input"]) * c["up"],),
    "mlp.silu_mul.joined": lambda c: (silu(halves(c["input"])[0]) * halves(c["input"])[1],),
    "mlp.gelu_mul": lambda c: _gelu_of(c, (c["input"], c["up"])),
    "mlp.gelu_mul.joined": lambda c: _gelu_of(c, halves(c["input"])),
    "mlp.swiglu_oai": lambda c: _oai_of(c, (c["input"], c["up"])),
    "mlp.swiglu_oai.interleaved": lambda c: _oai_of(c, turns(c["input"])),
}

"""Mixtures of experts, a token after another."""

from __future__ import annotations

import numpy as np

from oracles import weights
from oracles.activation import gelu, halves, oai, silu, turns


def _scores(row, scoring):
    if scoring == "sigmoid":
        return 1.0 / (1.0 + np.exp(-row))
    if scoring == "sqrt_softplus":
        return np.sqrt(np.logaddexp(row, 0.0))
    powers = np.exp(row - row.max())
    return powers / powers.sum()


def _route(c):
    logits, top_k = c["logits"], c["top_k"]
    groups, top = c.get("expert_groups"), c.get("top_groups")
    weights, places = np.zeros((len(logits), top_k)), np.zeros((len(logits), top_k), np.int64)
    for token, row in enumerate(logits):
        scores = _scores(row, c.get("scoring", "softmax"))
        choice = scores + (0 if c.get("bias") is None else c["bias"])
        choice = np.where(np.isnan(choice), np.inf, choice)  # NaN is the largest, as in torch
        if groups is not None:
            split = choice.reshape(groups, -1)
            best = np.argsort(-np.sort(split)[:, -2:].sum(-1), kind="stable")[:top]
            open_ = np.full(split.shape, -np.inf)
            open_[best] = split[best]
            choice = open_.reshape(-1)
        places[token] = np.argsort(-choice, kind="stable")[:top_k]
        mine = scores[places[token]]
        weights[token] = mine / (mine.sum() + 1e-20) if c.get("renormalize", True) else mine
    return weights * c.get("scale", 1.0), places


def _gate(c, joined):
    name = c.get("activation", "silu")
    if name == "swiglu_oai":
        return oai(*turns(joined), c.get("alpha", 1.702), c.get("limit", 7.0))
    gate, up = halves(joined)
    return (silu(gate) if name == "silu" else gelu(gate, "tanh" if name == "gelu_tanh" else "none")) * up


def _experts(c):
    out = np.zeros_like(c["input"])
    of_gate, of_down = c.get("gate_up_bias"), c.get("down_bias")
    for token, row in enumerate(c["input"]):
        for number, share in zip(c["expert_ids"][token], c["expert_weights"][token], strict=True):
            if number < 0:
                continue
            joined = c["gate_up_weight"][number] @ row + (0 if of_gate is None else of_gate[number])
            made = c["down_weight"][number] @ _gate(c, joined)
            out[token] += share * (made + (0 if of_down is None else of_down[number]))
    return (out,)


def _stack(c, part, columns):
    """The numbers of all experts of a quantised weight."""
    names = {"weight": "weight", "weight_scale": "scale", "weight_zero": "zero", "group_index": "group_index"}
    names |= {"second_scale": "second_scale"}
    found = []
    for expert in range(len(c[f"{part}_weight"])):
        own = {of: c.get(f"{part}_{name}") for of, name in names.items()}
        own = {of: None if each is None else each[expert] for of, each in own.items()}
        found.append(weights.numbers({**own, "input": np.empty((0, columns)), "weight_format": c[f"{part}_format"]}))
    return np.array(found)


def _quantised(c):
    gate_up = _stack(c, "gate_up", c["input"].shape[1])
    return _experts({**c, "gate_up_weight": gate_up, "down_weight": _stack(c, "down", gate_up.shape[1] // 2)})


ORACLES = {"moe.route": _route, "moe.experts": _experts, "moe.experts.quant": _quantised}
ORACLES["moe.experts.quant.int8"] = _quantised

"""A random call asked of numpy: arguments in the canonical layout as arrays, results back as what comparisons know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from layerzero.core.judges import Distribution
from layerzero.engine.reference import moved
from layerzero.testing import compare
from layerzero.testing.generate import RandomCall
from oracles import (
    activation,
    attention,
    cascade,
    comm,
    conv,
    elementwise,
    embedding,
    experts,
    kv,
    latent,
    linear,
    loss,
    moe,
    norm,
    paged,
    positions,
    quantize,
    ragged,
    rope,
    sampling,
    sparse,
    tensor,
    verify,
    weights,
)

Oracle = Callable[[Mapping[str, Any]], Any]

FAMILIES = (
    activation,
    attention,
    cascade,
    comm,
    conv,
    elementwise,
    embedding,
    experts,
    kv,
    latent,
    linear,
    loss,
    moe,
    norm,
    paged,
    positions,
    quantize,
    ragged,
    rope,
    sampling,
    sparse,
    tensor,
    verify,
    weights,
)

ORACLES: dict[str, Oracle] = {name: oracle for family in FAMILIES for name, oracle in family.ORACLES.items()}
"""By the name of an operation, what gives its results: a tuple of arrays, the written tensors after the returned ones.

What is drawn is a pair instead: the probabilities of each row, and what may come.
"""


def array(value: Any) -> Any:
    """An argument as numpy has it: floating tensors in float64."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().resolve_neg().cpu()
    return (plain.double() if plain.is_floating_point() else plain).numpy().copy()


def truth(call: RandomCall) -> compare.Expected:
    """What a call should give by numpy; its kinds and judges are those of the operation."""
    routed = compare.route(call)
    schema = routed.operation.schema
    found = compare.expected(call)
    known = compare.canonical(routed)
    with np.errstate(all="ignore"):
        told = ORACLES[routed.operation.name]({name: array(value) for name, value in known.items()})
    outputs = (*schema.results(routed.arguments), *(schema.tensor(name) for name in schema.mutated))
    if len(told) != len(outputs):
        raise ValueError(f"{routed.operation.name}: wanted {len(outputs)} results of numpy, got {len(told)}")
    values, judges = {}, dict(found.judges)
    for output, each in zip(outputs, told, strict=True):
        judge, given = judges[output.name]
        if isinstance(judge, Distribution):
            judges[output.name] = judge, replace(given, basis=tuple(map(torch.from_numpy, each)))
            continue
        made = torch.from_numpy(np.array(each))
        values[output.name] = moved(made, output, schema.canonical, routed.layout)
    results = tuple(values.get(name, own) for name, own in zip(found.names, found.results, strict=True))
    written = {name: values[name] for name in found.mutated}
    return replace(found, results=results, mutated=written, judges=judges)

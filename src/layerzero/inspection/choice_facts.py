"""The example calls of frozen choices: facts again, as they were written down."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_named
from layerzero.core.eager_state import STATE_FACTS
from layerzero.core.facts import CallState, Facts, FactsBuilder, TensorFacts
from layerzero.core.handle import OfKind
from layerzero.core.operation import Routed
from layerzero.core.recipe import CallRecipe
from layerzero.engine.frozen_choices import STATE, FrozenChoice
from layerzero.engine.plain import plain_facts
from layerzero.engine.registry import REGISTRY


def facts_of(choice: FrozenChoice) -> Facts:
    """The facts of a written call, without its tensors."""
    recipe: CallRecipe = choice.call
    operation = REGISTRY.operation(recipe.operation)
    if operation.plain is not None:
        arguments, sizes = operation.plain.described(recipe.params)
        return plain_facts(Routed(operation, dict(arguments))).of_sizes(sizes, {})
    params: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in recipe.params.items()
    }
    for name in operation.schema.handles:
        params[name] = None if params[name] == "none" else OfKind(str(params[name]))
    tensors = {
        name: torch.empty_strided(each.shape, each.strides, dtype=dtype_named(each.dtype), device="meta")
        for name, each in recipe.tensors.items()
    }
    general = {name: value for name, value in choice.state.items() if name not in STATE_FACTS}
    if set(general) != set(STATE) - STATE_FACTS.keys():
        raise TypeError(f"state: wanted {', '.join(STATE)}, got {', '.join(choice.state)}")
    read = {name: row.restored(choice.state[name]) for name, row in STATE_FACTS.items() if name in choice.state}
    facts = FactsBuilder(operation).of_valid(
        {**params, **tensors},
        device=Device.detect(recipe.device),
        layout=recipe.layout,
        state=CallState(requires_grad=recipe.requires_grad, read=read, **general),  # type: ignore[arg-type]
    )
    aligned = {name: recipe.tensors[name].alignment_bytes for name in facts.tensors}
    return facts.with_tensors({
        name: TensorFacts(each.shape, each.strides, each.dtype, aligned[name]) for name, each in facts.tensors.items()
    })  # fmt: skip

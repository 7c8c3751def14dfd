"""Calls that were written down, made again: random values in tensors of the same sizes, strides and alignment."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import TensorSchema
from layerzero.core.dtypes import dtype_named
from layerzero.core.operation import Case, Function, Operation, OpKind
from layerzero.core.recipe import CallRecipe, TensorRecipe
from layerzero.ops.calls import accepted, drawn, function_for, read


def arguments_of_recipe(
    recipe: CallRecipe, operation: Operation, device: str | None = None
) -> tuple[Function, dict[str, Any]]:
    """The function that a written call goes to, and its arguments.

    Args:
        device: where the tensors lie, in place of the call's; ``meta`` gives shapes and strides alone, of a call of any
            size. Tensors without an address count as aligned.
    Raises: KeyError where no function calls the operation; LookupError where a value is known to have been there, but
        not what it was.
    """
    function, schema = function_for(operation), operation.schema
    place = device or recipe.device
    generator = None if place == "meta" else torch.Generator(place).manual_seed(0)
    sizes: dict[str, int] = {}
    for tensor in schema.inputs:
        if tensor.name in recipe.tensors:
            axes = tensor.axes_in(recipe.layout, schema.canonical)
            named = axes[1:] if axes[:1] == ("...",) else axes
            shape = recipe.tensors[tensor.name].shape
            sizes |= zip(named, shape[len(shape) - len(named) :], strict=True)
            if named != axes and schema.leading:
                sizes[schema.leading] = math.prod(shape[: len(shape) - len(named)])
    own = _own_values(recipe, operation, sizes, place)
    values: dict[str, Any] = {}
    for tensor in schema.inputs:
        written = recipe.tensors.get(tensor.name)
        if written is not None:
            values[tensor.name] = _tensor(tensor, written, place, sizes, generator, own.get(tensor.name))
    values |= {name: read(recipe.params.get(name)) for name in (*schema.chosen, *schema.bounds)}
    for name in schema.scalars:
        if recipe.params.get(name) == "given":
            values[name] = schema.param(name).example
            if values[name] is None:
                raise LookupError(f"{operation.name}: {name} was given, and its schema has no example of it")
    for name in schema.bounds:  # what the call promised, its values keep
        if values[name] is not None:
            for bounded in schema.param(name).made_of:
                values[bounded].clamp_(max=values[name])
            values[name] = own.get(name, values[name])
    for name in schema.handles:  # of the kind that the call had
        kind, param = recipe.params.get(name, "none"), schema.param(name)
        if kind != "none" and param.make is not None:
            values[name] = param.make(values, kind == "capturable")
    values = {**operation.fixed, **values, "layout": recipe.layout}
    return function, accepted(function, values)


def _own_values(recipe: CallRecipe, operation: Operation, sizes: dict[str, int], device: str) -> dict[str, Any]:
    """Values that the operation draws itself: places, counts, what is drawn from, weights, and what it promises.

    Weights of unit normal numbers make results of a hundred where a model's are of order 1: rounding what lies between
    two products is then more than their judge allows, and right kernels fail (mlp.fused.gated, bfloat16, 1024 inputs).
    """
    schema, chance = operation.schema, operation.kind is OpKind.SAMPLING
    weights = {each.name for each in schema.inputs if each.resident and not each.mutated and not each.has_layout}
    wanted = [
        each.name
        for each in schema.inputs
        if (each.is_index or chance or each.name in weights) and each.name in recipe.tensors
    ]
    if operation.examples is None or not wanted or not set(operation.cases[0].sizes) <= sizes.keys():
        return {}
    # On the call's device: an H200's host took most of a minute for a large cache that is thrown away (2026-11-21).
    exact = chance or not weights.isdisjoint(wanted)
    dtype = dtype_named(recipe.tensors[schema.dtype_tensor.name].dtype) if exact else torch.bfloat16
    promised = {name: recipe.params[name] for name in schema.bounds if recipe.params.get(name) is not None}
    chosen = {name: recipe.params[name] for name in schema.chosen if recipe.params.get(name) is not None}
    made = operation.examples(Case("again", sizes, chosen | promised), dtype, torch.device(device), None)
    shapes = {name: recipe.tensors[name].shape for name in wanted if name in made}
    found: dict[str, Any] = {
        name: made[name].view(shape) if made[name].numel() == math.prod(shape) else made[name]
        for name, shape in shapes.items()
    }
    return found | {name: made[name] for name in promised if name in made}


def _tensor(
    schema: TensorSchema,
    recipe: TensorRecipe,
    device: str,
    sizes: dict[str, int],
    generator: torch.Generator | None,
    own: Tensor | None,
) -> Tensor:
    """A tensor as it lay in memory; axes that were expanded share their elements again."""
    dtype = dtype_named(recipe.dtype)
    offset = recipe.alignment_bytes // dtype.itemsize if recipe.alignment_bytes < 16 else 0
    solid = tuple(1 if step == 0 else size for size, step in zip(recipe.shape, recipe.strides, strict=True))
    last = sum(max(size - 1, 0) * step for size, step in zip(solid, recipe.strides, strict=True))
    memory = torch.zeros(offset + last + 1, device=device, dtype=dtype)
    if own is None or solid != tuple(own.shape):
        own = drawn(schema, solid, dtype, torch.device(device), sizes, generator)
    memory.as_strided(solid, recipe.strides, offset).copy_(own)
    return memory.as_strided(recipe.shape, recipe.strides, offset)

"""Calls that were written down, made again: random values in tensors of the same sizes, strides and alignment."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import TensorSchema
from layerzero.core.dtypes import dtype_named
from layerzero.core.handle import CAPTURABLE
from layerzero.core.operation import Case, Function, Operation, OpKind
from layerzero.core.recipe import CallRecipe, TensorRecipe
from layerzero.ops.calls import accepted, drawn, function_for, read
from layerzero.ops.comm.ranks import kind_of_group, problem_of
from layerzero.ops.linear.packed import DENSE, PACKED, PackedWeight


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
    sizes |= _derived_sizes(recipe, operation, sizes)
    own = _own_values(recipe, operation, sizes, place)
    values: dict[str, Any] = {}
    for tensors in _in_one_memory([each for each in schema.inputs if each.name in recipe.tensors], recipe):
        values |= _tensors(tensors, recipe, place, sizes, generator, own)
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
        alone = param.kind is kind_of_group and kind == "none" and problem_of(None)  # of a default group, elsewhere
        if param.make is not None and (kind != "none" or alone):
            values[name] = made = param.make({**values, "layout": recipe.layout}, kind == CAPTURABLE)
            if isinstance(made, PackedWeight) and kind in (PACKED, DENSE):
                made.kind = kind
    values = {**operation.fixed, **values, "layout": recipe.layout}
    return function, accepted(function, values)


def _derived_sizes(recipe: CallRecipe, operation: Operation, sizes: dict[str, int]) -> dict[str, int]:
    """Sizes of a case that no tensor of the call has as an axis: a packed weight without a bias names no outputs.

    Without them such a weight was drawn as plain numbers, and the groups of its columns did not exist.
    """
    wanted = set(operation.cases[0].sizes) - sizes.keys()
    if operation.derive is None or wanted.isdisjoint(operation.derived):
        return {}
    shapes: dict[str, Any] = {
        name: torch.empty(each.shape, dtype=dtype_named(each.dtype), device="meta")
        for name, each in recipe.tensors.items()
    }
    found = operation.derive(shapes | {name: read(each) for name, each in recipe.params.items()}, sizes)
    return {name: value for name in wanted if isinstance(value := found.get(name), int)}


_WHOLE = torch.int32, torch.int64
"""Dtypes of places, counts and classes: a loss of random targets, none of them a class, neither built nor was timed."""


def _own_values(recipe: CallRecipe, operation: Operation, sizes: dict[str, int], device: str) -> dict[str, Any]:
    """Values that the operation draws itself: whole numbers, what is drawn from, scales, weights, what it promises.

    Weights of unit normal numbers make results of a hundred where a model's are of order 1: rounding what lies between
    two products is then more than their judge allows, and right kernels fail (mlp.fused.gated, bfloat16, 1024 inputs).
    """
    schema, chance = operation.schema, operation.kind is OpKind.SAMPLING
    weights = {each.name for each in schema.inputs if each.resident and not each.mutated and not each.has_layout}
    scales = {each.name for each in schema.inputs if not each.same_dtype}  # or numbers of rows, which are positive, too
    own = weights | scales
    own |= {name for name, each in recipe.tensors.items() if dtype_named(each.dtype) in _WHOLE}
    wanted = [
        each.name
        for each in schema.inputs
        if (each.is_index or chance or each.name in own) and each.name in recipe.tensors
    ]
    if operation.examples is None or not wanted or not set(operation.cases[0].sizes) <= sizes.keys():
        return {}
    # On the call's device: an H200's host took most of a minute for a large cache that is thrown away (2026-11-21).
    exact = chance or not weights.isdisjoint(wanted)
    dtype = dtype_named(recipe.tensors[schema.dtype_tensor.name].dtype) if exact else torch.bfloat16
    promised = {name: recipe.params[name] for name in schema.bounds if recipe.params.get(name) is not None}
    chosen = {name: recipe.params[name] for name in schema.chosen if recipe.params.get(name) is not None}
    given = tuple([each.name for each in schema.optional if each.name in recipe.tensors])
    made = operation.examples(Case("again", sizes, chosen | promised, given), dtype, torch.device(device), None)
    shapes = {name: recipe.tensors[name].shape for name in wanted if name in made}
    found: dict[str, Any] = {
        name: made[name].view(shape) if made[name].numel() == math.prod(shape) else made[name]
        for name, shape in shapes.items()
    }
    return found | {name: made[name] for name in promised if name in made}


def _in_one_memory(inputs: list[TensorSchema], recipe: CallRecipe) -> list[list[TensorSchema]]:
    """Tensors that lie in one memory: those whose rows stand in the gaps that the one before leaves in its own.

    The latent and the rotated part of a cache, cosines and sines, gate and up are columns of one tensor wherever
    it matters, and libraries that read both through one pointer copy them otherwise: a tuned latent decode never
    chose FlashMLA, 1.11 times as fast as what it chose (H200, 64 sequences of 16384 tokens, 2026-11-24).
    """
    found: list[list[TensorSchema]] = []
    for each in inputs:
        group = [recipe.tensors[name.name] for name in found[-1]] if found else []
        written = each.mutated or (found and found[-1][0].mutated)  # calls refuse most that share what is written
        if group and not written and _is_beside(recipe.tensors[each.name], group):
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _is_beside(right: TensorRecipe, group: list[TensorRecipe]) -> bool:
    """Whether a tensor's rows fit right behind those of others, in the same places."""
    left = group[0]
    if right.dtype != left.dtype or right.strides != left.strides or len(right.shape) < 2:
        return False
    if right.shape[:-1] != left.shape[:-1] or right.strides[-1] != 1 or 0 in (*right.shape, *right.strides):
        return False
    steps = [step for size, step in zip(right.shape[:-1], right.strides[:-1], strict=True) if size > 1]
    width = sum(each.shape[-1] for each in group)
    first = left.alignment_bytes if left.alignment_bytes < 16 else 0
    behind = (first + width * dtype_named(left.dtype).itemsize) % 16
    aligned = (behind & -behind or 16) == right.alignment_bytes
    return bool(steps) and width + right.shape[-1] <= min(steps) and aligned


def _tensors(
    group: list[TensorSchema],
    recipe: CallRecipe,
    device: str,
    sizes: dict[str, int],
    generator: torch.Generator | None,
    own: dict[str, Any],
) -> dict[str, Tensor]:
    """Tensors as they lay in one memory; axes that were expanded share their elements again."""
    written = [recipe.tensors[each.name] for each in group]
    first, dtype = written[0], dtype_named(written[0].dtype)
    offset = first.alignment_bytes // dtype.itemsize if first.alignment_bytes < 16 else 0
    solid = [
        tuple(1 if step == 0 else size for size, step in zip(each.shape, each.strides, strict=True)) for each in written
    ]
    before = sum(each.shape[-1] for each in written[:-1])
    last = sum(max(size - 1, 0) * step for size, step in zip(solid[-1], first.strides, strict=True))
    memory = torch.zeros(offset + before + last + 1, device=device, dtype=dtype)
    made: dict[str, Tensor] = {}
    for schema, each, shape in zip(group, written, solid, strict=True):
        values = own.get(schema.name)
        other = values is not None and values.numel() and shape != tuple(values.shape)
        if values is not None and other and values.is_floating_point():  # scales of another shape stay above 0
            values = values.flatten().repeat(-(-math.prod(shape) // values.numel()))[: math.prod(shape)].view(shape)
        if values is None or shape != tuple(values.shape):
            values = drawn(schema, shape, dtype, torch.device(device), sizes, generator)
        memory.as_strided(shape, each.strides, offset).copy_(values)
        made[schema.name] = memory.as_strided(each.shape, each.strides, offset)
        offset += each.shape[-1] if each.shape else 0
    return made

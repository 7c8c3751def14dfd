"""Run an operation's own definition, or its shapes alone, in the layout of the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from layerzero.core.arguments import TensorSchema, permutation
from layerzero.core.facts import Facts
from layerzero.core.operation import Operation, Routed


def reference_call(routed: Routed) -> Any:
    """Run the reference; made of torch operators, so every transform applies to it."""
    return _given(routed, _in_layout(routed.operation, routed.operation.reference, routed.arguments, routed.layout))


def fake_call(routed: Routed) -> Any:
    """Make results of the right shape, strides and dtype; nothing is computed."""
    operation = routed.operation
    compute = operation.fake or _on_meta(operation.reference)
    return _given(routed, _in_layout(operation, compute, routed.arguments, routed.layout))


def _given(routed: Routed, result: Any) -> Any:
    """A result in the dtype that the caller gets."""
    if "" not in routed.casts:
        return result
    dtype, schemas = routed.casts[""][1], routed.operation.schema.results(routed.arguments)
    found = [
        each if schema.own_dtype else each.to(dtype) for each, schema in zip(as_tuple(result), schemas, strict=True)
    ]
    return tuple(found) if isinstance(result, tuple) else found[0]


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Results as a tuple; a function that only writes into its arguments has none."""
    return result if isinstance(result, tuple) else () if result is None else (result,)


def _on_meta(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference for tensors without memory: what it returns is dense, and lies where its first tensor does."""

    def fake(first: torch.Tensor, *tensors: Any, **named: Any) -> Any:
        result = reference(_empty(first), *map(_empty, tensors), **{name: _empty(each) for name, each in named.items()})
        if isinstance(result, tuple):
            return tuple(first.new_empty(each.shape, dtype=each.dtype) for each in result)
        return None if result is None else first.new_empty(result.shape, dtype=result.dtype)

    return fake


def _empty(value: Any) -> Any:
    """A tensor of the same shape and strides on the meta device, which may be written into."""
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _in_layout(
    operation: Operation, compute: Callable[..., Any], arguments: Mapping[str, Any], layout: str | None
) -> Any:
    """Call with tensors moved to the canonical layout, and move the results back."""
    schema = operation.schema
    canonical = schema.canonical
    tensors, named = [], {}
    for tensor in schema.inputs:
        value = moved(arguments.get(tensor.name), tensor, layout, canonical)
        if tensor.required:
            tensors.append(value)
        else:
            named[tensor.name] = value
    named |= {name: arguments[name] for name in schema.chosen}
    named |= {name: arguments.get(name) for name in (*schema.scalars, *schema.bounds)}
    named |= {name: arguments.get(name) for name in schema.handles if name not in schema.promises}
    result = compute(*tensors, **named)
    if layout in (None, canonical):
        return result
    outputs = schema.results(named)
    if isinstance(result, tuple):
        return tuple(moved(each, output, canonical, layout) for each, output in zip(result, outputs, strict=True))
    return moved(result, outputs[0], canonical, layout) if outputs else result


def moved(tensor: Any, schema: TensorSchema, source: str | None, target: str | None) -> Any:
    """A tensor or result seen in another layout, where it has one; nothing is copied."""
    if tensor is None or not schema.has_layout or source is None or target is None or source == target:
        return tensor
    # Dynamo warns of caches, and traces what is below them
    axes = permutation.__wrapped__ if torch.compiler.is_dynamo_compiling() else permutation
    return tensor.permute(axes(source, target, tensor.ndim))


def leading(facts: Facts, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes of a result's leading axes: those of the first tensor that has some."""
    if axes[:1] == ("...",):
        for tensor, own in facts.operation.schema.axes_in(facts.layout):
            if own[:1] == ("...",) and tensor.name in facts.tensors:
                return facts.tensors[tensor.name].shape[: 1 - len(own) or None]
    return ()


def dtype_of(output: TensorSchema, facts: Facts) -> torch.dtype:
    """The dtype that a result of a call has: the only one it may have, that of what it follows, else the call's."""
    constraint = output.dtype_constraint or ()
    if len(constraint) == 1:
        return next(iter(constraint))
    source = output.dtype_from
    named = facts.tensors[source].dtype if source in facts.tensors else facts.get(source)
    dtype = named if isinstance(named, torch.dtype) else facts["dtype"]
    assert isinstance(dtype, torch.dtype)
    return dtype

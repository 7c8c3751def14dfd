"""Run an operation's own definition, or its shapes alone, in the layout of the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.core.operation import Operation, Routed


def reference_call(routed: Routed) -> Any:
    """Run the reference; made of torch operators, so every transform applies to it."""
    return _in_layout(routed.operation, routed.operation.reference, routed.arguments, routed.layout)


def fake_call(routed: Routed) -> Any:
    """Make results of the right shape, strides and dtype; nothing is computed."""
    return _in_layout(routed.operation, routed.operation.fake, routed.arguments, routed.layout)


def _in_layout(
    operation: Operation, compute: Callable[..., Any], arguments: Mapping[str, Any], layout: str | None
) -> Any:
    """Call with tensors moved to the canonical layout, and move the first result back."""
    schema = operation.schema
    move = bool(operation.layouts) and layout not in (None, operation.layouts[0])
    tensors, named = [], {}
    for tensor in schema.inputs:
        value = arguments.get(tensor.name)
        if move and tensor.has_layout and value is not None:
            value = value.transpose(1, 2)
        if tensor.required:
            tensors.append(value)
        else:
            named[tensor.name] = value
    named |= {name: arguments[name] for name in schema.params}
    named |= {name: arguments.get(name) for name in schema.bounds}
    result = compute(*tensors, **named)
    if not move or not schema.outputs or not schema.outputs[0].has_layout:
        return result
    if isinstance(result, tuple):
        return (result[0].transpose(1, 2), *result[1:])
    return result.transpose(1, 2)

"""The same functions as ``torch.ops.layerzero.*``: schemas, eager implementation, shapes, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from layerzero.core.arguments import TensorSchema
from layerzero.core.errors import InvalidCallError
from layerzero.core.graph_capture import held_off
from layerzero.core.operation import Function, Routed
from layerzero.core.operator_schema import TorchSchema
from layerzero.core.system import forking
from layerzero.engine import namespace
from layerzero.engine.reference import fake_call, moved, reference_call
from layerzero.ops import FUNCTIONS

namespace.install()  # where this is imported without the package's entrance having seen torch

_LOCK = forking.rlock()  # reentrant: as torch defines an operator, it asks the namespace for it
_UNDEFINED = dict(FUNCTIONS)
"""The functions of families whose operators are not defined yet."""

_LIBRARIES: dict[str, torch.library.Library] = {}
"""What defined the operators of a function of the families; it lives as long as the process."""

_APART: dict[str, torch.library.Library] = {}
"""The same of functions that were registered, and that may go again."""


def define_all() -> list[str]:
    """Define the operators of every function; gives their names."""
    for name in list(_UNDEFINED):
        define(name)
    return [name for function in list(FUNCTIONS.values()) for name in function.torch_schemas]


def define(name: str) -> None:
    """Define an operator, and those of the same function; the engine behind them is imported when one first runs."""
    with _LOCK:
        for function in [_UNDEFINED[name]] if name in _UNDEFINED else list(_UNDEFINED.values()):
            if name in function.torch_schemas:
                del _UNDEFINED[function.name]
                try:
                    _LIBRARIES[function.name] = _library(function)
                except BaseException:
                    _UNDEFINED[function.name] = function
                    raise


def register_apart(function: Function) -> None:
    """Define the operators of a function that may go again."""
    for name in function.torch_schemas:
        define(name)  # where a function of a family has it, torch says that it is taken
    _APART[function.name] = _library(function)


def unregister(function: Function) -> None:
    """Take back what :func:`register_apart` defined."""
    _APART.pop(function.name)._destroy()  # type: ignore[no-untyped-call]


def is_apart(function: Function) -> bool:
    """Whether :func:`unregister` can take a function's operators back."""
    return function.name in _APART


def _library(function: Function) -> torch.library.Library:
    """A library with the operators of a function: all of them, or it is gone again."""
    library = torch.library.Library("layerzero", "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        with held_off():
            for name, schema in function.torch_schemas.items():
                _register(function, name, schema, library)
    except BaseException:
        library._destroy()  # type: ignore[no-untyped-call]
        raise
    return library


def _register(function: Function, name: str, schema: TorchSchema, library: torch.library.Library) -> None:
    library.define(name + schema.signature, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(name, _eager(function, schema), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"layerzero::{name}", _fake(function, schema), lib=library)
    if function.mutates:
        library.impl(name, _negated(function, name, schema), "Negative")  # type: ignore[no-untyped-call]
    else:
        backward, setup = _gradients(function, schema)
        torch.library.register_autograd(f"layerzero::{name}", backward, setup_context=setup, lib=library)


def _negated(function: Function, name: str, schema: TorchSchema) -> Callable[..., Any]:
    """The call on plain copies, which are copied back: torch's fallback for negated views takes one that is written."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(schema.order, args, strict=False)) | kwargs
        plain = {key: each.resolve_neg() if isinstance(each, torch.Tensor) else each for key, each in given.items()}
        result = getattr(torch.ops.layerzero, name)(**plain)
        for key in function.mutates:
            if plain.get(key) is not given.get(key):
                given[key].copy_(plain[key])
        return result

    return call


def _random(function: Function) -> dict[str, object]:
    """The parameters that make a call random, with the values at which they do not."""
    params = [each for operation in function.operations for each in operation.schema.params]
    return {each.name: each.neutral for each in params if each.random}


def _bound(schema: TorchSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(zip(schema.order, args, strict=False)) | dict(kwargs) | dict(schema.fixed)
    return arguments | {name: tuple(arguments[name]) for name in schema.lists if arguments.get(name) is not None}


def _complete(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    defaults = {p.name: p.default for p in function.parameters if p.default is not p.empty}
    return defaults | arguments


def _routed(function: Function, arguments: dict[str, Any]) -> Routed:
    from layerzero.engine.config import current_policy

    return function.route(_complete(function, arguments), current_policy().layout)


def _eager(function: Function, schema: TorchSchema) -> Callable[..., Any]:
    def eager(*args: Any, **kwargs: Any) -> Any:
        from layerzero.engine.services import SERVICES

        arguments = _bound(schema, args, kwargs)
        result = SERVICES.call(function.name).fast(**arguments)
        if result is None:
            return None
        first = function.operations[0].schema
        outputs, layout = first.results(arguments), arguments.get("layout")
        if layout is None and any(each.has_layout for each in outputs):
            layout = _routed(function, arguments).layout
        promised = [
            _with_promised_strides(each, output, first.canonical, layout)
            for each, output in zip(result if isinstance(result, tuple) else (result,), outputs, strict=True)
        ]
        return tuple(promised) if isinstance(result, tuple) else promised[0]

    return eager


def _with_promised_strides(
    result: torch.Tensor, output: TensorSchema, canonical: str | None, layout: str | None
) -> torch.Tensor:
    """Give a result the strides that the fake function promised to compiled code: dense in the canonical layout.

    Kernels differ in theirs; most write the canonical layout, so that nothing is copied.
    """
    dense: torch.Tensor = moved(result, output, layout, canonical).contiguous()
    return moved(dense, output, canonical, layout)  # type: ignore[no-any-return]  # it moves what it gets


def _fake(function: Function, schema: TorchSchema) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        from layerzero.engine.dispatch import ENGINE

        arguments = _bound(schema, args, kwargs)
        if ENGINE.watchers:
            _tell(function, arguments)
        return fake_call(_routed(function, arguments))

    return fake


def _tell(function: Function, arguments: dict[str, Any]) -> None:
    from layerzero.engine.config import current_policy
    from layerzero.engine.services import SERVICES
    from layerzero.engine.transforms import tell_shapes

    tell_shapes(SERVICES.call(function.name).dispatcher, _complete(function, arguments), current_policy())


def _gradients(function: Function, schema: TorchSchema) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Backward through the operator: recompute the reference under autograd and ask it.

    Eager calls keep their kernel's own backward; only the operator needs this, since torch cannot see through it.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        arguments = dict(zip(schema.order, inputs, strict=True))
        for name, neutral in _random(function).items():
            got = arguments.get(name, neutral)
            if got != neutral:  # recomputing would draw others than the forward pass did
                problem = f"{name}: wanted {neutral} for gradients through torch.ops, got {got}; call lz instead"
                raise InvalidCallError(function.name, [problem])
        if arguments.get("layout", "given") is None:  # backward may run where another layout is configured
            arguments["layout"] = _routed(function, _bound(schema, inputs, {})).layout
        ctx.names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
        ctx.rest = {name: value for name, value in arguments.items() if name not in ctx.names}
        ctx.save_for_backward(*(arguments[name] for name in ctx.names))

    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        further = torch.is_grad_enabled()  # create_graph=True: gradients of gradients lead to what the caller has
        with torch.enable_grad():
            leaves = {
                name: tensor.view_as(tensor)
                if further and tensor.requires_grad
                else tensor.detach().requires_grad_(tensor.is_floating_point())
                for name, tensor in zip(ctx.names, ctx.saved_tensors, strict=True)
            }
            result = reference_call(_routed(function, _bound(schema, (), leaves | ctx.rest)))
        outputs = result if isinstance(result, tuple) else (result,)
        pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if grad is not None]
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        found = torch.autograd.grad(
            [p[0] for p in pairs], wanted, [p[1] for p in pairs], create_graph=further, allow_unused=True
        )
        by_name = dict(zip([name for name, leaf in leaves.items() if leaf.requires_grad], found, strict=True))
        return tuple(by_name.get(name) for name in schema.order)

    return backward, setup

"""Generate the callable of a function: its public signature, an exact key of its arguments, one table lookup.

A hit costs the key, one dictionary read and the plan. What makes no key (subclasses, modes, transforms) and what is
not in the table goes to the slower ways; they have the same results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import Dispatcher
from layerzero.engine.reference import reference_call
from layerzero.engine.state import in_dispatch_mode, in_transform

_PLAIN = frozenset({torch.Tensor, Parameter})

_SDPA_STATE = "_flash_sdp(), _efficient_sdp(), _math_sdp(), _cudnn_sdp()"


class Call:
    """The ways of one function's call: the generated fast one, and the ones it hands over to."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.dispatcher = Dispatcher(function)
        self.source = _source(function)
        self.fast: Callable[..., Any] = self._generate()

    def _generate(self) -> Callable[..., Any]:
        namespace: dict[str, Any] = {
            "_PLAIN": _PLAIN,
            "_cache": self.dispatcher.cache,
            "_scopes": SCOPES,
            "_scoped": self._scoped_table,
            "_miss": self._miss,
            "_failed": self._failed,
            "_unusual": self._unusual,
            "_compiling": torch.compiler.is_compiling,
            "_operator": self._operator,
            "_grad_enabled": torch.is_grad_enabled,
            "_inference": torch.is_inference_mode_enabled,
            "_shares_memory": _shares_memory,
            "_deterministic": torch.are_deterministic_algorithms_enabled,
            "_autocast": torch._C._is_any_autocast_enabled,
            "_dispatch_modes": torch._C._len_torch_dispatch_stack,
            "_function_modes": torch._C._len_torch_function_stack,
            "_transforms": torch._C._functorch.peek_interpreter_stack,
            "_forward_ad": torch.autograd.forward_ad,
            "_flash_sdp": torch._C._get_flash_sdp_enabled,
            "_efficient_sdp": torch._C._get_mem_efficient_sdp_enabled,
            "_math_sdp": torch._C._get_math_sdp_enabled,
            "_cudnn_sdp": torch._C._get_cudnn_sdp_enabled,
        }
        exec(compile(self.source, f"<layerzero {self.function.name}>", "exec"), namespace)  # noqa: S102  # our own text
        fast: Callable[..., Any] = namespace[self.function.name]
        fast.__doc__ = self.function.signature.__doc__
        fast.__module__ = "layerzero"
        fast.__annotations__ = self.function.signature.__annotations__
        fast.__wrapped__ = self.function.signature  # type: ignore[attr-defined]  # inspect.signature and help() follow it
        return fast

    def _arguments(self, values: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip((parameter.name for parameter in self.function.parameters), values, strict=True))

    def _scoped_table(self) -> dict[Any, Plan]:
        return self.dispatcher.cache.table(SCOPES.policy())

    def _miss(self, key: Any, *values: Any) -> Any:
        return self.dispatcher.miss(key, self._arguments(values))

    def _failed(self, plan: Plan, error: Exception, *values: Any) -> Any:
        return self.dispatcher.failed(plan, error, self._arguments(values))

    def _operator(self, *values: Any) -> Any:
        """Call ``torch.ops.layerzero``: torch's dispatcher knows what to do with modes and wrapper subclasses."""
        arguments = self._arguments(values)
        wants_gradient = any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
        if self.function.mutates and wants_gradient and torch.is_grad_enabled():
            # An operator that writes into its arguments cannot have a gradient of its own; torch's operators can.
            return reference_call(self.function.route(arguments, current_policy().layout))
        for name, schema in self.function.torch_schemas.items():
            if all(arguments[fixed] == value for fixed, value in schema.fixed.items()):
                best = name, schema
        name, schema = best
        for listed in schema.lists:
            if isinstance(arguments[listed], int):
                arguments[listed] = [arguments[listed]]
        return getattr(torch.ops.layerzero, name)(**{key: arguments[key] for key in schema.order})

    def _unusual(self, *values: Any) -> Any:
        """Run a call that makes no key: subclasses, modes, transforms, or arguments that are wrong."""
        arguments = self._arguments(values)
        tensors = tuple(value for value in values if isinstance(value, torch.Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(self.fast, tensors, **arguments)
        if in_transform():
            return self.dispatcher.reference(arguments)
        if in_dispatch_mode() or any(_has_torch_dispatch(tensor) for tensor in tensors):
            # the same errors as everywhere, before torch sees the call
            self.function.route(dict(arguments), current_policy().layout)
            return self._operator(*values)
        return self.dispatcher.once(arguments)


def _shares_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    try:
        return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, fake: whoever looks closer says what is wrong
        return True


def _has_torch_dispatch(tensor: torch.Tensor) -> bool:
    return type(tensor) not in _PLAIN and type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def _source(function: Function) -> str:
    """Write the fast path of a function.

    The key holds, for every tensor, dtype, device, shape, strides, the low bits of its address, the negative bit and
    whether it asks for gradients; every other argument by value; and the eager state. Whatever a limit reads is in it,
    so a plan that is found is legal for the call that found it.
    """
    parameters = list(function.parameters)
    names = [parameter.name for parameter in parameters]
    given = ", ".join(names)
    required = [p.name for p in parameters if p.name in function.tensors and p.default is inspect.Parameter.empty]
    optional = [name for name in function.tensors if name not in required]
    checks = [f"type({name}) not in _PLAIN" for name in required]
    checks += [f"({name} is not None and type({name}) not in _PLAIN)" for name in optional]
    for name in function.mutates:  # what makes writing into it an error is looked at on every call
        others = [other for other in required if _apart(function, name, other)]
        checks += [f"({name}.requires_grad and {name}.is_leaf)", f"{name}.is_inference() and not _inference()"]
        checks += [f"_shares_memory({name}, {other})" for other in others]
    for pair in function.may_share_storage:
        checks.append(" == ".join(f"{name}.data_ptr()" for name in sorted(pair)))
    checks += [f"({name} is not None and (type({name}) is not int or {name} < 1))" for name in function.bounds]
    checks += ["_dispatch_modes()", "_function_modes()", "_transforms() is not None", "_forward_ad._current_level >= 0"]
    parts = [_tensor_key(name) for name in required]
    parts += [f"None if {name} is None else ({_tensor_key(name)}, {name}.requires_grad)" for name in optional]
    parts += [_value_key(function, name) for name in names if name not in function.tensors]
    parts += ["_grad_enabled() and (" + _any_grad(required, optional) + ")", "_deterministic()", "_autocast()"]
    if "sdpa" in function.state:
        parts.append(_SDPA_STATE)
    lines = [
        f"def {function.name}({_signature(function)}):",
        "    if _compiling():",
        f"        return _operator({given})",
        f"    if {' or '.join(checks)}:",
        f"        return _unusual({given})",
        "    try:",
        f"        _key = ({', '.join(parts)})",
        "        _table = _cache.current if not _scopes.active else _scoped()",
        "        _plan = _table.get(_key)",
        # no hash (a list), no strides and address (sparse, nested), or no handle where one belongs
        "    except (TypeError, RuntimeError, AttributeError):",
        f"        return _unusual({given})",
        "    if _plan is None:",
        f"        return _miss(_key, {given})",
        "    _plan.used = True",
        "    try:",
        f"        return _plan.run({given})",
        "    except Exception as _error:",
        f"        return _failed(_plan, _error, {given})",
    ]
    return "\n".join(lines) + "\n"


def _tensor_key(name: str) -> str:
    return f"{name}.dtype, {name}.device, {name}.shape, {name}.stride(), {name}.data_ptr() & 15, {name}.is_neg()"


def _value_key(function: Function, name: str) -> str:
    """An argument by value; a bound by the power of two above it; a handle by its kind and whether it belongs here."""
    if name in function.bounds:
        return f"None if {name} is None else ({name} - 1).bit_length()"
    if name in function.handles:
        return f"None if {name} is None else {name}.kind_for({', '.join(function.handles[name])})"
    return name


def _apart(function: Function, mutated: str, other: str) -> bool:
    """Whether a tensor that is written into must not share memory with another one."""
    return mutated != other and frozenset({mutated, other}) not in function.may_share_storage


def _any_grad(required: list[str], optional: list[str]) -> str:
    tests = [f"{name}.requires_grad" for name in required]
    tests += [f"({name} is not None and {name}.requires_grad)" for name in optional]
    return " or ".join(tests)


def _signature(function: Function) -> str:
    text, keyword_only = [], False
    for parameter in function.parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            text.append("*")
            keyword_only = True
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        text.append(parameter.name + default)
    return ", ".join(text)

"""The callable of a function: in C where that was built, else generated Python; both with the slower ways behind.

A hit costs the key, one table lookup and the plan. What makes no key (subclasses, modes, transforms) and what is not in
the table goes to the slower ways; they have the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from layerzero.core.bundle import MISSING, Bundle, unpack
from layerzero.core.errors import InvalidCallError, LayerZeroPerformanceWarning, meant
from layerzero.core.import_hook import is_imported, when_imported
from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.core.system import log, warn
from layerzero.engine import accelerator
from layerzero.engine.cache import Key, PlanTable
from layerzero.engine.call_source import coarse_key, key_source, names_of, source
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import Dispatcher
from layerzero.engine.fusion import FUSING, exporting, expressed, expression_of
from layerzero.engine.transforms import in_dispatch_mode, in_transform, is_default_device, top_mode

_PLAIN = frozenset({torch.Tensor, Parameter})


class Call:
    """The ways of one function's call: the fast one in C or generated Python, and the ones it hands over to.

    Attributes:
        python: the generated function. It has the complete semantics; the C path hands over to it what it cannot read.
        key_of: the key that it finds a plan by, None for a call that makes none.
        native: the owner of the C path, None without it.
        fast: what users call.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.dispatcher = Dispatcher(function)
        self.expression = expression_of(function)
        if self.expression is not None:  # before the first change of anything: the environment may wish
            engine = self.dispatcher.engine
            FUSING.look(frozen=engine.frozen is not None, registered=engine.registry.has_own)
        self.deciding = [  # handles that a result hangs on
            each.name
            for operation in function.operations
            for each in operation.schema.params
            if each.name in function.handles and each.changes_result
        ]
        params = [each for operation in function.operations for each in operation.schema.params]
        self.random = {each.name: each.neutral for each in params if each.random}
        self.demanded = [  # tensors that lack are not looked for in tables
            place
            for place, each in enumerate(function.parameters)
            if each.default is each.empty and each.name not in function.tensors
        ]
        assert function.torch_schemas  # written now: Dynamo may trace what asks for them
        self.source = source(function)
        self.key_of: Callable[..., tuple[Any, ...] | None]
        self.python: Callable[..., Any] = self._generate()
        self.native = self._accelerate() if accelerator.HOT is not None else None
        self.fast: Callable[..., Any] = self.python if self.native is None else getattr(self.native, function.name)
        if self.native is not None:
            substitute(self.native, self.fast, self.python)

    def _accelerate(self) -> Any:
        ways: dict[str, Callable[..., Any]] = {
            "python": self.python,
            "miss": self._native_miss,
            "failed": self._failed,
            "scoped": lambda: self._scoped_table().index,
        }
        native = accelerator.declare(self.function, ways)
        setattr(native, self.function.name, native.builtin())
        self.dispatcher.cache.attach(accelerator.HOT.Index, native.publish)
        return native

    def _generate(self) -> Callable[..., Any]:
        namespace: dict[str, Any] = {
            "_PLAIN": _PLAIN,
            "_MISSING": MISSING,
            **names_of(self.function),
            "_Tensor": torch.Tensor,
            "_cache": self.dispatcher.cache,
            "_scopes": SCOPES,
            "_scoped": self._scoped_table,
            "_miss": self._miss,
            "_failed": self._failed,
            "_unusual": self._unusual,
            "_misfit": self._misfit,
            "_compiling": torch.compiler.is_dynamo_compiling,
            "_operator": self._operator,
            "_grad_enabled": torch.is_grad_enabled,
            "_inference": torch.is_inference_mode_enabled,
            "_apart_by": _apart_by,
            "_shares_memory": _shares_memory,
            "_deterministic": torch._C._get_deterministic_algorithms,
            "_autocast": torch._C._is_any_autocast_enabled,
            "_threads": torch.get_num_threads,
            "_dispatch_modes": torch._C._len_torch_dispatch_stack,
            "_function_modes": torch._C._len_torch_function_stack,
            "_transforms": torch._C._functorch.peek_interpreter_stack,
            "_forward_ad": torch.autograd.forward_ad,
            "_tracing": torch._C._is_tracing,
        }
        text = self.source + "\n\n" + key_source(self.function)
        exec(compile(text, f"<layerzero {self.function.name}>", "exec"), namespace)  # noqa: S102  # our own text
        self.key_of = namespace["key_of"]
        fast: Callable[..., Any] = namespace[self.function.name]
        fast.__doc__ = self.function.signature.__doc__
        fast.__module__ = "layerzero"
        fast.__annotations__ = self.function.signature.__annotations__
        fast.__wrapped__ = self.function.signature  # type: ignore[attr-defined]  # inspect.signature and help() follow it
        return fast

    def _arguments(self, values: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.dispatcher.names, values, strict=True))

    def _are_to_unpack(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a tensor's place has an object, or nothing; a handle may be an object that brought itself."""
        held = any(isinstance(arguments[name], Bundle) for name in self.function.tensors)
        return held or any(value is MISSING for value in arguments.values())

    def _misfit(self, unknown: Mapping[str, Any], beyond: tuple[Any, ...], *values: Any) -> Any:
        """Raise what Python does for arguments that a function has not, and name the nearest, or those that it has."""
        if not unknown:
            parameters = self.function.parameters
            positional = sum(each.kind is not each.KEYWORD_ONLY for each in parameters)
            self.function.signature(*values[:positional], *beyond)  # raises, with the numbers of both
        first, renamed = next(iter(unknown)), self.function.renamed
        known = [name for name in self.dispatcher.names if name not in self.function.given_as]
        hint = f"; it is {renamed[first]!r} now" if first in renamed else meant(first, known)
        hint = hint or f"; it has {', '.join(known)}"
        raise TypeError(f"{self.function.name}() got an unexpected keyword argument {first!r}{hint}")

    def _scoped_table(self) -> PlanTable:
        return self.dispatcher.cache.table(SCOPES.policy())

    def _miss(self, exact: tuple[Any, ...], *values: Any) -> Any:
        """Look in the table, which has size classes, too; then choose."""
        if self.demanded and any(values[place] is MISSING for place in self.demanded):
            unpack(self.function, self._arguments(values))
        table = self.dispatcher.cache.table(current_policy())
        negated = tuple(isinstance(value, torch.Tensor) and value.is_neg() for value in values)
        found = (*exact, negated) if any(negated) else exact
        coarse, shapes, strides = coarse_key(found, self.dispatcher.order)
        plan = table.find(found, coarse, shapes, strides)
        if plan is None:
            return self.dispatcher.miss(Key(found, coarse), self._arguments(values))
        if found is exact:
            table.saw(exact, plan)
        plan.used = True
        try:
            return plan.run(*values)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises
            return self._failed(plan, error, *values)

    def _native_miss(self, exact: bytes, coarse: bytes, *values: Any) -> Any:
        arguments = self._arguments(values)
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_neg():  # the C key does not tell
                return self.python(**arguments)  # a plan chosen for such a call is not for others
        return self.dispatcher.miss(Key(exact, coarse, self.native), arguments)

    def _failed(self, plan: Plan, error: Exception, *values: Any) -> Any:
        return self.dispatcher.failed(plan, error, self._arguments(values))

    def _operator(self, *values: Any) -> Any:
        """Call ``torch.ops.layerzero``: torch's dispatcher knows what to do with modes and wrapper subclasses."""
        arguments = self._arguments(values)
        if self._are_to_unpack(arguments):  # in compiled code
            return self._operator(*unpack(self.function, arguments).values())
        wants_gradient = any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
        drawn = any(arguments[name] != neutral for name, neutral in self.random.items())
        if (self.function.mutates or drawn) and wants_gradient and torch.is_grad_enabled():
            # An operator that writes into its arguments, or draws, cannot have a gradient of its own; torch's can.
            return self.dispatcher.reference(arguments)
        for name, schema in self.function.torch_schemas.items():
            if all(arguments[fixed] == value for fixed, value in schema.fixed.items()):
                best = name, schema
        name, schema = best
        left = [each for each in self.function.handles if each not in schema.order and arguments[each] is not None]
        if any(each in self.deciding for each in left):  # a group: without it others' tensors would be added up
            return self.function.signature(**{each: arguments[each] for each in self.dispatcher.names})
        if left and torch.compiler.is_dynamo_compiling():
            _tell_unused(self.function.name, ", ".join(left))
        for listed in schema.lists:
            if isinstance(arguments[listed], str):  # what torch's schemas have no word for: padding="same"
                return self.function.operations[0].stock(**arguments)()  # type: ignore[misc]  # it has one
            if isinstance(arguments[listed], int):
                arguments[listed] = [arguments[listed]]
        result = getattr(torch.ops.layerzero, name)(**{key: arguments[key] for key in schema.order})
        compiling = torch.compiler.is_dynamo_compiling() and not exporting()
        if self.expression is not None and compiling and not FUSING.wish:
            return expressed(self.expression, arguments, result)
        return result

    def _unusual(self, *values: Any) -> Any:
        """Run a call that makes no key: subclasses, modes, transforms, objects, or arguments that are wrong."""
        arguments = self._arguments(values)
        if is_default_device(top_mode()):
            return self._beside_default_device(arguments)
        if self._are_to_unpack(arguments):
            return self.fast(**unpack(self.function, arguments))
        tensors = tuple(value for value in values if isinstance(value, torch.Tensor))
        if has_torch_function(tensors) and not any(each.is_nested for each in tensors):  # theirs go by a name alone
            return handle_torch_function(self.fast, tensors, **arguments)
        if in_transform():
            return self.dispatcher.reference(arguments)
        if in_dispatch_mode() or any(_has_torch_dispatch(tensor) for tensor in tensors):
            # the same errors as everywhere, before torch sees the call
            self.function.route(dict(arguments), current_policy().layout)
            try:
                return self._operator(*values)
            except (NotImplementedError, TypeError) as error:
                wanted = "wanted a class of tensors that has code for torch.ops.layerzero"
                problems = [
                    f"{name}: {wanted}, got {type(each).__name__}; call it on plain tensors, such as DTensor.to_local()"
                    for name, each in arguments.items()
                    if isinstance(each, torch.Tensor) and _has_torch_dispatch(each)
                ]
                if not problems or "layerzero" not in str(error):  # it is of what the class, or a mode, runs
                    raise
                raise InvalidCallError(self.function.name, problems) from error
        return self.dispatcher.run_unkept(arguments)

    def _beside_default_device(self, arguments: dict[str, Any]) -> Any:
        """Run a call under ``torch.set_default_device``: it means nothing to a call with tensors.

        As torch's own functions run it, without the mode, but without asking it first: that cost 60 us a call.
        """
        mode = torch._C._pop_torch_function_stack()
        try:
            return self.fast(**arguments)
        finally:
            torch._C._push_on_torch_function_stack(mode)


def _tell_unused(function: str, names: str) -> bool:
    text = (
        f"lz.{function}: {names}= has no effect in compiled code, where an operator of tensors stands in for the call: "
        "kernels that plan on the host plan for each call again. Call it outside of what torch.compile sees, as with "
        "torch.compiler.disable, to pay once a step"
    )
    warn(text, LayerZeroPerformanceWarning, stacklevel=2)
    return True


# Dynamo runs it while it traces, and nothing of it stays in the code.
_tell_unused._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _apart_by(left: torch.Tensor, right: torch.Tensor) -> int:
    """How far apart two tensors of one storage start, in bytes; 0 where they are of two."""
    if left.untyped_storage()._cdata != right.untyped_storage()._cdata:
        return 0
    return right.data_ptr() - left.data_ptr()


def _shares_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    try:
        return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, fake: the slow way says what is wrong
        return True


def _has_torch_dispatch(tensor: torch.Tensor) -> bool:
    return type(tensor) not in _PLAIN and type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


_DYNAMO = "torch._dynamo"

_waiting: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []


def substitute(native: Any, builtin: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Let Dynamo trace ``traced``, the generated Python, where it meets a builtin, which it cannot see through."""
    _waiting.append((native, builtin, traced))
    if len(_waiting) == 1 or is_imported(_DYNAMO):  # the first that waits registers the others, too
        when_imported(_DYNAMO, _register)


def _register() -> None:
    import torch

    from layerzero.engine import accelerator

    while _waiting:
        native, builtin, traced = _waiting.pop()
        try:
            torch.compiler.substitute_in_graph(builtin, skip_signature_check=True)(traced)
            # after a graph break the builtin runs while Dynamo listens, and it would compile the kernels' own Python
            native.unwatched(torch.compiler.disable(builtin))  # type: ignore[no-untyped-call]
            accelerator.HOT.watch(torch._C._dynamo.eval_frame.get_eval_frame_callback)
        except Exception as error:  # noqa: BLE001  # Dynamo's import, and with it the user's program, must not fail here
            log.warning("torch.compile will break graphs at lz.%s: %s", builtin.__name__, error)

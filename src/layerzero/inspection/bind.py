"""A function bound to one kind of call: static code pays for the kernel and a guard, and never for a lookup."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from layerzero.core.bundle import MISSING, Bundle, unpack
from layerzero.core.eager_state import declared
from layerzero.core.errors import CudaGraphUnsafeError, InvalidCallError, stays
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Plan, Report
from layerzero.engine import accelerator
from layerzero.engine.cache import Key, PlanTable
from layerzero.engine.call import Call
from layerzero.engine.call_source import coarse_key
from layerzero.engine.config import CONFIGURATION, SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.plain import PLAIN_CALLS, plain_facts
from layerzero.engine.plan_source import PlanUnusableError
from layerzero.engine.policy import Policy
from layerzero.inspection.answers import Named, check_operation, name_of, question
from layerzero.ops import DROP_INS, plain_function_of

_OF_TENSOR = ("shape", "strides", "dtype", "device", "address modulo 16", "requires_grad")
_OF_STATE = ("gradients are wanted", "deterministic algorithms", "autocast")


_stays = stays("lz.bind", "bound function", "call lz.bind again")

if accelerator.HOT is not None:
    copyreg.pickle(accelerator.HOT.Bound, _stays)


class _InForce(NamedTuple):
    """A plan, the policy that it was chosen under, and the table that stands for its epoch."""

    plan: Plan
    policy: Policy
    epoch: PlanTable
    proved: bool
    """Whether it ran here before; the first run is watched."""


class BoundFunction:
    """What :func:`bind` hands out; in C where that was built, with these attributes and semantics.

    Attributes:
        function: name of the public function.
        plan: what runs; chosen anew by the first guarded call after the epoch moved.
        guard: whether calls are checked.
        parameters: names of what a call passes, in order.
        fast: the same callable in C; None where there is none.
    """

    def __init__(
        self, call: Call, arguments: dict[str, Any], wanted: str, passed: tuple[str, ...], *, guard: bool
    ) -> None:
        self.function, self.guard = call.function.name, guard
        self._call, self._wanted = call, wanted
        self._native = None if call.fast is call.python else call.native
        varying = {*call.function.tensors, *call.function.bounds, *call.function.handles}
        self.parameters = tuple(name for name, value in arguments.items() if name in varying and value is not None)
        self._passed = tuple(name for name in passed if name in self.parameters)
        self._names = tuple(arguments)
        self._fixed = {name: None if name in self.parameters else value for name, value in arguments.items()}
        self._layers = SCOPES.layers()
        self._exact = self._key_of_example(arguments)
        self._in_force = self._choose(arguments)
        self.fast = self._accelerated(arguments)
        self._install(self._in_force)

    @property
    def plan(self) -> Plan:
        return self._in_force.plan

    @property
    def report(self) -> Report:
        """Why this kernel: every candidate with its score or a reason."""
        return self.plan.report

    __reduce_ex__ = _stays

    def __repr__(self) -> str:
        guard = "" if self.guard else ", guard=False"
        return f"<lz.{self.function} bound to {self.plan.kernel_id}, takes {', '.join(self.parameters)}{guard}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the kind that was bound."""
        has_bundle = any(isinstance(value, Bundle) for value in (*args, *kwargs.values()))
        arguments = (self._unpacked if has_bundle else self._complete)(args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._call.fast(**arguments)
        values, now = tuple(arguments.values()), self._in_force
        if self.guard or not now.proved:
            exact = self._call.key_of(*values)
            if exact is None or (SCOPES.active and current_policy() is not now.policy) or ENGINE.watchers:
                return self._call.fast(**arguments)  # something listens, or a scope decides otherwise
            if exact != self._exact:
                if exact[:-1] == self._exact[:-1]:  # another number of threads: the function chooses for it
                    return self._call.fast(**arguments)
                raise InvalidCallError(f"{self.function}, bound", self._differences(exact))
            if any(isinstance(value, torch.Tensor) and value.is_neg() for value in values):
                return self._call.fast(**arguments)
            if now.epoch is not self._cache.current:
                now = self._in_force = self._choose(arguments)
        if not now.proved:
            result = self._call.dispatcher.run(now.plan, arguments)
            if now.epoch is self._cache.current:  # no failure, and nothing else that asks for another choice
                self._in_force = now._replace(proved=True)
            self._install(self._in_force)
            return result
        self._install(now)
        try:
            return now.plan.run(*values)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises
            return self._failed(now.plan, error, *values)

    @property
    def _cache(self) -> Any:
        return self._call.dispatcher.cache

    def _complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument of the function, in its order."""
        given = dict(zip(self.parameters, args, strict=False))
        if len(args) + len(kwargs) != len(self.parameters) or {*given, *kwargs} != set(self.parameters):
            got = ", ".join([*(f"#{number}" for number in range(1, len(args) + 1)), *kwargs]) or "nothing"
            raise TypeError(f"{self!r}: wanted {', '.join(self.parameters)}, got {got}; all else was fixed by lz.bind")
        return {**self._fixed, **given, **kwargs}

    def _unpacked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument of a call with an object that stands for several, in the order of the example's own."""
        given = dict(zip(self._passed, args, strict=False))
        if len(args) > len(self._passed) or given.keys() & kwargs or not kwargs.keys() <= {*self.parameters}:
            got = ", ".join([*(f"#{number}" for number in range(1, len(args) + 1)), *kwargs])
            raise TypeError(f"{self!r}: wanted {', '.join(self._passed)} as in the example, got {got}")
        left = dict.fromkeys(self.parameters, MISSING)
        found = unpack(self._call.function, {**self._fixed, **left, **given, **kwargs})
        return {name: found[name] for name in self._names}

    def _key_of_example(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        function = self._call.function
        function.route(dict(arguments), CONFIGURATION.policy.layout)  # the caller's mistakes are reported as everywhere
        exact = self._call.key_of(*arguments.values())
        odd = [
            name for name in self.parameters if isinstance(arguments[name], torch.Tensor) and arguments[name].is_neg()
        ]
        if exact is None or odd or any(getattr(arguments[name], "is_meta", False) for name in self.parameters):
            what = f"{', '.join(odd)}: " if odd else ""
            problem = (
                f"{what}wanted plain tensors with memory and without the negative bit, outside of modes and "
                f"transforms, got {', '.join(type(arguments[name]).__name__ for name in self.parameters)}; "
                f"call lz.{function.name} there"
            )
            raise InvalidCallError(f"bind {function.name}", [problem])
        return exact

    def _choose(self, arguments: dict[str, Any]) -> _InForce:
        """The plan of this very call in the epoch that holds now, from the table or chosen and kept there."""
        epoch = self._cache.current
        policy = CONFIGURATION.effective(*self._layers) if self._layers else CONFIGURATION.policy
        coarse, shapes, strides = coarse_key(self._exact, self._call.dispatcher.order)
        key = Key(self._exact, coarse)
        words = None if self._native is None else self._native.key(tuple(arguments.values()))
        if words is not None:
            key = Key(words[0], words[1], self._native)
        plan = self._cache.table(policy).find(key.exact, key.coarse, shapes, strides)
        proved = plan is not None
        if plan is None:
            plan = self._call.dispatcher.plan_for(key, arguments, policy, self._call.dispatcher.tensors(arguments))
        check_operation(self._wanted, plan.report)
        return _InForce(plan, policy, epoch, proved)

    def _accelerated(self, arguments: dict[str, Any]) -> Any:
        """The callable in C; None also where C cannot read such a call."""
        words = None if self._native is None else self._native.key(tuple(arguments.values()))
        if words is None:
            return None
        return accelerator.HOT.Bound(
            function=self._native,
            owner=self,
            otherwise=self.__call__,
            failed=self._failed,
            exact=words[0],
            values=tuple(self._fixed.values()),
            passed=tuple(self._names.index(name) for name in self.parameters),
            guarded=self.guard,
        )

    def _install(self, now: _InForce) -> None:
        """Let C run a plan that has run here before."""
        if self.fast is not None and now.proved:
            plan = now.plan
            self.fast.install(now.epoch.index, plan, plan.direct or plan.run, plan.reads_negated)

    def _failed(self, plan: Plan, error: Exception, *values: Any) -> Any:
        """Guarded, what a failure does everywhere; unguarded, the caller gets it as it is."""
        if self.guard:
            return self._call.dispatcher.failed(plan, error, dict(zip(self._names, values, strict=True)))
        if isinstance(error, PlanUnusableError):
            raise CudaGraphUnsafeError(plan.report.operation, [plan.kernel_id]) from None
        raise error

    def _differences(self, exact: tuple[Any, ...]) -> list[str]:
        """What is not as it was bound, argument by argument."""
        tensors = [name for name in self._names if name in self._call.function.tensors]
        others = [name for name in self._names if name not in tensors]
        return [
            f"{what}: wanted {wanted} as bound, got {got}; bind again, or call lz.{self.function}"
            for what, wanted, got in self._parts(exact, tensors, others)
            if wanted != got
        ]

    def _parts(
        self, exact: tuple[Any, ...], tensors: list[str], others: list[str]
    ) -> Iterator[tuple[str, object, object]]:
        asked = [each.text for state in declared(self._call.function.state) for each in state.questions]
        names = [*tensors, *others, *_OF_STATE, *asked]
        for name, wanted, got in zip(names, self._exact, exact, strict=False):
            if name not in tensors or wanted is None:  # absent ones are fixed
                yield name, wanted, got
                continue
            if got is None:  # one that the function itself may go without
                yield name, "a tensor", None
                continue
            for what, each, other in zip(_OF_TENSOR, wanted, got, strict=False):
                plain = isinstance(each, torch.Size)
                yield f"{name}: {what}", tuple(each) if plain else each, tuple(other) if plain else other


def bind(function_or_operation: Named, *args: Any, guard: bool = True, **kwargs: Any) -> Callable[..., Any]:
    """Choose once for calls like this example; the result is called with the tensors alone and looks nothing up.

        attend = lz.bind(lz.attention, q, k, v, causal=True, layout="BSHD")
        output = attend(q, k, v)
        attend.plan.kernel_id, print(attend.report)

    The bound callable takes, by position or name, those tensors, handles and bounds that the example had; every other
    argument is fixed. Nothing runs here, and the example is not kept. Where the example had a layer of a cache
    (:class:`layerzero.KVCache`) in place of tensors, calls take one, too, in the example's order. That costs some
    microseconds more than the tensors, which the bound callable takes as well.

    Guarded, a call must be like the example in shapes, strides, dtypes, devices, alignment, grad mode, autocast and
    deterministic mode. So must what else its function depends on (``Function.state``). InvalidCallError names what is
    not. Once the epoch moved (settings, a failing or banned kernel, a new winner), the next call chooses anew. Inside a
    mode, a transform or a scope with other settings, and with another number of threads, a call is one of the function
    itself. A failure is answered as everywhere.

    ``guard=False`` checks the first call alone. Every later one runs that kernel, whatever it is given and whatever was
    decided since, and the caller gets the kernel's own exception.

    Of functions without tensors (``lz.bind(lz.tokenize, "an example", "cl100k_base")``) a bound call passes what the
    first parameter is. One or several must be as bound; where sizes are of another class, the function itself runs.

    Args:
        function_or_operation: ``lz.attention`` or its name, an operation or its name, an alias (``attention.causal``).
        args, kwargs: an example call of that function.
        guard: whether calls are looked at.
    Raises: InvalidCallError for a wrong example; KeyError for an unknown name, TypeError for what names nothing; what
        choosing raises.
    """
    wanted = name_of(function_or_operation, "bind")
    if wanted in DROP_INS:
        problem = f"wanted a function that passes its tensors on as they are, got {wanted}"
        raise InvalidCallError("bind", [f"{problem}; lz.bind({DROP_INS[wanted].instead}) binds what it calls"])
    plain = plain_function_of(wanted)
    if plain is not None:
        return bind_plain(plain, wanted, args, kwargs, guard=guard)
    dispatcher, arguments = question(wanted, args, kwargs)
    function = dispatcher.function
    passed = list(inspect.Signature(function.parameters).bind_partial(*args, **kwargs).arguments)
    for name, number in function.given_as.items():
        if number in passed and arguments[name] is not None:
            passed[passed.index(number)] = name
    bound = BoundFunction(CALLS[function.name], arguments, wanted, tuple(passed), guard=guard)
    return bound if bound.fast is None else bound.fast


class PlainBound:
    """What ``lz.bind`` hands out for a function without tensors.

    Attributes:
        function: name of the public function.
        plan: what runs; chosen anew by the first guarded call after the epoch moved, what the example named changed,
            or in a forked child.
        guard: whether calls are looked at.
        parameters: the name of what a call passes.
    """

    def __init__(self, function: PlainFunction, arguments: dict[str, Any], wanted: str, *, guard: bool) -> None:
        self.function, self.guard, self._wanted = function.name, guard, wanted
        self._dispatcher, self._call = PLAIN_CALLS[function.name]
        self._ways, self._example = self._dispatcher.ways, arguments
        self._choose()
        self.parameters = (self._binding.passed,)
        self._fixed = {name: value for name, value in arguments.items() if name != self._binding.passed}

    def _choose(self) -> None:
        """Choose for calls like the example, in the epoch that holds now."""
        ENGINE.registry.ready()
        function = self._dispatcher.function
        binding = self._binding = function.bind(self._example)
        self._table, self._changed = self._ways.table, binding.changed
        self._kind = binding.kind(self._example[binding.passed])
        routed = function.route(dict(self._example))
        self.plan: Plan = self._dispatcher.choose(plain_facts(routed), current_policy())
        check_operation(self._wanted, self.plan.report)
        self._run: Callable[[Any], Any] = self.plan.run
        whole = self._whole if self.guard else _nothing
        self._quick: Callable[[Any], Any] = whole if binding.quick is None else binding.quick(self._run)

    def _whole(self, items: Any) -> Any:
        """A call of the kind that was bound; None for another."""
        binding = self._binding
        return binding.finish(self._run(items)) if binding.kind(items) == self._kind else None

    @property
    def report(self) -> Report:
        """Why this kernel: every candidate with its score or a reason."""
        return self.plan.report

    __reduce_ex__ = _stays

    def __repr__(self) -> str:
        guard = "" if self.guard else ", guard=False"
        return f"<lz.{self.function} bound to {self.plan.kernel_id}, takes {self.parameters[0]}{guard}>"

    def __call__(self, items: Any) -> Any:
        """Run a call of the kind that was bound."""
        if not self.guard:
            found = self._quick(items)
            return self._binding.finish(self._run(items)) if found is None else found
        # another table: another epoch or process, settings of a block, or a listener
        if self._ways.table is not self._table or (self._changed is not None and self._changed()):
            return self._anew(items)
        try:
            found = self._quick(items)
        except (KeyboardInterrupt, SystemExit, InvalidCallError):
            raise
        except BaseException:  # noqa: BLE001  # some libraries panic in classes of their own; the function answers it
            return self._call(items, **self._fixed)
        return self._other(items) if found is None else found

    def _other(self, items: Any) -> Any:
        """Answer a call of other sizes. Raises: InvalidCallError for several in place of one, or one of several."""
        kind = self._binding.kind(items)
        if kind[0] != self._kind[0]:
            problem = f"{self.parameters[0]}: wanted {self._kind[0]} as bound, got {kind[0]}"
            raise InvalidCallError(f"{self.function}, bound", [f"{problem}; bind again, or call lz.{self.function}"])
        return self._call(items, **self._fixed)

    def _anew(self, items: Any) -> Any:
        """Answer a call after what was chosen here stopped to hold; what a block decides holds for its calls alone."""
        if SCOPES.active or ENGINE.watchers:
            return self._other(items)
        self._choose()
        return self._other(items) if self._binding.kind(items) != self._kind else self(items)


def _nothing(_: Any) -> None:
    """What an unguarded call knows of its items, where the function has no quick way."""


def bind_plain(function: PlainFunction, wanted: str, args: Any, kwargs: Any, *, guard: bool) -> PlainBound:
    """Bind a function without tensors. Raises: TypeError for arguments that it does not take; what choosing raises."""
    try:
        bound = inspect.signature(function.signature).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"bind {function.name}: {error}") from None
    bound.apply_defaults()
    return PlainBound(function, dict(bound.arguments), wanted, guard=guard)

"""An operation: a computation with a schema, a reference and cases; and a function: what the user calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

import torch

from layerzero.core.arguments import Adapter, Param, Role
from layerzero.core.bundle import MISSING, Bundle, lacking, unpack
from layerzero.core.dtypes import ordered
from layerzero.core.eager_state import STATE_FACTS, declared
from layerzero.core.errors import RegistrationError, misfit
from layerzero.core.judge import Elementwise, Judge, Property, Tolerance
from layerzero.core.operator_schema import TorchSchema, torch_schemas
from layerzero.core.plain import Plain
from layerzero.core.reasons import Reason
from layerzero.core.schema import OperationSchema
from layerzero.core.values import Check

__all__ = ["GENERAL_FACTS", "Case", "Function", "OpKind", "Operation", "Part", "Route", "Routed", "Tolerance", "Work"]

Random = torch.Generator | None
"""Where the numbers of examples come from; torch's own generator where None."""

GENERAL_FACTS = (
    *("operation", "layout", "platform", "sm", "dtype"),
    *("requires_grad", "deterministic", "capturing", "autocast", *STATE_FACTS),
)
"""Facts that calls of all operations have."""


class OpKind(StrEnum):
    """What an operation works on; it decides which parts a declaration must have."""

    TENSOR = "tensor"
    TOKENIZATION = "tokenization"
    SAMPLING = "sampling"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must do at least, by any kernel: arithmetic, and bytes between memory and chip, each once."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Case:
    """A named call as data: axis sizes and parameters that tests, benchmarks, warmup and docs share.

    Attributes:
        name: short and unique within the operation.
        sizes: axis name to size.
        params: parameters that differ from their neutral value.
        given: optional tensors that the call brings.
    """

    name: str
    sizes: Mapping[str, int]
    params: Mapping[str, object] = field(default_factory=dict)
    given: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A call of its own that is a piece of a larger one.

    Attributes:
        text: which piece, ``queries 96 to 127``.
        arguments: the function's arguments of it.
        place: cuts each of its results out of that of the whole call.
    """

    text: str
    arguments: Mapping[str, Any]
    place: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation.

    Attributes:
        schema: name, tensors, parameters.
        summary: one line for tables.
        reference: plain PyTorch in the canonical layout; computes in float32 or wider; also the last candidate.
        cases: named calls.
        fake: the same signature on shapes alone; returns tensors of the right shape and dtype, nothing computed. The
            reference itself runs on the meta device if None; set it where its results depend on values.
        tolerance: allowed distance from the reference by dtype of the call, where results are near it.
        tolerance_reason: why these numbers.
        judge: the rule for a right result: one for all, or by name of results and written tensors. Without one, a
            result is near the reference within the tolerance.
        properties: what holds of the results of several runs, where one result cannot show it.
        kind, is_collective: what it works on; of the kind ``communication`` it is a collective.
        fixed: arguments that its function has and it has not, with the values that they have in its calls.
        sibling: the operation with equal head counts that this one generalises, if any.
        left_by_state: where the caller's eager state leaves some libraries only, what says so and their names, from the
            call's facts; None where it leaves all. References may always run.
        unlike_sibling: why a kernel of the sibling alone does not take a call, from the call's facts.
        has_fallback: whether the reference may run as the last candidate.
        derive: further facts of a call (``group``, ``rows``) from its arguments and axis sizes.
        aliases: other names under which rules and questions may name its facts.
        derived: the names of those facts, so that rules may match them.
        derived_from: the axes that each of them follows from, ``...`` for all leading ones; a size is their product, or
            bounded by it. A plan is not reused for other sizes where a derived fact that is not named here was read.
        adapters: by the kind that a limit's repair names, what a plan may do beyond copies and views.
        check_values: texts of what is wrong already, and checks (:mod:`layerzero.core.values`), which are read
            together. Places and counts are declared in the schema instead. It runs in debug mode, because reading waits
            for the device, and once a kernel raised.
        guard: given a function's name and a layout, the check of the tensors of every call, kept plans included. It
            raises InvalidCallError. None, which costs a call nothing, where nothing is checked. What changes this
            answer calls :func:`layerzero.core.plan.outdate`.
        number_guard: the same for numbers that a handle may be made of: once for each handle, else at every call.
        note: remembers of a plan's first call, from its arguments and its layout, what later calls are checked for.
            Hits do not pass here.
        examples: arguments of a case that the schema cannot tell how to draw; they replace what it draws.
        complete: sizes that follow from others, where a call is described by the shapes of its first tensors.
        work: what a call must do, from its facts; ``layerzero bench`` computes GB/s and TFLOP/s from it.
        scratch: elements that the reference needs for more than the tensors (scores), from the sizes of a call.
        parts: pieces of a call that is too large to be computed in float64 as a whole; None where it cannot be cut.
        sweep: cases worth measuring on a kind of device (``cpu``, ``cuda``), in any order. Sizes that are named replace
            its own; none where it lacks the name.
        class_facts: facts that tell classes of calls apart in place of their sizes: what a verdict is about. For an
            operation whose kernels are right or wrong for an object (a tokenizer), whatever the sizes.
        plain: what an operation without tensors has in place of what tensors are drawn and compared by.
        expression: torch's own way to the result, from the function's arguments: what is written without LayerZero.
        stock: the same for an expression with something to prepare: returns what computes, or None where torch has no
            way for these arguments. It calls the expression if None.
        fuses: whether compiled code computes ``stock`` in place of a kernel, in one loop with the code around it.
        advice: what to do where no kernel takes a call, from its facts and each kernel's reasons; empty for nothing.
        name: the operation's name, ``attention.gqa.prefill``.
        layouts: layouts that a call may have, that of the schema first; empty where axes have no layout.
        behind: by the name of every fact that its calls have, the axes that it follows from.
    """

    schema: OperationSchema
    summary: str
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    fake: Callable[..., Any] | None = None
    tolerance: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    tolerance_reason: str = ""
    judge: Judge | Mapping[str, Judge] | None = None
    properties: tuple[Property, ...] = ()
    kind: OpKind = OpKind.TENSOR
    fixed: Mapping[str, object] = field(default_factory=dict)
    sibling: str = ""
    left_by_state: Callable[[Any], tuple[str, tuple[str, ...]] | None] | None = None
    unlike_sibling: Callable[[Any], Reason] | None = None
    has_fallback: bool = True
    derive: Callable[[Mapping[str, object], Mapping[str, int]], Mapping[str, object]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    derived_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    check_values: Callable[..., Sequence[str | Check]] | None = None
    guard: Callable[[str, str | None], Callable[..., None] | None] | None = None
    number_guard: Callable[[str, str | None], Callable[..., None]] | None = None
    note: Callable[[Mapping[str, Any], str | None], None] | None = None
    advice: Callable[[Any, Mapping[str, Sequence[Reason]]], str] | None = None
    examples: Callable[[Case, torch.dtype, torch.device, Random], dict[str, Any]] | None = None
    complete: Callable[[Mapping[str, int]], Mapping[str, int]] | None = None
    work: Callable[[Mapping[str, Any]], Work] | None = None
    scratch: Callable[[Mapping[str, int]], int] | None = None
    parts: Callable[[Mapping[str, Any], Any], Sequence[Part] | None] | None = None
    sweep: Callable[[str, Mapping[str, Sequence[int]]], Iterable[Case]] | None = None
    class_facts: tuple[str, ...] = ()
    plain: Plain | None = None
    expression: Callable[..., Any] | None = None
    stock: Callable[..., Callable[[], object] | None] | None = None
    fuses: bool = False
    behind: Mapping[str, frozenset[str]] = field(init=False, repr=False, compare=False)
    name: str = field(init=False, repr=False, compare=False)
    is_collective: bool = field(init=False, repr=False, compare=False)
    layouts: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.schema.operation)
        object.__setattr__(self, "is_collective", self.kind is OpKind.COMMUNICATION)
        object.__setattr__(self, "layouts", self.schema.layouts)
        axes = frozenset(axis for tensor in self.schema.inputs for axis in tensor.shape_vars)
        behind = dict.fromkeys((*GENERAL_FACTS, *self.schema.arguments), frozenset[str]())
        behind |= {axis: frozenset({axis}) for axis in axes if axis != "..."}
        behind |= {name: frozenset(self.derived_from.get(name, axes)) for name in self.derived}
        object.__setattr__(self, "behind", MappingProxyType(behind))
        if self.stock is None and self.expression is not None:
            object.__setattr__(self, "stock", _calling(self.expression))
        problems = []
        if self.fuses and (self.stock is None or self.schema.mutated):
            problems.append("fuses: wanted torch's own way (expression= or stock=) and nothing that is written into")
        if isinstance(self.judge, Mapping):
            known = self._judged
            strangers = [name for name in self.judge if name not in known]
            problems += [f"judge: wanted names among {', '.join(known)}, got {name!r}" for name in strangers]
        for each in self.properties:
            for name in sorted(each.arguments - self.schema.known):
                problems.append(f"properties: {each.name}: wanted arguments of the operation, got {name!r}")
        if problems:
            raise RegistrationError(f"operation {self.name!r}: {'; '.join(problems)}")

    @property
    def _judged(self) -> tuple[str, ...]:
        """What there is to judge: the results, and the tensors that are written into."""
        return (*(output.name for output in self.schema.outputs), *self.schema.mutated)

    @property
    def looked_at(self) -> tuple[str, ...]:
        """Parameters that choose and that ``check_values`` names, as a block's size; passed ones it gets as well."""
        if self.check_values is None:
            return ()
        named = inspect.signature(self.check_values).parameters
        return tuple(each.name for each in self.schema.params if each.role is Role.CHOSEN and each.name in named)

    @property
    def judges(self) -> Mapping[str, Judge]:
        """The judge of each result and of each tensor that is written into, by name."""
        near = Elementwise(self.tolerance, self.tolerance_reason)
        own = self.judge or {}
        if isinstance(own, Mapping):
            return {name: own.get(name, near) for name in self._judged}
        return dict.fromkeys(self._judged, own)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that a call may have and its judges can judge, as far as the operation names them."""
        if not self.schema.inputs:
            return ()
        named = [each.dtypes for each in self.judges.values()]
        allowed = [each for each in (*named, self.schema.dtype_tensor.dtype_constraint) if each is not None]
        return ordered(frozenset.intersection(*allowed)) if allowed else ()

    @property
    def facts(self) -> frozenset[str]:
        """Names of every fact that a call of this operation has."""
        return frozenset(self.behind)


def _calling(expression: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    def stock(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return lambda: expression(*args, **kwargs)

    return stock


@dataclass(frozen=True, slots=True)
class Routed:
    """What a route returns: the operation of this call and its canonical arguments.

    Attributes:
        operation: the chosen operation.
        arguments: canonical argument values; tensors under the names that the function uses.
        layout: layout of the tensors that have one.
        varies: axes whose size may differ within its bit length, all that share its name together. The route must give
            the same operation and values for each, and no error; ``...`` for the leading axes. Plans are reused by it.
        equal: two of these axes that are as long as each other in every such call, as the route needs; or none.
        casts: dtypes before and after of each tensor in ``arguments`` that was cast, and of the result under ``""``.
    """

    operation: Operation
    arguments: Mapping[str, object]
    layout: str | None = None
    varies: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    casts: Mapping[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)


class Route(Protocol):
    """Turn a function's arguments into one operation; raises InvalidCallError for the caller's mistakes."""

    def __call__(self, arguments: dict[str, Any], default_layout: str | None) -> Routed: ...


@dataclass(frozen=True, slots=True)
class Function:
    """What the user calls; its route turns the facts of a call into one operation.

    Attributes:
        name: public name, ``attention`` for ``lz.attention``.
        signature: a Python function with the public signature and docstring, such as a reference; it is never called.
        route: from arguments to an operation: gives a ``Routed``, after the schema's ``validate`` found nothing wrong.
            It runs where a kernel is chosen, not on hits: those check ``least`` and ``most`` of passed numbers alone.
        operations: every operation that the route can return.
        draw: random arguments for the fuzzer; those of a case with other sizes if None. Results must fit the dtype: the
            truth is computed in float64, and compared as it is.
        weight: how often the fuzzer draws it, relative to others.
        order: the parameters of its ``torch.ops.layerzero`` operators in order; that of the signature if empty.
        state: names of eager state that changes the choice, from :mod:`layerzero.core.eager_state`: ``sdpa`` (the
            caller's sdpa_kernel context), ``matmul`` (in what float32 is multiplied).
        may_share_storage: pairs of tensors that may lie in one storage although one of them is written into.
        renamed: names that it and its arguments had before, with those of today. The function's own still work, with a
            DeprecationWarning; those of arguments raise a TypeError that names the new one.
        lacking: what a call without its required arguments may have meant, for the end of the error.
        parameters: the public parameters in order, then the tensors that callers give by the name of a number.
        given_as: the names of those tensors, with the name that each is given by.
        tensors: names of the parameters that are tensors.
        mutates: names of the tensors that are written into.
        bounds, handles, scalars: names of the parameters of these roles.
    """

    name: str
    signature: Callable[..., Any]
    route: Route
    operations: tuple[Operation, ...]
    draw: Callable[[Any, torch.dtype], dict[str, Any]] | None = None
    weight: int = 2
    order: tuple[str, ...] = ()
    state: frozenset[str] = frozenset()
    may_share_storage: frozenset[frozenset[str]] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    lacking: str = ""
    parameters: Sequence[inspect.Parameter] = field(init=False, repr=False, compare=False)
    given_as: Mapping[str, str] = field(init=False, repr=False, compare=False)
    tensors: tuple[str, ...] = field(init=False, repr=False, compare=False)
    mutates: tuple[str, ...] = field(init=False, repr=False, compare=False)
    bounds: tuple[str, ...] = field(init=False, repr=False, compare=False)
    handles: tuple[str, ...] = field(init=False, repr=False, compare=False)
    scalars: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _schemas: dict[str, TorchSchema] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:  # reading a signature costs as much as judging a kernel
        try:
            declared(self.state)
        except KeyError as error:
            raise RegistrationError(f"function {self.name!r}: state: {error.args[0]}") from None
        public = inspect.signature(self.signature).parameters
        schemas = [operation.schema for operation in self.operations]
        inputs = {tensor.name: tensor for schema in schemas for tensor in schema.inputs}
        given_as = {
            each.name: each.given_as for each in inputs.values() if each.given_as in public and each.name not in public
        }
        hidden = (inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in given_as)
        parameters = (*public.values(), *hidden)
        names = [each.name for each in parameters]
        derived: dict[str, object] = {
            "parameters": parameters,
            "given_as": MappingProxyType(given_as),
            "tensors": tuple(name for name in names if name in inputs),
            "mutates": tuple(name for name in names if any(name in schema.mutated for schema in schemas)),
        }
        for role in ("bounds", "handles", "scalars"):
            having = {name for schema in schemas for name in getattr(schema, role)}
            derived[role] = tuple(name for name in names if name in having)
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def torch_schemas(self) -> Mapping[str, TorchSchema]:
        """Name of a ``torch.ops.layerzero`` operator to its schema; read on demand. Raises: RegistrationError."""
        return torch_schemas(self, self._schemas)

    def param(self, name: str) -> Param | None:
        """What an operation says about a parameter that is no tensor; None where none has it (``layout``).

        Of a handle, what the operation says whose calls bring most of what it was made of.
        """
        said = [each for operation in self.operations for each in operation.schema.params if each.name == name]
        return max(said, key=lambda each: len(each.made_of), default=None)

    def _lacking(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """What a call lacks, for the end of an error; empty where something else is wrong with it."""
        signature = inspect.Signature(self.parameters)
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return ""
        missing = [each.name for each in self.parameters if each.default is each.empty and each.name not in given]
        return lacking(self, missing, given)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Bind a call to the public signature, defaults filled in. Raises: TypeError for one that does not fit."""
        signature = inspect.Signature(self.parameters)
        has_bundle = any(isinstance(value, Bundle) for value in (*args, *kwargs.values()))
        try:
            bound = signature.bind_partial(*args, **kwargs) if has_bundle else signature.bind(*args, **kwargs)
        except TypeError as error:
            known = [name for name in signature.parameters if name not in self.given_as]
            raise misfit(self.name, error, kwargs, known, self.renamed, self._lacking(args, kwargs)) from None
        bound.apply_defaults()
        for name, number in self.given_as.items():
            if isinstance(bound.arguments.get(number), torch.Tensor):
                bound.arguments[name], bound.arguments[number] = bound.arguments[number], None
        if not has_bundle:
            return dict(bound.arguments)
        return unpack(self, {name: bound.arguments.get(name, MISSING) for name in signature.parameters})

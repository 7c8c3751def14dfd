"""An operation: a computation with a schema, a reference and cases; and a function: what the user calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch

from layerzero.core.schema import OperationSchema

GENERAL_FACTS = (
    *("operation", "layout", "platform", "sm", "dtype"),
    *("requires_grad", "deterministic", "capturing", "autocast", "sdpa_disabled"),
)
"""Facts that calls of all operations have."""


class OpKind(StrEnum):
    """What an operation works on; it decides which parts a declaration must have."""

    TENSOR = "tensor"
    TOKENIZATION = "tokenization"
    SAMPLING = "sampling"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a kernel may be from the reference in float64: ``|got - want| <= atol + rtol * |want|``."""

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must do at least, whoever does it: arithmetic, and bytes between memory and chip, each once."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Case:
    """A named call as data: axis sizes and parameters that tests, benchmarks, warmup and docs share.

    Attributes:
        name: short and unique within the operation.
        sizes: axis name to size.
        params: parameters that differ from their neutral value.
    """

    name: str
    sizes: Mapping[str, int]
    params: Mapping[str, object] = field(default_factory=dict)


class Fold(Protocol):
    """Fold arguments that a kernel lacks (a sliding window, device lengths) into an additive attention mask.

    Called with the tensors in the canonical layout and the arguments to fold by name.
    """

    def __call__(self, query: torch.Tensor, key: torch.Tensor, **arguments: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation.

    Attributes:
        schema: name, tensors, parameters.
        summary: one line for tables.
        reference: plain PyTorch in the canonical layout; computes in float32 or wider; also the last candidate.
        fake: the same signature on shapes alone; returns tensors of the right shape and dtype, nothing computed.
        cases: named calls.
        tolerance: allowed distance from the reference by dtype.
        tolerance_reason: why these numbers.
        kind: what it works on.
        layouts: layouts that a call may have; empty where axes have no layout.
        sibling: the operation with equal head counts that this one generalises, if any.
        has_fallback: whether the reference may run as the last candidate.
        derive: further facts of a call (``group``, ``rows``) from its arguments and axis sizes.
        derived: the names of those facts, so that rules may match them.
        derived_from: the axes that each of them follows from, ``...`` for all leading ones; a size is their product, or
            bounded by it. A plan is not reused for other sizes where a derived fact that is not named here was read.
        fold: computes the mask that stands in for arguments a kernel lacks.
        check_values: lists what is wrong with values that lie on the device (a page beyond the cache); asked in debug
            mode, because reading them waits for the device.
        examples: tensors of a case where plain normal numbers will not do; the generator draws them.
        work: what a call must do, from its facts; ``layerzero bench`` tells GB/s and TFLOP/s by it.
    """

    schema: OperationSchema
    summary: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cases: tuple[Case, ...]
    tolerance: Mapping[torch.dtype, Tolerance]
    tolerance_reason: str
    kind: OpKind = OpKind.TENSOR
    layouts: tuple[str, ...] = ()
    sibling: str = ""
    has_fallback: bool = True
    derive: Callable[[Mapping[str, object], Mapping[str, int]], Mapping[str, object]] | None = None
    derived: tuple[str, ...] = ()
    derived_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fold: Fold | None = None
    check_values: Callable[..., list[str]] | None = None
    examples: Callable[[Case, torch.dtype, torch.device, torch.Generator | None], dict[str, torch.Tensor]] | None = None
    work: Callable[[Mapping[str, Any]], Work] | None = None

    @property
    def name(self) -> str:
        """The operation's name, ``attention.gqa.prefill``."""
        return self.schema.operation

    @property
    def facts(self) -> frozenset[str]:
        """Names of every fact that a call of this operation has."""
        axes = {axis for tensor in self.schema.inputs for axis in tensor.shape_vars if axis != "..."}
        return frozenset({*GENERAL_FACTS, *self.schema.arguments, *self.derived, *axes})


@dataclass(frozen=True, slots=True)
class Routed:
    """What a route returns: the operation of this call and its canonical arguments.

    Attributes:
        operation: the chosen operation.
        arguments: canonical argument values; tensors under the names that the function uses.
        layout: layout of the tensors that have one.
        assumed_layout: whether the layout is only an assumption.
        varies: axes whose size may differ within its bit length, all that share its name together, without the route
            giving another operation, other values or an error; ``...`` for the leading axes. Plans are reused by it.
    """

    operation: Operation
    arguments: Mapping[str, object]
    layout: str | None = None
    assumed_layout: bool = False
    varies: tuple[str, ...] = ()


class Route(Protocol):
    """Turn a function's arguments into one operation; raises InvalidCallError for the caller's mistakes."""

    def __call__(self, arguments: dict[str, Any], default_layout: str | None) -> Routed: ...


@dataclass(frozen=True, slots=True)
class Function:
    """What the user calls; its route turns the facts of a call into one operation.

    Attributes:
        name: public name, ``attention`` for ``lz.attention``.
        signature: a Python function with the public signature and docstring; its body is never run.
        route: from arguments to an operation.
        operations: every operation that the route can return.
        tensors: names of the parameters that are tensors.
        mutates: names of the tensors that are written into.
        torch_schemas: name of a ``torch.ops.layerzero`` operator to its schema.
        state: eager state that changes the choice for this function (``sdpa``: the caller's sdpa_kernel context).
        handles: names of the parameters that are handles, each with the tensors that it must have been made of.
        may_share_storage: pairs of tensors that may lie in one storage although one of them is written into.
        parameters: the public parameters in order.
    """

    name: str
    signature: Callable[..., Any]
    route: Route
    operations: tuple[Operation, ...]
    tensors: tuple[str, ...]
    mutates: tuple[str, ...] = ()
    torch_schemas: Mapping[str, TorchSchema] = field(default_factory=dict)
    state: frozenset[str] = frozenset()
    handles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    may_share_storage: frozenset[frozenset[str]] = frozenset()
    parameters: Sequence[inspect.Parameter] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:  # reading a signature costs as much as judging a kernel
        object.__setattr__(self, "parameters", tuple(inspect.signature(self.signature).parameters.values()))

    @property
    def bounds(self) -> tuple[str, ...]:
        """The parameters that are upper bounds."""
        return self.operations[0].schema.bounds

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Bind a call to the public signature, defaults filled in."""
        bound = inspect.signature(self.signature).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


@dataclass(frozen=True, slots=True)
class TorchSchema:
    """One ``torch.ops.layerzero`` operator of a function.

    Attributes:
        signature: arguments and returns in torch's schema language.
        order: the function's parameter for each argument of that schema.
        fixed: parameters that this operator pins, because a torch operator's return type may not depend on a flag.
        lists: parameters that are lists there; a lone number becomes one on the way in, a tuple on the way out.
    """

    signature: str
    order: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict)
    lists: tuple[str, ...] = ()

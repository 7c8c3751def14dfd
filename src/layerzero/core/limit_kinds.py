"""Limits, which are demands of a kernel on the facts of a call, as data; the kinds that any operation may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import MAX_ALIGNMENT_BYTES, Facts, TensorFacts
from layerzero.core.reasons import Reason, ReasonCode


class Repair(NamedTuple):
    """What the plan could do about a violation: ``copy``, ``expand``, ``fold`` or ``split`` the named argument."""

    kind: str
    argument: str


class Finding(NamedTuple):
    """One violated limit and its repair, None where nothing helps."""

    reason: Reason
    repair: Repair | None = None


Findings = tuple[Finding, ...]
NOTHING: Findings = ()


class Limit(ABC):
    """Something that a kernel demands of the facts of a call."""

    __slots__ = ()

    @abstractmethod
    def check(self, facts: Facts) -> Findings:
        """List what this limit finds wrong; empty means legal. Facts are in the kernel's layout.

        It follows from the facts: calls that agree in what was read of them are not checked again. Under capture it may
        look at what earlier calls made, too.
        """

    def facts_named(self) -> tuple[str, ...]:
        """Names of facts and tensors in its declaration; registering refuses a kernel whose operations lack one."""
        return ()

    @abstractmethod
    def describe(self) -> str:
        """Write the limit for a table."""


@dataclass(frozen=True, slots=True)
class OfTensors(Limit):
    """A demand on how some tensors lie, which a copy meets.

    The three that most kernels have check in one go: asking ``problem`` took a miss of attention 30 us more (65 limits,
    AMD EPYC, 2026-11-29).
    """

    tensors: tuple[str, ...]

    def problem(self, name: str, tensor: TensorFacts, facts: Facts, /) -> Reason | None:
        """What is wrong with one of them."""
        raise NotImplementedError

    def check(self, facts: Facts) -> Findings:
        given = [(name, facts.tensors[name]) for name in self.tensors if name in facts.tensors]
        found = [(name, self.problem(name, tensor, facts)) for name, tensor in given]
        return tuple([Finding(reason, Repair("copy", name)) for name, reason in found if reason is not None])

    def facts_named(self) -> tuple[str, ...]:
        return self.tensors


def violated(code: ReasonCode, fact: str, wanted: object, got: object, repair: Repair | None = None) -> Findings:
    """One violation."""
    return (Finding(Reason(code, fact, wanted, got), repair),)


@dataclass(frozen=True, slots=True)
class Platform(Limit):
    """The kernel runs on these platforms only."""

    names: tuple[str, ...]

    def check(self, facts: Facts) -> Findings:
        got = facts.device.platform
        if got in self.names:
            return NOTHING
        return violated(ReasonCode.PLATFORM_MISMATCH, "platform", " or ".join(self.names), got)

    def describe(self) -> str:
        return " or ".join(self.names)


@dataclass(frozen=True, slots=True)
class Arch(Limit):
    """NVIDIA compute capability between ``min`` and ``max``, both inclusive."""

    min: tuple[int, int] | None = None
    max: tuple[int, int] | None = None

    def check(self, facts: Facts) -> Findings:
        sm = facts.device.sm
        if sm is None:  # another platform: Platform says so
            return NOTHING
        if self.min is not None and sm < self.min:
            return violated(ReasonCode.SM_TOO_OLD, "sm", f">= {_sm(self.min)}", _sm(sm))
        if self.max is not None and sm > self.max:
            return violated(ReasonCode.SM_TOO_NEW, "sm", f"<= {_sm(self.max)}", _sm(sm))
        return NOTHING

    def describe(self) -> str:
        if self.min and self.max:
            return f"sm {_sm(self.min)} to {_sm(self.max)}"
        low = f">= {_sm(self.min)}" if self.min else ""
        high = f"<= {_sm(self.max)}" if self.max else ""
        return f"sm {low} {high}".replace("  ", " ").strip()


def _sm(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@dataclass(frozen=True, slots=True)
class Instruction(Limit):
    """The device has this matrix or vector instruction (``wgmma``, ``avx512_bf16``).

    Where ``dtype`` is given, calls of other dtypes need none.
    """

    name: str
    code: ReasonCode = ReasonCode.INSTRUCTION_SET_MISMATCH
    dtype: str = ""

    def check(self, facts: Facts) -> Findings:
        have = facts.device.instruction_sets
        if self.name in have or (self.dtype and dtype_name(facts["dtype"]) != self.dtype):  # type: ignore[arg-type]
            return NOTHING
        return violated(self.code, "instruction_sets", self.name, ", ".join(sorted(have)) or "none known")

    def describe(self) -> str:
        return f"{self.dtype} needs {self.name}" if self.dtype else f"needs {self.name}"


@dataclass(frozen=True, slots=True)
class Dtype(Limit):
    """The dtype of the first tensor is one of these."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.names:
            dtype_named(name)  # a misspelt dtype is a mistake of the declaration: fail where it is made

    def check(self, facts: Facts) -> Findings:
        got = dtype_name(facts["dtype"])  # type: ignore[arg-type]  # the builder puts a torch.dtype there
        if got in self.names:
            return NOTHING
        return violated(ReasonCode.DTYPE_UNSUPPORTED, "dtype", " or ".join(self.names), got)

    def describe(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True, slots=True)
class Dim(Limit):
    """A size lies within bounds, is a multiple, or is one of a set."""

    name: str
    min: int | None = None
    max: int | None = None
    multiple: int | None = None
    one_of: tuple[int, ...] = ()

    def check(self, facts: Facts) -> Findings:
        got = facts.size(self.name)
        codes = facts.operation.schema.axis(self.name).codes
        if self.min is not None and got < self.min:
            return violated(codes.invalid, self.name, f"at least {self.min}", got)
        if self.max is not None and got > self.max:
            return violated(codes.too_large, self.name, f"at most {self.max}", got)
        if self.one_of and got not in self.one_of:
            return violated(codes.invalid, self.name, "one of " + ", ".join(map(str, self.one_of)), got)
        if self.multiple is not None and got % self.multiple:
            return violated(codes.uneven, self.name, f"a multiple of {self.multiple}", got)
        return NOTHING

    def facts_named(self) -> tuple[str, ...]:
        return (self.name,)

    def describe(self) -> str:
        parts = [
            f"{self.name} >= {self.min}" if self.min is not None else "",
            f"{self.name} <= {self.max}" if self.max is not None else "",
            f"{self.name} % {self.multiple} == 0" if self.multiple else "",
            f"{self.name} in {self.one_of}" if self.one_of else "",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class OneOf(Limit):
    """A fact has one of these values (``attn_mask`` in ``none``, ``float``)."""

    fact: str
    values: tuple[object, ...]
    foldable: bool = False

    def check(self, facts: Facts) -> Findings:
        got = facts[self.fact]
        if got in self.values:
            return NOTHING
        code = facts.operation.schema.code(self.fact)
        repair = Repair("fold", self.fact) if self.foldable else None
        return violated(code, self.fact, " or ".join(str(value) for value in self.values), got, repair)

    def facts_named(self) -> tuple[str, ...]:
        return (self.fact,)

    def describe(self) -> str:
        return f"{self.fact}: {', '.join(str(value) for value in self.values)}"


@dataclass(frozen=True, slots=True)
class Positive(Limit):
    """A number that, where it is given, is above 0."""

    fact: str

    def check(self, facts: Facts) -> Findings:
        got = facts[self.fact]
        if got is None or (isinstance(got, (int, float)) and got > 0):
            return NOTHING
        return violated(ReasonCode.CONSTRAINT_FAILED, self.fact, "above 0", got)

    def facts_named(self) -> tuple[str, ...]:
        return (self.fact,)

    def describe(self) -> str:
        return f"{self.fact} > 0"


@dataclass(frozen=True, slots=True)
class Equal(Limit):
    """Two sizes are the same (``value_dim`` and ``head_dim``)."""

    left: str
    right: str

    def check(self, facts: Facts) -> Findings:
        left, right = facts.size(self.left), facts.size(self.right)
        if left == right:
            return NOTHING
        code = facts.operation.schema.axis(self.left).codes.invalid
        return violated(code, self.left, f"{right} like {self.right}", left)

    def facts_named(self) -> tuple[str, ...]:
        return (self.left, self.right)

    def describe(self) -> str:
        return f"{self.left} == {self.right}"


@dataclass(frozen=True, slots=True)
class LastStrideOne(OfTensors):
    """The last axis of these tensors is dense; repairable by a copy."""

    def check(self, facts: Facts) -> Findings:
        return tuple(
            [
                Finding(Reason(ReasonCode.STRIDE_LAST_DIM, name, 1, tensor.last_stride), Repair("copy", name))
                for name in self.tensors
                if (tensor := facts.tensors.get(name)) is not None and tensor.last_stride != 1
            ]
        )

    def describe(self) -> str:
        return f"dense last axis: {', '.join(self.tensors)}"


@dataclass(frozen=True, slots=True)
class Contiguous(OfTensors):
    """These tensors are contiguous in the kernel's layout; repairable by a copy."""

    def check(self, facts: Facts) -> Findings:
        return tuple(
            [
                Finding(
                    Reason(ReasonCode.NOT_CONTIGUOUS, name, "contiguous", f"strides {tensor.strides}"),
                    Repair("copy", name),
                )
                for name in self.tensors
                if (tensor := facts.tensors.get(name)) is not None and not tensor.contiguous
            ]
        )

    def describe(self) -> str:
        return f"contiguous: {', '.join(self.tensors)}"


@dataclass(frozen=True, slots=True)
class Aligned(OfTensors):
    """Every row of these tensors starts at a multiple of so many bytes; repairable by a copy whose rows do.

    Rows of int64, which holds places and counts, are distinguished by elements alone: a limit may demand at most 8
    bytes. Vector loads of a GPU kernel end in a misaligned address otherwise, and with it the process's CUDA context.
    """

    bytes: int

    def __post_init__(self) -> None:
        if self.bytes > MAX_ALIGNMENT_BYTES:
            raise ValueError(f"alignment beyond {MAX_ALIGNMENT_BYTES} bytes is not read, got {self.bytes}")

    def check(self, facts: Facts) -> Findings:
        return tuple(
            [
                Finding(
                    Reason(ReasonCode.MISALIGNED, name, f"{self.bytes} bytes", f"{tensor.row_alignment_bytes} bytes"),
                    Repair("copy", name) if dense_rows_start_at(tensor, self.bytes) else None,
                )
                for name in self.tensors
                if (tensor := facts.tensors.get(name)) is not None and tensor.row_alignment_bytes < self.bytes
            ]
        )

    def describe(self) -> str:
        return f"rows aligned to {self.bytes} bytes: {', '.join(self.tensors)}"


def dense_rows_start_at(tensor: TensorFacts, wanted_bytes: int) -> bool:
    """Whether a copy of a tensor starts every row at a multiple of so many bytes."""
    return tensor.ndim < 2 or tensor.shape[-1] * tensor.dtype.itemsize % wanted_bytes == 0


@dataclass(frozen=True, slots=True)
class Custom(Limit):
    """A rule that no other limit can say; ``check_facts`` returns a Reason or None."""

    text: str
    check_facts: Callable[[Facts], Reason | None]

    def check(self, facts: Facts) -> Findings:
        reason = self.check_facts(facts)
        return NOTHING if reason is None else (Finding(reason),)

    def describe(self) -> str:
        return self.text


def rule(
    text: str,
    holds: Callable[[Any], object],
    code: str = ReasonCode.CONSTRAINT_FAILED,
    *,
    got: str | Callable[[Any], object] = "",
) -> Custom:
    """A rule that no other limit can say, where one condition and one sentence are enough.

    Args:
        text: which fact must be what: ``value_dim: below head_dim``.
        holds: whether facts keep the rule.
        code: that of the reason for refusing others.
        got: what they have in its place, or a function that tells; else the fact, of a tensor its shape.
    """
    (fact, _, wanted), catalogued = text.partition(": "), ReasonCode(code)

    def check(facts: Facts) -> Reason | None:
        if holds(facts):
            return None
        there = f"shape {facts.tensors[fact].shape}" if fact in facts.tensors else facts.get(fact)
        return Reason(catalogued, fact, wanted, got(facts) if callable(got) else got or there)

    return Custom(text, check)

"""Times of kernels: what a measurement found, and what it is worth as evidence for a call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from layerzero.core.dtypes import INDEX, dtype_name
from layerzero.core.eager_state import STATE_FACTS
from layerzero.core.facts import MAX_ALIGNMENT_BYTES, Facts, TensorFacts, plain

HOST_MARGIN = 1.2
"""A host's typical time counts so many times: it is slower for seconds more often than it is quicker.

Choices recomputed from an H200's stored times took 1.009 to 1.010 times the best of three judgements of 80 calls at
1.2, 1.010 to 1.014 at 1 and 1.011 to 1.014 at 1.3 (2026-11-22).
"""


class Provenance(StrEnum):
    """Where a time comes from, best first."""

    MEASURED = "measured"
    IMPORTED = "imported"
    """Measured elsewhere, on the same device with the same versions."""
    PREDICTED = "predicted"
    PRIOR = "prior"


class Evidence(msgspec.Struct, frozen=True):
    """A time for one kernel and one call.

    Attributes:
        time_us: the median as it was measured here or elsewhere, or else what a table or a prediction says.
        provenance: where it comes from.
        confidence: 0 to 1, how much it may decide.
        noise: relative spread between repeated measurements, as measured, or what the time may be off by.
        device_us: what the device takes of it; None where that is not measured apart.
        stands_in: whether it is of eager calls, for replays that were not timed.
        fitted: whether a shipped time was computed from those of other sizes.
        error: distance of the result from the reference in float64, relative to its norm; None where none was measured.
        cost_us: what kernels are compared by; no measurement. The ledger gives how long a caller waits at the host's
            usual pace, which is the time unless something else is known. :func:`layerzero.engine.order.costs` compares
            the kernels of a call, so that plans for new sizes and the device's part count.
        cost_noise: differences of costs below it do not count.
    """

    time_us: float
    provenance: Provenance = Provenance.MEASURED
    confidence: float = 1.0
    noise: float = 0.03
    device_us: float | None = None
    stands_in: bool = False
    cost_us: float = -1.0
    cost_noise: float = -1.0
    fitted: bool = False
    error: float | None = None

    def __post_init__(self) -> None:
        """Let the time and its noise decide where no cost is given."""
        if self.cost_us < 0:
            msgspec.structs.force_setattr(self, "cost_us", self.time_us)
        if self.cost_noise < 0:
            msgspec.structs.force_setattr(self, "cost_noise", self.noise)

    @property
    def told(self) -> str:
        """The time and where it is from; the device's part and the cost where those are other numbers; the error."""
        source = str(self.provenance)
        if self.provenance is Provenance.PRIOR:
            source = "predicted from shipped times" if self.fitted else "as shipped"
        others = {"device": self.device_us, "cost": self.cost_us}
        unlike = {name: us for name, us in others.items() if us and not math.isclose(us, self.time_us, rel_tol=1e-3)}
        error = [] if self.error is None else [f"error {self.error:.1e}"]
        parts = [f"{self.time_us:.1f} us {source}", *(f"{name} {us:.1f} us" for name, us in unlike.items()), *error]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What timing one kernel on one call found; times of a call in steady state, adapters included.

    Attributes:
        median_us, p95_us: of the samples.
        variance_us2: of the samples.
        samples: how many there were.
        noise: relative difference between the medians of the two halves of the samples, taken in turn.
        first_call_us: the very first call, loading and compiling included; None where it was not timed.
        graph: whether replays of a captured graph were timed, not eager calls.
        condition: state of the machine, ``temperature=warm,memory=low``; empty where it could not be read.
        origin: what measured: ``tune``, ``bench``, ``online``.
        device_us: median of the device's own time; None where it was not measured apart, as on a CPU.
        host_us: what calls back to back take when little interrupts the host (10th percentile); None as above.
        error: distance of the first result from the reference in float64, relative to its norm; None where nothing was
            compared.
    """

    median_us: float
    p95_us: float
    variance_us2: float
    samples: int
    noise: float = 0.03
    first_call_us: float | None = None
    graph: bool = False
    condition: str = ""
    origin: str = "tune"
    device_us: float | None = None
    host_us: float | None = None
    error: float | None = None


_NO_WORK = frozenset({"capturing", "deterministic", *(each.fact for each in STATE_FACTS.values() if not each.works)})
_NO_WORK |= {"tokenizer_id"}
"""State that changes which kernels are legal, but not how much there is to do; and a name whose hash is there, too."""


def call_work(facts: Facts) -> tuple[tuple[str, str], ...]:
    """Everything that changes how long a call takes; the identity under which times are kept.

    Factors, epsilons and promised bounds count as given or not. Of memory, what sizes do not say: dtypes that differ
    from the first tensor's, how dense each tensor is, how optional ones broadcast, and how its rows are aligned.
    """
    if not facts.work:
        facts.work = _call_work(facts)
    return facts.work


def _call_work(facts: Facts) -> tuple[tuple[str, str], ...]:
    schema = facts.operation.schema
    read = {name: each for name, each in facts.tensors.items() if name not in schema.one_by_one}
    rows = [each.row_alignment_bytes for each in read.values() if each.dtype not in INDEX]
    idle, bounds = schema.idle, schema.bounds  # what follows from a bound is a size of its own, as context_bound is
    named = [
        (name, value if type(value) is str and name not in bounds else _amount(value, bound=name in bounds))
        for name, value in facts.items()
        if name not in _NO_WORK and name not in idle and (name not in STATE_FACTS or value != STATE_FACTS[name].neutral)
    ]
    named += [("layout", str(facts.layout)), ("device_name", facts.device.name)]
    named += [
        ("memory", " ".join(_memory(read, facts))),
        ("row_alignment", str(min(rows, default=MAX_ALIGNMENT_BYTES))),
    ]
    named.sort()
    return tuple(named)


_WRITTEN = frozenset({int, bool, str, type(None)})
"""Types of facts that are their own text."""


def _amount(value: object, *, bound: bool = False) -> str:
    if bound and value is not None:
        return "given"
    if type(value) in _WRITTEN:
        return str(value)
    if type(value) is float:
        return "0" if value == 0 else "set"
    return str(plain(value))


def _memory(read: Mapping[str, TensorFacts], facts: Facts) -> list[str]:
    """What is unusual about each tensor; nothing about one that is dense and of the call's dtype."""
    optional, dtype = [schema.name for schema in facts.operation.schema.optional], facts["dtype"]
    found = []
    for name, tensor in read.items():
        words = []
        if tensor.dtype is not dtype:
            words.append(dtype_name(tensor.dtype))
        if name in optional:
            words.append("x".join("1" if size == 1 else "n" for size in tensor.shape))
        if not tensor.contiguous:
            words.append(density(tensor))
        if tensor.negated:
            words.append("negated")
        if words:
            found.append(f"{name}:{','.join(words)}")
    return found


def density(tensor: TensorFacts) -> str:
    """How a tensor lies that is not contiguous: ``rows`` that are dense, a step in them, or one element for many."""
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.strides, strict=True)):
        return "expanded"
    return "rows" if tensor.last_stride == 1 else "strided"


def live_sizes(facts: Facts) -> dict[str, int]:
    """The sizes that differ from call to call, and bounds of them."""
    schema = facts.operation.schema
    return {
        name: value
        for name, value in facts.items()
        if type(value) is int and (schema.axis(name).live or name in schema.bounds)
    }


def looseness(facts: Facts) -> list[str]:
    """How each tensor lies that is not contiguous."""
    loose = ((name, each) for name, each in facts.tensors.items() if not each.contiguous)
    one_by_one = facts.operation.schema.one_by_one
    return [f"{name}:{density(each)}" for name, each in loose if name not in one_by_one]

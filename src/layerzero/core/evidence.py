"""Times of kernels: what a measurement found, and what it is worth as evidence for a call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from layerzero.core.facts import Facts


class Provenance(StrEnum):
    """Where a time comes from, best first."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    PRIOR = "prior"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A time for one kernel and one call.

    Attributes:
        time_us: median time of a call.
        provenance: where it comes from.
        confidence: 0 to 1, how much it may decide.
        noise: relative spread between repeated measurements; differences below it do not count.
    """

    time_us: float
    provenance: Provenance = Provenance.MEASURED
    confidence: float = 1.0
    noise: float = 0.03


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
        origin: what measured: ``tune``, ``bench``, ``online``, ``import``.
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


def call_work(facts: Facts) -> tuple[object, ...]:
    """Everything that changes how long a call takes; the identity under which times are kept."""
    values = facts.to_dict()
    ignored = {"sdpa_disabled", "capturing", "deterministic", "scale"}
    return tuple(sorted((name, str(value)) for name, value in values.items() if name not in ignored))

"""What a tuning run tells while it goes on, and what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from layerzero.tuning.measuring.contest import Contest
from layerzero.tuning.measuring.jobs import Job
from layerzero.tuning.proving.vetting import Vetted

Progress = Callable[["Step"], None]


@dataclass(frozen=True, slots=True)
class Step:
    """Where a tuning run is: told before and after each call that it looks at.

    Attributes:
        job: the call.
        number, total: which of how many.
        contest: what was found; None before, and where there was nothing to measure.
        skipped: why nothing was measured; empty where something was, or will be.
        left_s: seconds that are left of the budget; None without one.
    """

    job: Job
    number: int
    total: int
    contest: Contest | None = None
    skipped: str = ""
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a call gets after it was measured.

    Attributes:
        kernel_id: what is chosen now; None if nothing is.
        confidence: how much the times may decide: that of the least certain one.
        too_noisy: whether that is too little, and priority decides; the call is measured again by the next run.
        builds: whether it was compiled in this process only: another one builds it before it runs it.
        before: what was chosen before anything of the call was measured, with what was built then.
    """

    kernel_id: str | None
    confidence: float
    too_noisy: bool
    builds: bool = False
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuning run did.

    Attributes:
        contests: what was measured, in order.
        choices: what each of these calls gets now, with as many threads as torch used meanwhile.
        known: calls whose times were known before.
        skipped: calls that could not be measured, with the reason.
        needs_bytes: what those of them need that memory does not hold.
        left: calls that time did not suffice for.
        vetted: what vetting said about kernels that may not run before; those without a verdict were not measured.
        in_process: kernels that ran here for the first time, since no child process could be asked, and why not.
        not_built: kernels that compile and were not measured, and why not.
        winners_changed: calls for which another kernel is chosen now.
        spared: kernels that were not measured for a call, since what this machine knows rules them out.
        seconds: how long it took; ``compile_s`` of them went into first calls.
    """

    contests: tuple[Contest, ...]
    choices: tuple[Choice, ...]
    known: int
    skipped: Mapping[str, str]
    needs_bytes: Mapping[str, int]
    left: int
    vetted: tuple[Vetted, ...]
    in_process: Mapping[str, str]
    not_built: Mapping[str, str]
    winners_changed: int
    spared: int
    seconds: float
    compile_s: float

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "measured": [
                found.to_dict()
                | {
                    "before": now.before,
                    "after": now.kernel_id,
                    "confidence": now.confidence,
                    "too_noisy": now.too_noisy,
                    "builds": now.builds,
                }
                for found, now in zip(self.contests, self.choices, strict=True)
            ],
            "known": self.known,
            "skipped": dict(self.skipped),
            "needs_bytes": dict(self.needs_bytes),
            "left": self.left,
            "vetted": [each.to_dict() for each in self.vetted],
            "in_process": dict(self.in_process),
            "not_built": dict(self.not_built),
            "winners_changed": self.winners_changed,
            "spared": self.spared,
            "seconds": self.seconds,
            "compile_s": self.compile_s,
        }

    def __str__(self) -> str:
        text = f"{len(self.contests)} calls measured in {self.seconds:.0f} s, {self.compile_s:.0f} s of it first calls"
        text += f"; {self.known} were known, {self.left} are left"
        text += (
            f"; {self.spared} times were spared: they cannot win by what was measured before, or a capture refused them"
            if self.spared
            else ""
        )
        noisy = sum(each.too_noisy for each in self.choices)
        text += f"; {noisy} were too noisy to decide" if noisy else ""
        return f"{text}; {len(self.skipped)} could not be measured" if self.skipped else text

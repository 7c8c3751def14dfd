"""What conformance found: results, kernels and the whole, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

BAD = ("wrong", "died", "hung")
"""What makes a run fail."""

STATUSES = ("passed", "refused", *BAD, "not tried", "needed", "too strict")
"""Of a check: the result is right; the kernel is refused; it is wrong; the process died of it; it did not come back;
it could not be tried. Of what lies beyond a limit: the limit is needed; the library is right there."""

TOO_STRICT = "too strict"

EVERY_CHECK = "every check"
"""The name of the one check of an operation in which none could be made; that it was not tried makes a run fail."""


@dataclass(frozen=True, slots=True)
class Result:
    """One check of one kernel in one operation.

    Attributes:
        status: one of ``STATUSES``.
        message: what there is to say: reasons, what was wrong, how it died, why it was not tried.
    """

    kernel_id: str
    operation: str
    check: str
    status: str
    message: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class KernelReport:
    """One kernel.

    Attributes:
        kernel_id, source: the kernel and its library.
        operations: those in question.
        package: the library's package, with the version that is installed: ``onnxruntime 1.32.0``.
        refused: why nothing ran: not installed, another platform; empty if something did.
        tolerance: how far it may be off beyond its operation's tolerance, and why; empty if it may not.
        note: what else to know, as that it ran in the caller's own process.
        results: every check, in order.
    """

    kernel_id: str
    source: str
    operations: tuple[str, ...]
    package: str = ""
    refused: str = ""
    tolerance: str = ""
    note: str = ""
    results: list[Result] = field(default_factory=list)

    @property
    def problems(self) -> list[Result]:
        """What is wrong, and operations in which nothing could be checked at all."""
        return [result for result in self.results if result.status in BAD or result.check == EVERY_CHECK]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; also where nothing ran because the kernel is refused here."""
        return not self.problems

    @property
    def counts(self) -> Counter[str]:
        """How often each status came, without what lies beyond the limits."""
        return Counter(result.status for result in self.results if not result.check.startswith("beyond "))

    @property
    def passed(self) -> int:
        """How many checks passed; 0 proves nothing."""
        return self.counts["passed"]

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def limits(self) -> list[str]:
        """A line for each limit: its last legal and first illegal value, and what the library does beyond it."""
        lines: dict[str, list[str]] = {}
        for operation in self.operations:
            mine = [result for result in self.results if result.operation == operation]
            for limit in mine:
                if limit.check.startswith("limit "):
                    lines.setdefault(_limit_line(limit, mine), []).append(operation)
        return [
            line if len(names) == len(self.operations) else f"{', '.join(names)}: {line}"
            for line, names in lines.items()
        ]

    def lines(self) -> Iterator[str]:
        """The summary, the problems and the limits."""
        if self.refused:
            yield f"{self.kernel_id}: refused: {self.refused}"
            return
        counts, limits = self.counts, self.limits()
        told = [f"{counts[each]} {each}" for each in STATUSES if counts[each] or each in ("passed", "wrong")]
        strict = sum(line.endswith(TOO_STRICT) for line in limits)
        told.append(f"{len(limits)} limits" + (f", {strict} too strict" if strict else ""))
        yield f"{self.kernel_id}: {', '.join(told)} ({self.seconds:.1f} s)"
        if self.note:
            yield f"  note: {self.note}"
        if not self.passed and self.ok:
            yield from (f"  refused: {text}" for text in dict.fromkeys(each.message for each in self.results))
        if self.tolerance:
            yield f"  tolerance: {self.tolerance}"
        for problem in self.problems:
            yield f"  {problem.status}: {problem.operation}, {problem.check}: {problem.message}"
        for text, count in Counter(each.message for each in self.results if _untried(each)).items():
            yield f"  not tried: {text} ({count} checks)"
        for line in limits:
            yield f"  {line}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _untried(result: Result) -> bool:
    """Whether a check was not tried, and the reason stands nowhere else in the report."""
    return result.status == "not tried" and not result.check.startswith((EVERY_CHECK, "limit ", "beyond "))


def _limit_line(limit: Result, results: Sequence[Result]) -> str:
    name = f"beyond {limit.check.removeprefix('limit ')}"
    beyond = [each for each in results if each.check == name or each.check.startswith(f"{name} (")]
    line = f"{limit.check}: {limit.message if limit.status not in BAD else limit.status}"
    against = [each for each in beyond if each.status == "needed"]
    right = [each for each in beyond if each.status == "too strict"]
    if against:
        line += f"; the library there: {against[0].message}: needed"
    elif right:
        line += f"; the library there: {'; '.join(dict.fromkeys(each.message for each in right))}: {TOO_STRICT}"
    elif beyond and "not tried" not in line:
        line += f"; the library there: not tried: {beyond[0].message}"
    return line


@dataclass(slots=True)
class ConformanceReport:
    """A whole run.

    Attributes:
        seed, device: what draws the calls, and where they ran.
        machine: versions, device and driver, as :func:`layerzero.testing.conformance.machine` gives them.
        kernels: one report each.
        seconds: time taken, processes included.
    """

    seed: int
    device: str
    machine: dict[str, object] = field(default_factory=dict)
    kernels: list[KernelReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, died or hung."""
        return all(kernel.ok for kernel in self.kernels)

    @property
    def passed(self) -> int:
        """How many checks passed; 0 proves nothing."""
        return sum(kernel.passed for kernel in self.kernels)

    @property
    def problems(self) -> list[Result]:
        return [problem for kernel in self.kernels for problem in kernel.problems]

    def kernel(self, kernel_id: str) -> KernelReport:
        """One kernel's report. Raises KeyError if it has none."""
        for each in self.kernels:
            if each.kernel_id == kernel_id:
                return each
        raise KeyError(f"no report about {kernel_id!r}; there are {', '.join(each.kernel_id for each in self.kernels)}")

    def to_dict(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "seed": self.seed,
            "device": self.device,
            "machine": self.machine,
            "seconds": round(self.seconds, 3),
            "kernels": [
                {
                    "id": each.kernel_id,
                    "library": each.source,
                    "package": each.package,
                    "operations": list(each.operations),
                    "refused": each.refused or None,
                    "tolerance": each.tolerance or None,
                    "note": each.note or None,
                    "counts": dict(each.counts),
                    "limits": each.limits(),
                    "results": [{**asdict(result), "seconds": round(result.seconds, 4)} for result in each.results],
                }
                for each in self.kernels
            ],
        }

    def __str__(self) -> str:
        ran = [each for each in self.kernels if not each.refused]
        head = (
            f"{len(ran)} of {len(self.kernels)} kernels ran on {self.device}, seed {self.seed}: {self.passed} checks "
            f"passed, {len(self.problems)} wrong; {self.seconds:.0f} s"
        )
        # problems once more at the end: a log of CI keeps its last lines, and 192 kernels fill 40,000 characters
        found = [
            f"  {each.kernel_id} in {each.operation}, {each.check}: {each.status}: {each.message}"
            for each in self.problems
        ]
        return "\n".join([*(str(each) for each in self.kernels), head, *found])

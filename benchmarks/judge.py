"""Judge choices in a fresh run: LayerZero's kernel against every legal one, side by side, and what no difference costs.

Ratios compare one statistic: the median on a GPU, the 10th percentile on a CPU, where other work on the machine makes
everything but the quick runs long. *again* is the chosen kernel once more under another name: what its column differs
from 1 by is noise. *through lz* is the public function itself, with its lookup.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import layerzero as lz
from layerzero.core.plan import Report
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.tuning.measurement.clocks import Clock
from layerzero.tuning.measurement.contest import Contest, bound_plan, contest, torch_default
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.timing import Effort, quantile

AGAIN, THROUGH, TORCH = "again", "through lz", "torch default"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judged call.

    Attributes:
        group, name, operation: which.
        chosen: the kernel that LayerZero chose before anything here ran.
        evidence: where its time came from: measured, predicted, prior, or none.
        times_us: of each kernel.
        parts_us: of each kernel, what its device and its host took; None where they were not told apart.
        again_us, through_us, torch_us: of what ran beside them; None where there is none.
        problems: kernels without a time, and why.
        first_choice: of each library, the kernel that it ranks first.
    """

    group: str
    name: str
    operation: str
    chosen: str | None
    evidence: str
    times_us: dict[str, float]
    again_us: float | None
    through_us: float | None
    torch_us: float | None
    problems: dict[str, str] = field(default_factory=dict)
    first_choice: dict[str, str] = field(default_factory=dict)
    parts_us: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The fastest kernel."""
        return min(self.times_us, key=lambda name: self.times_us[name])

    @property
    def ratio(self) -> float:
        """The chosen kernel's time over the best one's."""
        return self._over_best(self.times_us.get(self.chosen or "", self.through_us or math.inf))

    @property
    def through(self) -> float | None:
        """The public function's time over the best kernel's."""
        return None if self.through_us is None else self._over_best(self.through_us)

    @property
    def noise(self) -> float | None:
        """What the same kernel's second run differs by from its first."""
        mine = self.times_us.get(self.chosen or "")
        return None if mine is None or self.again_us is None else self.again_us / mine

    def _over_best(self, time_us: float) -> float:
        return time_us / self.times_us[self.best]


def judge(
    group: str, job: Job, clock: Clock, effort: Effort, leave_out: Sequence[str], device: torch.device, seed: int
) -> Verdict:
    """Judge one call. Raises what making its data raises."""
    statistic = _statistic(device)
    call = job.make(device)
    function = getattr(lz, call.function)
    with torch.no_grad():
        chosen = _chosen(call.function, call.arguments)
        through = functools.partial(function, **call.arguments)
        through()  # chosen and kept, before the contest builds what was not built
        beside: dict[str, Callable[[], Any]] = {THROUGH: through}
        if chosen.chosen is not None:
            beside[AGAIN] = bound_plan(chosen.chosen, chosen, call)[1]
        default = torch_default(call.function, call.arguments)
        if default is not None:
            beside[TORCH] = default
    found = contest(call, effort=effort, leave_out=leave_out, beside=beside, clock=clock, origin="bench", seed=seed)
    times = {entry.kernel.id: statistic(entry.samples) for entry in found.entries if entry.samples}
    others = {name: statistic(samples) for name, samples in found.others.items()}
    return Verdict(
        group, job.name, found.report.operation, chosen.kernel_id, _evidence(chosen), times,
        others.get(AGAIN), others.get(THROUGH), others.get(TORCH),
        {entry.kernel.id: f"{entry.status}: {entry.detail}" for entry in found.entries if not entry.samples},
        _first_choices(found),
        {each.id: (measured.device_us, measured.host_us) for each, measured in found.times.items()},
    )  # fmt: skip


def _statistic(device: torch.device) -> Callable[[Sequence[float]], float]:
    return statistics.median if device.type == "cuda" else functools.partial(quantile, share=0.1)


def _chosen(function: str, arguments: Any) -> Report:
    given = CALLS[function].function.bind((), arguments)
    report, _ = CALLS[function].dispatcher.explain(given, current_policy())
    return report


def _evidence(report: Report) -> str:
    return "none" if report.chosen is None else report.chosen.provenance or "none"


def _first_choices(found: Contest) -> dict[str, str]:
    first: dict[str, Any] = {}
    for entry in found.entries:
        if entry.samples and (
            entry.kernel.source not in first or entry.kernel.priority > first[entry.kernel.source].priority
        ):
            first[entry.kernel.source] = entry.kernel
    return {source: kernel.id for source, kernel in first.items()}


def mean(ratios: Iterable[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Of each operation, each group and everything: what LayerZero's choices cost, and what fixed ones do."""
    parts: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        for part in (verdict.operation, f"group {verdict.group}", "all"):
            parts[part].append(verdict)
        if len(verdict.times_us) > 1:
            parts["all with a choice"].append(verdict)
    return {part: _part(each) for part, each in sorted(parts.items())}


def _part(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    ratios = [verdict.ratio for verdict in verdicts]
    through = [verdict.through for verdict in verdicts if verdict.through is not None]
    noise = [max(each, 1 / each) for verdict in verdicts if (each := verdict.noise) is not None]
    worst = max(verdicts, key=lambda verdict: verdict.ratio)
    return {
        "calls": len(verdicts),
        "mean": mean(ratios),
        "worst": worst.ratio,
        "worst_call": f"{worst.name}: {worst.chosen} for {worst.best}",
        "within_5_percent": sum(ratio <= 1.05 for ratio in ratios),
        "through_lz_mean": mean(through) if through else None,
        "noise_mean": mean(noise) if noise else None,
        "noise_worst": max(noise, default=None),
        "libraries": _libraries(verdicts),
        "kernels": _kernels(verdicts),
        "torch_default": _against(verdicts, lambda verdict: verdict.torch_us),
    }


def _libraries(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Somebody who always calls one library, its kernel of highest priority; where it cannot, torch's default."""
    names = sorted({source for verdict in verdicts for source in verdict.first_choice})
    fixed = {}
    for name in names:

        def time_us(verdict: Verdict, name: str = name) -> float | None:
            kernel = verdict.first_choice.get(name)
            return verdict.torch_us if kernel is None else verdict.times_us[kernel]

        served = sum(name in verdict.first_choice for verdict in verdicts)
        fixed[name] = _against(verdicts, time_us) | {"served": served}
    return fixed


def _kernels(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    names = sorted({kernel for verdict in verdicts for kernel in verdict.times_us})
    return {name: _against(verdicts, lambda verdict, name=name: verdict.times_us.get(name)) for name in names}


def _against(verdicts: Sequence[Verdict], time_us: Callable[[Verdict], float | None]) -> dict[str, Any]:
    ratios = [each / verdict.times_us[verdict.best] for verdict in verdicts if (each := time_us(verdict)) is not None]
    return {"calls": len(ratios), "mean": mean(ratios) if ratios else None, "worst": max(ratios, default=None)}

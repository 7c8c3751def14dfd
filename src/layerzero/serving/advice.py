"""What would make this machine faster: at most five lines, those first from which most is to be gained.

Gains are given where times are known of what runs and of what would: of calls that were made here, as misses left them
in the ledger, or, before there are any, of the operations' named cases.

And what formats of weights cost and get on a device (``layerzero formats``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from layerzero.backends.torch.quantized_linear import AS_NUMBERS
from layerzero.core.device import Device
from layerzero.core.evidence import Provenance
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Candidate, Report
from layerzero.core.reasons import ReasonCode
from layerzero.core.system.resources import thread_advice
from layerzero.engine import accelerator, legality, probe
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.order import costs
from layerzero.engine.probe import Machine
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import explain
from layerzero.inspection.model_sets import fitting_libraries
from layerzero.ops import function_of
from layerzero.ops.linear.weight_formats import examples_of_formats
from layerzero.ops.quantize.conversion import PATHS, ranked
from layerzero.tuning.measurement.jobs import Job, jobs_of_cases
from layerzero.tuning.measurement.tune import jobs_called

MOST = 5

LOOKED_AT = 64
"""Calls that are explained: a millisecond each."""

WORTH = 1.02
"""A smaller gain is none."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A line of advice, and how many times faster the calls that it is about get; None where no time tells."""

    text: str
    gain: float | None = None
    calls: int = 0

    def to_dict(self) -> dict[str, object]:
        return {"text": self.text, "gain": self.gain and round(self.gain, 2), "calls": self.calls}

    def __str__(self) -> str:
        if self.gain is None:
            return f"{self.text} (gain not known before)"
        return f"{self.text} ({self.gain:.2f} times faster in {self.calls} of the calls looked at)"


def advice(device: str | None = None) -> tuple[Advice, ...]:
    """Say what to do to be faster here; at most five lines, and none while a setting keeps every call from its kernel.

    Args:
        device: ``cpu`` or ``cuda``; CUDA where there is a device.
    """
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    REGISTRY.ready()
    if any(REGISTRY.names.problems(current_policy())):  # doctor lists them as issues
        return ()
    called = jobs_called(target)
    jobs = (called or _cases(target))[:LOOKED_AT]
    reports = [explain(job.facts(target)) for job in jobs]
    known = sorted(_of_times(reports), key=lambda each: -(each.gain or 0.0))
    return tuple([*known, *_of_settings(target, reports, called=bool(called))][:MOST])


def _cases(device: str) -> list[Job]:
    names = [name for name in REGISTRY.operations() if function_of(name) is not None]
    return list(jobs_of_cases(names, ["bfloat16" if device == "cuda" else "float32"]))


def _of_times(reports: Sequence[Report]) -> Iterator[Advice]:
    """What keeps a kernel from calls of which times say that it is faster than what runs."""
    gains: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        chosen = report.chosen
        if chosen is None or chosen.time_us is None:
            continue
        for_each: dict[str, float] = {}
        kept = {each.kernel: way for each in report.candidates if (way := _way(each, report))}
        evidence = costs(ENGINE.ledger.evidence(list(kept), report.facts), kept)
        for kernel, way in kept.items():
            if kernel.id in evidence:
                gain = chosen.time_us / evidence[kernel.id].time_us
                for_each[way] = max(gain, for_each.get(way, 0.0))
        for way, gain in for_each.items():
            if gain >= WORTH:
                gains[way].append(gain)
    for way, several in gains.items():
        yield Advice(way, math.exp(sum(map(math.log, several)) / len(several)), len(several))


def _way(candidate: Candidate, report: Report) -> str:
    """What would let a refused kernel run this call; empty where nothing does."""
    codes, kernel = {reason.code for reason in candidate.reasons}, candidate.kernel
    if codes == {ReasonCode.NOT_INSTALLED}:
        install = probe.this_machine().install(kernel.backend, report.facts.device)
        return f"install {kernel.source}: {install}" if install else ""
    if codes == {ReasonCode.JIT_DISABLED}:
        return _build(kernel)
    if kernel in legality.awaiting([candidate], report.facts):
        return f"let {kernel.source} prove itself here: layerzero vet --backend {kernel.source}"
    return ""


def _build(kernel: Kernel) -> str:
    if current_policy().jit == "background":
        return f"let {kernel.source} be built: it is, behind the first calls; lz.warmup does it before"
    return f"build {kernel.source}: set jit: background, or call lz.warmup"


def _of_settings(device: str, reports: Sequence[Report], *, called: bool) -> Iterator[Advice]:
    of_clocks = (Provenance.MEASURED, Provenance.IMPORTED)
    unmeasured = [each for each in reports if each.chosen is None or each.chosen.provenance not in of_clocks]
    if called and unmeasured:
        calls = f"{len(unmeasured)} call{'s' * (len(unmeasured) > 1)}"
        yield Advice(f"layerzero tune --budget-s 300 measures {calls} of this machine that were not measured")
    elif not called:
        yield Advice("run your program, then layerzero tune --budget-s 300: it measures what was called")
    if device == "cpu" and (threads := thread_advice(torch.get_num_threads())):
        yield Advice(threads)
    if accelerator.HOT is None:
        why = f"calls like earlier ones find their kernel in Python ({accelerator.ABSENT})"
        yield Advice(f"{why}; reinstall LayerZero where there is a C compiler")
    if not current_policy().enabled:
        yield Advice("LayerZero is disabled: set enabled: true")
    awaiting = {each.source for report in reports for each in legality.awaiting(report.candidates, report.facts)}
    for name in sorted(awaiting):
        yield Advice(f"{name} may not run before it was vetted: layerzero vet --backend {name}")
    if current_policy().jit == "never":
        yield Advice("kernels that compile are never built: set jit: background")


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """What a format of weights costs and gets on a device.

    Attributes:
        name: as ``lz.quantize_weight`` takes it.
        bits: of a number, scales included.
        loss: of normal numbers, as a share of their norm.
        native: whether the device computes in such numbers.
        rounded: what kernels may round rows to; empty where they may not.
        here: the kernel that runs with the libraries that are here.
        kernels: those of all tested libraries that fit, in the order of preference where nothing was measured.
        instead: where all of these multiply with the numbers written out, formats that a kernel takes as they are, in
            the order of ``quant.priority``. A weight that is quantised already is quantised anew, and loses again.
    """

    name: str
    bits: float
    loss: float
    native: bool
    rounded: str
    here: str
    kernels: tuple[str, ...]
    instead: tuple[str, ...] = ()


_OF_BYTES = frozenset({"avx_vnni", "avx512_vnni", "amx_int8"})
"""A CPU's instructions that multiply int8."""


def formats(
    device: Device, rows: int = 1, dtype: torch.dtype | None = None, torch_version: str = ""
) -> tuple[FormatChoice, ...]:
    """Tell what each format of weights loses, and which kernels multiply with it on a device, the least loss first.

    Args:
        device: where; it need not be here.
        rows: of the product with 4096 x 4096 numbers.
        dtype: of the rows; bfloat16, and float32 on a CPU, if None.
        torch_version: with which torch libraries have to go; the one that is here by default.
    """
    given = dtype or (torch.float32 if device.platform == "cpu" else torch.bfloat16)
    bare = Machine(device, {"torch": torch_version or str(torch.__version__).partition("+")[0]})
    pretended, found = fitting_libraries(bare, device)[2], []
    for each in examples_of_formats(rows, given):
        here = explain(*each.call, device=device).kernel_id
        with SCOPES.scope({"allow_jit_compile": True}):
            report = explain(*each.call, device=device, libraries=pretended)
        kernels = tuple(one.kernel.id for one in report.candidates if one.legal and not one.kernel.is_reference)
        native = each.numbers in device.dtypes or (each.numbers == "int8" and bool(_OF_BYTES & device.instruction_sets))
        found.append(FormatChoice(each.name, each.bits, each.loss, native, each.rounded, here or "", kernels))
    fast = [each.name for each in found if not all(kernel.startswith(AS_NUMBERS) for kernel in each.kernels)]
    others = {of: ranked([each for each in PATHS[of] if each in fast], current_policy(), device.dtypes) for of in PATHS}
    return tuple(
        [each if each.name in fast else replace(each, instead=tuple(others.get(each.name, ()))) for each in found]
    )

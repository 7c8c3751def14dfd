"""``lz.readiness_check``: whether traffic may come: what calls would choose is built, and every other part is ready.

``lz.jit_status``: what builds in the background, what waits, what was built, and what did not build.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import torch
from torch.nn import Module

from layerzero.core.device import device_here
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.config import current_policy
from layerzero.engine.jit import BuildIdentity, build_of
from layerzero.inspection.answers import explain
from layerzero.serving.background_builds import BUILDS
from layerzero.serving.own_builds import wanted
from layerzero.serving.readiness_parts import BEFORE, PARTS, Looked, Part, PartState
from layerzero.tuning.measurement.tune import every_call
from layerzero.tuning.measurement.workload import every_call_of_file, model_compared
from layerzero.tuning.storage.host_notes import FailedBuild, progress_of_others


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A kernel that was built in the background of this process, for which operation, and in how many seconds."""

    kernel_id: str
    operation: str
    seconds: float


@dataclass(frozen=True, slots=True)
class JitStatus:
    """What becomes of kernels that compile.

    Attributes:
        setting: ``jit`` as it holds here: background, inline or never.
        building: ids of the kernels that this process builds now.
        waiting: calls whose builds wait behind them.
        dropped: calls that the queue had no room for.
        built: what was built in the background of this process.
        failed: what did not build, here or in an earlier process; it is not tried again until a version or a
            compiler changes.
        elsewhere: what another process of this host builds; empty where none does, or where this one builds.
    """

    setting: str
    building: tuple[str, ...] = ()
    waiting: int = 0
    dropped: int = 0
    built: tuple[BuiltKernel, ...] = ()
    failed: tuple[FailedBuild, ...] = ()
    elsewhere: str = ""

    @property
    def done(self) -> bool:
        """Whether nothing builds and nothing waits in this process."""
        return not self.building and not self.waiting

    def to_dict(self) -> dict[str, object]:
        failed = [{"kernel_id": each.kernel, "call_class": each.call_class, "log": each.log} for each in self.failed]
        built = [asdict(each) for each in self.built]
        return {**asdict(self), "building": list(self.building), "built": built, "failed": failed}

    def lines(self) -> list[str]:
        """What there is to say, a line each; nothing where nothing ever compiled."""
        lines = []
        if self.building or self.waiting:
            lines.append(f"building {', '.join(self.building) or 'next'}; {self.waiting} calls wait")
        if self.elsewhere:
            lines.append(self.elsewhere)
        if self.built:
            seconds = sum(each.seconds for each in self.built)
            names = ", ".join(dict.fromkeys(each.kernel_id for each in self.built))
            lines.append(f"built in {seconds:.0f} s: {names}")
        if self.dropped:
            lines.append(f"{self.dropped} calls were dropped: the queue was full")
        return lines

    def failures(self) -> list[str]:
        """What did not build, a line for each kernel and error: for what, when, and the next step."""
        alike: dict[tuple[str, str], dict[str, float]] = {}
        for each in self.failed:
            alike.setdefault((each.kernel, each.gist), {})[each.call_class] = each.at_unix_s
        lines = []
        for (kernel, gist), classes in alike.items():
            more = f" and {len(classes) - 1} more" if len(classes) > 1 else ""
            when = datetime.fromtimestamp(max(classes.values()), UTC).strftime("%Y-%m-%d %H:%M UTC")
            failed = f"{kernel} did not build for {next(iter(classes))}{more} ({when}): {gist}"
            lines.append(f"{failed}; another kernel runs, and lz.warmup tries again")
        return lines

    def __str__(self) -> str:
        return "\n".join([f"jit: {self.setting}", *self.lines(), *self.failures()])


def jit_status() -> JitStatus:
    """Tell what is built in the background, and what became of it; see the setting ``jit``."""
    here = BUILDS.building, BUILDS.waits
    others = None if here[0] or BUILDS.host.held else progress_of_others()
    return JitStatus(
        setting=current_policy().jit,
        building=here[0],
        waiting=here[1],
        dropped=BUILDS.dropped,
        built=tuple(BuiltKernel(*each) for each in BUILDS.built),
        failed=BUILDS.failures.all(),
        elsewhere="" if others is None else str(others),
    )


SHOWN = 20
"""Builds that the text names; it counts the others."""


@dataclass(frozen=True, slots=True)
class LackingBuild:
    """A build that calls lack.

    Attributes:
        kernel_id: what they would choose if it were built.
        instead: what runs in its place; empty where nothing may.
        operation: what is called.
        call: one of them: operation, sizes, dtype.
        calls: how many of the calls that were looked at lack it.
        error: why it failed to build on this machine; empty where it was not tried.
    """

    kernel_id: str
    instead: str
    operation: str
    call: str
    calls: int
    error: str = ""

    @property
    def reason(self) -> Reason:
        """What is missing, with the next step."""
        more = f" and {self.calls - 1} more calls" if self.calls > 1 else ""
        fact, got = f"{self.call}{more}", self.instead or "nothing"
        hint = "lz.warmup(manifest=...) builds it before traffic comes"
        if self.error:
            hint = "Nothing waits for it; lz.warmup with these shapes tries again"
            hint = hint if self.instead else "These calls raise; lift the lock, or deny the kernel"
        return Reason(ReasonCode.JIT_CACHE_INCOMPLETE, fact, self.kernel_id, got, hint)

    def to_dict(self) -> dict[str, object]:
        return {"code": str(self.reason.code), **asdict(self), "message": self.reason.message}

    def __str__(self) -> str:
        return f"failed: {self.error}: {self.reason}" if self.error else str(self.reason)


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether traffic may come.

    Attributes:
        calls: how many calls were looked at.
        lacking: the builds that are missing, those first that most calls lack.
        failed: the builds that calls would choose and that failed on this machine: the next kernel serves.
        complete: how many of the calls have all that they would choose.
        parts: a line for each other part that ``lz.readiness_check`` names.
    """

    calls: int
    lacking: tuple[LackingBuild, ...] = ()
    failed: tuple[LackingBuild, ...] = ()
    complete: int = 0
    parts: tuple[Part, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether nothing is missing that could be built, and every call is answered: no part is ``not ready``."""
        return all(each.state is not PartState.NOT_READY for each in (self.builds, *self.parts))

    @property
    def degraded(self) -> bool:
        """Whether traffic may come, and is served slower or otherwise than it could be."""
        return self.ready and any(each.state is PartState.DEGRADED for each in (self.builds, *self.parts))

    @property
    def builds(self) -> Part:
        """Whether what calls would choose is built."""
        wrong = [each.name for each in self.parts[: len(BEFORE)] if each.state is PartState.NOT_READY]
        if wrong:  # those of BEFORE come first
            return Part("builds", PartState.NOT_READY, f"not looked at, since {' and '.join(wrong)} cannot be used")
        text = f"{self.complete} of {self.calls} calls have all that they would choose"
        if not self.calls:
            text = "no call is known that would have to be; lz.record writes a manifest of those that matter"
        if self.lacking or not all(each.instead for each in self.failed):
            return Part("builds", PartState.NOT_READY, text)
        return Part("builds", PartState.DEGRADED if self.failed else PartState.READY, text)

    def __bool__(self) -> bool:
        return self.ready

    def to_dict(self) -> dict[str, object]:
        return {
            "ready": self.ready,
            "degraded": self.degraded,
            "calls": self.calls,
            "complete": self.complete,
            "lacking": [each.to_dict() for each in self.lacking],
            "failed": [each.to_dict() for each in self.failed],
            "parts": [each.to_dict() for each in (self.builds, *self.parts)],
        }

    def __str__(self) -> str:
        lines = [f"{'ready' if self.ready else 'not ready'}: {self.builds.text}"]
        for builds, kind in ((self.lacking, "builds"), (self.failed, "builds that failed")):
            lines += [f"  {each}" for each in builds[:SHOWN]]
            if len(builds) > SHOWN:
                lines.append(f"  and {len(builds) - SHOWN} further {kind}")
        return "\n".join([*lines, *map(str, self.parts)])


def readiness_check(
    manifest: str | os.PathLike[str] | None = None,
    *,
    model: str | Module = "",
    device: str | torch.device | None = None,
    sets: Sequence[str] = (),
) -> Readiness:
    """Tell whether traffic may come. Nothing runs, and nothing is built.

    Every part has a line: builds, settings, descriptors, tables (each call finds a kernel), headroom (workspaces fit
    into what is free), the database of times, health (kernels that rest, suspects, bans), libraries (none harms
    another), telemetry (listeners take their events), frozen choices, ranks, and sets.

    A kernel that compiles is built if this process built it, or if an earlier one left it in its library's cache. A
    build that failed on this machine is listed with its reason and the kernel that serves in its place. It is not
    waited for, unless nothing else may serve. ``lz.jit_status()`` lists every failure.

    Args:
        manifest: a file that ``lz.record`` wrote: every call in it is looked at. If None: what this machine called so
            far, as misses left it in the cache folder, at most 1,000 calls.
        model: what the manifest must have been recorded of, a name or the model; another one is an error.
        device: whose calls; CUDA where there is a device, else the CPU.
        sets: sets of operations that the deployment needs: ``decoder``, ``quantised``, ``experts``, ``serving``, ...
    Returns: the report, which is true if traffic may come. Calls without tensors compile nothing, and are left out.
    Raises: ValueError for a file that is no manifest, of another model, or of other devices alone, and for a word that
        names no set.
    """
    looked = Looked(str(device_here(device)), sets=(sets,) if isinstance(sets, str) else sets)
    before = tuple(check(looked) for check in BEFORE)
    if any(each.state is PartState.NOT_READY for each in before):
        return Readiness(0, parts=before)
    reports: list[tuple[str, Report]] = []
    found = _builds(manifest, model, device, reports)
    looked = replace(looked, calls=reports)
    return replace(found, parts=(*before, *(check(looked) for check in PARTS)))


def _builds(
    manifest: str | os.PathLike[str] | None = None,
    model: str | Module = "",
    device: str | torch.device | None = None,
    reports: list[tuple[str, Report]] | None = None,
) -> Readiness:
    """What is built of what calls would choose; the report of each call comes into ``reports``."""
    target = device_here(device).type
    model = model_compared(model, manifest)
    jobs = every_call(target) if manifest is None else every_call_of_file(manifest, target, model=model)
    lacking: dict[BuildIdentity, LackingBuild] = {}
    failed: dict[BuildIdentity, LackingBuild] = {}
    complete = 0
    for job in jobs:
        facts = job.facts(target)
        errors: dict[BuildIdentity, str] = {}
        missing = _missing(facts, errors)
        report = None if reports is None and not missing and not errors else explain(facts)
        if reports is not None and report is not None:
            reports.append((job.name, report))
        if not missing and not errors:
            complete += 1
            continue
        assert report is not None
        instead = report.kernel_id or ""
        for builds, identities in ((lacking, missing), (failed, errors)):
            for identity in identities:
                new = LackingBuild(identity[0], instead, job.operation, job.name, 0, errors.get(identity, ""))
                before = builds.get(identity, new)
                builds[identity] = replace(before, calls=before.calls + 1, instead=before.instead and instead)
    return Readiness(len(jobs), _by_calls(lacking), _by_calls(failed), complete)


def _missing(facts: Facts, errors: dict[BuildIdentity, str]) -> list[BuildIdentity]:
    """The build that a call lacks, if there is one; those before it that failed come into ``errors``."""

    def failed(kernel: Kernel, facts: Facts) -> bool:
        error = BUILDS.failure(kernel, facts)
        if error:
            errors[build_of(kernel, facts)] = error
        return error != ""

    found = wanted(facts, failed)
    return [] if found is None else [found.identity]


def _by_calls(builds: dict[BuildIdentity, LackingBuild]) -> tuple[LackingBuild, ...]:
    return tuple(sorted(builds.values(), key=lambda each: -each.calls))


def lines_of_builds() -> list[str]:
    """What calls of this machine would choose and is not built, or failed to build: a line each, with the next step."""
    status = jit_status()
    lines, setting = status.failures(), status.setting
    way = "the next such call has it built behind it" if setting == "background" else f"jit is {setting}"
    for each in _builds().lacking:
        more = f" and {each.calls - 1} more calls" if each.calls > 1 else ""
        now = "it is being built" if each.kernel_id in status.building else f"{way}; lz.warmup builds it now"
        lines.append(
            f"{each.kernel_id} is not built, which {each.call}{more} would choose over "
            f"{each.instead or 'nothing'}: {now}"
        )
    return lines

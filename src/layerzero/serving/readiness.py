"""``lz.readiness_check``: whether all that a deployment's calls would choose is built, so that traffic may come."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from layerzero.asking.answers import explain
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.jit import BuildIdentity
from layerzero.serving.building import BUILDS
from layerzero.serving.wanted import wanted
from layerzero.tuning.measuring.asked import every_call
from layerzero.tuning.measuring.manifest import every_call_of_file

SHOWN = 20
"""Builds that the text names; it counts the others."""


@dataclass(frozen=True, slots=True)
class LackingBuild:
    """A build that calls lack.

    Attributes:
        kernel_id: what they would choose if it were built.
        instead: what runs meanwhile; empty where nothing may.
        operation: what is called.
        call: one of them: operation, sizes, dtype.
        calls: how many of the calls that were looked at lack it.
    """

    kernel_id: str
    instead: str
    operation: str
    call: str
    calls: int

    @property
    def reason(self) -> Reason:
        """Why traffic should wait, with the next step."""
        more = f" and {self.calls - 1} more calls" if self.calls > 1 else ""
        fact, got = f"{self.call}{more}", self.instead or "nothing"
        hint = "lz.warmup(manifest=...) builds it before traffic comes"
        return Reason(ReasonCode.JIT_CACHE_INCOMPLETE, fact, self.kernel_id, got, hint)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "code": str(self.reason.code),
            "kernel_id": self.kernel_id,
            "instead": self.instead,
            "operation": self.operation,
            "call": self.call,
            "calls": self.calls,
            "message": self.reason.message,
        }


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether traffic may come.

    Attributes:
        calls: how many calls were looked at.
        lacking: the builds that are missing, those first that most calls lack.
    """

    calls: int
    lacking: tuple[LackingBuild, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether nothing is missing."""
        return not self.lacking

    def __bool__(self) -> bool:
        return self.ready

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {"ready": self.ready, "calls": self.calls, "lacking": [each.to_dict() for each in self.lacking]}

    def __str__(self) -> str:
        if not self.calls:
            return "ready: no call is known that would have to be; lz.record writes a manifest of those that matter"
        served = sum(each.calls for each in self.lacking)
        said = "ready" if self.ready else "not ready"
        lines = [f"{said}: {self.calls - served} of {self.calls} calls have all that they would choose"]
        lines += [f"  {each.reason}" for each in self.lacking[:SHOWN]]
        if len(self.lacking) > SHOWN:
            lines.append(f"  and {len(self.lacking) - SHOWN} further builds")
        return "\n".join(lines)


def readiness_check(
    manifest: str | os.PathLike[str] | None = None,
    *,
    model: str = "",
    device: str | torch.device | None = None,
) -> Readiness:
    """Tell whether what calls would choose is built, before traffic comes. Nothing runs, and nothing is built.

    A kernel that compiles is built if this process built it, or if an earlier one left it in its library's cache.
    What failed to build on this machine is not waited for: ``lz.jit_status()`` lists it.

    Args:
        manifest: a file that ``lz.record`` wrote: every call in it is looked at. If None: what this machine called so
            far, as misses left it in the cache folder, at most 1,000 calls.
        model: what the manifest must have been recorded of; a manifest of another model is an error.
        device: whose calls; CUDA where there is a device, else the CPU.
    Returns: the report, which is true if traffic may come. Calls without tensors compile nothing, and are left out.
    Raises: ValueError for a file that is no manifest, of another model, or of other devices alone.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if model and manifest is None:
        raise ValueError(f"model: wanted it beside a manifest, which it is compared with, got {model!r} alone")
    jobs = every_call(target) if manifest is None else every_call_of_file(manifest, target, model=model)
    lacking: dict[BuildIdentity, LackingBuild] = {}
    for job in jobs:
        facts = job.facts(target)
        found = wanted(facts, BUILDS.given_up)
        if found is None:
            continue
        before = lacking.get(found.identity)
        if before is None:
            instead = explain(facts).kernel_id or ""
            lacking[found.identity] = LackingBuild(found.kernel.id, instead, job.operation, job.name, 1)
        else:
            lacking[found.identity] = replace(before, calls=before.calls + 1)
    return Readiness(len(jobs), tuple(sorted(lacking.values(), key=lambda each: -each.calls)))

"""``lz.jit_status``: what builds in the background, what waits, what was built, and what did not build."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from layerzero.engine.config import current_policy
from layerzero.serving.background_builds import BUILDS
from layerzero.tuning.storage.builds import FailedBuild, progress_of_others


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
        """Plain values for JSON."""
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

"""What ``layerzero doctor`` shows: what is usable here, in a screen; the rest counted, or listed with a flag.

A child process imports plugins first: one that ends its process must not take the command along. This module is the
child's worker, too: it imports the plugin that it is given by name.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from layerzero.cli.tables import counted, hardware, lines_of, new_row, table_of, told
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.plugins import installed, refused, version_of
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.diagnosis import Diagnosis, LibraryFinding
from layerzero.inspection.model_sets import OperationFinding, OperationSupport
from layerzero.serving.advice import Advice
from layerzero.serving.readiness import JitStatus
from layerzero.testing.child_main import Tell
from layerzero.testing.children import End, Task, run_apart
from layerzero.tuning.storage.files import cache_folder
from layerzero.tuning.storage.host_notes import forgive

TIMEOUT_S = 300.0
"""How long a plugin may take; some compile on import."""


class PluginImport(msgspec.Struct, frozen=True):
    """A plugin to import."""

    plugin: str


def ask_a_child() -> None:
    """Leave out, here, the plugins that end a child or that none could try; forgive those that a child imported."""
    admitted = [each for each in installed() if not refused(each, CONFIGURATION.policy)]
    if not admitted or REGISTRY.plugins is None:
        return
    harmful: dict[str, str] = {}

    def ended(task: Task, end: End) -> None:
        harmful[task.owner] = f"{end.reason} in a child process" if end.step is not None else str(end)

    tasks = deque(Task(PluginImport(each.name), each.name, TIMEOUT_S) for each in admitted)
    run_apart(__name__, tasks, found=lambda task, value: None, ended=ended)  # noqa: ARG005  # that it came back is all
    folder = cache_folder()
    for each in admitted:
        if each.name in harmful:
            REGISTRY.plugins.leave_out(each.name, harmful[each.name])
        elif folder is not None:
            forgive(folder, each.name, version_of(each))


def work(job: PluginImport, tell: Tell) -> None:
    """Import a plugin."""
    for each in installed():
        if each.name == job.plugin:
            tell.begins()
            with contextlib.suppress(Exception, SystemExit):  # the parent imports it, too, and says what it raised
                each.load()
    tell.found(None)


def diagnosis(found: Diagnosis, *, everything: bool = False) -> Iterator[RenderableType]:
    """Versions, devices, libraries, issues.

    Libraries that are not installed, and those for other hardware, have a line each kind, unless ``everything`` is
    listed.
    """
    yield from map(Text, found.head())
    for device in found.devices:
        sm = f", compute capability {device.sm[0]}.{device.sm[1]}" if device.sm else ""
        sets = ", ".join(sorted(device.instruction_sets))
        yield Text(f"{device.platform}:{device.index} {device.name}{sm}{f' ({sets})' if sets else ''}")
    if found.asked_for:
        usable = sum(library.reason is None for library in found.libraries)
        yield Text(f"{usable} of {len(found.libraries)} libraries are usable; `layerzero doctor` lists them")
        yield from _asked_for(found.asked_for)
    else:
        yield from (Text(f"memory {name}: {free}") for name, free in found.memory.items())
        yield from _libraries(found.libraries, everything)
    yield from (Text(line, style=style) for line, style in found.faults())


_FOLDED = (ReasonCode.PLATFORM_MISMATCH, ReasonCode.NOT_INSTALLED)
"""Reasons that need no look: other hardware, and what may be installed."""


def _libraries(libraries: Sequence[LibraryFinding], everything: bool) -> Iterator[RenderableType]:
    """A row for each library that is here; what it is for and every refusal where everything is listed."""
    shown = [each for each in libraries if everything or each.reason is None or each.reason.code not in _FOLDED]
    table = table_of("library", "version", "kernels", "state", right=("kernels",))
    for library in shown:
        state = Text(f"usable{library.known}", style="green") if library.reason is None else told(library.reason)
        about = lines_of(library.summary, state) if everything else state
        new_row(table, library.name, library.version or "", str(library.kernels), about)
    yield table
    folded = [(each, each.reason) for each in libraries if each not in shown and each.reason is not None]
    absent = [(each, why) for each, why in folded if why.code is ReasonCode.NOT_INSTALLED]
    if absent:
        yield Text(f"not installed: {'; '.join(_how_to(each, why) for each, why in absent)}", style="dim")
    elsewhere = Counter(
        hardware(str(why.wanted).split(" or ")) for _, why in folded if why.code is ReasonCode.PLATFORM_MISMATCH
    )
    if elsewhere:
        yield counted("libraries for other hardware", elsewhere)


def _how_to(library: LibraryFinding, why: Reason) -> str:
    """The name of a library, and the command that installs it."""
    return f"{library.name.partition(' (')[0]} ({why.hint.partition(': ')[2] or why.message})"


def _asked_for(findings: Sequence[OperationFinding]) -> Iterator[RenderableType]:
    """A row for each operation that a library serves; the others by what they fall back to; what would help them."""
    table = table_of("name", "dtype", "has here", "kernel of a library")
    fallen: dict[OperationSupport, list[str]] = {}
    for finding in findings:
        if not finding.kernels:
            fallen.setdefault(finding.served, []).append(finding.operation)
            continue
        first = next((name for name in finding.chosen if name in finding.kernels), finding.kernels[0])
        more = f" and {len(finding.kernels) - 1} more" if len(finding.kernels) > 1 else ""
        style = "green" if finding.served is OperationSupport.OPTIMISED else "yellow"
        new_row(table, finding.operation, finding.dtype, Text(finding.served, style=style), f"{first}{more}")
    if table.row_count:
        yield table
    for served, names in fallen.items():
        yield Text.assemble((f"{served}: ", "yellow"), ", ".join(names))
    helps: dict[str, list[str]] = {}
    for finding in findings:
        if finding.refused:
            _, _, reason = finding.refused.partition("] ")
            helps.setdefault(reason or finding.refused, []).append(finding.operation)
    for reason, names in helps.items():
        yield Text(f"{', '.join(names)}: {reason}", style="dim")


def faster(status: JitStatus, advice: Sequence[Advice]) -> Iterator[RenderableType]:
    """What is built in the background, and what to do to be faster here."""
    for line in status.lines():
        yield Text(f"jit: {line}")
    if advice:
        yield Text("to be faster here:", style="bold")
    for each in advice:
        yield Padding(Text(str(each)), (0, 0, 0, 2))

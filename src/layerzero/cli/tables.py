"""Answers as tables: 100 columns are enough, and a pipe reads the same words as a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from layerzero.asking.diagnosis import Diagnosis
from layerzero.asking.sets import OperationFinding, Served
from layerzero.cli import describe
from layerzero.cli.listing import Listed
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Platform
from layerzero.core.operation import Operation
from layerzero.core.plan import Candidate, Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import Setting
from layerzero.serving.advice import Advice
from layerzero.serving.jit_status import JitStatus
from layerzero.tuning.keeping.rows import Row


def _table(*headers: str, **right: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=False)
    for header in headers:
        fold = header in ("kernel", "library", "key", "name")  # ids stay whole; prose wraps
        table.add_column(header, no_wrap=fold, justify="right" if header in right else "left")
    return table


def _row(table: Table, *cells: Text | str) -> None:
    """Add a row; strings are text, not markup: ``list[str]`` and ``[CODE]`` stay as they are."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _lines(*lines: Text | str) -> Text:
    return Text("\n").join([line if isinstance(line, Text) else Text(line) for line in lines])


def explained(report: Report, *, everything: bool = True) -> Iterator[RenderableType]:
    """The call, then a row for each candidate: score and its terms, or every reason why it is refused.

    Those for other hardware are counted in one line, unless ``everything`` is listed.
    """
    title = Text.assemble((report.operation, "bold"), " -> ", (report.kernel_id or "no legal kernel", "bold green"))
    if report.locked:
        title.append(f"  ({report.locked})")
    yield title
    yield Text(_call(report.facts), style="dim")
    table = _table("", "kernel", "score", "why", score="right")
    elsewhere: Counter[str] = Counter()
    for candidate in report.candidates:
        chosen = candidate is report.chosen
        made_for = "" if everything or candidate.legal else _made_for(candidate)
        if made_for:
            elsewhere[made_for] += 1
            continue
        mark = Text(">", style="bold green") if chosen else Text("")
        name = Text(candidate.kernel.id, style="bold green" if chosen else "" if candidate.legal else "dim")
        score = f"{candidate.score:.1f}" if candidate.legal else Text("refused", style="red")
        _row(table, mark, name, score, _why(candidate))
    yield table
    if elsewhere:
        counted = ", ".join(f"{count} for {name}" for name, count in elsewhere.most_common())
        yield Text(f"not for this device: {counted}; --all lists them", style="dim")
    for note in report.notes:
        yield Text(f"note: {note}")
    if report.chosen is None and report.locked:
        yield Text(f"next step: remove the {report.locked}, or let it say `otherwise: select`")


_PLATFORMS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "hpu": "Gaudi", "xpu": "Intel GPUs", "cpu": "CPUs"}
_OTHER_GPUS = frozenset({ReasonCode.SM_TOO_OLD, ReasonCode.SM_TOO_NEW, ReasonCode.INSTRUCTION_SET_MISMATCH})


def _made_for(candidate: Candidate) -> str:
    """What other hardware a refused kernel is made for; empty if it is for this one."""
    codes = {reason.code for reason in candidate.reasons}
    if ReasonCode.PLATFORM_MISMATCH in codes:
        named = next((each.names for each in candidate.kernel.limits if isinstance(each, Platform)), None)
        platforms = named or candidate.kernel.backend.platforms
        return " and ".join(_PLATFORMS.get(name, name) for name in platforms)
    return "other GPUs" if codes & _OTHER_GPUS else ""


def _call(facts: Facts) -> str:
    """The call in a line: tensors, what differs from neutral, layout, device."""
    shapes: dict[str, list[str]] = {}
    for name, tensor in facts.tensors.items():
        shapes.setdefault(f"{_sizes(tensor.shape)} {dtype_name(tensor.dtype)}", []).append(name)
    parts = [f"{', '.join(names)} {shape}" for shape, names in shapes.items()]
    schema = facts.operation.schema
    shown = [name for name in schema.chosen if facts[name] != schema.neutral.get(name, facts[name])]
    parts += [f"{name} {facts[name]}" for name in shown]
    parts += [name for name in ("requires_grad", "deterministic", "capturing", "autocast") if facts[name]]
    parts.append(str(facts.layout) if facts.layout else "")
    return f"{'; '.join(filter(None, parts))}; on {facts.device.name}"


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _why(candidate: Candidate) -> Text:
    if not candidate.legal:
        return _lines(*_against(candidate.reasons))
    terms = ", ".join(f"{term.name} {term.points:+.1f}" for term in candidate.terms)
    lines = [terms]
    if candidate.time_us is not None:
        lines.append(f"{candidate.time_us:.1f} us {candidate.provenance}, confidence {candidate.confidence:.2f}")
    return _lines(*lines, *(f"adapts: {adaptation.text}" for adaptation in candidate.adaptations))


def _against(reasons: Sequence[Reason]) -> Iterator[Text]:
    """Every reason; beside another platform, or a library that is not there, the others by code only."""
    first = [reason for reason in reasons if reason.code is ReasonCode.PLATFORM_MISMATCH]
    first = first or [reason for reason in reasons if reason.code is ReasonCode.NOT_INSTALLED]
    yield from map(_reason, first[:1] or reasons)
    others = list(dict.fromkeys(str(reason.code) for reason in reasons if reason not in first))
    if first and others:
        yield Text.assemble("also ", (", ".join(others), "yellow"))


def _reason(reason: Reason) -> Text:
    return Text.assemble((str(reason.code), "yellow"), ": ", reason.message)


def kernels(found: Sequence[Listed]) -> Iterator[RenderableType]:
    """A row for each kernel: whether it can run here, priority, what it runs, limits and flags."""
    table = _table("kernel", "priority", "runs, on, limits, flags", priority="right")
    references = [listed for listed in found if listed.kernel.is_reference]
    for listed in found:
        kernel = listed.kernel
        if kernel.is_reference:
            continue
        name = Text(kernel.id, style="bold" if listed.reason is None else "dim")
        here = Text(f"installed {listed.version}".strip() if listed.version else "usable here", style="green")
        if listed.reason is not None:
            here = Text(str(listed.reason.code), style="yellow")
        dtypes = ", ".join(describe.dtypes(kernel)) or "any dtype"
        lines = [
            f"runs: {', '.join(describe.operations(kernel.operations))}",
            f"on: {', '.join(describe.platforms(kernel))}; {dtypes}",
        ]
        limits = describe.limits(kernel)
        lines += [f"limits: {'; '.join(limits)}"] if limits else []
        lines.append(f"flags: {', '.join(describe.flags(kernel)) or 'none'}")
        lines += [f"narrowed by: {kernel.revision}"] if kernel.revision else []
        _row(table, _lines(name, here), str(kernel.priority), _lines(*lines))
        table.add_section()
    if references:
        runs = f"runs: {', '.join(describe.operations([listed.kernel.operations[0] for listed in references]))}"
        takes = "takes everything; the operation's own definition in plain PyTorch, the last candidate"
        _row(table, _lines("reference.<operation>", Text("usable here", style="green")), "0", _lines(runs, takes))
    yield table


def operations(found: Sequence[Operation]) -> Iterator[RenderableType]:
    """A row for each operation."""
    table = _table("name", "function", "what it computes, named cases", "kernels", kernels="right")
    for operation in found:
        cases = f"cases: {', '.join(case.name for case in operation.cases)}"
        text = _lines(operation.summary, Text(cases, style="dim"))
        count = len(REGISTRY.kernels(operation.name))
        _row(table, operation.name, describe.function_of(operation.name), text, str(count))
    yield table


def diagnosis(found: Diagnosis) -> Iterator[RenderableType]:
    """Versions, devices, libraries, issues."""
    yield Text(", ".join(f"{name} {version}" for name, version in found.versions.items()))
    for device in found.devices:
        sm = f", compute capability {device.sm[0]}.{device.sm[1]}" if device.sm else ""
        sets = ", ".join(sorted(device.instruction_sets))
        yield Text(f"{device.platform}:{device.index} {device.name}{sm}{f' ({sets})' if sets else ''}")
    if found.asked_for:
        usable = sum(library.reason is None for library in found.libraries)
        yield Text(f"{usable} of {len(found.libraries)} libraries are usable; `layerzero doctor` lists them")
        yield from _asked_for(found.asked_for)
    else:
        yield _libraries(found)
    for kernel, error in found.resting.items():
        yield Text(f"resting: {kernel}: {error}", style="red")
    for line in found.health_lines():
        yield Text(line)
    for name, error in found.plugin_errors.items():
        yield Text(f"plugin {name}: {error}", style="red")
    for each in found.descriptors:
        yield Text(f"descriptor: {each['name']} (sha256 {each['sha256']})")
    for issue in found.issues:
        yield Text(f"issue: {issue}", style="yellow")
    if not found.issues:
        yield Text("no issues found", style="green")


def _libraries(found: Diagnosis) -> Table:
    table = _table("library", "version", "kernels", "state", kernels="right")
    for library in found.libraries:
        state = Text(f"usable{library.known}", style="green") if library.reason is None else _reason(library.reason)
        _row(table, library.name, library.version or "", str(library.kernels), _lines(library.summary, state))
    return table


def _asked_for(findings: Sequence[OperationFinding]) -> Iterator[RenderableType]:
    """A row for each operation that a library serves; the others by what they fall back to; what would help them."""
    table = _table("name", "dtype", "has here", "kernel of a library")
    fallen: dict[Served, list[str]] = {}
    for finding in findings:
        if not finding.kernels:
            fallen.setdefault(finding.served, []).append(finding.operation)
            continue
        first = next((name for name in finding.chosen if name in finding.kernels), finding.kernels[0])
        more = f" and {len(finding.kernels) - 1} more" if len(finding.kernels) > 1 else ""
        style = "green" if finding.served is Served.OPTIMISED else "yellow"
        has = Text(finding.served, style=style)
        _row(table, finding.operation, finding.dtype, has, f"{first}{more}")
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
        yield Text(f"  {each}")


def effective(settings: Mapping[str, tuple[Any, str]]) -> Iterator[RenderableType]:
    """A row for each setting; those that somebody set stand out."""
    table = _table("key", "value", "origin")
    for key, (value, origin) in settings.items():
        style = "" if origin == "default" else "bold green"
        _row(table, Text(key, style=style), Text(repr(value), style=style), Text(origin, style=style or "dim"))
    yield table


def keys(settings: Mapping[str, Setting]) -> Iterator[RenderableType]:
    """A row for each key."""
    table = _table("key", "type", "default", "meaning")
    for key, setting in settings.items():
        meaning = setting.meaning if setting.built else f"{setting.meaning} (not built yet: the default only)"
        _row(table, key, describe.kind(setting.kind), repr(setting.default), meaning)
    yield table


def times(rows: Sequence[Row], here: Sequence[bool]) -> RenderableType:
    """Measured times, and whether each counts on this machine."""
    table = _table("kernel", "work", "time", "from")
    for row, counts in zip(rows, here, strict=True):
        sizes = " ".join(f"{name} {size}" for name, size in row.work.sizes.items())
        head = f"{row.facts.get('operation', '')} {row.facts.get('dtype', '')}{' in a graph' if row.graph else ''}"
        spread = f"{row.median_us:.1f} us, p95 {row.p95_us:.1f}"
        if row.device_us is not None:
            host = f", host {row.host_us:.1f}" if row.host_us is not None else ""
            spread += f"\ndevice {row.device_us:.1f} us{host}"
        origin = f"{row.origin}, {row.samples} samples{f', {row.condition}' if row.condition else ''}"
        whence = f"imported from {row.source}" if row.source else row.written_at[:16]
        _row(
            table,
            row.kernel,
            _lines(head, Text(sizes, style="dim")),
            _lines(spread, Text("" if counts else "does not count here", style="yellow")),
            _lines(origin, Text(whence, style="dim")),
        )
    return table

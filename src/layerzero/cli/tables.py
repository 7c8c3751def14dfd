"""Answers as tables: 100 columns are enough, and a pipe reads the same words as a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from layerzero.cli import describe
from layerzero.cli.listing import Listed
from layerzero.cli.rows import Lines, new_row, whole
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Platform
from layerzero.core.operation import Operation
from layerzero.core.plan import Candidate, Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import Setting
from layerzero.tuning.keeping.rows import Row


def table_of(*headers: str, kind: type[Table] = Table, **right: str) -> Table:
    """A table; columns whose names are given as ``right`` stand to the right."""
    table = kind(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=False)
    for header in headers:
        fold = header in ("kernel", "library", "key", "name")  # ids stay whole; prose wraps
        justify: JustifyMethod = "right" if header in right else "left"
        table.add_column(whole(header), no_wrap=fold, justify=justify, overflow="fold")
    return table


def lines_of(*lines: Text | str) -> Text:
    """A cell of several lines."""
    return Text("\n").join([line if isinstance(line, Text) else Text(line) for line in lines])


def explained(report: Report, *, everything: bool = True) -> Iterator[RenderableType]:
    """The call, then a row for each candidate: score and its terms, or every reason why it is refused.

    Those for other hardware are counted in one line, unless ``everything`` is listed.
    """
    yield from asked(report)
    table = table_of("", "kernel", "score", "why", score="right")
    refused, hardware = elsewhere(report)
    for candidate in report.candidates:
        chosen = candidate is report.chosen
        if not everything and not candidate.legal and candidate not in refused:
            continue
        mark = Text(">", style="bold green") if chosen else Text("")
        name = Text(candidate.kernel.id, style="bold green" if chosen else "" if candidate.legal else "dim")
        score = f"{candidate.score:.1f}" if candidate.legal else Text("refused", style="red")
        new_row(table, mark, name, score, _why(candidate))
    yield table
    if not everything:
        yield from hardware
    yield from notes_of(report)


def asked(report: Report) -> Iterator[Text]:
    """What was asked about, and who runs it."""
    title = Text.assemble((report.operation, "bold"), " -> ", (report.kernel_id or "no legal kernel", "bold green"))
    if report.locked:
        title.append(f"  ({report.locked})")
    yield title
    yield Text(_call(report.facts), style="dim")


def elsewhere(report: Report, *, hint: bool = True) -> tuple[list[Candidate], list[Text]]:
    """The refused kernels that are made for this device, and a line that counts the others.

    ``hint``: whether it says where they are listed.
    """
    refused = {id(each): _made_for(each) for each in report.candidates if not each.legal}
    count = Counter(made_for for made_for in refused.values() if made_for)
    here = [each for each in report.candidates if refused.get(id(each)) == ""]
    return here, [counted("not for this device", count, hint=hint)] if count else []


def notes_of(report: Report) -> Iterator[Text]:
    """What else a reader should know."""
    for note in report.notes:
        yield Text(f"note: {note}")
    if report.chosen is None and report.locked:
        yield Text(f"next step: remove the {report.locked}, or let it say `otherwise: select`")


PLATFORMS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "hpu": "Gaudi", "xpu": "Intel GPUs", "cpu": "CPUs"}
"""What people call them."""

_OTHER_GPUS = frozenset({ReasonCode.SM_TOO_OLD, ReasonCode.SM_TOO_NEW, ReasonCode.INSTRUCTION_SET_MISMATCH})


def _made_for(candidate: Candidate) -> str:
    """What other hardware a refused kernel is made for, the first of several; empty if it is for this one."""
    codes = {reason.code for reason in candidate.reasons}
    if ReasonCode.PLATFORM_MISMATCH in codes:
        named = next((each.names for each in candidate.kernel.limits if isinstance(each, Platform)), None)
        platforms = named or candidate.kernel.backend.platforms
        return PLATFORMS.get(platforms[0], platforms[0])
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
        return lines_of(*_against(candidate.reasons))
    terms = ", ".join(f"{term.name} {term.points:+.1f}" for term in candidate.terms)
    lines = [terms]
    if candidate.evidence is not None:
        lines.append(f"{candidate.evidence.told}, confidence {candidate.confidence:.2f}")
    return lines_of(*lines, *(f"adapts: {adaptation.text}" for adaptation in candidate.adaptations))


def _against(reasons: Sequence[Reason]) -> Iterator[Text]:
    """Every reason; beside another platform, or a library that is not there, the others by code only."""
    first = [reason for reason in reasons if reason.code is ReasonCode.PLATFORM_MISMATCH]
    first = first or [reason for reason in reasons if reason.code is ReasonCode.NOT_INSTALLED]
    yield from map(told, first[:1] or reasons)
    others = list(dict.fromkeys(str(reason.code) for reason in reasons if reason not in first))
    if first and others:
        yield Text.assemble("also ", (", ".join(others), "yellow"))


def told(reason: Reason) -> Text:
    """A reason, its code first."""
    return Text.assemble((str(reason.code), "yellow"), ": ", reason.message)


def libraries(found: Sequence[Listed]) -> Iterator[RenderableType]:
    """A row for each library that runs here: how many kernels it has, and of which functions."""
    table = table_of("library", "version", "kernels", "of", kernels="right")
    here = [each for each in found if each.reason is None and not each.kernel.is_reference]
    for name in sorted({each.kernel.source for each in here}):
        mine = [each for each in here if each.kernel.source == name]
        named = {describe.function_of(operation) or operation for each in mine for operation in each.kernel.operations}
        new_row(table, name, mine[0].version, str(len(mine)), ", ".join(sorted(named)))
    yield table
    yield Text("`layerzero kernels FUNCTION`, --backend NAME and --all list kernels with their limits")


def kernels(found: Sequence[Listed], *, everything: bool = True) -> Iterator[RenderableType]:
    """A row for each kernel: whether it can run here, priority, what it runs, limits and flags.

    Those for other hardware are counted in one line, unless ``everything`` is listed.
    """
    elsewhere = Counter(
        hardware(describe.platforms(each.kernel)) for each in found if each.elsewhere and not everything
    )
    found = [each for each in found if everything or not each.elsewhere]
    table = table_of("kernel", "priority", "runs, on, limits, flags", priority="right")
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
        new_row(table, lines_of(name, here), str(kernel.priority), lines_of(*lines))
        table.add_section()
    if references:
        runs = f"runs: {', '.join(describe.operations([listed.kernel.operations[0] for listed in references]))}"
        takes = "takes everything; the operation's own definition in plain PyTorch, the last candidate"
        new_row(
            table, lines_of("reference.<operation>", Text("usable here", style="green")), "0", lines_of(runs, takes)
        )
    yield table
    if elsewhere:
        yield counted("not for this machine", elsewhere)


def counted(what: str, hardware: Counter[str], *, hint: bool = True) -> Text:
    """One line for all that is made for other hardware."""
    each = ", ".join(f"{count} for {name}" for name, count in hardware.most_common())
    return Text(f"{what}: {each}{'; --all lists them' if hint else ''}", style="dim")


def hardware(platforms: Iterable[str]) -> str:
    """What something is made for, in words."""
    return " and ".join(PLATFORMS.get(name, name) for name in platforms)


def operations(found: Sequence[Operation]) -> Iterator[RenderableType]:
    """A row for each operation."""
    table = table_of("name", "function", "what it computes, named cases", "kernels", kernels="right")
    for operation in found:
        cases = f"cases: {', '.join(case.name for case in operation.cases)}"
        text = lines_of(operation.summary, Text(cases, style="dim"))
        count = len(REGISTRY.kernels(operation.name))
        new_row(table, operation.name, describe.function_of(operation.name), text, str(count))
    yield table


def effective(settings: Mapping[str, tuple[Any, str]]) -> Iterator[RenderableType]:
    """A row for each setting; those that somebody set stand out."""
    table = table_of("key", "value", "origin")
    for key, (value, origin) in settings.items():
        style = "" if origin == "default" else "bold green"
        new_row(table, Text(key, style=style), Text(repr(value), style=style), Text(origin, style=style or "dim"))
    yield table


def keys(settings: Mapping[str, Setting]) -> Iterator[RenderableType]:
    """A row for each key."""
    table = table_of("key", "type", "default", "meaning")
    for key, setting in settings.items():
        meaning = setting.meaning if setting.built else f"{setting.meaning} (not built yet: the default only)"
        new_row(table, key, describe.kind(setting.kind), repr(setting.default), meaning)
    yield table


def times(rows: Sequence[Row], here: Sequence[bool]) -> RenderableType:
    """Measured times, a line each where that is wide enough, and whether each counts on this machine."""
    table = table_of("kernel", "work", "time", "from", kind=Lines)
    for row, counts in zip(rows, here, strict=True):
        whence = "imported" if row.source else row.written_at[:10]
        whence += "" if counts else ", does not count here"
        time = ", ".join([f"{row.median_us:.1f} us", *_parts(row)])
        new_row(table, row.kernel, " ".join(_work(row)), time, Text(whence, style="dim" if counts else "yellow"))
    return table


def times_in_full(rows: Sequence[Row], here: Sequence[bool]) -> RenderableType:
    """The same with spread, samples and the state of the machine, some lines each."""
    table = table_of("kernel", "work", "time", "from")
    for row, counts in zip(rows, here, strict=True):
        head, sizes = _work(row)
        spread = "\n".join([f"{row.median_us:.1f} us, p95 {row.p95_us:.1f}", *_parts(row)])
        origin = f"{row.origin}, {row.samples} samples{f', {row.condition}' if row.condition else ''}"
        whence = f"imported from {row.source}" if row.source else row.written_at[:16]
        new_row(
            table,
            row.kernel,
            lines_of(head, Text(sizes, style="dim")),
            lines_of(spread, Text("" if counts else "does not count here", style="yellow")),
            lines_of(origin, Text(whence, style="dim")),
        )
    return table


def _work(row: Row) -> tuple[str, str]:
    """What was timed: operation and dtype, and the sizes."""
    sizes = " ".join(f"{name} {size}" for name, size in row.work.sizes.items())
    return f"{row.facts.get('operation', '')} {row.facts.get('dtype', '')}{' in a graph' if row.graph else ''}", sizes


def _parts(row: Row) -> list[str]:
    """What the device and the host take of a time, where they were told apart."""
    if row.device_us is None:
        return []
    return [f"device {row.device_us:.1f} us{f', host {row.host_us:.1f}' if row.host_us is not None else ''}"]

"""``layerzero explain`` and ``which``: every candidate with its reasons, or, on a small screen, those that may run."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from layerzero.cli.calls import CallFlags, ExplainFlags
from layerzero.cli.flags import drop_in_question, plain_report
from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.cli.question import question
from layerzero.cli.tables import PLATFORMS, SMALL, counted, fitting, folded, lines_of, new_row, some, table_of, told
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Platform
from layerzero.core.plan import Candidate, Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops import DROP_INS, plain_function_of

MOST_ROWS, FEW = fitting(16, screen=SMALL), 4
"""Kernels that may run and have a row each, and refused ones that a line names."""


_MEANS = {
    ReasonCode.CONSTRAINT_FAILED: "made for other calls",
    ReasonCode.JIT_DISABLED: "not built yet",
    ReasonCode.NOT_VETTED: "has to prove itself here first",
}
"""Codes that do not say it themselves."""


def _report(flags: CallFlags) -> Report:
    if plain_function_of(flags.name) is not None:
        return plain_report(flags)
    return (drop_in_question(flags, DROP_INS[flags.name]) if flags.name in DROP_INS else question(flags)).ask()


def explain(flags: ExplainFlags) -> Answer:
    """Show the whole report; as text, kernels for other hardware are one line unless ``everything`` is set.

    On a screen that does not hold that, what keeps kernels from the call is a line for each kind of reason, too.
    """
    report = _report(flags)
    shown = functools.partial(explained, report, everything=flags.everything)
    fits = None if flags.everything else functools.partial(on_a_small_screen, report)
    return Answer(report.to_dict(), shown, FINE if report.chosen else NO, fits)


def which(flags: CallFlags) -> Answer:
    """Show the kernel's id alone, so that a script can use it."""
    report = _report(flags)
    score = round(report.chosen.score, 3) if report.chosen else None
    data = {"kernel_id": report.kernel_id, "score": score, "operation": report.operation}
    if report.kernel_id is None:
        say(f"no kernel of {report.operation} is legal for this call; `layerzero explain` with these options says why")
        return Answer(data, tuple, NO)
    kernel_id = report.kernel_id
    return Answer(data, lambda: [kernel_id])


def explained(report: Report, *, everything: bool = True) -> Iterator[RenderableType]:
    """The call, then a row for each candidate: score and its terms, or every reason why it is refused.

    Those for other hardware are counted in one line, unless ``everything`` is listed.
    """
    yield from asked(report)
    table = table_of("", "kernel", "score", "why", right=("score",))
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
    """The call in question, and which kernel runs it."""
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
    lines += [f"workspace: {candidate.workspace}"] if candidate.workspace else []
    return lines_of(*lines, *(f"adapts: {adaptation.text}" for adaptation in candidate.adaptations))


def _against(reasons: Sequence[Reason]) -> Iterator[Text]:
    """Every reason; after another platform or a library that is not there, the others by code only."""
    first = [reason for reason in reasons if reason.code is ReasonCode.PLATFORM_MISMATCH]
    first = first or [reason for reason in reasons if reason.code is ReasonCode.NOT_INSTALLED]
    yield from map(told, first[:1] or reasons)
    others = list(dict.fromkeys(str(reason.code) for reason in reasons if reason not in first))
    if first and others:
        yield Text.assemble("also ", (", ".join(others), "yellow"))


def on_a_small_screen(report: Report) -> Iterator[RenderableType]:
    """The call, a row for each kernel that may run, why the first does, and one line for each kind of refusal."""
    yield from asked(report)
    legal = [each for each in report.candidates if each.legal]
    table = table_of("", "kernel", "score", "time", right=("score",))
    styles = ["bold green" if each is report.chosen else "" for each in legal]
    rows = [
        (Text(">" if style else "", style=style), Text(each.kernel.id, style=style), f"{each.score:.1f}", _time(each))
        for each, style in zip(legal, styles, strict=True)
    ]
    yield from folded(table, rows, MOST_ROWS, "and {} with lower scores")
    if report.chosen is not None:
        yield Text.assemble(("why: ", "bold"), _why_chosen(report.chosen))
    others, hardware = elsewhere(report, hint=False)
    yield from _refused([each for each in others if not each.kernel.asked_for])  # a setting that is off asks for those
    yield from hardware
    yield Text("--all lists each with its reasons, its terms, and what to install", style="dim")
    yield from notes_of(report)


def _time(each: Candidate) -> str:
    return "not measured" if each.evidence is None else each.evidence.told


def _why_chosen(chosen: Candidate) -> str:
    """The terms of its score, how far its time is believed, and what it adapts, in a line."""
    parts = [", ".join(f"{term.name} {term.points:+.1f}" for term in chosen.terms)]
    if chosen.evidence is not None:
        parts.append(f"confidence {chosen.confidence:.2f}")
    if chosen.adaptations:
        parts.append(f"adapts: {', '.join(each.text for each in chosen.adaptations)}")
    return "; ".join(parts)


_MENDED = frozenset({ReasonCode.NOT_VETTED, ReasonCode.JIT_DISABLED})


def _refused(candidates: Sequence[Candidate]) -> Iterator[Text]:
    """A line for each reason that comes first, with the kernels that it keeps from the call.

    What vetting or a build would mend comes last of a kernel's reasons: with another one, neither helps.
    """
    of: dict[ReasonCode, list[str]] = defaultdict(list)
    for each in candidates:
        codes = [reason.code for reason in each.reasons]
        of[next((code for code in codes if code not in _MENDED), codes[0])].append(each.kernel.id)
    for code, names in of.items():
        means = f" ({_MEANS[code]})" if code in _MEANS else ""
        yield Text.assemble((f"refused, {code}{means}: ", "yellow"), some(names, FEW))

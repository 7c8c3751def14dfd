"""What ``layerzero explain`` shows where every reason would not fit on a screen: who may run, and the rest counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from layerzero.cli.rows import new_row
from layerzero.cli.tables import asked, elsewhere, notes_of, table_of
from layerzero.core.plan import Candidate, Report
from layerzero.core.reasons import ReasonCode

MOST_ROWS, FEW = 8, 4
"""Kernels that may run and have a row each, and refused ones that a line names."""


_MEANS = {
    ReasonCode.CONSTRAINT_FAILED: "made for other calls",
    ReasonCode.JIT_DISABLED: "not built yet",
    ReasonCode.NOT_VETTED: "has to prove itself here first",
}
"""Codes that do not say it themselves."""


def folded(report: Report) -> Iterator[RenderableType]:
    """The call, a row for each kernel that may run, why the first does, and one line for each kind of refusal."""
    yield from asked(report)
    legal = [each for each in report.candidates if each.legal]
    table = table_of("", "kernel", "score", "time", score="right")
    for each in legal[:MOST_ROWS]:
        chosen = each is report.chosen
        name = Text(each.kernel.id, style="bold green" if chosen else "")
        new_row(table, Text(">", style="bold green") if chosen else Text(""), name, f"{each.score:.1f}", _time(each))
    if legal:
        yield table
    if len(legal) > MOST_ROWS:
        yield Text(f"and {len(legal) - MOST_ROWS} with lower scores", style="dim")
    if report.chosen is not None:
        yield Text.assemble(("why: ", "bold"), _why(report.chosen))
    others, hardware = elsewhere(report, hint=False)
    yield from _refused(others)
    yield from hardware
    yield Text("--all lists each with its reasons, its terms, and what to install", style="dim")
    yield from notes_of(report)


def _time(each: Candidate) -> str:
    return "nobody measured it" if each.evidence is None else each.evidence.told


def _why(chosen: Candidate) -> str:
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
        more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
        means = f" ({_MEANS[code]})" if code in _MEANS else ""
        yield Text.assemble((f"refused, {code}{means}: ", "yellow"), f"{', '.join(names[:FEW])}{more}")

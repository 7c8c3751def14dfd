"""The judge's findings as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from judge import Verdict


def line(verdict: Verdict) -> str:
    """One call in a line, fastest first."""
    times = sorted(verdict.times_us.items(), key=lambda item: item[1])
    text = ", ".join(f"{kernel} {time_us:.1f}" for kernel, time_us in times)
    beside = ", ".join(
        f"{name} {time_us:.1f}"
        for name, time_us in (("lz", verdict.through_us), ("again", verdict.again_us), ("torch", verdict.torch_us))
        if time_us is not None
    )
    problems = "".join(f"; {kernel} {problem[:100]}" for kernel, problem in verdict.problems.items())
    return (
        f"{verdict.ratio:.2f} {verdict.name}: chose {verdict.chosen} ({verdict.evidence}): {text} | {beside}{problems}"
    )


def page(data: dict[str, Any], verdicts: Sequence[Verdict]) -> str:
    """The whole section."""
    lines = [", ".join(f"{name} {version}" for name, version in data["versions"].items()), ""]
    tuned = data.get("tuned")
    if tuned:
        text = f"Tuned: {len(tuned['measured'])} calls in {tuned['seconds']:.0f} s, {tuned['compile_s']:.0f} s of it "
        text += f"first calls (loading, compiling); {tuned['known']} were known, {tuned['left']} left, "
        lines += [text + f"{len(tuned['skipped'])} could not be measured.", ""]
    if verdicts:
        lines += _summary(data["summary"]) + _libraries(data["summary"]) + _calls(verdicts)
    lines += _host(data.get("host", []))
    problems = [f"- {each.name}, `{kernel}`: {text}" for each in verdicts for kernel, text in each.problems.items()]
    problems += [f"- {name}: {text}" for name, text in data["skipped"].items()]
    lines += ["### Failures", "", *(problems or ["none"]), ""]
    return "\n".join(lines)


def _summary(summary: dict[str, Any]) -> list[str]:
    lines = [
        "### LayerZero's choice over the best legal kernel",
        "",
        "| what | calls | geometric mean | worst | within 5 % | noise, mean | noise, worst | through lz |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part, found in summary.items():
        cells = [found["mean"], found["worst"]]
        lines.append(
            f"| {part} | {found['calls']} | {cells[0]:.3f} | {cells[1]:.2f} | {found['within_5_percent']} | "
            f"{_number(found['noise_mean'], 3)} | {_number(found['noise_worst'])} | "
            f"{_number(found['through_lz_mean'], 3)} |"
        )
    missed = [f"- worst of {part}: {found['worst_call']}" for part, found in summary.items() if found["worst"] > 1.05]
    return [*lines, "", *missed, ""]


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _libraries(summary: dict[str, Any]) -> list[str]:
    """What somebody pays who calls one library everywhere."""
    found = summary["all"]
    rows = [
        f"| always `{name}` | {each['served']} | {each['calls']} | {_number(each['mean'])} | {_number(each['worst'])} |"
        for name, each in found["libraries"].items()
    ]
    default = found["torch_default"]
    rows.append(
        f"| torch's own functions | {default['calls']} | {default['calls']} | {_number(default['mean'])} | "
        f"{_number(default['worst'])} |"
    )
    rows += [
        f"| `{name}`, where it is legal | {each['calls']} | {each['calls']} | {_number(each['mean'])} | "
        f"{_number(each['worst'])} |"
        for name, each in found["kernels"].items()
    ]
    return [
        "### Fixed choices over the best legal kernel",
        "",
        "A library serves a call with its kernel of highest priority; where it has none, torch's own function does.",
        "",
        "| choice | serves | calls | geometric mean | worst |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def _calls(verdicts: Sequence[Verdict]) -> list[str]:
    """A table for each operation: a row a call, a column a kernel."""
    lines = ["### Times, us", ""]
    for operation in dict.fromkeys(verdict.operation for verdict in verdicts):
        rows = [verdict for verdict in verdicts if verdict.operation == operation]
        kernels = sorted({kernel for row in rows for kernel in row.times_us})
        lines += [
            f"| {operation} | chosen | evidence | ratio | noise | lz | torch | " + " | ".join(kernels) + " |",
            "|---" * (len(kernels) + 7) + "|",
        ]
        for row in rows:
            cells = [_cell(row.times_us.get(kernel), row.times_us[row.best]) for kernel in kernels]
            name = row.name.removeprefix(operation).strip()
            lines.append(
                f"| {name} | {row.chosen} | {row.evidence} | {row.ratio:.2f} | {_number(row.noise)} | "
                f"{_cell(row.through_us)} | {_cell(row.torch_us)} | " + " | ".join(cells) + " |"
            )
        lines.append("")
    return lines


def _cell(time_us: float | None, best: float | None = None) -> str:
    if time_us is None:
        return ""
    text = f"{time_us:.1f}" if time_us < 100 else f"{time_us:.0f}"
    return f"**{text}**" if time_us == best else text


def _host(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [
        "### Host time of a call, us",
        "",
        "| call | kernel | direct | library's entry | lz | lz - direct |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['call']} | {row['kernel']} | {row['error']} | | | |")
        else:
            cells = [_number(row.get(name)) for name in ("direct", "own", "lz", "lz_minus_direct")]
            lines.append(f"| {row['call']} | {row['kernel']} | {' | '.join(cells)} |")
    return [*lines, ""]

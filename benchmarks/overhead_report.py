"""One run of the overhead benchmark as a table, as a page, as a bar chart, and beside the run before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "overhead.md"
OPERATOR, CUSTOM = "C++ operator, .default", "torch.library.custom_op"

GOALS = (
    ("a hit under no_grad", "lz.attention", 200),
    ("a hit with grad on", "lz.attention, grad on", 260),
    ("bound, guarded", "lz.bind", 150),
    ("bound, unguarded", "lz.bind, guard=False", 40),
    ("pure Python, public API", "lz.attention in Python", 1300),
)
"""What is wanted, of which line, in nanoseconds over the direct call."""


def show(run: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Print the run; beside each figure the change since the last recorded run on such a processor."""
    console = Console()
    machine = run["machine"]
    console.print(f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}")
    console.print(f"hit path: {machine['hit_path']}")
    table = Table(title="nanoseconds over a direct call of the same kernel (median of interleaved rounds)")
    for column in ("call", "ns", "of a C++ operator", "of custom_op", "last run"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for cells in rows(run, before):
        table.add_row(*cells, style="bold" if cells[0].startswith("lz.") else None)
    console.print(table)
    for line in summary(run):
        console.print(line)
    for name, reason in run["missing"].items():
        console.print(f"not here: {name} ({reason})", markup=False)
    if before is None:
        console.print("no run was recorded on such a processor; --record keeps this one")


def rows(run: dict[str, Any], before: dict[str, Any] | None = None) -> list[tuple[str, ...]]:
    """Name, nanoseconds, ratios and change of every line, the cheapest first."""
    found, lines = run["over_ns"], []
    for name, each in sorted(found.items(), key=lambda pair: pair[1]):
        last = (before or {}).get("over_ns", {}).get(name)
        change = f"{last:.0f} ({each - last:+.0f})" if last is not None else ""
        lines.append((name, f"{each:.0f}", f"{each / found[OPERATOR]:.2f}", f"{each / found[CUSTOM]:.3f}", change))
    return lines


def summary(run: dict[str, Any]) -> list[str]:
    """What is wanted and what came; threads, cold calls and misses."""
    found = run["over_ns"]
    lines = []
    for what, name, wanted in GOALS:
        lines.append(f"{what}: {found[name]:.0f} ns, wanted at most {wanted}{_missed(found[name] > wanted)}")
    ratio, factor = found["lz.attention"] / found[OPERATOR], found[CUSTOM] / found["lz.attention"]
    lines.append(f"a hit is {ratio:.2f} of a C++ operator's .default call, wanted at most 0.30{_missed(ratio > 0.3)}")
    lines.append(f"custom_op costs {factor:.0f} times a hit, wanted at least 25{_missed(factor < 25)}")
    threads = ", ".join(f"{number}: {each:.2f}" for number, each in run["threads"].items())
    late = _missed(run["threads"]["8"] > 1.3)
    lines.append(f"wall time a call by threads, of one thread's: {threads}; wanted at most 1.30{late}")
    cold = ", ".join(f"{name} {each} ns" for name, each in run["cold_ns"].items())
    lines.append(f"cold, after 32 MiB of other memory: {cold}")
    misses = ", ".join(f"{name} {each:.0f} us" for name, each in run["miss_us"].items())
    missed = _missed(max(run["miss_us"].values()) > 150)
    lines.append(f"a miss with ten candidates: {misses}; wanted at most 150{missed}")
    return lines


def _missed(missed: bool) -> str:
    return ": missed" if missed else ""


def write_markdown(run: dict[str, Any]) -> Path:
    """Write the page."""
    machine = run["machine"]
    lines = [
        "# What a call costs beside its kernel",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, torch {machine['torch']},",
        f"{machine['date']}; hits are found in {machine['hit_path']}. `make bench` makes it again.",
        "",
        "Nanoseconds over a direct call of the same kernel, which does nothing; three float32 tensors on a CPU,",
        "medians of interleaved rounds in one process. The machine was shared, so ratios mean more than nanoseconds.",
        "",
        "| call | ns | of a C++ operator | of custom_op |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cells[:4])} |" for cells in rows(run)),
        "",
        *(f"- {line}" for line in summary(run)),
        *(f"- not measured: {name} ({reason})" for name, reason in run["missing"].items()),
        "",
        "A bound callable is called with its tensors alone. F.sdpa is timed with its kernel; its choice alone is the",
        "operator of six arguments. flashinfer-bench falls back after its look into the table.",
        "",
        "![bars](overhead.png)",
        "",
    ]
    PAGE.write_text("\n".join(lines))
    return PAGE


def write_chart(run: dict[str, Any], path: Path) -> None:
    """Draw the bars, LayerZero's in another colour."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines = [(name, each) for name, each in sorted(run["over_ns"].items(), key=lambda pair: -pair[1]) if each > 0]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(lines) + 1.2))
    colours = ["tab:orange" if name.startswith("lz.") else "tab:gray" for name, _ in lines]
    bars = axes.barh([name for name, _ in lines], [each for _, each in lines], color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("ns over a direct call of the same kernel (log scale)")
    axes.tick_params(labelsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)

"""What ``layerzero demo`` prints: one screen of bars, what changed and why, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

NEXT = (
    ("layerzero doctor", "which libraries are here, and what the others need"),
    ("layerzero tune attention --budget-s 60", "measure this machine's kernels: times decide from then on"),
    ("python examples/generate.py", "the same for a model that writes; see examples/ for more"),
)


SCREEN = 40
"""Lines of a terminal that hold all of it, the prompt before and behind it included; on a smaller one it is short."""


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print the answer of the demonstration."""
    small = console.is_terminal and console.height < SCREEN
    counts = [row["runs"] for row in result["results"]]
    runs = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    threads = f", {result['threads']} threads" if not result["gpu"] else ""
    _say(
        console, f"[bold]{result['device']}[/]{threads}, torch {result['torch']}; medians of {runs} runs, taken in turn"
    )
    for row in result["results"]:
        _say(console, f"{'' if small else chr(10)}[bold]{row['what']}[/], {row['dtype']}")
        for bar in _bars(row, console.width):
            console.print(bar, no_wrap=True, overflow="ellipsis", highlight=False)
    if small:
        _say(console, f"[bold]what changed[/]: {_in_short(result['results'])}")
        _say_why(console, result)
        _say(console, f"[bold]next[/]: {'; '.join(command for command, _ in NEXT[:2])}")
        return
    _say(console, "\n[bold]what changed[/] in the encoder and the decoder, checked module by module")
    for line in _changes(result["results"]):
        _say(console, f"  {line}")
    _say_why(console, result)
    _say(console, f"[bold]next[/] ({result['seconds']:.0f} s so far)")
    width = max(len(command) for command, _ in NEXT)
    for command, what in NEXT:
        _say(console, f"  {command.ljust(width)}  [dim]{what}[/]")


def _say_why(console: Console, result: Mapping[str, Any]) -> None:
    _say(console, "[bold]why[/], for two calls of a word in the decoder")
    for each in result["why"]:
        refused = ", ".join(f"{count} {why}" for why, count in each["refused"].items())
        _say(console, f"  {each['call']}: {each['kernel']}, 1 of {len(each['legal'])}; refused: {refused}")


def _say(console: Console, line: str) -> None:
    console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)


def _bars(row: Mapping[str, Any], width: int) -> Iterator[Text]:
    """One bar for each way, the longest stock's or longer."""
    longest = max(each["ms"] for each in row["ways"].values())
    room = max(8, width - 70)  # what stands beside it
    for name, each in row["ways"].items():
        length = max(1, round(each["ms"] / longest * room))
        stock = name == "stock"
        line = Text(f"  {name:<20}{each['ms']:>9.2f} ms ")
        line.append("█" * length, style="dim" if stock else "green" if each["times_as_fast"] > 1.0 else "yellow")
        if not stock:
            line.append(f" {each['times_as_fast']:.2f} x", style="bold")
            line.append(f", off by {each['error']:.0e}{_same(row, name)}")
        yield line


def _same(row: Mapping[str, Any], name: str) -> str:
    """Whether the decoder wrote the same words, where it wrote any."""
    same = row.get("same_words")
    return "" if same is None else ", same words" if same[name] else ", other words"


def _changes(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """Lines on what ``lz.optimize`` replaced: one for each kind of module, of the first and the last model."""
    for row in rows[:1] + rows[-1:]:
        for each in row["changed"]:
            kernels = "" if each["kernels"] in {"", "by call"} else f" ({_short(each['kernels'])})"
            yield escape(f"{each['count']} {each['module']} by {_short(each['by'])}{kernels}")
        before, packed = (row["bytes"][name] / 1e6 for name in ("weights", "packed"))
        left = sum(row["left"].values())
        yield f"[dim]{left} modules left, {before:.0f} MB of weights and {packed:.0f} MB of packed copies[/]"


def _in_short(rows: list[Mapping[str, Any]]) -> str:
    """How many modules were replaced, and how many were left, of the first and the last model."""
    shown = rows[:1] + rows[-1:]
    changed = sum(each["count"] for row in shown for each in row["changed"])
    left = sum(sum(row["left"].values()) for row in shown)
    return f"{changed} modules, checked one by one, {left} left; a terminal of {SCREEN} lines shows which"


def _short(kernels: str, most: int = 2) -> str:
    names = kernels.split(", ")
    return ", ".join(names[:most]) + (f" and {len(names) - most}" if len(names) > most else "")

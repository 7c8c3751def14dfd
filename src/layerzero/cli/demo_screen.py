"""What ``layerzero demo`` prints: one screen of bars, what changed and why, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from layerzero.cli.tables import some

NEXT = (
    ("layerzero doctor", "what is here, and what others need"),
    ("layerzero tune attention --budget-s 60", "measure here: times decide then"),
    ("python examples/generate.py", "a model that writes; there are more"),
)

_WIDE = 120
"""Columns of a terminal in which two names of a list fit."""

_TOLD = len("  12345.67 ms  12.34 x (10.12-12.34), off 1e-02, other words") + 1
"""Columns apart from a way's name and its bar."""

_SHORTEST = 3
"""Columns of a bar on a narrow terminal."""


SCREEN = 40
"""Lines of a terminal that hold all of it, the prompt before and behind it included; on a smaller one it is short."""


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print the answer of the demonstration."""
    small = console.is_terminal and console.height < SCREEN
    counts = [row["runs"] for row in result["results"]]
    runs = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    threads = f", {result['threads']} threads" if not result["gpu"] else ""
    threads += f", busy: {result['busy']}" if result.get("busy") else ""
    measured = f"medians of {runs} turns, of their ratios, and (where those lie)"
    _say(console, f"[bold]{result['device']}[/]{threads}, torch {result['torch']}; {measured}")
    for line in dict.fromkeys(filter(None, [row.get("emulated") for row in result["results"]])):
        console.print(line, highlight=False)
    for row in result["results"]:
        _say(console, f"{'' if small else chr(10)}[bold]{row['what']}[/], {row['dtype']}")
        for bar in _bars(row, console.width):
            console.print(bar, no_wrap=True, overflow="ellipsis", highlight=False)
    if small:
        _say(console, f"[bold]what changed[/]: {_in_short(result['results'])}")
        _say_why(console, result, cut=True)
        _say(console, f"[bold]next[/]: {'; '.join(command for command, _ in NEXT[:2])}")
        return
    _say(console, "\n[bold]what changed[/] in the encoder and the decoder, checked module by module")
    for line in _changes(result["results"], most=2 if console.width >= _WIDE else 1):
        console.print(Padding(line, (0, 0, 0, 2), expand=False), highlight=False)
    _say_why(console, result, cut=False)
    _say(console, f"[bold]next[/] ({result['seconds']:.0f} s so far)")
    width = max(len(command) for command, _ in NEXT)
    for command, what in NEXT:
        _say(console, f"  {command.ljust(width)}  [dim]{what}[/]")


def _say_why(console: Console, result: Mapping[str, Any], *, cut: bool) -> None:
    _say(console, "[bold]why[/], for two calls of a word in the decoder")
    for each in result["why"]:
        refused = ", ".join(f"{count} {why}" for why, count in each["refused"].items())
        text = f"{each['call']}: {each['kernel']}, 1 of {len(each['legal'])}; refused: {refused}"
        if cut:
            _say(console, f"  {text}")
        else:
            console.print(Padding(text, (0, 0, 0, 2), expand=False), highlight=False)


def _say(console: Console, line: str) -> None:
    console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)


def _bars(row: Mapping[str, Any], width: int) -> Iterator[Text]:
    """One bar for each way, the longest stock's or longer."""
    longest = max(each["ms"] for each in row["ways"].values())
    named = max(map(len, row["ways"])) + 2
    room = max(_SHORTEST, width - named - _TOLD)
    for name, each in row["ways"].items():
        length = max(1, round(each["ms"] / longest * room))
        stock = name == "stock"
        line = Text(f"  {name:<{named}}{each['ms']:>9.2f} ms ")
        doubtful = stock or each["is_noise"]
        line.append("█" * length, style="dim" if doubtful else "green" if each["times_as_fast"] > 1.0 else "yellow")
        if not stock:
            between = f"{each['times_as_fast_from']:.2f}-{each['times_as_fast_to']:.2f}"
            if each["is_noise"]:
                line.append(f" noise ({between} x)", style="yellow")
            else:
                line.append(f" {each['times_as_fast']:.2f} x", style="bold")
                line.append(f" ({between})")
            line.append(f", off {each['error']:.0e}{_same(row, name)}")
        yield line


def _same(row: Mapping[str, Any], name: str) -> str:
    """Whether the decoder wrote the same words, where it wrote any."""
    same = row.get("same_words")
    return "" if same is None else ", same words" if same[name] else ", other words"


def _changes(rows: list[Mapping[str, Any]], most: int) -> Iterator[str]:
    """Lines on what ``lz.optimize`` replaced: one for each kind of module, of the first and the last model."""
    for row in rows[:1] + rows[-1:]:
        for each in row["changed"]:
            kernels = "" if each["kernels"] in {"", "by call"} else f", kernels {_short(each['kernels'], most)}"
            yield escape(f"{each['count']} {each['module']} by {_short(each['by'], most)}{kernels}")
        before, packed = (row["bytes"][name] / 1e6 for name in ("weights", "packed"))
        left = sum(row["left"].values())
        modules = "1 module" if left == 1 else f"{left} modules"
        yield f"[dim]{modules} left, {before:.0f} MB of weights and {packed:.0f} MB of packed copies[/]"


def _in_short(rows: list[Mapping[str, Any]]) -> str:
    """How many modules were replaced, and how many were left, of the first and the last model."""
    shown = rows[:1] + rows[-1:]
    changed = sum(each["count"] for row in shown for each in row["changed"])
    left = sum(sum(row["left"].values()) for row in shown)
    return f"{changed} modules, checked one by one, {left} left; a terminal of {SCREEN} lines shows which"


def _short(kernels: str, most: int) -> str:
    return some(kernels.split(", "), most)

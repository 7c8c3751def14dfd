"""What a long command tells on stderr while it works: a bar in a terminal, and a line for each result as it comes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from layerzero.cli.output import say


class _What(TextColumn):
    """What is done now: the one part of the line that is cut where a terminal is narrow, counts and times are not."""

    def render(self, task: Task) -> Text:
        """The text of a task, in one line."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class Live:
    """A bar and lines above it; without a terminal lines alone, and where nobody wants them nothing."""

    def __init__(self, progress: Progress, task: TaskID, *, quiet: bool) -> None:
        self._progress, self._task, self._quiet = progress, task, quiet

    def at(self, text: str, done: int, total: int, left_s: float | None) -> None:
        """Say what is done now, and how much there is left of calls and seconds."""
        left = "" if left_s is None or left_s == math.inf else f"{max(left_s, 0.0):.0f} s left"
        self._progress.update(self._task, completed=done, total=total, description=text, left=left)

    def row(self, text: str) -> None:
        """Tell a result."""
        if self._quiet:
            return
        if self._progress.disable:
            say(text)
        else:
            self._progress.console.print(Text(text), soft_wrap=True)


@contextlib.contextmanager
def live(*, quiet: bool, console: Console | None = None) -> Iterator[Live]:
    """Tell on stderr while a command works."""
    console = console or Console(stderr=True, highlight=False)
    left = TextColumn("{task.fields[left]}")
    what = _What("{task.description}", markup=False, table_column=Column())
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), left, what)
    off = quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=off, transient=True) as progress:
        task = progress.add_task("looking for what to measure", total=None, left="")
        yield Live(progress, task, quiet=quiet)

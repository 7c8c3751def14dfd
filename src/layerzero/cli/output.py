"""What every command shares: one answer as tables or as JSON, progress on stderr, one way to fail, and ``--module``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import io
import json
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand

from layerzero.cli.tables import Lines
from layerzero.core import errors
from layerzero.core.system import resources

WIDTH = 100
"""Columns where stdout is no terminal and COLUMNS says nothing; a table whose numbers and ids need more takes more."""

PROSE = 24
"""Columns that text gets at least which may wrap."""

LEAST, GAP = 10, 3
"""Columns that remain in a terminal for what may wrap, and those between two columns."""

FINE, NO, INVALID, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: fine; the answer is no; the question makes no sense; interrupted by Ctrl-C."""

END_S = 2.0
"""How long an interrupted command may take to end."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say.

    Attributes:
        data: what ``--json`` prints, with ``"Infinity"`` as text, which JSON has no word for.
        show: what a person sees; made only when it is shown.
        code: the exit code.
        folded: what a person sees where ``show`` takes more lines than the terminal has.
    """

    data: object
    show: Callable[[], Iterable[RenderableType]]
    code: int = FINE
    folded: Callable[[], Iterable[RenderableType]] | None = None


class Command(TyperCommand):
    """A command whose function returns an :class:`Answer`; ``--json`` and errors work the same in all of them."""

    def invoke(self, ctx: typer.Context) -> None:  # type: ignore[override]  # typer.Context is what typer passes
        as_json = bool(ctx.params.get("json"))
        with _warnings_on_stderr(), _stdout_kept_for_json(as_json):
            try:
                answer: Answer = super().invoke(ctx)
            except (errors.LayerZeroError, KeyError, ValueError, OSError) as error:
                if not _ours(error):
                    raise
                answer = _failure(error, ctx.command_path)
        try:
            _print(answer, as_json=as_json)
        except BrokenPipeError:
            raise  # whatever reads has seen enough: typer ends in silence
        except OSError as error:  # as of a full disk
            say(f"error: stdout: wanted a place to write to, got: {error.strerror}")
            with contextlib.suppress(io.UnsupportedOperation), _nowhere() as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is buffered would fail again at the end
            raise typer.Exit(NO) from None
        raise typer.Exit(answer.code)


def _print(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(json.loads(json.dumps(answer.data, default=str), parse_constant=str), indent=2))
        return
    console = stdout_console()
    parts = list(answer.show())
    if answer.folded is not None and console.is_terminal and not _fits(console, parts):
        parts = list(answer.folded())
    for part in parts:
        if isinstance(part, str):  # text as it is: neither wrapped nor read as markup
            typer.echo(part)
        else:
            _print_whole(console, part)


Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="MODULE", help="Import this first: it registers kernels; again for more."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

_OF_ALL = {
    "module": inspect.Parameter("module", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Modules),
    "json": inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson),
}
"""Options that commands have besides those of their functions."""


def examples(*lines: str) -> str:
    """What the help of commands ends with."""
    return "\b\nExamples:\n" + "\n".join(f"  layerzero {line}" for line in lines)


class Commands(typer.Typer):
    """Commands whose functions return an :class:`Answer`."""

    def command(  # type: ignore[override]  # of typer's options only these are used
        self, name: str, *lines: str, modules: bool = False
    ) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
        """Add a command with ``--json``, whose help ends in these examples.

        With ``modules`` it has ``--module``, too, and imports what that names before its function runs, which gets
        either option only where it has such a parameter.
        """

        def add(function: Callable[..., Answer]) -> Callable[..., Answer]:
            signature = inspect.signature(function, eval_str=True)
            own = signature.parameters
            more = [each for each in _OF_ALL.values() if each.name not in own and (modules or each.name == "json")]

            @functools.wraps(function)
            def run(**typed: Any) -> Answer:
                if modules:
                    import_modules(typed["module"] or ())
                return function(**{each: typed[each] for each in own})

            run.__signature__ = signature.replace(parameters=[*own.values(), *more])  # type: ignore[attr-defined]
            super(Commands, self).command(name, cls=Command, epilog=examples(*lines))(run)
            return function

        return add


def stdout_console(file: TextIO | None = None) -> Console:
    """Make a console that is readable in a terminal, in a pipe and in a file."""
    stream = file or sys.stdout
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(file=stream, width=WIDTH if piped else None, highlight=False)


def _print_whole(console: Console, part: RenderableType) -> None:
    """Print a table so that none of its numbers and ids is cut.

    Away from a terminal it takes the columns that they need. In one the widest go on in the next line.
    """
    before = console.width
    if isinstance(part, Table):
        endless = console.options.update(max_width=10_000)
        whole = [
            max(Measurement.get(console, endless, cell).maximum for cell in (column.header, *column.cells))
            for column in part.columns
        ]
        if console.is_terminal:
            _give_way(part, whole, console.width)
        else:
            for column, width in zip(part.columns, whole, strict=True):
                column.min_width = width if column.no_wrap or isinstance(part, Lines) else min(width, PROSE)
            console.width = max(before, Measurement.get(console, endless, part).minimum)
    console.print(part)
    console.width = before


def _fits(console: Console, parts: Iterable[RenderableType]) -> bool:
    """Whether a screen holds all of it, and the next prompt."""
    with console.capture() as printed:
        for part in parts:
            _print_whole(console, Text(part) if isinstance(part, str) else part)
    return len(printed.get().splitlines()) < console.height


def _give_way(table: Table, whole: Sequence[int], width: int) -> None:
    """Let the widest columns wrap that would not, as long as those alone take more than a terminal has."""
    needs = [size if column.no_wrap else min(size, LEAST) for column, size in zip(table.columns, whole, strict=True)]
    while sum(needs) + GAP * len(needs) > width:
        widest = max(range(len(needs)), key=lambda place: needs[place])
        if needs[widest] <= LEAST:
            return
        table.columns[widest].no_wrap, needs[widest] = False, LEAST


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), mode="w", encoding="utf-8")


def say(text: str) -> None:
    """Write a diagnostic, which never mixes with the answer."""
    typer.echo(text, err=True)


class Program(Commands):
    """The commands. Ctrl-C ends one within two seconds and with all that it started, whatever it is at."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # Python's word for one that was closed before
                setattr(sys, name, _nowhere())  # until the end
            elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")  # a letter that its encoding lacks ends no command
        if not kwargs.get("standalone_mode", True) or threading.current_thread() is not threading.main_thread():
            return super().__call__(*args, **kwargs)
        ended, (told, tell) = threading.Event(), os.pipe()
        os.set_blocking(tell, False)
        before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)  # heard of even while a kernel runs
        resources.started("layerzero-interrupts", _watch, told, ended)
        try:
            return super().__call__(*args, **kwargs)
        except SystemExit as end:
            if end.code == INTERRUPTED:  # what was begun is tidied up; what libraries wait for is not wanted now
                _end_now()
            raise
        finally:
            ended.set()
            signal.set_wakeup_fd(before)
            os.close(tell)


def _watch(told: int, ended: threading.Event) -> None:
    """Give an interrupted command two seconds to end by itself."""
    while (signals := os.read(told, 1)) and signal.SIGINT not in signals:
        pass
    if signals and not ended.wait(END_S):
        _end_now()
    os.close(told)


def _end_now() -> NoReturn:
    """End without waiting for anything, and end the processes that libraries started, as to compile."""
    for child in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _descendants(process: int) -> list[int]:
    """Processes that a process started, and those that they started; none where the system does not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it just ended
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _ours(error: Exception) -> bool:
    """Whether LayerZero raised this on purpose: a bug's ``KeyError: 'name'`` keeps its traceback."""
    if isinstance(error, errors.LayerZeroError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return module.startswith("layerzero.") and " " in _message(error)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: wanted a place to write to, got: {error.strerror}"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)  # str() would quote it


def _failure(error: Exception, command: str) -> Answer:
    """Write the error to stderr; with ``--json``, it is the document, too."""
    message = _message(error)
    say(f"error: {message}")
    usage = isinstance(
        error, (errors.InvalidCallError, errors.PolicyError, errors.RegistrationError)
    ) or not isinstance(error, errors.LayerZeroError)
    if usage:
        settings = isinstance(error, errors.PolicyError) and not isinstance(error, errors.UnknownOperationError)
        say(f"next step: {'`layerzero config keys` lists them' if settings else f'`{command} --help` has examples'}")
    data = {"error": {"type": type(error).__name__, "message": message}}
    return Answer(data, tuple, INVALID if usage else NO)


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Warnings as one line each, without the source line that Python adds."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _stdout_kept_for_json(active: bool) -> Iterator[None]:
    """Send what kernel libraries print, from Python or from C, to stderr while a command works."""
    if not active:
        yield
        return
    sys.stdout.flush()
    try:
        stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
    except io.UnsupportedOperation:  # streams in memory, as in a test
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    kept = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C buffers its own output and would write it after the switch back
        os.dup2(kept, stdout)
        os.close(kept)


class _What(TextColumn):
    """What is done now: the one part of the line that is cut where a terminal is narrow, counts and times are not."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class Live:
    """A bar and lines above it; without a terminal lines alone, and with ``quiet`` nothing."""

    def __init__(self, progress: Progress, task: TaskID, *, quiet: bool) -> None:
        self._progress, self._task, self._quiet = progress, task, quiet

    def at(self, text: str, done: int, total: int, left_s: float | None) -> None:
        """Say what is done now, and how much there is left of calls and seconds."""
        left = "" if left_s is None or left_s == math.inf else f"{max(left_s, 0.0):.0f} s left"
        self._progress.update(self._task, completed=done, total=total, description=text, left=left)

    def row(self, text: str) -> None:
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
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("looking for what to measure", total=None, left="")
        yield Live(progress, task, quiet=quiet)


def existing(file: Path, what: str) -> Path:
    """The file. Raises: ValueError where there is none."""
    try:
        got = "" if file.stat() and file.is_file() else "a folder" if file.is_dir() else "nothing"
    except (OSError, ValueError) as error:  # a name that no file may have; from Python 3.14 on, stat alone raises
        why = getattr(error, "strerror", error)
        got = "nothing" if isinstance(error, FileNotFoundError) else f"a name that names none: {why}"
    if got:
        raise ValueError(f"{file}: wanted {what}, got {got}")
    return file


def import_modules(modules: Sequence[str]) -> None:
    """Import each, with the current folder on the path, as ``python -m`` has it.

    Raises: ValueError for a module that does not import or registers nothing.
    """
    if not modules:
        return
    from layerzero.testing.conformance import imported

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    problem = imported(modules)
    if problem:
        raise ValueError(problem)

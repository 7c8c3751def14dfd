"""What is kept of work: the rows of the database, and which calls this machine really made.

The database holds works, and times of kernels on them. Calls that were chosen for are kept for ``layerzero tune``.

A miss hands over the facts of its call and goes on; once a second, and as the process ends, what came is merged into
one file of the cache folder. Hits are not counted: a call counts once a process and epoch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from layerzero.core.arguments import Axis
from layerzero.core.dtypes import INDEX, dtype_name
from layerzero.core.evidence import Measurement, call_work
from layerzero.core.facts import Facts
from layerzero.core.recipe import CallRecipe
from layerzero.core.schema import OperationSchema
from layerzero.core.system import disk, forking, log
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.environment import Environment
from layerzero.tuning.storage.sql_schema import COLUMNS, NUMBERS, holds_whole, start_of


@functools.cache
def _schema(operation: str) -> OperationSchema | None:
    found = REGISTRY.operations().get(operation)
    return None if found is None else found.schema


def scaling_of(facts: Mapping[str, str]) -> frozenset[str]:
    """Names of the scaling sizes of a work; none of an operation that this process does not know."""
    schema = _schema(facts.get("operation", ""))
    return frozenset() if schema is None else schema.scaling


def axes_of(facts: Mapping[str, str]) -> tuple[Axis, ...]:
    """What sizes of a work mean; nothing of an operation that this process does not know."""
    schema = _schema(facts.get("operation", ""))
    return () if schema is None else schema.axes


def implied_of(facts: Mapping[str, str]) -> frozenset[str]:
    """Names of the facts that sizes of a work imply."""
    schema = _schema(facts.get("operation", ""))
    return frozenset() if schema is None else schema.implied


class Work(msgspec.Struct, frozen=True):
    """What there is to do, as text: the facts of a call that change its time.

    Attributes:
        facts: by name, sorted.
        key: the identity of the work.
        family: the identity of all works that differ from it in scaling sizes only.
    """

    facts: tuple[tuple[str, str], ...]

    @property
    def key(self) -> bytes:
        return _digest(self.facts)

    @property
    def family(self) -> bytes:
        """Hash of the facts that are no scaling sizes."""
        named = dict(self.facts)
        scaling, implied = scaling_of(named), implied_of(named)
        sized = {name for name, value in self.facts if name in scaling and value.isdigit()}
        return _digest(tuple([pair for pair in self.facts if pair[0] not in implied and pair[0] not in sized]))

    @property
    def sizes(self) -> dict[str, int]:
        scaling = scaling_of(dict(self.facts))
        return {name: int(value) for name, value in self.facts if name in scaling and value.isdigit()}


_COUNTS = frozenset(map(dtype_name, INDEX))
"""Dtypes of tables and lengths: whichever it is, a call takes as long."""

_SCATTERED = frozenset({"expanded", "strided", "negated"})


def is_plain(memory: str) -> bool:
    """Whether all tensors are dense, or at least in their rows; of :func:`call_work`'s words."""
    return all(_SCATTERED.isdisjoint(word.partition(":")[2].split(",")) for word in memory.split())


def unusual(memory: str) -> str:
    """What is left of such words beside dense rows and tables: other dtypes, and how optional tensors broadcast."""
    left = []
    for word in memory.split():
        name, _, about = word.partition(":")
        told = [each for each in about.split(",") if each != "rows" and each not in _COUNTS]
        left += [f"{name}:{','.join(told)}"] if told else []
    return " ".join(left)


def in_other_layout(work: Work) -> Work | None:
    """The same work on dense tensors with their axes in the other order; None where there is no such thing."""
    facts = dict(work.facts)
    schema = _schema(facts.get("operation", ""))
    others = [each for each in (schema.layouts if schema is not None else ()) if each != facts["layout"]]
    layout = others[0] if others and facts["layout"] != str(None) else None
    if layout is None or any(word.partition(":")[2] != "rows" for word in facts["memory"].split()):
        return None
    return Work(tuple(sorted((facts | {"layout": layout, "memory": ""}).items())))


_ALIGNMENTS = "16", "8", "4", "2", "1"

_FIRST_AXIS = re.compile(r"(?<=[:,])([1n])(?=(?:x[1n])+(?: |,|$))")
"""Whether an optional tensor has one for all along its first axis, in the words of :func:`call_work`."""


def alike(work: Work) -> Iterator[Work]:
    """Of a call with an optional tensor, as a mask: with rows aligned otherwise, then for one batch or for each.

    A mask of 511 keys has rows that nothing is aligned in, and that of a batch of two has another word than that of one
    sequence; what was measured of either is the best that is known of the other. Where there is none, it is the data
    itself that is aligned otherwise, and kernels run it another way.
    """
    facts = dict(work.facts)
    memory, rows = facts.get("memory", ""), facts.get("row_alignment", "")
    if not _FIRST_AXIS.search(memory):
        return
    flipped = _FIRST_AXIS.sub(lambda found: "n" if found[1] == "1" else "1", memory)
    for words in dict.fromkeys((memory, flipped)):
        for aligned in (rows, *(each for each in _ALIGNMENTS if each != rows)):
            if (words, aligned) != (memory, rows):
                yield Work(tuple(sorted((facts | {"memory": words, "row_alignment": aligned}).items())))


def work_of(facts: Facts) -> Work:
    """The work of a call."""
    return Work(call_work(facts))


def _digest(pairs: tuple[tuple[str, str], ...]) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(pairs), digest_size=16).digest()


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One time, with everything that says what it is worth; a line of an exported file.

    Attributes:
        kernel: its id.
        facts: the work, see :class:`Work`.
        environment: under which it was taken.
        median_us, p95_us, variance_us2, samples, noise, first_call_us, graph, condition, origin: the measurement.
        device_us, host_us: its parts, None where they were not measured apart.
        error: of the result, relative; None where nothing was compared.
        adapts: what the plan had to adapt, as explain names it.
        device_uuid, layerzero: the very device, and this library's version; for people, they decide nothing.
        written_at: ISO 8601, UTC.
        source: where it was imported from; empty if it was measured here.
    """

    kernel: str
    facts: dict[str, str]
    environment: Environment
    median_us: float
    p95_us: float
    variance_us2: float
    samples: int
    noise: float
    first_call_us: float | None = None
    graph: bool = False
    condition: str = ""
    origin: str = "tune"
    device_us: float | None = None
    host_us: float | None = None
    error: float | None = None
    adapts: str = ""
    device_uuid: str = ""
    layerzero: str = ""
    written_at: str = ""
    source: str = ""

    @property
    def work(self) -> Work:
        return Work(tuple(sorted(self.facts.items())))

    @property
    def values(self) -> tuple[Any, ...]:
        """What the database holds of it behind work and graph, as it is read back."""
        return tuple([
            self.environment.key if name == "environment" else _stored(name, getattr(self, name)) for name in COLUMNS
        ])  # fmt: skip


def _plain(value: Any) -> Any:
    """A float of the language where a library's was measured: only those are written down."""
    return float(value) if isinstance(value, float) else value


def _stored(name: str, value: Any) -> Any:
    """A value as SQLite gives it back: numbers as floats, and no negative zero."""
    return value if value is None or name == "samples" or name not in NUMBERS else float(value) + 0.0


def row_of(
    kernel_id: str, work: Work, uuid: str, environment: Environment, measurement: Measurement, adapts: str = ""
) -> Row:
    """Write down a measurement that was just made."""
    from layerzero import __version__

    return Row(
        kernel=kernel_id,
        facts=dict(work.facts),
        environment=environment,
        **{name: _plain(getattr(measurement, name)) for name in Measurement.__slots__},
        adapts=adapts,
        device_uuid=uuid,
        layerzero=__version__,
        written_at=now(),
    )


def stored_row(work: bytes, graph: int, facts: Any, environment: Any, values: Sequence[Any]) -> Row:
    """A row of the database's columns, its checksum last. Raises: ValueError if it is not as it was written."""
    data = dict(zip(COLUMNS, values, strict=False))
    row = msgspec.convert(data | {"graph": bool(graph), "facts": facts, "environment": environment}, Row)
    check(row)
    if not holds_whole(start_of(work, graph), tuple(values)):
        raise ValueError(f"{row.kernel}: its checksum does not hold; it counts for nothing")
    if row.work.key != work or row.environment.key != data["environment"]:
        raise ValueError(f"{row.kernel}: its work or environment is not the one that it was measured for")
    return row


def now() -> str:
    """The time of writing: ISO 8601 in UTC to the millisecond, so that text sorts as time does."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


MAX_SAMPLES = 2**53
"""More than any call takes; what is above does not fit the database's integers at some point."""


def check(row: Row) -> None:
    """Refuse numbers that are no times. Raises: ValueError."""
    wrong = problem({name: getattr(row, name) for name in NUMBERS})
    if wrong:
        name, value = wrong
        raise ValueError(f"{row.kernel}: {name}: wanted a finite number, got {value}")


def problem(numbers: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The first of a row's numbers that is none, with its value; None if all are fine. For reading as for writing."""
    for name, value in numbers.items():
        if value is None and name in _OPTIONAL:
            continue
        whole = name == "samples"
        if not isinstance(value, int if whole else (float, int)) or not math.isfinite(value):
            return name, value
        if value < 0 or (value == 0 and name in _POSITIVE) or (whole and value > MAX_SAMPLES):
            return name, value
    return None


_OPTIONAL = frozenset({"first_call_us", "device_us", "host_us", "error"})
_POSITIVE = frozenset({"median_us", "samples", "device_us", "host_us"})


def is_to_come(written_at: str) -> bool:
    """Whether a time says that it was written in the future: some clock was wrong then, or is wrong now."""
    here = now()
    if written_at <= here:
        return False
    try:
        return datetime.fromisoformat(written_at) - datetime.fromisoformat(here) > SKEW
    except (ValueError, TypeError):  # no date, which sorts behind every date
        return True


SKEW = timedelta(minutes=1)
"""What the clocks of machines that share a folder may be apart."""


CALLS_FILE, CALLS_LOCK = "calls-1.json", "calls-1.lock"

MAX_WAITING = 4096
MAX_CALLS = 1000
"""Calls in the file; of further ones those that were made longest ago are forgotten."""

MOST_BYTES = 16 << 20


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call, how often it was chosen for, and when last."""

    count: int
    at_unix_s: float
    call: CallRecipe


class CallsMade:
    """The calls of this process that are not written yet, and the file of all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: deque[Facts] = deque(maxlen=MAX_WAITING)
        self._lock = forking.lock()
        self.add = self._waiting.append
        """Hand over the facts of a call; never waits."""
        forking.in_child(self.forget)
        atexit.register(self.write)

    def forget(self) -> None:
        """Leave what waits to the process that this one was forked from."""
        self._waiting.clear()

    def made(self) -> list[Made]:
        """What was called, in this process and in earlier ones, the latest first."""
        self.write()
        return sorted(self._read(), key=lambda each: -each.at_unix_s)

    def write(self) -> None:
        """Merge what came since; what cannot be written now waits, unless another process has it amid writing."""
        with self._lock:  # what another thread took from the queue is in the file before this one reads that
            self._write()

    def _write(self) -> None:
        if not self._waiting or disk.distrust(self.folder):
            return
        with contextlib.suppress(OSError):  # a full disk; the ledger tells of a folder that cannot be written
            disk.make_private(self.folder)
            with disk.opened(self.folder / CALLS_LOCK, os.O_RDWR | os.O_CREAT) as lock:
                if disk.lock(lock):  # else another process writes
                    self._merge()

    def _merge(self) -> None:
        taken = list[Facts]()
        try:
            for _ in range(len(self._waiting)):
                taken.append(self._waiting.popleft())
            self._put(taken)
        except BaseException as error:
            if isinstance(error, OSError) or not isinstance(error, Exception):
                self._waiting.extendleft(reversed(taken))  # a full disk, an interrupt: they wait for the next time
            raise

    def _put(self, taken: Sequence[Facts]) -> None:
        kept = {msgspec.json.encode(each.call): each for each in self._read()}
        now = time.time()
        for facts in taken:
            try:
                call = msgspec.json.encode(CallRecipe.of(facts))
                before = kept.get(call) or Made(0, now, msgspec.json.decode(call, type=CallRecipe))
            except Exception:  # logged and left out: it would keep all others from the file
                log.warning("a call is not kept for tuning: its recipe cannot be written", exc_info=True)
                continue
            kept[call] = Made(before.count + 1, now, before.call)
        latest = sorted(kept.values(), key=lambda each: -each.at_unix_s)[:MAX_CALLS]
        disk.write_whole(self.folder / CALLS_FILE, msgspec.json.encode(latest), private=True)

    def _read(self) -> list[Made]:
        if disk.distrust(self.folder):
            return []
        return disk.read_json(self.folder / CALLS_FILE, MOST_BYTES, list[Made]) or []  # else what comes is written anew

"""The file format of times that ship: a table of one device's, strictly read, and made of measured rows.

A table is JSON under ``tuning/priors``, one or more a device. It does not tell layouts, row strides and devices apart,
which :mod:`layerzero.tuning.storage.prior` makes up for: it decides less than what was measured here.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path

import msgspec

from layerzero.core.device import Device, capability_hash
from layerzero.core.dtypes import DTYPES
from layerzero.tuning.prediction.fitting import Time, weighed
from layerzero.tuning.storage.rows import Row, Work, implied_of, is_plain, scaling_of, unusual

FORMAT = 1
KIND = "layerzero priors"

LOOSE = frozenset({"layout", "memory", "row_alignment", "device_name", "platform", "sm"})
"""Facts that a table does not distinguish, besides those that sizes imply; of memory, what is dense and what counts."""

UNUSUAL = "unusual_memory"
"""The fact that says what is unusual about the tensors of a family; absent where nothing is."""


def told_apart(facts: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """What a table tells works apart by: everything that is no scaling size and does not follow from one."""
    left_out = LOOSE | implied_of(facts)
    scaling = scaling_of(facts)
    memory = unusual(facts.get("memory", ""))
    return frozenset(
        (name, value)
        for name, value in [*facts.items(), *([(UNUSUAL, memory)] if memory else [])]
        if name not in left_out and not (name in scaling and value.isdigit())
    )


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of kernels, in microseconds, at some scaling sizes; the device's, too, where it was measured apart."""

    sizes: dict[str, int]
    times_us: dict[str, float]
    device_us: dict[str, float] = {}


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cases that differ in scaling sizes only; ``graph`` is None where the times hold for eager calls and replays."""

    facts: dict[str, str]
    cases: list[Case]
    graph: bool | None = None


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of priors and where it comes from.

    Attributes:
        format, kind: version of this document, and what it is.
        device, driver, torch: under which it was measured.
        versions: by kernel, the version of its library, empty where torch brings it.
        date, script: when, and by what.
        resolution_us: what the times were rounded to.
        threads, capability: of a CPU, whose name alone tells neither; such a table counts in full for the same ones.
        instruction_sets: of a CPU: without them the table counts for no other one.
    """

    format: int
    kind: str
    device: str
    driver: str
    torch: str
    versions: dict[str, str]
    date: str
    script: str
    families: list[Family]
    resolution_us: float = 0.0
    threads: int = 0
    capability: str = ""
    instruction_sets: tuple[str, ...] = ()


def read_table(file: Path) -> Table:
    """Read a table strictly. Raises: ValueError with what was wanted and got; OSError."""
    try:
        table = msgspec.json.decode(file.read_bytes(), type=Table)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file.name}: {error}") from error
    if (table.format, table.kind) != (FORMAT, KIND):
        wanted = f"wanted format {FORMAT} of {KIND!r}"
        raise ValueError(f"{file.name}: {wanted}, got format {table.format} of {table.kind!r}")
    if not table.device or not math.isfinite(table.resolution_us) or table.resolution_us < 0:
        raise ValueError(f"{file.name}: wanted a device and a resolution_us of at least 0")
    date.fromisoformat(table.date)
    for number, family in enumerate(table.families):
        for problem in _problems(family, table):
            raise ValueError(f"{file.name}: families[{number}]: {problem}")
    return table


def _problems(family: Family, table: Table) -> Iterable[str]:
    facts = family.facts
    if not facts.get("operation") or facts.get("dtype") not in DTYPES:
        yield f"wanted an operation and a dtype, got {facts.get('operation')!r} and {facts.get('dtype')!r}"
    scaling = scaling_of(facts)
    misplaced = sorted(facts.keys() & (LOOSE | implied_of(facts) | scaling))
    if misplaced:
        yield f"facts: wanted none that a table does not tell apart or that is a size, got {', '.join(misplaced)}"
    names = [set(case.sizes) for case in family.cases]
    if not names or any(each != names[0] or not each <= scaling for each in names):
        yield f"cases: wanted the same scaling sizes in each, got {sorted(set().union(*names))}"
    for case in family.cases:
        for kernel_id, time_us in case.times_us.items():
            if not (math.isfinite(time_us) and time_us > 0):
                yield f"{kernel_id}: wanted a time above 0, got {time_us}"
            if kernel_id not in table.versions:
                yield f"{kernel_id}: wanted the version of its library in versions, got none"
        for kernel_id, device_us in case.device_us.items():
            if kernel_id not in case.times_us or not (math.isfinite(device_us) and device_us > 0):
                yield f"{kernel_id}: device_us: wanted a time above 0 next to one in times_us, got {device_us}"
        if min(case.sizes.values(), default=1) < 1:
            yield f"sizes: wanted numbers above 0, got {case.sizes}"


def slug(device_name: str) -> str:
    """A device's name as the beginning of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def table_of(found: Iterable[Row], script: str) -> Table:
    """Make a table of measured rows: what calls take while the host runs at its usual pace, three digits of it.

    Raises: ValueError unless they are of one device, driver, torch and versions.
    """
    times: dict[tuple[frozenset[tuple[str, str]], bool], dict[tuple[tuple[str, int], ...], dict[str, Row]]] = {}
    rows = [row for row in found if not row.source and is_plain(row.facts.get("memory", ""))]
    rows = [row for row in rows if row.facts.get("row_alignment") == "16"]
    for row in rows:
        sizes = Work(tuple(sorted(row.facts.items()))).sizes
        facts = told_apart(row.facts)
        case = times.setdefault((facts, row.graph), {}).setdefault(tuple(sorted(sizes.items())), {})
        if row.kernel not in case or case[row.kernel].written_at < row.written_at:
            case[row.kernel] = row
    versions = {(row.kernel, row.environment.version) for row in rows}
    about = {_about(row) for row in rows}
    if len(about) != 1 or len(dict(versions)) != len(versions):
        got = ", ".join(sorted({" ".join(map(str, filter(None, each))) for each in (*about, *versions)})) or "nothing"
        wanted = "wanted times of one device, driver and torch, and of one version of each library"
        raise ValueError(f"a table of priors: {wanted}, got {got}")
    ((device, driver, torch, threads, capability),) = about
    families = [
        Family(dict(sorted(facts)), list(_cases(cases)), graph)
        for (facts, graph), cases in sorted(times.items(), key=lambda each: (sorted(each[0][0]), each[0][1]))
    ]
    day = max(row.written_at for row in rows)[:10]
    names = dict(sorted(versions))
    here = Device.detect("cpu")  # a row keeps the hash of what its CPU can do
    sets = tuple(sorted(here.instruction_sets)) if capability == capability_hash(here) else ()
    return Table(
        *(FORMAT, KIND, device, driver, torch, names, day, script, families),
        threads=threads,
        capability=capability,
        instruction_sets=sets,
    )


def _about(row: Row) -> tuple[str, str, str, int, str]:
    environment = row.environment
    told = (environment.threads, environment.capability) if environment.platform == "cpu" else (0, "")
    return (environment.device, environment.driver, environment.torch, *told)


def _cases(measured: Mapping[tuple[tuple[str, int], ...], Mapping[str, Row]]) -> Iterator[Case]:
    times = {sizes: [_time(row) for row in rows.values()] for sizes, rows in measured.items()}
    waited: dict[tuple[str, str], list[float]] = {}
    for time in (each for several in times.values() for each in several):
        if time.waits and time.host_us is not None:
            waited.setdefault((time.kernel, time.adapts), []).append(time.host_us)
    hosts = {about: statistics.median_low(each) for about, each in waited.items()}
    for sizes in sorted(times):
        found = weighed(times[sizes], hosts)
        device_us = {name: each.device_us for name, each in sorted(found.items()) if each.device_us is not None}
        yield Case(
            dict(sizes),
            {name: float(f"{found[name].cost_us:.3g}") for name in sorted(found)},
            {name: float(f"{told_us:.3g}") for name, told_us in device_us.items()},
        )


def _time(row: Row) -> Time:
    numbers = (row.median_us, row.noise, row.samples, row.variance_us2)
    about = (row.kernel, row.environment.key, row.condition, row.source)
    return Time(*about, *numbers, row.written_at, row.adapts, row.device_us, row.host_us)

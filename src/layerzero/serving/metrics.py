"""``lz.metrics``: what this process chose, built and had to do without, as plain numbers, and the names they go by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import torch

from layerzero.core.system import memory
from layerzero.core.system.memory import FREE
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.events import EVENTS, BuildCounts
from layerzero.engine.functions import CALLS
from layerzero.engine.health import Counts
from layerzero.engine.plain import PLAIN_CALLS
from layerzero.serving.background_builds import BUILDS
from layerzero.tuning.storage.store import StoreLedger


class KernelMetrics(msgspec.Struct, frozen=True):
    """One kernel and operation in the life of this process.

    Attributes:
        kernel, operation: ids.
        selections: how often it was chosen. Hits are not choices, and are not counted: a counter would cost a hit.
        failures: how often it raised, or gave a result of another kind.
        fallbacks: how often another kernel ran in its place.
        builds, failed_builds, build_seconds: what was compiled, in the background or by ``lz.warmup``.
    """

    kernel: str
    operation: str
    selections: int = 0
    failures: int = 0
    fallbacks: int = 0
    builds: int = 0
    failed_builds: int = 0
    build_seconds: float = 0.0


class MemoryMetrics(msgspec.Struct, frozen=True):
    """What is free on a device, as it was read last.

    Attributes:
        device: as torch names it.
        free_bytes, largest_block_bytes: in all, and what one request can get.
        fragmentation: 0 where one request gets all of it at once, up to 1 where it lies in small pieces.
        age_seconds: how old the reading is.
    """

    device: str
    free_bytes: float
    largest_block_bytes: float
    fragmentation: float
    age_seconds: float


class Metrics(msgspec.Struct, frozen=True):
    """A snapshot of this process, plain data.

    Attributes:
        version, torch: of LayerZero and torch.
        kernels: each kernel and operation that was chosen, built, or failed.
        misses: calls that no kept plan served, by function: each waited for a choice.
        plans: plans that are kept now, by function.
        selecting_seconds: what all choices took, loading included.
        epochs: how often all plans were dropped: settings, times, builds or kernels changed.
        resting: kernels that failed and rest now, as ``KERNEL in OPERATION``.
        disabled: libraries that this process does without after repeated errors of the device.
        context_lost: what an error of the device that stays means; empty while the device works.
        suspects: kernels and classes that may have ended a process and wait for ``lz.confirm_suspects()``.
        bans: kernels and classes that a child process found wrong, crashing or hanging on this machine.
        frozen: classes whose kernel is held by ``lz.freeze`` or ``lz.agree``; None while choices follow new times.
        departures: held classes whose kernel could not run.
        building, builds_waiting, builds_dropped: kernels that are built now, calls behind them, calls without room.
        database_age_seconds: since measured times were last written; None where none are kept on disk.
        memory: what is free on each device in use; none of one that does not say.
        events_dropped, listener_errors: what ``lz.on_event``'s listeners lost.
    """

    version: str
    torch: str
    kernels: tuple[KernelMetrics, ...]
    misses: dict[str, int]
    plans: dict[str, int]
    selecting_seconds: float
    epochs: int
    resting: tuple[str, ...]
    disabled: tuple[str, ...]
    context_lost: str
    suspects: int
    bans: int
    frozen: int | None
    departures: int
    building: int
    builds_waiting: int
    builds_dropped: int
    database_age_seconds: float | None
    memory: tuple[MemoryMetrics, ...]
    events_dropped: int
    listener_errors: int

    def to_dict(self) -> dict[str, object]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return "\n".join(
            f"{each.name}{_labelled(labels)} {value:g}" for each in SERIES for labels, value in each.rows(self)
        )


def metrics() -> Metrics:
    """Count what this process did so far: choices, misses, builds, fallbacks, failures, bans, sizes of caches.

    Everything is counted on misses, builds and failures. A hit is not counted: it would cost as much again.
    """
    from layerzero import __version__

    health, frozen, ledger = ENGINE.health, ENGINE.frozen, ENGINE.ledger
    suspects = ledger.suspects()
    written = ledger.times.written_at_unix_s() if isinstance(ledger, StoreLedger) else None
    caches = {name: call.dispatcher.cache for name, call in list(CALLS.items())}
    plain = {name: dispatcher.ways for name, (dispatcher, _) in list(PLAIN_CALLS.items())}
    dropped, errors = EVENTS.lost()
    return Metrics(
        version=__version__,
        torch=str(torch.__version__),
        kernels=tuple(_kernels()),
        misses={name: each.misses for name, each in (caches | plain).items() if each.misses},
        plans={name: count for name, each in (caches | plain).items() if (count := len(each.plans()))},
        selecting_seconds=EVENTS.selecting_ns / 1e9,
        epochs=ENGINE.epoch,
        resting=tuple(f"{kernel} in {operation}" for kernel, operation in health.breakers()),
        disabled=tuple(health.disabled()),
        context_lost=health.context_lost,
        suspects=sum(each.verdict is None for each in suspects),
        bans=sum(each.verdict is not None for each in suspects),
        frozen=None if frozen is None else len(frozen.choices),
        departures=0 if frozen is None else len(frozen.departures),
        building=len(BUILDS.building),
        builds_waiting=BUILDS.waits,
        builds_dropped=BUILDS.dropped,
        database_age_seconds=None if written is None else max(time.time() - written, 0.0),
        memory=tuple(_memory()),
        events_dropped=dropped,
        listener_errors=errors,
    )


def _kernels() -> Iterator[KernelMetrics]:
    selections, builds, counts = EVENTS.selections(), EVENTS.builds(), ENGINE.health.counts()
    for key in sorted({*selections, *builds, *counts}):
        failed, built = counts.get(key, Counts()), builds.get(key, BuildCounts())
        yield KernelMetrics(
            *key, selections.get(key, 0), failed.failures, failed.fallbacks, built.built, built.failed, built.seconds
        )


def _memory() -> Iterator[MemoryMetrics]:
    """A reading is as old as it may be when a call is chosen for: a scrape costs no more."""
    for device in memory.in_use():
        found = FREE.of(device, CONFIGURATION.policy["memory.max_age_s"])
        if not math.isinf(found.free):
            name = f"{device.torch_type}:{device.index}"
            yield MemoryMetrics(name, found.free, found.largest, found.fragmentation, FREE.age_s(found))


Labels = dict[str, str]


class Series(NamedTuple):
    """A name under which numbers are exported.

    Attributes:
        name: as Prometheus wants it: the unit as a suffix, ``_total`` on what only grows.
        help: one line.
        rows: labels and value of each number.
    """

    name: str
    help: str
    rows: Callable[[Metrics], Iterator[tuple[Labels, float]]]

    @property
    def grows(self) -> bool:
        """Whether it is a counter; else it is a gauge."""
        return self.name.endswith("_total")

    @property
    def unit(self) -> str:
        """The unit as OpenTelemetry writes it."""
        return "s" if "_seconds" in self.name else "By" if self.name.endswith("_bytes") else "1"


def _of_kernels(read: Callable[[KernelMetrics], float]) -> Callable[[Metrics], Iterator[tuple[Labels, float]]]:
    def rows(found: Metrics) -> Iterator[tuple[Labels, float]]:
        for each in found.kernels:
            if value := read(each):
                yield {"kernel": each.kernel, "operation": each.operation}, value

    return rows


def _of_functions(read: Callable[[Metrics], dict[str, int]]) -> Callable[[Metrics], Iterator[tuple[Labels, float]]]:
    return lambda found: iter([({"function": name}, float(value)) for name, value in read(found).items()])


def _of_devices(read: Callable[[MemoryMetrics], float]) -> Callable[[Metrics], Iterator[tuple[Labels, float]]]:
    return lambda found: iter([({"device": each.device}, read(each)) for each in found.memory])


def _one(read: Callable[[Metrics], float | None]) -> Callable[[Metrics], Iterator[tuple[Labels, float]]]:
    return lambda found: iter([] if (value := read(found)) is None else [({}, float(value))])


SERIES: tuple[Series, ...] = (
    Series(
        "layerzero_info",
        "Versions; always 1.",
        lambda found: iter([({"version": found.version, "torch": found.torch}, 1.0)]),
    ),
    Series("layerzero_selections_total", "Choices of a kernel.", _of_kernels(lambda each: each.selections)),
    Series("layerzero_selection_seconds_total", "Time that choices took.", _one(lambda each: each.selecting_seconds)),
    Series("layerzero_misses_total", "Calls that no kept plan served.", _of_functions(lambda each: each.misses)),
    Series("layerzero_plans", "Plans that are kept now.", _of_functions(lambda each: each.plans)),
    Series("layerzero_epochs_total", "Times that all plans were dropped.", _one(lambda each: each.epochs)),
    Series("layerzero_failures_total", "Failures of a kernel in calls.", _of_kernels(lambda each: each.failures)),
    Series("layerzero_fallbacks_total", "Calls that another kernel ran.", _of_kernels(lambda each: each.fallbacks)),
    Series("layerzero_builds_total", "Builds that worked.", _of_kernels(lambda each: each.builds)),
    Series("layerzero_failed_builds_total", "Builds that failed.", _of_kernels(lambda each: each.failed_builds)),
    Series("layerzero_build_seconds_total", "Time that builds took.", _of_kernels(lambda each: each.build_seconds)),
    Series("layerzero_building", "Kernels that are built now.", _one(lambda each: each.building)),
    Series("layerzero_builds_waiting", "Calls whose builds wait.", _one(lambda each: each.builds_waiting)),
    Series("layerzero_builds_dropped_total", "Calls that found no room.", _one(lambda each: each.builds_dropped)),
    Series("layerzero_resting_kernels", "Kernels that failed and rest now.", _one(lambda each: len(each.resting))),
    Series("layerzero_disabled_libraries", "Libraries out of use here.", _one(lambda each: len(each.disabled))),
    Series("layerzero_context_lost", "1 once the device is lost.", _one(lambda each: bool(each.context_lost))),
    Series("layerzero_suspects", "Kernels and classes under suspicion.", _one(lambda each: each.suspects)),
    Series("layerzero_bans", "Kernels and classes banned on this machine.", _one(lambda each: each.bans)),
    Series("layerzero_frozen_classes", "Classes whose kernel is held.", _one(lambda each: each.frozen)),
    Series("layerzero_departures", "Held classes that run another kernel.", _one(lambda each: each.departures)),
    Series(
        "layerzero_database_age_seconds",
        "Time since measured times were last written.",
        _one(lambda each: each.database_age_seconds),
    ),
    Series("layerzero_memory_free_bytes", "Free memory of a device.", _of_devices(lambda each: each.free_bytes)),
    Series(
        "layerzero_memory_largest_block_bytes",
        "What one request can get of it.",
        _of_devices(lambda each: each.largest_block_bytes),
    ),
    Series(
        "layerzero_memory_fragmentation",
        "Share of it that one request does not get at once.",
        _of_devices(lambda each: each.fragmentation),
    ),
    Series("layerzero_memory_age_seconds", "Time since it was read.", _of_devices(lambda each: each.age_seconds)),
    Series("layerzero_events_dropped_total", "Events that listeners lost.", _one(lambda each: each.events_dropped)),
    Series("layerzero_listener_errors_total", "Errors that listeners raised.", _one(lambda each: each.listener_errors)),
)
"""Every exported number: Prometheus, OpenTelemetry and docs/operating.md read this table."""


def _labelled(labels: Labels) -> str:
    """Labels as Prometheus has them, quotes and backslashes escaped."""
    told = {name: value.replace("\\", r"\\").replace('"', r"\"") for name, value in labels.items()}
    return "{" + ", ".join(f'{name}="{value}"' for name, value in told.items()) + "}" if told else ""

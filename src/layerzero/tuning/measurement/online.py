"""Times of a share of the calls in production, against those of the database; off unless ``sampling_rate`` is set.

A plan that is chosen while it is set counts its calls down to the next sample. On a CPU a sample is two readings of the
clock, on a GPU two events on the stream of the call, which a thread reads later: nothing waits for the device. The
queue to that thread is bounded, and what does not fit is counted. Nothing is written to the database: a time taken
during other work is no measurement, but where twenty of them agree that a kernel takes half as long again as the
database says, or two thirds of it, one warning says so and what to tune anew. Once it was, samples are compared with
the new time. A process that was forked begins with nothing, and with a thread of its own.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from layerzero.core.errors import InvalidCallError
from layerzero.core.evidence import Provenance, call_work
from layerzero.core.facts import Facts, FactsBuilder
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import class_text
from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.core.system import forking, log
from layerzero.core.system.resources import started
from layerzero.engine.dispatch import ENGINE
from layerzero.tuning.storage.store import NOTES

MAX_WAITING = 1024
"""Samples that wait for the thread; further ones are dropped, and counted."""

MAX_KEPT = 1000
"""Calls (kernel and work) whose samples are kept."""

SAMPLES = 20
"""Samples of one call from which on its median is compared."""

DRIFT = 1.5
"""How many times as long as the database says, or as short, before it is reported."""

FIRST = 3
"""Calls of a new plan that are not sampled: allocators and caches settle."""

MAX_NOTES = 20
"""Calls that doctor names; it counts the others."""

PAUSE_S = 0.2
"""How often the thread looks."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A call that takes another time in production than when it was measured; ``advice``: how to measure it anew."""

    kernel_id: str
    operation: str
    call_class: str
    measured_us: float
    seen_us: float
    samples: int
    advice: str

    def __str__(self) -> str:
        return (
            f"{self.kernel_id} takes {self.seen_us:.1f} us in production (median of {self.samples}) for "
            f"{self.call_class}, {self.measured_us:.1f} us in the database: measure it again, {self.advice}"
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """What sampling has seen in this process.

    Attributes:
        taken: samples that were read.
        dropped: samples for which the queue had no room.
        unmeasured: samples of calls of which the database has no measured time.
        drifted: calls whose times differ.
    """

    taken: int = 0
    dropped: int = 0
    unmeasured: int = 0
    drifted: tuple[Drift, ...] = ()


@dataclass(slots=True)
class _Sample:
    """One call: its plan, its function, what its tensors were, its other arguments, and how to read its time."""

    plan: Plan
    function: Function
    arguments: dict[str, Any]
    time_us: Callable[[], float | None]


@dataclass(slots=True)
class _Seen:
    """A kernel and a call: what the database said when it was last read, samples in all and since then."""

    kernel: Kernel
    facts: Facts
    measured_us: float | None
    times_us: deque[float] = field(default_factory=lambda: deque(maxlen=4 * SAMPLES))
    since: int = 0
    drift: Drift | None = None

    def look(self) -> None:
        """Ask the database again; another time than before is compared with samples that are taken from now on."""
        self.since, measured_us = 0, _measured_us(self.kernel, self.facts)
        if measured_us != self.measured_us:
            self.measured_us, self.drift = measured_us, None
            self.times_us.clear()


class Sampler:
    """The queue, its thread, and what was seen."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Know nothing and have no thread: at first, and in a process that was forked."""
        self._lock = forking.lock()
        self._waiting: deque[_Sample] = deque()
        self._seen: dict[tuple[object, ...], _Seen] = {}
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self.taken = self.dropped = self.unmeasured = 0

    def put(self, sample: _Sample) -> None:
        """Hand a sample to the thread; never waits."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(sample)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = started("layerzero-sampling", self._work)
                    if self._thread is None:
                        log.debug("no sample is read: no thread could be started")
        self._wake.set()

    def _work(self) -> None:
        let_others_capture()
        while True:
            self._wake.wait()
            self._wake.clear()
            time.sleep(PAUSE_S)
            try:
                self.read()
            except Exception:
                log.exception("sampling: a sample could not be read")

    def read(self) -> None:
        """Read what is ready; the rest waits for the next time."""
        try:
            for _ in range(len(self._waiting)):
                sample = self._waiting.popleft()
                time_us = sample.time_us()
                if time_us is None:
                    self._waiting.append(sample)
                else:
                    self._keep(sample, time_us)
        finally:  # also behind one that could not be read
            if self._waiting:
                self._wake.set()

    def _keep(self, sample: _Sample, time_us: float) -> None:
        self.taken += 1
        facts = _facts(sample)
        if facts is None:
            self.unmeasured += 1
            return
        kernel = sample.plan.kernel
        key = (kernel.id, call_work(facts))
        seen = self._seen.get(key)
        if seen is None:
            seen = _Seen(kernel, facts, _measured_us(kernel, facts))
            with self._lock:
                if len(self._seen) >= MAX_KEPT:
                    self._seen.pop(next(iter(self._seen)))
                self._seen[key] = seen
        elif seen.since >= SAMPLES:
            seen.look()
        seen.since += 1
        seen.times_us.append(time_us)
        if seen.measured_us is None:
            self.unmeasured += 1
        elif seen.drift is None and len(seen.times_us) >= SAMPLES:
            self._compare(sample.plan, facts, seen)

    def _compare(self, plan: Plan, facts: Facts, seen: _Seen) -> None:
        assert seen.measured_us is not None
        median = statistics.median(seen.times_us)
        if 1 / DRIFT <= median / seen.measured_us <= DRIFT:
            return
        seen.look()
        if not seen.times_us:  # it was measured anew meanwhile
            return
        from layerzero.tuning.measurement.jobs import command_for

        counts = seen.measured_us, median, len(seen.times_us)
        drift = Drift(plan.kernel_id, plan.report.operation, class_text(facts), *counts, command_for(facts))
        first = not any(each.drift for each in self._kept())
        seen.drift = drift
        if first:
            log.warning("%s; in this process, lz.sampled() and lz.doctor() list all such calls", drift)

    def _kept(self) -> list[_Seen]:
        with self._lock:
            return list(self._seen.values())

    def sampling(self) -> Sampling:
        """What was seen so far; what was measured anew since it drifted does so no more."""
        drifting = [seen for seen in self._kept() if seen.drift is not None]
        for seen in drifting:
            seen.look()
        drifted = tuple(seen.drift for seen in drifting if seen.drift is not None)
        return Sampling(self.taken, self.dropped, self.unmeasured, drifted)

    def notes(self) -> tuple[str, ...]:
        found = self.sampling()
        notes = [str(each) for each in found.drifted[:MAX_NOTES]]
        if len(found.drifted) > MAX_NOTES:
            notes.append(f"{len(found.drifted) - MAX_NOTES} further calls take another time; lz.sampled() lists them")
        if found.dropped:
            notes.append(
                f"sampling dropped {found.dropped} of {found.taken + found.dropped} samples; lower sampling_rate"
            )
        return tuple(notes)


SAMPLER = Sampler()
"""The one of this process."""

NOTES.append(SAMPLER.notes)
forking.in_child(SAMPLER.begin)  # its thread exists in the parent only


def sampled() -> Sampling:
    """What sampling has seen of this process's calls: samples, dropped ones, and calls whose times drifted.

    ``lz.configure(sampling_rate=0.01)`` lets one call in a hundred be timed.
    """
    return SAMPLER.sampling()


def attach(plan: Plan, function: Function, rate: float) -> None:
    """Let a plan that was just made time a share of its calls.

    Calls with gradients are left alone: a part of their work comes later. So are those of a capture.
    """
    facts = plan.report.facts
    if facts["requires_grad"] or facts["capturing"]:
        return
    names = [parameter.name for parameter in function.parameters]
    run, cuda, index = plan.run, facts.device.torch_type == "cuda", facts.device.index
    spread = max(round(2 / max(rate, 1e-15)) - 1, 1)  # the mean of 1 to that is 1 / rate
    left = FIRST + random.randint(1, spread)  # noqa: S311  # no secret

    def counted(*values: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left > 0:
            return run(*values, **named)
        left = random.randint(1, spread)  # noqa: S311  # no secret
        arguments = {**dict(zip(names, values, strict=False)), **named}
        result, time_us = _with_events(run, arguments, index) if cuda else _with_clock(run, arguments)
        if time_us is not None:
            shapes = {name: _shape(value) for name, value in arguments.items()}
            SAMPLER.put(_Sample(plan, function, shapes, time_us))
        return result

    plan.run, plan.direct = counted, None


def _with_clock(run: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, Callable[[], float | None]]:
    started = time.perf_counter_ns()
    result = run(**arguments)
    took_us = (time.perf_counter_ns() - started) / 1000.0
    return result, lambda: took_us


def _with_events(
    run: Callable[..., Any], arguments: dict[str, Any], index: int
) -> tuple[Any, Callable[[], float | None] | None]:
    """Time a call by events in the stream of its device, which need not be the current one."""
    if torch.cuda.is_current_stream_capturing():
        return run(**arguments), None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(index)
    start.record(stream)
    result = run(**arguments)
    end.record(stream)

    def time_us() -> float | None:
        return start.elapsed_time(end) * 1000.0 if end.query() else None  # type: ignore[no-untyped-call]

    return result, time_us


def _shape(value: Any) -> Any:
    """What the thread needs of an argument: not the tensor, whose memory others wait for."""
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _facts(sample: _Sample) -> Facts | None:
    """The facts of a call that a plan served: its own sizes, and for the rest what the plan was chosen for."""
    chosen, handles = sample.plan.report.facts, sample.function.handles
    arguments = {
        name: torch.empty_strided(value[0], value[1], dtype=value[2], device="meta") if _is_shape(value) else value
        for name, value in sample.arguments.items()
        if name not in handles
    }
    try:
        routed = sample.function.route(sample.function.bind((), arguments), chosen.layout)
    except InvalidCallError:  # values decide something here that shapes do not tell
        return None
    if routed.operation is not chosen.operation:
        return None
    built = FactsBuilder(routed.operation).of_valid(routed.arguments, device=chosen.device, layout=chosen.layout)
    tensors = {
        name: msgspec.structs.replace(each, alignment_bytes=chosen.tensors[name].alignment_bytes)
        for name, each in built.tensors.items()
        if name in chosen.tensors
    }
    return chosen.of_sizes(built.sizes(), tensors)


def _measured_us(kernel: Kernel, facts: Facts) -> float | None:
    """The median that the database has of a kernel and a call; None where it was never measured."""
    found = ENGINE.ledger.evidence([kernel], facts).get(kernel.id)
    measured = found is not None and found.provenance in (Provenance.MEASURED, Provenance.IMPORTED)
    return found.time_us if found is not None and measured else None


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], torch.dtype)


def let_others_capture() -> None:
    """Let this thread ask events while another one captures a graph: CUDA forbids that to all threads otherwise."""
    if not torch.cuda.is_available() or not torch.version.cuda:
        return
    try:
        relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    except (OSError, AttributeError) as error:
        log.warning("sampling: a graph capture may fail while samples are read: %s", error)

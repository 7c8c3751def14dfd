"""What carries ``lz.metrics`` and events out of the process: Prometheus, OpenTelemetry, JSON lines of ``logging``.

Prometheus and OpenTelemetry read the counters when they collect; nothing is added to them during calls. Spans and
lines are made on the thread of a listener (:mod:`layerzero.engine.events`): an exporter that hangs stops itself alone.
"""

from __future__ import annotations

import importlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from layerzero.core.system import forking
from layerzero.engine.events import Event, Listener, on_event
from layerzero.serving.metrics import SERIES, Metrics, Series, metrics

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

SHARED_S = 1.0
"""How old a snapshot may be that instruments of OpenTelemetry share."""


def _library(name: str, package: str) -> Any:
    """An optional library. Raises: ModuleNotFoundError that names the package which brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"wanted {name}, got {error}; `pip install {package}` brings it", name=error.name
        ) from error


# Prometheus


class PrometheusCollector:
    """The numbers of ``lz.metrics`` as prometheus-client collects them, read when they are scraped."""

    def collect(self) -> Iterator[Any]:
        found = metrics()
        for each in SERIES:
            rows = list(each.rows(found))
            family = self._family(each, list(rows[0][0]) if rows else [])
            for labels, value in rows:
                family.add_metric(list(labels.values()), value)
            yield family

    def describe(self) -> Iterator[Any]:
        """Every series without values: registering does not scrape, and a registry refuses names that it has."""
        return (self._family(each, []) for each in SERIES)

    @staticmethod
    def _family(series: Series, labels: list[str]) -> Any:
        core = _library("prometheus_client.core", "prometheus-client")
        kind = core.CounterMetricFamily if series.grows else core.GaugeMetricFamily
        return kind(series.name, series.help, labels=labels)


def register_with_prometheus(registry: CollectorRegistry | None = None) -> PrometheusCollector:
    """Add the numbers of ``lz.metrics`` to a registry of prometheus-client; its default one if None.

    Returns: the collector, for ``registry.unregister``.
    Raises: ModuleNotFoundError without prometheus-client; ValueError for a registry that has them already.
    """
    collector = PrometheusCollector()
    (registry or _library("prometheus_client", "prometheus-client").REGISTRY).register(collector)
    return collector


def prometheus_text() -> bytes:
    """The numbers of ``lz.metrics`` as text that Prometheus scrapes. Raises: ModuleNotFoundError, see above."""
    client = _library("prometheus_client", "prometheus-client")
    registry = client.CollectorRegistry()
    registry.register(PrometheusCollector())
    return bytes(client.generate_latest(registry))


# OpenTelemetry


def register_with_opentelemetry(*, tracer_provider: Any = None, meter_provider: Any = None) -> Listener:
    """Give OpenTelemetry a span for each event, and the numbers of ``lz.metrics``, through its API alone.

    A span is named ``layerzero.KIND``, and is a child of the span that the call was made in. It begins and ends with
    the choice or the build. Its attributes are ``layerzero.kernel``, ``.operation``, ``.call_class``, ``.reason``,
    ``.instead`` and ``.took_us``. Without a provider, nothing is made.

    Args:
        tracer_provider, meter_provider: those that the program set globally if None.
    Returns: the listener, whose ``close`` ends the spans; instruments stay as long as their provider.
    Raises: ModuleNotFoundError without opentelemetry-api.
    """
    from layerzero import __version__

    trace = _library("opentelemetry.trace", "opentelemetry-api")
    api = _library("opentelemetry.metrics", "opentelemetry-api")
    tracer = trace.get_tracer("layerzero", __version__, tracer_provider)
    meter = api.get_meter("layerzero", __version__, meter_provider)
    shared = _Shared()
    for each in SERIES:
        name = each.name.removesuffix("_total").replace("_", ".", 1)
        make = meter.create_observable_counter if each.grows else meter.create_observable_gauge
        make(name, callbacks=[_observed(each, shared, api.Observation)], unit=each.unit, description=each.help)
    durations = meter.create_histogram("layerzero.selection.duration", "s", "Time that a choice took.")

    def span_of(event: Event) -> None:
        about = {"layerzero.kernel": event.kernel, "layerzero.operation": event.operation}
        took_ns = int((event.took_us or 0.0) * 1000)
        if event.kind == "selection":
            durations.record(took_ns / 1e9, about)
        span = tracer.start_span(f"layerzero.{event.kind}", start_time=event.at_ns - took_ns)
        if span.is_recording():
            given = {f"layerzero.{name}": value for name, value in event.to_dict().items() if name != "at_ns"}
            span.set_attributes(given)
            if event.kind == "failure" or (event.kind == "build" and event.reason):
                span.set_status(trace.StatusCode.ERROR, event.reason)
        span.end(event.at_ns)

    return on_event(span_of)


class _Shared:
    """One snapshot for the instruments of a collection: each one's second question begins the next."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._asked: set[str] = set()
        self._taken_s = 0.0
        self._found: Metrics | None = None

    def of(self, series: Series) -> Metrics:
        with self._lock:
            if self._found is None or series.name in self._asked or time.monotonic() - self._taken_s > SHARED_S:
                self._asked.clear()
                self._found, self._taken_s = metrics(), time.monotonic()
            self._asked.add(series.name)
            return self._found


def _observed(series: Series, shared: _Shared, observation: Callable[..., Any]) -> Callable[[Any], list[Any]]:
    """What an instrument asks when it is collected."""
    return lambda _: [observation(value, labels) for labels, value in series.rows(shared.of(series))]


# JSON lines


class JsonFormatter(logging.Formatter):
    """One JSON object a line for any record of ``logging``; a record of an event has the event's fields as well.

    Fields: ``time`` (UTC), ``level``, ``logger``, ``message``, of an event those of :class:`layerzero.Event`, and
    ``exception`` where there was one.
    """

    def format(self, record: logging.LogRecord) -> str:
        event = getattr(record, "layerzero", None)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **(event if isinstance(event, Mapping) else {}),  # other libraries may use the name as well
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # text that is no UTF-8, as in names of files; escapes say it
            text = json.dumps(msgspec.to_builtins(line, enc_hook=str, str_keys=True))
            return json.dumps(json.loads(text, parse_constant=lambda _: None))  # no number in JSON: null, as above


def register_with_logging(logger: str = "layerzero.events") -> Listener:
    """Log every event at INFO, on a thread of its own; :class:`JsonFormatter` writes all of its fields.

        handler = logging.StreamHandler(); handler.setFormatter(lz.JsonFormatter())
        events = logging.getLogger("layerzero.events"); events.addHandler(handler); events.setLevel(logging.INFO)
        lz.register_with_logging()

    Returns: the listener, whose ``close`` ends it.
    """
    log = logging.getLogger(logger)

    def line_of(event: Event) -> None:
        instead = f"; {event.instead} ran in its place" if event.instead else ""
        text = f"{event.kind} of {event.kernel} for {event.call_class}"
        text += f": {event.reason}" if event.reason else ""
        log.info("%s%s", text, instead, extra={"layerzero": event.to_dict()})

    return on_event(line_of)

"""Metrics are a snapshot of plain data; Prometheus, OpenTelemetry and JSON lines tell the same numbers and events."""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import os
import re
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.events import EVENTS
from layerzero.serving import exporters
from layerzero.serving.exporters import prometheus_text
from layerzero.serving.metrics import SERIES
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")


def norm(rows=2, width=8):
    return lz.rms_norm(torch.ones(rows, width), torch.ones(width))


def breaks(input, weight, *, eps):
    raise RuntimeError("no such luck")


@pytest.fixture
def broken():
    """A kernel that fails, in whose place torch's runs."""
    lz.register_kernel("norm.rms", "mine.breaks", priority=100)(breaks)
    lz.configure(unmeasured="priority", allow=["torch", "mine.breaks"])
    norm()


def of(name, found):
    (series,) = (each for each in SERIES if each.name == name)
    return list(series.rows(found))


def test_quotes_and_backslashes_in_a_kernels_id_are_escaped():
    lz.register_kernel("norm.rms", 'mine."q"\\b', priority=100)(breaks)
    lz.configure(unmeasured="priority", allow=["torch", "mine.*"])
    norm()
    told = r'{kernel="mine.\"q\"\\b", operation="norm.rms"} 1'
    assert f"layerzero_selections_total{told}" in str(lz.metrics())


@pytest.mark.usefixtures("broken")
def test_choices_failures_and_fallbacks_are_counted_and_hits_are_not():
    x, weight = torch.ones(2, 8), torch.ones(8)
    before = lz.metrics()
    for _ in range(50):
        lz.rms_norm(x, weight)
    found = lz.metrics()
    by_kernel = {(each.kernel, each.operation): each for each in found.kernels}
    broke, ran = by_kernel["mine.breaks", "norm.rms"], by_kernel["torch.rms_norm", "norm.rms"]
    assert (broke.selections, broke.failures, broke.fallbacks) == (1, 1, 1)
    assert (ran.failures, ran.fallbacks) == (0, 0)
    assert ran.selections - sum(each.selections for each in before.kernels if each.kernel == "torch.rms_norm") == 1
    assert found.misses["rms_norm"] - before.misses["rms_norm"] == 1, "49 of 50 were hits"
    assert found.plans["rms_norm"] == 1
    assert found.resting == ("mine.breaks in norm.rms",)
    assert found.selecting_seconds > before.selecting_seconds
    assert json.loads(json.dumps(found.to_dict()))["kernels"][0]["kernel"] == "mine.breaks"
    assert 'layerzero_failures_total{kernel="mine.breaks", operation="norm.rms"} 1' in str(found).splitlines()


def test_builds_are_counted():
    kernel = lz.list_kernels("rms_norm")[0]
    facts = lz.facts("rms_norm", torch.ones(2, 8), torch.ones(8))
    EVENTS.built(kernel, facts, 2.5)
    EVENTS.built(kernel, facts, 0.5, "no compiler")
    (found,) = (each for each in lz.metrics().kernels if each.builds)
    assert (found.kernel, found.builds, found.failed_builds, found.build_seconds) == (kernel.id, 1, 1, 3.0)


def test_what_is_frozen_and_departs_is_a_number():
    norm()
    assert lz.metrics().frozen is None
    assert of("layerzero_frozen_classes", lz.metrics()) == []
    lz.freeze()
    lz.configure(deny=["torch.rms_norm"])
    try:
        norm()
        assert (lz.metrics().frozen, lz.metrics().departures) == (1, 1)
    finally:
        lz.thaw()


def test_suspects_bans_and_the_age_of_the_database_are_read(tmp_path):
    assert lz.metrics().database_age_seconds is None
    ENGINE.ledger = ledger = StoreLedger(FileLedger(tmp_path))
    facts = lz.facts("rms_norm", torch.ones(2, 8), torch.ones(8))
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "torch.rms_norm")
    ledger.suspect(kernel, facts, "it was running as a process ended")
    assert (lz.metrics().suspects, lz.metrics().bans) == (1, 0)
    ledger.settle(ledger.suspects()[0], Verdict.CRASHED, "SIGSEGV")
    assert (lz.metrics().suspects, lz.metrics().bans) == (0, 1)
    file = tmp_path / "perfdb.sqlite"
    ledger.times.spool.database.path = file
    file.write_bytes(b"damaged")
    os.utime(file, (1e9, 1e9))
    assert lz.metrics().database_age_seconds > 1e8, "a damaged one has an age, too, and nothing raises"


def test_a_context_that_is_lost_is_a_number():
    assert of("layerzero_context_lost", lz.metrics()) == [({}, 0.0)]
    ENGINE.health.context_lost = "restart the process"
    assert of("layerzero_context_lost", lz.metrics()) == [({}, 1.0)]


def test_names_are_as_prometheus_wants_them():
    assert len({each.name for each in SERIES}) == len(SERIES)
    for each in SERIES:
        assert re.fullmatch(r"layerzero_[a-z_]+", each.name)
        assert each.help.endswith(".")
        assert not re.search(r"_(ms|us|milliseconds|microseconds|kb|mb)\b", each.name), "base units alone"


def test_every_name_is_explained_for_operators():
    page = (Path(lz.__file__).parents[2] / "docs" / "operating.md").read_text()
    assert [each.name for each in SERIES if f"| `{each.name}`" not in page] == []


@pytest.mark.usefixtures("broken")
def test_prometheus_reads_the_same_numbers():
    parser = pytest.importorskip("prometheus_client.parser")
    families = {each.name: each for each in parser.text_string_to_metric_families(prometheus_text().decode())}
    assert {each.name.removesuffix("_total") for each in SERIES} == set(families)
    for each in SERIES:
        family = families[each.name.removesuffix("_total")]
        assert family.type == ("counter" if each.grows else "gauge")
    (sample,) = families["layerzero_fallbacks"].samples
    assert sample.name == "layerzero_fallbacks_total"
    assert (sample.labels, sample.value) == ({"kernel": "mine.breaks", "operation": "norm.rms"}, 1.0)


def test_a_registry_of_the_program_scrapes_when_it_is_asked():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    collector = lz.register_with_prometheus(registry)
    about = {"function": "rms_norm"}
    before = registry.get_sample_value("layerzero_misses_total", about) or 0
    norm(3, 16)
    assert registry.get_sample_value("layerzero_misses_total", about) == before + 1
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        lz.register_with_prometheus(registry)
    text = client.generate_latest(registry).decode()
    for each in SERIES:
        assert text.count(f"# HELP {each.name} ") == 1
    registry.unregister(collector)
    assert registry.get_sample_value("layerzero_misses_total", about) is None


@pytest.mark.parametrize("package", ["prometheus-client", "opentelemetry-api"])
def test_a_library_that_is_absent_is_named_with_its_package(package, monkeypatch):
    real = importlib.import_module

    def absent(name, package=None):
        if name.startswith(("prometheus_client", "opentelemetry")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ModuleNotFoundError, match=f"`pip install {package}` brings it"):
        getattr(lz, f"register_with_{package.partition('-')[0]}")()


@pytest.fixture
def collected():
    """Spans and instruments in memory."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    spans, instruments = trace.TracerProvider(), MeterProvider([reader])
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    listener = lz.register_with_opentelemetry(tracer_provider=spans, meter_provider=instruments)
    yield spans, exporter, reader, listener
    listener.close()
    instruments.shutdown()
    spans.shutdown()


def test_opentelemetry_gets_a_span_for_each_event_below_the_callers(collected):
    spans, exporter, _, listener = collected
    lz.register_kernel("norm.rms", "mine.breaks", priority=100)(breaks)
    lz.configure(unmeasured="priority", allow=["torch", "mine.breaks"])
    with spans.get_tracer("test").start_as_current_span("request") as request:
        norm()
    assert listener.flush(60)
    found = {each.name: each for each in exporter.get_finished_spans()}
    assert set(found) == {"request", "layerzero.selection", "layerzero.failure", "layerzero.fallback"}
    about = dict(found["layerzero.fallback"].attributes)
    assert about["layerzero.kernel"] == "mine.breaks"
    assert about["layerzero.instead"] == "torch.rms_norm"
    assert about["layerzero.call_class"].startswith("norm.rms float32")
    assert about["layerzero.reason"] == "RuntimeError: no such luck"
    chosen = found["layerzero.selection"]
    assert chosen.parent.span_id == request.get_span_context().span_id
    wanted_ns = int(chosen.attributes["layerzero.took_us"] * 1000)
    assert chosen.end_time - chosen.start_time == wanted_ns
    assert not found["layerzero.failure"].status.is_ok


def test_opentelemetry_collects_the_numbers(collected):
    _, _, reader, listener = collected
    norm()
    assert listener.flush(60)
    data = reader.get_metrics_data()
    found = {each.name: each for of in data.resource_metrics for scope in of.scope_metrics for each in scope.metrics}
    (point,) = [
        each for each in found["layerzero.selections"].data.data_points if each.attributes["kernel"] == "torch.rms_norm"
    ]
    assert point.value == EVENTS.selections()["torch.rms_norm", "norm.rms"]
    assert found["layerzero.selection_seconds"].unit == "s"
    assert found["layerzero.selection.duration"].data.data_points[0].count == 1


def test_opentelemetry_takes_one_snapshot_a_collection(collected, monkeypatch):
    _, _, reader, _ = collected
    taken = []
    monkeypatch.setattr(exporters, "metrics", lambda: taken.append(None) or lz.metrics())
    monkeypatch.setattr(exporters, "SHARED_S", math.inf)
    for count in (1, 2, 3):
        reader.get_metrics_data()
        assert len(taken) == count
    monkeypatch.setattr(exporters, "SHARED_S", -1.0)
    reader.get_metrics_data()
    assert len(taken) == 3 + len(SERIES), "one that is too old is not shared"


def test_without_a_provider_nothing_is_made():
    trace = pytest.importorskip("opentelemetry.trace")
    made = []
    listener = lz.register_with_opentelemetry()
    span = trace.get_tracer("test").start_span("mine")
    assert not span.is_recording(), "no provider is set in tests"
    type(span).set_attributes, before = lambda *given: made.append(given), type(span).set_attributes
    try:
        norm()
        assert listener.flush(60)
    finally:
        type(span).set_attributes = before
        listener.close()
    assert (made, listener.errors) == ([], 0)


def test_an_exporter_that_hangs_or_raises_harms_no_call(collected, caplog):
    spans, _, _, listener = collected
    from opentelemetry.sdk.trace import SpanProcessor

    class Raises(SpanProcessor):
        def on_start(self, span, parent_context=None):
            raise ConnectionError("the collector is gone")

    spans.add_span_processor(Raises())
    for width in (8, 16):
        assert norm(width=width).shape == (2, width)
    assert listener.flush(60)
    assert listener.errors == 2
    assert caplog.text.count("raised ConnectionError: the collector is gone") == 1


def test_json_lines_hold_the_fields_of_events_and_of_other_records():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(lz.JsonFormatter())
    log = logging.getLogger("layerzero.events")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    listener = lz.register_with_logging()
    try:
        norm()
        assert listener.flush(60)
        log.warning("a plain %s", "line")
        log.error("it failed", exc_info=ValueError("two\nlines"))
    finally:
        listener.close()
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    event, plain, failed = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (event["kind"], event["kernel"], event["level"]) == ("selection", "torch.rms_norm", "INFO")
    assert event["took_us"] > 0
    assert event["message"].startswith("selection of torch.rms_norm for norm.rms float32")
    assert event["time"].endswith("+00:00")
    assert (plain["message"], plain["logger"]) == ("a plain line", "layerzero.events")
    assert "ValueError: two\nlines" in failed["exception"]


def test_a_line_of_what_is_no_utf_8_is_written_with_escapes():
    event = {"reason": "\udc80", "at_ns": 3}
    record = logging.makeLogRecord({"name": "other", "msg": "no file \udcff", "layerzero": event})
    line = json.loads(lz.JsonFormatter().format(record))
    assert (line["message"], line["reason"], line["at_ns"]) == ("no file \udcff", "\udc80", 3)


@pytest.mark.parametrize("text", ["plain", "no file \udcff"])
def test_numbers_that_json_has_none_for_are_null_in_every_line(text):
    event = {"a": math.inf, "b": [-math.inf, math.nan]}
    written = lz.JsonFormatter().format(logging.makeLogRecord({"name": "other", "msg": text, "layerzero": event}))
    line = json.loads(written, parse_constant=pytest.fail)
    assert (line["message"], line["a"], line["b"]) == (text, None, [None, None])


@pytest.mark.parametrize("given", ["a string", 3, None, ["kind"]])
def test_a_record_of_another_library_may_use_the_name(given):
    record = logging.makeLogRecord({"name": "other", "msg": "a line", "layerzero": given})
    line = json.loads(lz.JsonFormatter().format(record))
    assert set(line) == {"time", "level", "logger", "message"}

"""Probes answer by ASGI and by a server of the standard library, alike; nothing that goes wrong harms the process."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.engine.dispatch import ENGINE
from layerzero.serving import exporters, probes
from layerzero.serving.probes import MAX_AGE_S, Probes

EXAMPLES = Path(__file__).parents[2] / "examples"
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def by_server(answers, path, method="GET"):
    server = lz.serve_health(0)
    server._server.probes = answers
    try:
        return asked(server.url + path, method)
    finally:
        server.close()


def asked(url, method="GET"):
    """Status, type and text, as a client of the standard library gets them."""
    try:
        with OPENER.open(urllib.request.Request(url, method=method), timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def by_asgi(answers, path, method="GET", **scope):
    sent = []

    async def receive():
        raise AssertionError("a probe reads no body")

    async def send(message):
        sent.append(message)

    asyncio.run(answers({"type": "http", "method": method, "path": path, **scope}, receive, send))
    start, body = sent
    headers = dict(start["headers"])
    if method != "HEAD":
        assert int(headers[b"content-length"]) == len(body["body"])
    return start["status"], headers[b"content-type"].decode(), body["body"].decode()


WAYS = pytest.mark.parametrize("ask", [by_server, by_asgi])


@WAYS
def test_a_process_lives_until_its_device_is_lost(ask):
    assert ask(Probes(), "/livez") == (200, "text/plain; charset=utf-8", "alive\n")
    ENGINE.health.context_lost = "the device's context is lost; restart the process"
    assert ask(Probes(), "/livez")[::2] == (503, "the device's context is lost; restart the process\n")


@WAYS
def test_readiness_has_the_lines_of_the_report(ask, tmp_path):
    status, _, text = ask(Probes(sets=["embedding"]), "/readyz")
    assert (status, text.splitlines()[0][:6]) == (200, "ready:")
    assert "sets: ready: 12 operations of embedding find kernels" in text
    ENGINE.health.context_lost = "restart the process"
    status, _, text = ask(Probes(), "/readyz")
    assert (status, text[:10]) == (503, "not ready:")
    assert "health: not ready: restart the process" in text
    status, _, text = ask(Probes(tmp_path / "none.json"), "/readyz")
    assert (status, text.partition(":")[0]) == (503, "/readyz")
    assert "wanted a manifest that lz.record wrote" in text


@WAYS
def test_metrics_are_prometheus_text(ask):
    pytest.importorskip("prometheus_client")
    lz.rms_norm(torch.ones(2, 8), torch.ones(8))
    status, kind, text = ask(Probes(), "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'layerzero_selections_total{kernel="torch.rms_norm",operation="norm.rms"}' in text


@WAYS
def test_without_prometheus_client_the_answer_says_what_brings_it(ask, monkeypatch):
    def absent():
        raise ModuleNotFoundError("`pip install prometheus-client` brings it")

    monkeypatch.setattr(probes, "prometheus_text", absent)
    assert ask(Probes(), "/metrics")[::2] == (501, "`pip install prometheus-client` brings it\n")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_probes_go_to_another_process_with_what_they_were_made_of(again, tmp_path):
    made = Probes(model="one", device="cpu", sets=["a"], fallback_file=tmp_path / "fallback")
    twin = again(made)
    assert (twin._asked, twin._file.path) == (made._asked, made._file.path)


@WAYS
def test_what_is_no_probe_is_refused(ask):
    assert ask(Probes(), "/")[::2] == (404, "wanted one of /livez, /readyz, /metrics, /statez, got '/'\n")
    assert ask(Probes(), "/livez", "POST")[::2] == (405, "wanted GET or HEAD, got POST\n")
    assert ask(Probes(), "/livez", "HEAD")[::2] == (200, "")


def test_a_request_of_no_address_is_answered():
    server = lz.serve_health(0)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
            answer = client.makefile("rb").read()
    finally:
        server.close()
    assert answer.startswith(b"HTTP/1.0 404 ")
    assert b"got 'http://['" in answer


def test_an_app_is_mounted_below_a_path():
    assert by_asgi(Probes(), "/layerzero/livez", root_path="/layerzero")[0] == 200
    assert by_asgi(Probes(), "/livez", root_path="/layerzero")[0] == 200, "servers that cut the path themselves"
    assert isinstance(probes.app, Probes)


def test_an_app_starts_and_ends_and_refuses_websockets():
    sent, messages = [], iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message["type"])

    asyncio.run(probes.app({"type": "lifespan"}, receive, send))
    asyncio.run(probes.app({"type": "websocket"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


def test_readiness_is_looked_at_once_in_ten_seconds_and_by_one_at_a_time(monkeypatch):
    now, looked, gate = [0.0], queue.SimpleQueue(), queue.SimpleQueue()

    class Report:
        def __bool__(self):
            return True

        def __str__(self):
            return "ready: as ever"

    def check(**_):
        looked.put(None)
        gate.get(timeout=60)
        return Report()

    monkeypatch.setattr(probes, "readiness_check", check)
    answers = Probes(clock=lambda: now[0])
    first = threading.Thread(target=answers.answer, args=("GET", "/readyz"))
    first.start()
    looked.get(timeout=60)
    assert answers.answer("GET", "/readyz").body == b"not ready: looking for the first time\n"
    assert answers.answer("GET", "/livez").status == 200, "liveness waits for nothing"
    gate.put(None)
    first.join(60)
    for now[0] in (1.0, MAX_AGE_S - 1):
        assert answers.answer("GET", "/readyz").body == b"ready: as ever\n"
    assert looked.empty()
    now[0] = MAX_AGE_S
    gate.put(None)
    assert answers.answer("GET", "/readyz").status == 200
    assert not looked.empty()


def test_a_look_that_takes_long_is_repeated_where_something_moved_and_seldom_else(monkeypatch):
    now, looks, ready = [0.0], [], [True]

    class Report:
        def __bool__(self):
            return ready[0]

    def check(**_):
        now[0] += 3.0
        looks.append(now[0])
        return Report()

    def asked_after(seconds):
        """How many looks there were, once it is asked so long behind the latest."""
        now[0] = looks[-1] + seconds
        answers.answer("GET", "/readyz")
        return len(looks)

    monkeypatch.setattr(probes, "readiness_check", check)
    answers = Probes(clock=lambda: now[0])
    answers.answer("GET", "/readyz")
    most = 3.0 / probes.SHARE
    assert asked_after(most - 1) == 1, "3 s of 60, and nothing moved"
    assert asked_after(most) == 2
    lz.configure(tune_samples=7)
    assert asked_after(MAX_AGE_S - 1) == 2
    assert asked_after(MAX_AGE_S) == 3, "settings moved"
    ENGINE.health.context_lost = "restart the process"
    assert asked_after(MAX_AGE_S) == 4, "health moved"
    lz.rms_norm(torch.ones(2, 8), torch.ones(8))
    assert asked_after(MAX_AGE_S) == 4, "a choice moves nothing"
    lz.freeze()
    try:
        assert asked_after(MAX_AGE_S) == 5, "what is frozen moved"
    finally:
        lz.thaw()
    ready[0] = False
    assert asked_after(MAX_AGE_S) == 6
    assert asked_after(MAX_AGE_S) == 7, "what is not ready is looked at as often as may be"


def test_a_probe_that_fails_is_told_once(monkeypatch, caplog):
    def broken():
        raise OSError("the disk is gone")

    monkeypatch.setattr(exporters, "metrics", broken)
    monkeypatch.setattr(probes, "prometheus_text", broken)
    answers = Probes()
    for _ in range(3):
        assert answers.answer("GET", "/metrics") == (503, b"/metrics: OSError: the disk is gone\n", probes._TEXT)
    assert caplog.text.count("the disk is gone") == 1


def test_a_client_that_goes_away_prints_nothing(capfd):
    server = lz.serve_health(0)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\n")
        assert asked(server.url + "/livez")[0] == 200
    finally:
        server.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_in_use_is_told_in_a_line_with_the_next_step():
    server = lz.serve_health(0)
    try:
        told = CliRunner().invoke(main, ["serve-health", "--port", str(server.port)])
    finally:
        server.close()
    assert told.exit_code == 2
    line = told.stderr.splitlines()[0]
    assert line == (
        f"error: port: wanted a free one on 127.0.0.1, got {server.port}, which another process has; "
        "name another, or 0 for any free one"
    )
    again = lz.serve_health(server.port)  # the port was given back
    again.close()


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70000)])
def test_an_address_that_is_not_here_is_refused(host, port):
    with pytest.raises(ValueError, match=rf"wanted to listen on {host}:{port}, got: .*; name another address or port"):
        lz.serve_health(port, host=host)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_hold_the_port():
    lz.serve_health(0)  # a program need not keep it
    gc.collect()
    (server,) = probes._OPEN
    (told, tell), (began, begin) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begin, b".")  # it has let go of the port
        os.read(told, 1)
        os._exit(0)
    os.read(began, 1)
    server.close()
    try:
        lz.serve_health(server.port).close()
    finally:
        os.write(tell, b".")
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_may_close_what_its_parent_serves():
    server = lz.serve_health(0)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends the child where it hangs
        server.close()
        server.wait()
        os._exit(0)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert asked(server.url + "/livez")[0] == 200, "the parent serves on"
    finally:
        server.close()
    server.close()  # a second time


def started(command, line, **options):
    """A process that prints an address, and that address; ended by the caller."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    timer = threading.Timer(120, process.kill)
    timer.start()
    said = []
    for text in process.stdout:
        said.append(text)
        if line in text:
            return process, timer, next(word for word in text.split() if word.startswith("http://"))
    pytest.fail("".join(said))


def curl(url):
    """The status and text that curl gets."""
    made = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "-m", "60", "-w", "\n%{http_code}", url],
        capture_output=True, text=True, check=True, timeout=90,
    )  # fmt: skip
    text, _, status = made.stdout.rpartition("\n")
    return int(status), text


@pytest.mark.slow
def test_the_command_is_asked_by_curl_until_a_signal_ends_it():
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    command = [sys.executable, "-m", "layerzero", "serve-health", "--port", "0", "--for", "embedding"]
    process, timer, url = started(command, "answers /livez")
    try:
        assert curl(f"{url}/livez") == (200, "alive\n")
        status, text = curl(f"{url}/readyz")
        assert (status, "embedding" in text) == (200, True)
        assert curl(f"{url}/metrics")[0] in (200, 501)
        assert curl(f"{url}/")[0] == 404
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        timer.cancel()
    assert process.returncode == 130


@pytest.mark.slow
def test_kubernetes_probes_of_the_example_are_answered():
    """The command of the example runs with another port; every path that it names is asked."""
    if not EXAMPLES.exists():
        pytest.skip("examples are not part of an installed package")
    deployment = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (port,) = (each["containerPort"] for each in container["ports"])
    command = container["command"]
    assert command[-1] == str(port)
    gets = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {each["port"] for each in gets.values()} == {port}
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    run = [sys.executable, *command[1:-1], "0"]
    process, timer, url = started(run, "probes on", cwd=EXAMPLES.parent, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    url = url.replace("0.0.0.0", "127.0.0.1")
    try:
        for each in gets.values():
            assert asked(url + each["path"])[0] == 200
        assert asked(url + template["metadata"]["annotations"]["prometheus.io/path"])[0] in (200, 501)
    finally:
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        timer.cancel()
    assert (process.returncode, said.splitlines()[-1]) == (0, "ended by SIGTERM")

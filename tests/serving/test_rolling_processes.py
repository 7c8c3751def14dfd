"""A rolling update of real processes of ``layerzero serve-health``, asked by the real client, with the real command."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from typer.testing import CliRunner

from clock import Clock
from layerzero.cli.app import main
from layerzero.serving.rolling_update import FAILED, UPDATED, Hooks, RollingUpdate, ask, command

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals of POSIX")]

RESTART = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, name, *more = sys.argv[1:]
place = Path(folder, name)
held, log = place.with_suffix(".pid"), place.with_suffix(".log")
if held.exists():
    os.kill(int(held.read_text()), signal.SIGKILL)
line = [sys.executable, "-m", "layerzero", "serve-health", "--port", place.with_suffix(".port").read_text()]
line += ["--for", "embedding", "--fallback-file", str(place.with_suffix(".fallback")), *more]
with log.open("w") as said:
    process = subprocess.Popen(line, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True)
held.write_text(str(process.pid))
while "answers /livez" not in log.read_text() and process.poll() is None:
    time.sleep(0.05)  # until it listens, or has ended
"""
"""Ends an instance and starts it anew, as a unit of a service does."""


class Processes:
    """Instances by name, each on a port of its own."""

    def __init__(self, folder, names):
        self.folder = folder
        held = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
        ports = {name: each.getsockname()[1] for name, each in held.items()}
        for name, each in held.items():
            each.close()
            (folder / f"{name}.port").write_text(str(ports[name]))
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}

    def restart(self, name, *more):
        subprocess.run([sys.executable, "-c", RESTART, str(self.folder), name, *more], check=True)

    def signal(self, name, number):
        os.kill(int((self.folder / f"{name}.pid").read_text()), number)

    def end(self):
        for each in self.urls:
            with suppress(OSError):
                self.signal(each, signal.SIGKILL)

    def forced(self):
        return {name: json.loads(ask(f"{url}/statez").text)["fallback"] for name, url in self.urls.items()}


@pytest.fixture
def processes(tmp_path):
    made = []

    def start(names):
        made.append(Processes(tmp_path, names))
        threads = [threading.Thread(target=made[0].restart, args=(each,)) for each in names]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return made[0]

    yield start
    for each in made:
        each.end()


def test_the_command_updates_every_process(processes, tmp_path):
    fleet, file = processes("ab"), tmp_path / "update.json"
    before = {each: (tmp_path / f"{each}.pid").read_text() for each in "ab"}
    seen = tmp_path / "{name}.seen"
    look = [sys.executable, "-c", "import sys; open(sys.argv[2], 'w').write(sys.argv[1])", "{url}", str(seen)]
    asked = ["rolling-update", *(f"{name}={url}" for name, url in fleet.urls.items()), "--state", str(file)]
    asked += ["--update", shlex.join([sys.executable, "-c", RESTART, str(tmp_path), "{name}"])]
    asked += ["--checkpoint", shlex.join(look)]
    asked += ["--fallback-on", f"touch {tmp_path}/{{name}}.fallback", "--json"]
    run = CliRunner().invoke(main, [*asked, "--fallback-off", f"rm -f {tmp_path}/{{name}}.fallback"])
    assert run.exit_code == 0, run.output
    data = json.loads(run.stdout)
    assert (data["done"], [each["reached"] for each in data["instances"]]) == (True, [UPDATED, UPDATED])
    assert "torch" in data["versions"]
    assert {each: (tmp_path / f"{each}.pid").read_text() for each in "ab"}.items().isdisjoint(before.items())
    assert {each: (tmp_path / f"{each}.seen").read_text() for each in "ab"} == fleet.urls
    assert fleet.forced() == {"a": False, "b": False}
    assert run.stderr.splitlines()[-1] == "done (2 updated)"
    assert json.loads(file.read_bytes()) == data


@pytest.mark.parametrize("way", ["never ready", "dies", "hangs"])
def test_a_process_that_does_not_come_back_stops_it_and_the_next_run_goes_on(processes, tmp_path, way):
    fleet, file, clock = processes("ab"), tmp_path / "update.json", Clock()

    def update(instance):
        more = ["--manifest", str(tmp_path / "none.json")] if way == "never ready" and instance.name == "b" else []
        fleet.restart(instance.name, *more)
        if instance.name == "b" and way != "never ready":
            fleet.signal("b", signal.SIGKILL if way == "dies" else signal.SIGSTOP)
            hung.append(way)

    def asks(url):
        stopped = way == "hangs" and hung and url.startswith(fleet.urls["b"])
        return ask(url, 0.05 if stopped else 120)  # a process that was stopped answers at no time

    def sleep(seconds):
        clock.now += seconds

    def run(update):
        hooks = Hooks(
            update, command(f"touch {tmp_path}/{{name}}.fallback"), command(f"rm {tmp_path}/{{name}}.fallback")
        )
        given = {"ready_s": 3, "file": file, "ask": asks, "clock": clock, "sleep": sleep}
        return RollingUpdate(fleet.urls, hooks, **given).run()

    hung = []
    reached = run(update)
    assert [each.reached for each in reached.instances] == [UPDATED, FAILED]
    told = (
        "/readyz: wanted it ready, got 503: /readyz" if way == "never ready" else "/livez: wanted it alive, got nothing"
    )
    assert reached.instances[1].told.startswith(told)
    assert clock.now >= 3, "it was waited for as long as was said"
    assert json.loads(ask(f"{fleet.urls['a']}/statez").text)["fallback"], "what is updated chooses nothing yet"
    hung.clear()
    assert run(lambda instance: fleet.restart(instance.name)).done
    assert fleet.forced() == {"a": False, "b": False}

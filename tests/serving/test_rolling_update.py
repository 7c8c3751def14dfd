"""A rolling update: one at a time, all on torch's own kernels, stopped by the first instance that is not as wanted."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from typer.testing import CliRunner

from clock import Clock
from layerzero.cli.app import main
from layerzero.core.system import disk
from layerzero.serving.probes import InstanceState
from layerzero.serving.rolling_update import (
    FAILED,
    UPDATED,
    UPDATING,
    WAITING,
    Hooks,
    Reply,
    RollingUpdate,
    ask,
    command,
)


class Fleet:
    """Instances that are no processes; hooks act on them, and what happens is written down."""

    def __init__(self, names="abc"):
        self.states = {each: InstanceState(f"{each}1", {"layerzero": "1"}, {}, file="/run/fallback") for each in names}
        self.unready, self.dead, self.acts, self.clock = set(), set(), [], Clock()
        self.lock = threading.Lock()

    def ask(self, url):
        name, path = url.removeprefix("http://").split("/")
        if name in self.dead:
            return Reply(0, "ConnectionRefusedError: nothing listens")
        if path == "readyz" and name in self.unready:
            return Reply(503, "not ready: 3 builds are missing\nand more")
        return Reply(200, msgspec.json.encode(self.states[name]).decode() if path == "statez" else "fine")

    def change(self, name, **what):
        with self.lock:
            self.states[name] = msgspec.structs.replace(self.states[name], **what)

    def update(self, instance):
        self.acts.append(f"update {instance.name}")
        assert all(each.fallback for each in self.states.values()), "all of them run torch's own kernels"
        self.change(instance.name, process=self.states[instance.name].process + "+", versions={"layerzero": "2"})

    def on(self, instance):
        self.acts.append(f"on {instance.name}")
        self.change(instance.name, fallback=True)

    def off(self, instance):
        self.acts.append(f"off {instance.name}")
        self.change(instance.name, fallback=False)

    def keep(self, instance):
        self.acts.append(f"keep {instance.name}")

    def run(self, file=None, most=1, **hooks):
        given = Hooks(**{"update": self.update, "fallback_on": self.on, "fallback_off": self.off} | hooks)
        urls = {each: f"http://{each}" for each in self.states}
        return RollingUpdate(
            urls, given, max_unavailable=most, ready_s=5, file=file, ask=self.ask, clock=self.clock, sleep=self.sleep
        ).run()

    def sleep(self, seconds):
        self.clock.now += seconds


def states(reached):
    return {each.name: each.reached for each in reached.instances}


def test_all_are_forced_then_updated_one_by_one_then_let_go():
    fleet = Fleet()
    reached = fleet.run(checkpoint=fleet.keep)
    assert reached.done, reached.lines()
    assert fleet.acts == [f"{act} {each}" for act in ("keep", "on", "update", "off") for each in "abc"]
    assert states(reached) == dict.fromkeys("abc", UPDATED)
    assert (reached.versions, reached.lines()[0]) == ({"layerzero": "2"}, "done (3 updated)")


def test_one_that_never_gets_ready_ends_it_and_the_next_run_goes_on(tmp_path):
    fleet, file = Fleet(), tmp_path / "update.json"

    def update(instance):
        fleet.update(instance)
        fleet.unready |= {"b"} if instance.name == "b" else set()

    reached = fleet.run(file, update=update)
    assert states(reached) == {"a": UPDATED, "b": FAILED, "c": WAITING}
    assert reached.lines()[0] == "stopped: b did not come back as wanted (1 updated, 1 failed, 1 waiting)"
    assert reached.instances[1].told == "/readyz: wanted it ready, got 503: not ready: 3 builds are missing"
    assert all(each.fallback for each in fleet.states.values()), "versions differ: none chooses for itself"
    fleet.unready.clear()
    fleet.acts.clear()
    assert fleet.run(file).done
    assert fleet.acts == ["on a", "on b", "on c", "update b", "update c", "off a", "off b", "off c"]
    with pytest.raises(ValueError, match="that update is done; remove the file to begin another"):
        fleet.run(file)


@pytest.mark.parametrize("way", ["dies", "stays", "raises", "other version", "forgets the fallback"])
def test_what_does_not_come_back_as_wanted_is_named(way):
    fleet, told = Fleet(), {
        "dies": "/livez: wanted it alive, got nothing: ConnectionRefusedError: nothing listens",
        "stays": "wanted a new process, got the one from before the update",
        "raises": "b: update: OSError: no such unit",
        "other version": "versions: layerzero: wanted 2, got 3",
        "forgets the fallback": "wanted torch's own kernels alone, got the opposite; it follows /run/fallback",
    }  # fmt: skip

    def update(instance):
        if instance.name == "b" and way == "raises":
            raise OSError("no such unit")
        if instance.name == "b" and way == "stays":
            return
        fleet.update(instance)
        if instance.name == "b":
            fleet.dead |= {"b"} if way == "dies" else set()
            fleet.change("b", **{"versions": {"layerzero": "3"}} if way == "other version" else {})
            fleet.change("b", fallback=way != "forgets the fallback")

    reached = fleet.run(update=update)
    assert states(reached) == {"a": UPDATED, "b": FAILED, "c": WAITING}
    assert reached.instances[1].told == told[way]


@pytest.mark.parametrize("way", ["dead", "unready", "of another version", "without a file", "not forced"])
def test_nothing_is_updated_where_the_instances_are_not_as_wanted_before(way):
    fleet, hooks = Fleet(), {}
    if way == "dead":
        fleet.dead.add("b")
    elif way == "unready":
        fleet.unready.add("b")
    elif way == "of another version":
        fleet.change("b", versions={"layerzero": "0"})
    elif way == "without a file":
        fleet.change("b", file="")
    else:
        hooks = {"fallback_on": lambda _: None}
    reached = fleet.run(**hooks)
    assert not reached.done
    assert reached.problem.startswith("a: wanted torch's own" if way == "not forced" else "b")
    assert not [each for each in fleet.acts if each.startswith("update")]


def test_none_is_updated_while_another_is_not_ready():
    fleet = Fleet()

    def update(instance):
        fleet.update(instance)
        fleet.unready.add("c")  # another one than that which is updated

    reached = fleet.run(update=update)
    assert states(reached) == {"a": UPDATED, "b": WAITING, "c": WAITING}
    assert reached.problem.startswith("c: /readyz: wanted it ready")


def test_two_at_a_time_and_what_was_broken_off_comes_first(tmp_path):
    fleet, file, together = Fleet("abcd"), tmp_path / "update.json", []
    meet = threading.Barrier(2, timeout=60)

    def update(instance):
        meet.wait()  # both of a pair are updated at once
        together.append(instance.name)
        fleet.update(instance)
        fleet.dead |= {instance.name} & {"c", "d"}

    reached = fleet.run(file, most=2, update=update)
    assert states(reached) == {"a": UPDATED, "b": UPDATED, "c": FAILED, "d": FAILED}
    assert [set(together[:2]), set(together[2:])] == [{"a", "b"}, {"c", "d"}]
    held = json.loads(file.read_bytes())
    held["instances"][3]["reached"] = UPDATING  # as where the coordinator itself was killed
    file.write_text(json.dumps(held))
    fleet.dead.clear()
    fleet.acts.clear()
    assert fleet.run(file).done
    assert [each for each in fleet.acts if "update" in each] == ["update c", "update d"], "neither waits for the other"


def test_an_old_process_that_was_not_ready_before_its_update_is_no_new_one():
    fleet, asked = Fleet("a"), []

    def ask(url):
        if url == "http://a/readyz" and fleet.acts:
            asked.append(url)
            if len(asked) == 2:  # as its turn comes; forced it was ready
                return Reply(503, "not ready: the disk is full")
        return Fleet.ask(fleet, url)

    fleet.ask = ask
    reached = fleet.run(update=lambda _: None)
    assert states(reached) == {"a": FAILED}
    assert reached.instances[0].told == "wanted a new process, got the one from before the update"


def test_an_old_process_that_outlived_a_broken_off_update_is_no_new_one(tmp_path):
    fleet, file = Fleet(), tmp_path / "update.json"

    def killed(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fleet.run(file, update=killed)
    reached = fleet.run(file, update=lambda _: None)
    assert reached.instances[0].told == "wanted a new process, got the one from before the update"
    assert fleet.run(file).done


@pytest.mark.parametrize(("after", "other"), [("a", "c"), ("c", "b")])
def test_an_instance_that_is_let_go_amid_the_update_stops_it(after, other):
    fleet = Fleet()

    def update(instance):
        fleet.update(instance)
        if instance.name == after:
            fleet.change(other, fallback=False)

    reached = fleet.run(update=update)
    assert (reached.done, reached.versions) == (False, {"layerzero": "2"})
    assert reached.problem.startswith(f"{other}: wanted torch's own kernels alone, got the opposite")


def test_kernels_of_the_hub_that_forced_instances_lack_make_no_other_version(tmp_path):
    fleet, file = Fleet(), tmp_path / "update.json"
    hub = {"layerzero": "1", "kernels": "with those of the hub"}
    for each in "abc":
        fleet.change(each, versions=hub)

    def on(instance):
        if instance.name == "b" and len(fleet.acts) == 1:
            raise OSError("no such host")
        fleet.on(instance)
        fleet.change(instance.name, versions={**hub, "kernels": "built in"})

    assert fleet.run(file, fallback_on=on).problem == "b: fallback_on: OSError: no such host"
    fleet.acts.clear()
    fleet.acts.append("again")
    fleet.change("c", versions={**hub, "layerzero": "0"})
    assert fleet.run(file, fallback_on=on).problem.startswith("c differs from b: versions: layerzero"), "like with like"
    fleet.change("c", versions=hub)
    assert fleet.run(file, fallback_on=on).done


def test_two_at_work_on_one_file_do_not_update_at_once(tmp_path):
    fleet, file = Fleet(), tmp_path / "update.json"
    second = RollingUpdate(
        {each: f"http://{each}" for each in "abc"}, Hooks(print), ready_s=0, ask=fleet.ask, file=file
    )

    def update(instance):
        fleet.update(instance)
        with pytest.raises(BlockingIOError, match="lock: wanted no other process at work, got one"):
            second.run()

    if disk.HAS_LOCKS:
        assert fleet.run(file, update=update).done
        assert [each.name for each in tmp_path.iterdir()] == ["update.json"]
        with pytest.raises(ValueError, match="that update is done"):
            second.run()  # it was made before the first one ended


@pytest.mark.parametrize("field", ["settings", "frozen"])
def test_instances_that_would_choose_otherwise_are_not_let_go(field):
    fleet = Fleet()

    def update(instance):
        fleet.update(instance)
        if instance.name == "c":
            fleet.change(
                "c", **{"settings": {"unmeasured": "'priority'"}} if field == "settings" else {"frozen": "f00"}
            )

    reached = fleet.run(update=update)
    assert (states(reached), reached.done) == (dict.fromkeys("abc", UPDATED), False)
    assert reached.problem.startswith(f"c differs from a: {field}")
    assert not [each for each in fleet.acts if each.startswith("off")]


def test_what_is_no_update_is_refused(tmp_path):
    fleet, file = Fleet(), tmp_path / "update.json"
    with pytest.raises(ValueError, match="wanted fallback_on and fallback_off, or neither, got one"):
        Hooks(fleet.update, fallback_on=fleet.on)
    for wrong in ({}, {"a": "10.0.0.7:9400"}, {"a": "file:///etc/passwd"}):
        with pytest.raises(ValueError, match="wanted names with addresses as http"):
            RollingUpdate(wrong, Hooks(fleet.update))
    with pytest.raises(ValueError, match="max_unavailable: wanted 1 or more, got 0"):
        fleet.run(most=0)
    file.write_text("[]")
    with pytest.raises(ValueError, match="wanted what an update reached, got something else"):
        fleet.run(file)
    file.unlink()
    fleet.dead.add("a")
    fleet.run(file)
    with pytest.raises(ValueError, match="wanted the instances of that update"):
        Fleet("ab").run(file)
    run = CliRunner().invoke(main, ["rolling-update", "a=http://a", "--update", "true", "--fallback-on", "true"])
    assert (run.exit_code, run.stderr.splitlines()[0][:46]) == (2, "error: --fallback-on, --fallback-off: wanted b")
    run = CliRunner().invoke(main, ["rolling-update", "a=http://a", "a=http://b", "--update", "true", "--no-fallback"])
    assert (run.exit_code, "wanted each name once" in run.stderr) == (2, True)


def test_a_command_gets_the_instance_without_a_shell_and_its_last_word_is_told():
    (instance,) = RollingUpdate({"a;b": "http://a"}, Hooks(print)).reached.instances
    code = "import sys; print(*sys.argv[1:]); sys.exit(len(sys.argv) - 3)"
    line = shlex.join([sys.executable, "-c", code, "{name}", "{url}"])
    command(line)(instance)
    with pytest.raises(RuntimeError, match=r"exit code 1: a;b http://a \$HOME$"):
        command(f"{line} $HOME")(instance)
    with pytest.raises(ValueError, match="wanted a command, got ' '"):
        command(" ")
    with pytest.raises(ValueError, match=r"wanted a command, got .*: No closing quotation"):
        command("touch 'fallback")


def test_what_answers_nothing_or_no_http_is_an_answer_too():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/livez"
        assert ask(url, timeout_s=0.05) == Reply(0, "TimeoutError: timed out"), "it accepts, and says nothing"
    assert ask(url)[0] == 0
    assert "ConnectionRefusedError" in ask(url).text


def test_a_probe_that_sends_elsewhere_is_not_followed():
    asked = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(302 if self.path == "/livez" else 200)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status = ask(f"http://127.0.0.1:{server.server_port}/livez").status
        server.shutdown()
    assert (status, asked) == (302, ["/livez"])

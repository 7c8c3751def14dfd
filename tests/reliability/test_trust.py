"""What docs/security.md says: each test that it names exists, and what the source must not contain is not in it."""

from __future__ import annotations

import ast
import os
import re
import signal
import stat
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.core.system import disk
from layerzero.testing import process
from layerzero.tuning.storage import host_notes

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "layerzero"


@pytest.fixture(autouse=True)
def hangs_end_the_run():
    signal.alarm(300)
    yield
    signal.alarm(0)


# markers of plugins


def left_behind(folder):
    """A marker as a dead process leaves it."""
    with host_notes.importing(folder, "evil", "1"):
        (path,) = (folder / "plugins").iterdir()
        said = path.read_bytes()
    path.write_bytes(said)
    return path


def test_a_marker_of_a_plugin_that_is_a_pipe_holds_up_nobody(tmp_path):
    folder = tmp_path / "cache"
    path = left_behind(folder)
    path.unlink()
    os.mkfifo(path)
    with host_notes.importing(folder, "evil", "1") as before:
        assert before == "", "it is no marker"


@pytest.mark.parametrize("to", ["/dev/zero", "/nonexistent", "/etc/hostname"])
def test_a_marker_of_a_plugin_that_is_a_link_is_not_followed(tmp_path, to):
    folder = tmp_path / "cache"
    path = left_behind(folder)
    path.unlink()
    path.symlink_to(to)
    with host_notes.importing(folder, "evil", "1") as before:
        assert before == ""


def test_markers_of_plugins_are_private(tmp_path):
    before = os.umask(0)
    try:
        with host_notes.importing(tmp_path / "new" / "cache", "evil", "1"):
            made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
            modes = {(path.is_dir(), oct(stat.S_IMODE(path.lstat().st_mode))) for path in made}
    finally:
        os.umask(before)
    assert len(made) == 4
    assert modes == {(True, "0o700"), (False, "0o600")}


def test_a_folder_that_others_may_write_says_nothing_about_plugins(tmp_path):
    folder = tmp_path / "cache"
    left_behind(folder)
    with host_notes.importing(folder, "evil", "1") as before:
        assert before.startswith("it ended process")
    folder.chmod(0o777)
    with host_notes.importing(folder, "evil", "1") as before:
        assert before == ""
    assert len(list((folder / "plugins").iterdir())) == 1, "nothing is written there, either"


# children


def test_children_import_nothing_from_where_they_are_started():
    child = process.Process("layerzero.tuning.verification.child", process.child_environment((), {}))
    try:
        said = []
        while len(said) < 4 and child.poll() is None:  # it is empty for a moment while a program is exchanged
            said = Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")
    finally:
        child.end()
    assert said[1:4] == [b"-P", b"-m", b"layerzero.testing.child_main"]


# the source

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "socket", "urllib.request", "http", "requests", "ftplib"}
FORBIDDEN_CALLS = {"eval", "os.system", "os.popen", "yaml.load", "torch.load", "torch.hub.load", "__import__"}
OBJECTS = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$")
"""Exchanges of torch.distributed that unpickle what another process sent."""

EXEC = {"engine/call.py", "engine/plan_source.py"}
CHILDREN = {
    "testing/process.py",
    "tuning/verification/build_child.py",  # asks the compiler that torch uses
    "serving/rolling_update.py",  # runs an operator's hooks
    "engine/probe.py",  # asks an operator's interpreter or container for its packages, and kills a container
    "tuning/storage/machine_exchange.py",  # asks a C++ compiler for its version
}
CONNECTED = {
    ("serving/probes.py", "http.server"),
    ("serving/rolling_update.py", "http.client"),
    ("serving/rolling_update.py", "urllib.request"),
    *((f"serving/isolation/{name}.py", "socket") for name in ("child", "kernels", "messages", "worker")),
}
"""What answers probes, what asks those that an operator names, where a program or a command asks for it, and pairs of
sockets between a process and its own children, which no other process can reach."""


NAMED = (*FORBIDDEN_MODULES, *FORBIDDEN_CALLS, "exec", "subprocess", "shell", "_object")
LOOKED_FOR = re.compile("|".join(map(re.escape, NAMED)))
"""Most files have none of it."""


def written(node):
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def test_nothing_executes_data_starts_a_shell_or_opens_a_connection():
    execs, children, bad = set(), set(), []
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if LOOKED_FOR.search(text) else ():
            imported = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            bad += [(name, each) for each in imported if {each, each.partition(".")[0]} & FORBIDDEN_MODULES]
            children |= {name} if "subprocess" in imported else set()
            call = written(node)
            bad += [(name, call)] if call in FORBIDDEN_CALLS or OBJECTS.search(call) else []
            bad += [(name, call) for each in getattr(node, "keywords", ()) if call and each.arg == "shell"]
            execs |= {name} if call == "exec" else set()
    assert (execs, children, set(bad)) == (EXEC, CHILDREN, CONNECTED)


# the page


def test_the_page_names_tests_that_exist():
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, test in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source, (file, test)


def test_the_page_says_what_the_code_holds():
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert f"{disk.PRIVATE_FILE:04o}" in text
    assert f"{disk.PRIVATE_FOLDER:04o}" in text
    for name in EXEC | CHILDREN:
        assert f"`{name}`" in text
    assert lz.__doc__

"""Plugins run only where the operator admits them, and one that ends the process does so once."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import layerzero as lz
from drawing import at_once
from layerzero.engine.config import Configuration
from layerzero.engine.plugins import ENTRY_POINTS, refused

GOOD = """
from layerzero.core.kernel import Backend, Kernel
def load(facts):
    return lambda input, weight: input
KERNELS = [Kernel(id="good.rms_norm", operations=("norm.rms",), backend=Backend(name="good", summary=""), load=load)]
"""
EVIL = "import os; os._exit(5)\n"
ASK = """
import warnings, sys
import layerzero as lz
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kernels = [each.id for each in lz.list_kernels("norm.rms")]
print("good.rms_norm" in kernels, sorted(name for name in ("good", "evil") if f"plugin_{name}" in sys.modules))
print([str(each.message) for each in caught])
print(lz.doctor().plugin_errors)
"""


ASKS = """
import layerzero as lz
import __main__
__main__.begun.set()
__main__.waits.wait()
KERNELS = []
print(len(lz.list_kernels("norm.rms")) > 1)
"""
FIRST_CALL_BESIDE_AN_IMPORT = """
import faulthandler, importlib.metadata, threading
import torch
import layerzero as lz

faulthandler.dump_traceback_later(60, exit=True)  # where both wait for each other
begun, waits, whole = threading.Event(), threading.Event(), importlib.import_module

def imported(name, *given):
    if name == "plugin_asks":
        waits.set()
    return whole(name, *given)

def called():
    begun.wait()
    importlib.import_module = importlib.metadata.import_module = imported
    lz.rms_norm(torch.ones(2, 4), torch.ones(4))

thread = threading.Thread(target=called)
thread.start()
import plugin_asks
thread.join()
"""


def test_a_first_call_beside_the_import_of_a_plugin_that_asks_layerzero(site):
    """The call held the registry's lock and waited for the import, whose code asked the registry."""
    site.install(asks=ASKS)
    ended = site("-c", FIRST_CALL_BESIDE_AN_IMPORT)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


@pytest.fixture
def site(tmp_path):
    """Install plugins by their text; returns a function that runs a script beside them."""
    folder = tmp_path / "site"

    def install(**plugins):
        for name, text in plugins.items():
            information = folder / f"{name}-1.0.dist-info"
            information.mkdir(parents=True, exist_ok=True)
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (information / "entry_points.txt").write_text(f"[layerzero.backends]\n{name} = plugin_{name}\n")
            (folder / f"plugin_{name}.py").write_text(text)

    def run(*command, **settings):
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "LAYERZERO_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, *(command or ("-c", ASK))]
        return subprocess.run(command, check=False, env=environment | settings, capture_output=True, text=True)

    run.install = install
    return run


@at_once("settings, word", [
    ({}, ""),
    ({"PLUGINS": "all"}, ""),
    ({"PLUGINS": "other, good"}, ""),
    ({"PLUGINS": "none"}, "plugins: none"),
    ({"PLUGINS": ""}, "plugins: none"),
    ({"PLUGINS": "other"}, "plugins: other"),
    ({"DISABLED": "1", "PLUGINS": "good"}, "enabled: false"),
    ({"DENY": "good"}, "deny: good"),
    ({"DENY": "go*"}, "deny: go*"),
    ({"DENY": "good.rms_norm"}, ""),
    ({"ALLOW": "torch"}, "allow: torch; plugins: [good] would import it"),
    ({"ALLOW": "torch,good.rms_norm"}, ""),
    ({"ALLOW": "torch", "PLUGINS": "good"}, ""),
])  # fmt: skip
def test_the_settings_say_whether_a_plugin_is_imported(settings, word):
    policy = Configuration({f"LAYERZERO_{name}": text for name, text in settings.items()}).policy
    assert refused(EntryPoint("good", "plugin_good", ENTRY_POINTS), policy) == word


@pytest.mark.slow
def test_a_plugin_that_policy_leaves_out_is_not_imported(site):
    site.install(good=GOOD)
    assert site().stdout.splitlines() == ["True ['good']", "[]", "{}"]
    found, warned, left_out = site(LAYERZERO_DISABLED="1").stdout.splitlines()
    assert (found, warned, left_out) == ("False []", "[]", "{'good': 'left out: enabled: false'}")


def test_all_is_a_word_and_no_other(site):
    with pytest.raises(lz.PolicyError, match="plugins: wanted 'all' or 'none' or a list of names, got 'al'"):
        lz.configure(plugins="al")


@pytest.mark.slow
def test_settings_may_admit_it_later_and_take_it_out_again(site):
    site.install(good=GOOD)
    script = """
import layerzero as lz
def here(): return "good.rms_norm" in [each.id for each in lz.list_kernels("norm.rms")]
for plugins in ("none", "all", [], ["good"]):
    lz.configure(plugins=plugins)
    print(here())
"""
    assert site("-c", script).stdout.split() == ["False", "True", "False", "True"]


@pytest.mark.slow
def test_one_that_ends_the_process_is_named_and_left_out_next_time(site):
    site.install(good=GOOD, evil=EVIL)
    assert site().returncode == 5
    found, warned, left_out = site().stdout.splitlines()
    assert found == "True ['good']"
    assert "the plugin 'evil' is left out: it ended process" in warned
    assert "layerzero doctor" in left_out


def test_those_that_fail_otherwise_take_nothing_along(site):
    site.install(
        a="import sys; sys.exit(3)", b="raise RuntimeError('no')", c="KERNELS = 5", d="syntax error", good=GOOD
    )
    unknown = "try: lz.vet('mine.own')\nexcept lz.UnknownOperationError as error: print(error)\n"
    found, warned, errors, unknown = site("-c", ASK + unknown).stdout.splitlines()
    assert (found, list(ast.literal_eval(errors))) == ("True ['good']", list("abcd"))
    assert "unknown operation 'mine.own'" in unknown
    assert "; the plugin 'b' may bring it and did not load: RuntimeError: no" in unknown
    for name in "abcd":
        assert f"the plugin '{name}' (plugin_{name}) was not loaded" in warned


@pytest.mark.slow
def test_doctor_survives_it_and_forgives_one_that_was_mended(site):
    site.install(good=GOOD, evil=EVIL)
    for _ in range(2):
        asked = site("-m", "layerzero", "doctor")
        assert asked.returncode == 0
        assert "evil" in asked.stdout
        assert "exit code 5" in " ".join(asked.stdout.split())
    site.install(evil=GOOD.replace("good", "evil"))
    assert "exit code 5" not in site("-m", "layerzero", "doctor").stdout
    assert site().stdout.startswith("True ['evil', 'good']")


@pytest.mark.slow
def test_a_child_imports_no_plugin_that_its_parent_does_not(site):
    site.install(good=GOOD, evil=EVIL)
    script = """
import layerzero as lz
for each in lz.vet("norm.rms", kernels=["torch.rms_norm"], shapes=[(4, 64)], dtype="float32", again=True):
    print(each.verdict)
"""
    assert site("-c", script, LAYERZERO_PLUGINS="good").stdout == "passed\n"
    assert site("-c", script, LAYERZERO_DENY="evil").stdout == "passed\n"


@pytest.mark.slow
def test_what_a_broken_plugin_would_bring_is_unknown_because_of_it(site):
    site.install(broken="import layerzero as lz; lz.Backend(name='b', summary='', requires=('numpy',))")
    told = site("-m", "layerzero", "conformance", "--operation", "mine.own")
    assert told.returncode == 2
    assert "unknown operation 'mine.own'" in told.stderr
    assert "; the plugin 'broken' may bring it and did not load: RegistrationError: b: versions" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.slow
def test_what_takes_long_is_told(site):
    site.install(good="import layerzero.engine.plugins as p; p.SLOW_S = 0.0\n" + GOOD)
    assert "the plugin good took 0." in site().stderr

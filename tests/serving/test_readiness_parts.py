"""Each part of readiness has a line; what makes calls slower is degraded, what makes them raise is not ready."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.core.ledger import Verdict
from layerzero.core.system.memory import FREE, Reading
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import Agreed
from layerzero.inspection.descriptors import DESCRIPTORS, exported
from layerzero.ops import SETS
from layerzero.serving import readiness_parts
from layerzero.serving.readiness_parts import PartState
from layerzero.tuning.storage import prior
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")
READY, DEGRADED, NOT_READY = PartState


def norm():
    return lz.rms_norm(torch.ones(3, 32), torch.ones(32))


def reads(monkeypatch, *mib):
    FREE.forget()
    monkeypatch.setattr(FREE, "read", lambda _: Reading(*(float(each * 2**20) for each in mib)))


@pytest.fixture
def manifest(tmp_path):
    with lz.record(tmp_path / "workload.json"):
        norm()
    return tmp_path / "workload.json"


def part(name, report):
    (found,) = (each for each in report.parts if each.name == name)
    return found


def of(name, *given, **more):
    report = lz.readiness_check(*given, device="cpu", **more)
    found = part(name, report)
    assert str(found) in str(report).splitlines()
    assert found.to_dict() in report.to_dict()["parts"]
    assert report.ready == (found.state is not NOT_READY)
    assert report.degraded == (found.state is DEGRADED)
    return found


def misspelt(monkeypatch):
    """A name that no kernel has, as a process finds it in its environment."""
    monkeypatch.setenv("LAYERZERO_DENY", "no_such_library")
    CONFIGURATION.reset()


def test_settings_that_no_call_can_use_are_not_ready(monkeypatch):
    assert of("settings").text in ("jit set, and valid", "jit, cpu_features set, and valid")
    misspelt(monkeypatch)
    found = of("settings")
    assert found.state is NOT_READY
    assert "no_such_library" in found.text
    assert found.step == "`layerzero config show` tells where each comes from"
    report = lz.readiness_check(device="cpu")
    assert str(report.builds) == "builds: not ready: not looked at, since settings cannot be used"
    assert str(report).startswith("not ready: not looked at")


def test_layerzero_switched_off_is_degraded():
    lz.configure(enabled=False)
    assert of("settings").state is DEGRADED


def test_a_descriptor_that_cannot_be_in_force_is_not_ready(tmp_path):
    file = tmp_path / "torch.json"
    assert of("descriptors").text == "0 in force"
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "torch.rms_norm").declared
    file.write_text(json.dumps(exported(kernel.backend, [kernel])))
    lz.configure(descriptors=[str(file)])
    assert of("descriptors").text == "1 in force"
    DESCRIPTORS.clear()  # the next use reads it anew, as the next process would
    file.write_text("{damaged")
    found = of("descriptors")
    assert found.state is NOT_READY
    assert "wanted a JSON file, got not valid JSON" in found.text


def test_an_empty_call_that_the_reference_serves_degrades_nothing(tmp_path):
    with lz.record(tmp_path / "workload.json"):
        lz.rms_norm(torch.ones(0, 32), torch.ones(32))
    lz.configure(deny=[each.source for each in lz.list_kernels("rms_norm") if not each.is_reference])
    assert of("tables", tmp_path / "workload.json").state is READY


def test_a_call_without_a_kernel_is_not_ready_and_a_slow_one_degraded(manifest):
    assert of("tables", manifest).text == "1 calls find a kernel"
    lz.configure(deny=[each.source for each in lz.list_kernels("rms_norm") if not each.is_reference])
    found = of("tables", manifest)
    assert found.state is DEGRADED
    assert "norm.rms 3x32 32 float32 runs the slow reference" in found.text
    lz.configure(fallback_enabled=False)
    found = of("tables", manifest)
    assert found.state is NOT_READY
    assert "finds no kernel" in found.text


def test_a_shipped_table_that_cannot_be_read_is_degraded(monkeypatch, manifest):
    class Damaged:
        problems = ("epyc.json: families[0]: wanted an operation",)

    monkeypatch.setattr(prior, "_LOADED", {"a CPU": Damaged})
    monkeypatch.setattr("layerzero.tuning.storage.store.priors_of", lambda _: None)
    assert of("tables", manifest).text == "epyc.json: families[0]: wanted an operation"


def test_a_workspace_beyond_what_is_free_is_not_ready(monkeypatch, manifest):
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "torch.rms_norm")
    big = {"workspace_bytes": lambda facts: 64 * 2**20, "id": "mine.big", "priority": 100}
    lz.register_backend([dataclasses.replace(kernel, **big)])
    lz.lock("norm.rms", "mine.big")
    assert "workspaces of these calls take 64 MiB at most" in of("headroom", manifest).text
    reads(monkeypatch, 100, 100, 100)
    found = of("headroom", manifest)
    assert found.state is DEGRADED
    assert found.text.startswith("100 MiB free, the largest block 100 MiB, 100 MiB of it at once (fragmentation 0.00)")
    assert found.text.endswith("memory_headroom_mb allows a kernel 1024 MiB")
    reads(monkeypatch, 60, 60, 60)
    found = of("headroom", manifest)
    assert found.state is NOT_READY
    assert "takes a workspace of 64 MiB, 60 MiB free" in found.text


def test_memory_in_pieces_is_degraded_and_shown_by_doctor_and_metrics(monkeypatch, manifest):
    reads(monkeypatch, 4000, 3000, 1000)
    found = of("headroom", manifest)
    assert (found.state, found.step) == (DEGRADED, "call lz.defragment() while nothing runs")
    assert "fragmentation 0.75" in found.text
    assert "fragmentation 0.75" in str(lz.doctor())
    assert 'layerzero_memory_fragmentation{device="cpu:0"} 0.75' in str(lz.metrics())
    lz.configure(**{"memory.fragmentation": 0.8})
    assert of("headroom", manifest).state is READY


def test_a_damaged_database_is_degraded_told_once_and_calls_go_on(tmp_path):
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "cache"))
    file = tmp_path / "perfdb.sqlite"
    lz.configure(**{"perfdb.path": str(file)})
    assert (of("database").state, of("database").text) == (READY, "no times on disk yet")
    file.write_bytes(b"this is no database" * 1000)
    with pytest.warns(lz.LayerZeroWarning, match="set aside") as warned:
        found = of("database")
        assert of("database").state is DEGRADED
        assert norm().shape == (3, 32)
    assert len(warned) == 1
    assert found.state is DEGRADED
    assert "set aside" in found.text


def test_kernels_that_rest_suspects_bans_and_lost_devices(tmp_path):
    assert of("health").state is READY
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "torch.rms_norm")
    ENGINE.health.failed(kernel, "norm.rms", RuntimeError("no such luck"))
    assert of("health").text == "torch.rms_norm in norm.rms rests"
    ENGINE.health.reset()
    ENGINE.ledger = ledger = StoreLedger(FileLedger(tmp_path))
    facts = lz.facts("rms_norm", torch.ones(2, 8), torch.ones(8))
    ledger.suspect(kernel, facts, "it was running as a process ended")
    assert of("health").text == "1 suspects"
    ledger.settle(ledger.suspects()[0], Verdict.WRONG, "off by one")
    assert of("health").text == "1 kernels and classes are banned on this machine"
    ENGINE.health.context_lost = "the device's context is lost"
    found = of("health")
    assert (found.state, found.step) == (NOT_READY, "restart the process")


def test_a_frozen_choice_that_is_not_kept_is_degraded():
    norm()
    assert of("frozen").text.startswith("nothing")
    lz.freeze()
    try:
        assert of("frozen").text == "1 classes keep their kernel"
        lz.configure(deny=["torch.rms_norm"])
        norm()
        found = part("frozen", lz.readiness_check(device="cpu"))
        assert found.state is DEGRADED
        assert "runs in place of torch.rms_norm" in found.text
    finally:
        lz.thaw()


def test_packages_that_harm_each_other_are_degraded(monkeypatch):
    assert of("libraries").state is READY
    harm = "nvidia-cuda-runtime-cu12 12.9 with torch for CUDA 13.0: a process may load both"
    monkeypatch.setattr(readiness_parts, "other_cudas", lambda: iter([harm]))
    found = of("libraries")
    assert (found.state, found.text, found.step) == (DEGRADED, harm, "`layerzero doctor` lists all issues")


def test_a_listener_that_loses_events_is_degraded_while_it_listens():
    assert of("telemetry").text == "no listener; lz.metrics() counts without one"
    listener = lz.on_event(lambda event: event.missing)
    assert of("telemetry").text == "listeners: 1"
    norm()
    listener.flush()
    found = of("telemetry")
    assert found.state is DEGRADED
    assert re.search(r"<lambda> raised [1-9]\d* times$", found.text)
    listener.close()
    assert of("telemetry").state is READY


def test_ranks_that_did_not_agree_or_differ_are_degraded(monkeypatch):
    assert of("ranks").text == "each chooses for itself"
    monkeypatch.setattr(readiness_parts, "ranks_choose", lambda _: True)
    assert (of("ranks").state, of("ranks").step) == (DEGRADED, "call lz.warmup or lz.agree() on every rank")
    monkeypatch.setattr(ENGINE, "frozen", Agreed({}))
    assert of("ranks").text == "they agreed on 0 classes"
    monkeypatch.setattr(ENGINE, "frozen", Agreed({}, fallback=True))
    assert (of("ranks").state, of("ranks").step) == (DEGRADED, "install the same versions")


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_served_here(name):
    found = of("sets", sets=[name])
    assert found.text == f"{len(SETS[name].operations)} operations of {name} find kernels"


def test_a_set_whose_kernels_are_denied_is_degraded_or_not_ready():
    others = {each.source for each in lz.list_kernels("activation.silu") if not each.is_reference}
    lz.configure(deny=sorted(others))
    assert of("sets", sets=["diffusion"]).state is DEGRADED
    lz.configure(fallback_enabled=False)
    assert of("sets", sets="diffusion").state is NOT_READY
    with pytest.raises(ValueError, match="got 'diffusions'; did you mean 'diffusion'"):
        lz.readiness_check(device="cpu", sets=["diffusions"])
    with pytest.raises(ValueError, match=r"wanted one of .*, got \['decoder'\]$"):
        lz.doctor(asked_for=["decoder"])


def test_the_command_tells_each_part_and_exits_by_the_worst(manifest, monkeypatch):
    def run(*line):
        return CliRunner().invoke(main, ["ready", "--manifest", str(manifest), "--device", "cpu", *line])

    told = run("--json", "--for", "embedding")
    assert told.exit_code == 0
    assert len(json.loads(told.stdout)["parts"]) == 13
    lz.configure(enabled=False)
    assert (run().exit_code, run("--strict").exit_code) == (0, 1)
    assert run("--for", "nothing").exit_code == 2
    misspelt(monkeypatch)
    told = run()
    assert told.exit_code == 1
    assert "settings: not ready: " in told.stdout

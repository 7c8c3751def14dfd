"""Readiness looks at every call that is asked about, and names what would run if it were built; nothing is built."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from compiled_norms import compiled_norm, width
from layerzero.cli.app import main
from layerzero.core.ledger import Ledger
from layerzero.engine import probe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.serving.background_builds import BUILDS
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger

PARTS = (
    *("builds", "settings", "descriptors", "tables", "headroom", "graphs", "database", "health"),
    *("libraries", "telemetry", "frozen", "ranks", "sets"),
)


@pytest.fixture(autouse=True)
def loads():
    """A kernel that compiles for each width, and would be chosen."""
    seen = []
    compiled_norm(seen.append, build_key=width, priority=90)
    lz.configure(allow=["mine", "torch"])
    return seen


def norm(rows, width):
    lz.rms_norm(torch.randn(rows, width), torch.randn(width))


@pytest.fixture
def manifest(tmp_path):
    with lz.record(tmp_path / "workload.json", model="m1"):
        for rows in (3, 4, 5):
            norm(rows, 32)
        norm(3, 40)
        norm(3, 48)
        lz.silu(torch.randn(4))
    return tmp_path / "workload.json"


def test_every_call_of_a_manifest_is_looked_at_and_warmup_makes_it_ready(manifest, loads):
    report = lz.readiness_check(manifest, device="cpu")
    assert not report
    assert not report.ready
    assert report.calls == 6
    assert [(each.kernel_id, each.instead, each.calls) for each in report.lacking] == [
        ("mine.compiled", "torch.rms_norm", 3),
        ("mine.compiled", "torch.rms_norm", 1),
        ("mine.compiled", "torch.rms_norm", 1),
    ]
    assert {each.reason.code for each in report.lacking} == {lz.ReasonCode.JIT_CACHE_INCOMPLETE}
    assert report.lacking[0].reason.fact == "norm.rms 3x32 32 float32 and 2 more calls"
    assert str(report).startswith("not ready: 1 of 6 calls have all that they would choose\n  [JIT_CACHE_INCOMPLETE] ")
    assert loads == [], "nothing is built by looking"

    lz.warmup("rms_norm", [(3, 32), (3, 40), (3, 48)], device="cpu")
    report = lz.readiness_check(manifest, device="cpu")
    assert report
    told = json.loads(json.dumps(report.to_dict()))
    assert {part.pop("name"): part["state"] for part in told.pop("parts")} == dict.fromkeys(PARTS, "ready")
    assert told == {"ready": True, "degraded": False, "calls": 6, "complete": 6, "lacking": [], "failed": []}
    first, *others = str(report).splitlines()
    assert first == "ready: 6 of 6 calls have all that they would choose"
    assert [line.partition(": ready: ")[0] for line in others] == list(PARTS[1:])


def test_libraries_are_looked_up_once_for_all_calls(manifest, monkeypatch):
    """A question on a device had a machine of its own: 200 calls looked 5,000 times, half of the time (2026-11-26)."""
    looked, look = [], probe.Machine._look

    def counted(machine, backend, device):
        looked.append((backend, device.runtime))
        return look(machine, backend, device)

    monkeypatch.setattr(probe.Machine, "_look", counted)
    probe.forget()
    assert lz.readiness_check(manifest, device="cpu").calls == 6
    assert looked
    assert len(looked) == len(set(looked))


def test_without_a_manifest_it_is_what_was_called(tmp_path):
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    norm(3, 32)
    assert [each.operation for each in lz.readiness_check(device="cpu").lacking] == ["norm.rms"]
    ENGINE.ledger = Ledger()
    report = lz.readiness_check(device="cpu")
    assert (report.calls, report.ready) == (0, True)
    assert str(report).startswith("ready: no call is known")


@pytest.mark.parametrize(
    ("jit", "step"), [("never", "jit is never"), ("background", "the next such call has it built behind it")]
)
def test_doctor_tells_what_is_not_built_and_what_failed_to(tmp_path, jit, step):
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    lz.configure(jit="never")
    norm(3, 32)
    norm(3, 40)
    lz.configure(jit=jit)
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "mine.compiled")
    BUILDS.failures.add(
        kernel, lz.facts("rms_norm", torch.randn(3, 40), torch.randn(40)), "lines\nno g++", lasting=False
    )
    found = lz.doctor()
    failed, missing = found.builds
    assert failed.startswith("mine.compiled did not build for ")
    assert re.search(r"\(\d{4}-\d\d-\d\d \d\d:\d\d UTC\): no g\+\+; .*lz.warmup tries again$", failed)
    assert missing.startswith("mine.compiled is not built, which norm.rms 3x32")
    assert missing.endswith(f"would choose over torch.rms_norm: {step}; lz.warmup builds it now")
    assert all(f"jit: {each}" in str(found) for each in found.builds)
    assert found.to_dict()["builds"] == list(found.builds)


def test_what_failed_to_build_is_not_waited_for(manifest):
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "mine.compiled")
    facts = lz.facts("rms_norm", torch.randn(3, 32), torch.randn(32))
    BUILDS.failures.add(kernel, facts, "lines\nno such compiler", lasting=False)
    report = lz.readiness_check(manifest, device="cpu")
    assert [each.calls for each in report.lacking] == [1, 1]
    assert [(each.kernel_id, each.instead, each.calls) for each in report.failed] == [
        ("mine.compiled", "torch.rms_norm", 3)
    ]
    assert report.complete == 1
    assert "  failed: no such compiler: [JIT_CACHE_INCOMPLETE] norm.rms 3x32" in str(report)
    assert "torch.rms_norm runs in its place. Nothing waits for it" in str(report)


def planted(manifest, fails, error="no such shape"):
    """A kernel in place of the other, which fails to build for some widths; those that it was loaded for."""
    loaded = []

    def load(facts):
        loaded.append(facts.size("hidden"))
        if facts.size("hidden") in fails:
            raise RuntimeError(error)
        return lambda input, weight, *, eps: torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "mine.compiled")
    lz.unregister_kernel("mine.compiled")
    lz.register_backend([dataclasses.replace(kernel, load=load)])
    return loaded


def test_each_size_fails_for_itself_is_told_once_and_the_next_kernel_serves(manifest, caplog):
    loaded = planted(manifest, {40})
    built = lz.warmup(manifest=manifest, device="cpu")
    assert sorted(set(loaded)) == [32, 40, 48]
    assert loaded.count(40) == 1
    assert [each.error for each in built if each.error] == ["RuntimeError: no such shape"]
    assert caplog.text.count("did not build for norm.rms") == 1
    report = lz.readiness_check(manifest, device="cpu")
    assert report
    assert (report.complete, report.lacking) == (5, ())
    assert [(each.call, each.error) for each in report.failed] == [
        ("norm.rms 3x40 40 float32", "RuntimeError: no such shape")
    ]
    assert lz.rms_norm(torch.ones(3, 40), torch.ones(40)).sum() > 0, "the next kernel serves"


def test_where_a_build_fails_the_next_kernel_that_compiles_is_built(manifest):
    planted(manifest, {32, 40, 48})
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "mine.compiled")
    lz.register_backend([dataclasses.replace(kernel, id="mine.second", load=good, priority=85)])
    lz.warmup(manifest=manifest, device="cpu")
    report = lz.readiness_check(manifest, device="cpu")
    assert report, str(report)
    assert {each.instead for each in report.failed} == {"mine.second"}


def good(facts):
    return lambda input, weight, *, eps: torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def test_what_the_machine_lacks_is_tried_once_and_every_size_is_given_up(manifest, caplog, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    loaded = planted(manifest, {32, 40, 48}, "No working C++ compiler")
    built = lz.warmup(manifest=manifest, device="cpu")
    assert (len(loaded), len(built), caplog.text.count("did not build")) == (1, 1, 1)
    BUILDS.begin()  # another process, which has the files alone
    report = lz.readiness_check(manifest, device="cpu")
    assert report, str(report)
    assert [each.error for each in report.failed] == [
        "a C++ compiler that works was not found: install one (g++), or name it in CXX"
    ] * 3


def test_a_failed_build_that_nothing_may_replace_is_not_ready(manifest):
    planted(manifest, {32, 40, 48})
    lz.warmup(manifest=manifest, device="cpu")
    assert lz.readiness_check(manifest, device="cpu")
    lz.configure(locks={"norm.rms": "mine.compiled"})
    report = lz.readiness_check(manifest, device="cpu")
    assert not report
    assert {each.instead for each in report.failed} == {""}
    assert "nothing runs in its place. These calls raise; lift the lock" in str(report)


def test_what_warmup_could_not_build_is_not_waited_for(manifest):
    def load(facts):
        raise RuntimeError("no such compiler")

    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "mine.compiled")
    broken = dataclasses.replace(kernel, id="mine.broken", load=load, build_key=lambda facts: 0, priority=95)
    lz.register_backend([broken])
    assert {each.kernel_id for each in lz.readiness_check(manifest, device="cpu").lacking} == {"mine.broken"}
    assert [each.kernel_id for each in lz.warmup(manifest=manifest, device="cpu") if each.error]
    report = lz.readiness_check(manifest, device="cpu")
    assert report, str(report)
    assert {each.kernel for each in lz.jit_status().failed} == {"mine.broken"}


def test_what_is_no_manifest_of_this_model_and_device_is_an_error(manifest, monkeypatch):
    with pytest.raises(ValueError, match="wanted a manifest of the model 'm2', got one of 'm1'"):
        lz.readiness_check(manifest, model="m2")
    with pytest.raises(ValueError, match="model: wanted it along with a manifest"):
        lz.readiness_check(model="m1")
    with pytest.raises(ValueError, match="wanted calls on meta, got 6 on cpu"), monkeypatch.context() as patch:
        patch.setattr("layerzero.serving.readiness.device_here", torch.device)
        lz.readiness_check(manifest, device="meta")
    damaged = json.loads(manifest.read_text())
    damaged["calls"][0]["call"]["tensors"]["input"]["shape"] = [-1, 2]
    manifest.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=r"wanted calls as lz\.record writes them"):
        lz.readiness_check(manifest, device="cpu")


def test_the_command_answers_with_its_exit_code(manifest):
    def run(line):
        return CliRunner().invoke(main, ["ready", *line], prog_name="layerzero")

    asked = ["--manifest", str(manifest), "--device", "cpu"]
    result = run(asked)
    assert (result.exit_code, result.output.partition(":")[0]) == (1, "not ready")
    assert json.loads(run([*asked, "--json"]).stdout)["lacking"][0]["kernel_id"] == "mine.compiled"
    lz.warmup(manifest=manifest, device="cpu")
    assert run([*asked, "--model", "m1"]).exit_code == 0
    assert run([*asked, "--model", "m2"]).exit_code == 2


def test_the_command_passes_over_what_failed_unless_it_is_strict(manifest):
    planted(manifest, {40})
    lz.warmup(manifest=manifest, device="cpu")
    asked = ["ready", "--manifest", str(manifest), "--device", "cpu"]
    codes = [CliRunner().invoke(main, [*asked, *more], prog_name="layerzero").exit_code for more in ((), ("--strict",))]
    assert codes == [0, 1]


def test_what_a_warmup_takes_away_while_it_is_asked_about_is_no_failure(monkeypatch):
    class TakenAway(dict):
        def __contains__(self, kernel_id):
            return True

    monkeypatch.setattr(BUILDS, "_lacking", TakenAway())
    facts = lz.facts("rms_norm", torch.randn(3, 32), torch.randn(32))
    assert BUILDS.failure(REGISTRY.kernel("mine.compiled"), facts) == ""

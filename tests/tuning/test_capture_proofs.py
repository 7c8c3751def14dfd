"""Captures are proved in a child, which may die, be killed or hang: the verdict is kept, and this process goes on."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest
import torch

import layerzero as lz
from layerzero.core.ledger import Verdict
from layerzero.engine import transforms
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.testing import execution
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import attempt
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger
from layerzero.tuning.verification import rehearsal
from layerzero.tuning.verification.vetting import vet_calls

X, WEIGHT = torch.randn(4, 64), torch.rand(64) + 0.5


@pytest.fixture
def kernels(monkeypatch, request, tmp_path):
    """The module that registers them, here and in children; and a ledger in files."""
    monkeypatch.syspath_prepend(str(request.path.parents[1]))
    monkeypatch.delitem(sys.modules, "cpu_graphs", raising=False)
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    module = importlib.import_module("cpu_graphs")
    monkeypatch.setitem(sys.modules, "cpu_graphs", module)
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    return module


def pair(name):
    return REGISTRY.kernel(f"capture.{name}"), lz.facts("rms_norm", X, WEIGHT)


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("right", "passed", ""),
        ("waits", "wrong", "under graph capture it raised RuntimeError: operation not permitted"),
        ("remembers", "wrong", "replay 1: result 0: "),
    ],
)
def test_replays_with_other_values_are_compared(kernels, monkeypatch, name, status, said):
    kernels.install(monkeypatch.setattr)
    kernel = REGISTRY.kernel(f"capture.{name}")
    call = RandomCall("rms_norm", {"input": X, "weight": WEIGHT, "eps": 1e-6})
    found = execution.captured(attempt(kernel, REGISTRY.operation("norm.rms"), call))
    assert found.status == status
    assert found.message.startswith(said)


@pytest.mark.slow
def test_a_child_proves_and_what_it_finds_is_asked_by_captures(kernels, monkeypatch, tmp_path):
    names = ("right", "waits", "dies", "killed", "hangs")
    with pytest.warns(lz.LayerZeroWarning, match="no capture takes capture.") as told:
        found = vet_calls(map(pair, names), graph=True, timeout_s=20.0)
    verdicts = {each.kernel_id.partition(".")[2]: each for each in found}
    assert [verdicts[name].verdict for name in names] == [
        Verdict.PASSED, Verdict.WRONG, Verdict.CRASHED, None, Verdict.HUNG,
    ]  # fmt: skip
    assert "killed from outside" in verdicts["killed"].detail
    assert sorted(str(each.message).split()[3] for each in told) == ["capture.dies", "capture.hangs", "capture.waits"]
    later = FileLedger(tmp_path)
    known = {name: later.capture(*pair(name)) for name in names}
    assert (known["right"], known["killed"]) == ("", None)
    assert "operation not permitted" in known["waits"]
    assert all(later.judgement(*pair(name)) is None for name in names), "outside of captures nothing is known"
    monkeypatch.setattr(transforms, "capturing", lambda tensors: True)
    for name in ("waits", "dies", "hangs"):
        with lz.scope(locks={"norm.rms": f"capture.{name}"}), pytest.raises(lz.CudaGraphUnsafeError) as raised:
            lz.rms_norm(X, WEIGHT)
        assert f"capture.{name}" in raised.value.reasons
    with lz.scope(locks={"norm.rms": "capture.right"}, graph_strict_mode=True):
        torch.testing.assert_close(lz.rms_norm(X, WEIGHT), torch.rms_norm(X, (64,), WEIGHT))


def test_strict_warmup_proves_what_calls_would_choose_until_one_is_safe(kernels, monkeypatch):
    """Each round asks children about all calls at once; a verdict is asked for once."""
    rounds = []

    def vetted(pairs, **options):
        assert options == {"graph": True, "go_on": True}
        rounds.append([kernel.id for kernel, _ in pairs])
        for kernel, facts in pairs:
            ENGINE.ledger.record_capture(kernel, facts, "it waits" if kernel.id == "capture.waits" else "")
        return []

    monkeypatch.setattr(rehearsal, "vet_calls", vetted)
    facts = lz.facts("rms_norm", X, WEIGHT)
    with lz.scope(graph_strict_mode=True, prefer_sources=["capture.waits"], unmeasured="priority"):
        rehearsal.prove_chosen([facts])
        assert [set(each) for each in rounds[:1]] == [{"capture.waits"}]
        assert len(rounds) == 2
        rehearsal.prove_chosen([facts])
        assert len(rounds) == 2
        inside = lz.explain("rms_norm", X, WEIGHT, capturing=True).chosen.kernel.id
    assert inside == rounds[1][0] != "capture.waits"


def test_captures_are_proved_where_a_device_has_some(kernels):
    with warnings.catch_warnings(), pytest.raises(lz.InvalidCallError, match="launches can be captured, got"):
        lz.vet("norm.rms", kernels=["capture.right"], device="cpu", graph=True)

"""What a capture asks before it takes a kernel: the verdict of a child process, the setting, and what a hit refuses."""

from __future__ import annotations

import logging

import pytest
import torch

import layerzero as lz
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.reasons import ReasonCode
from layerzero.engine import plan_source, transforms
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.serving import readiness_parts
from layerzero.tuning.storage import files
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger

X, WEIGHT = torch.randn(4, 64), torch.ones(64)
WHY = "under graph capture it raised AcceleratorError: operation not permitted when stream is capturing"


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """One in files, as processes have it."""
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    return ENGINE.ledger


@pytest.fixture
def capture(monkeypatch):
    """Calls with the tensors of a CPU, as if the stream were captured."""
    monkeypatch.setattr(transforms, "capturing", lambda tensors: True)


def torchs() -> Kernel:
    return REGISTRY.kernel("torch.rms_norm")


def test_an_unsafe_verdict_keeps_a_kernel_out_of_captures_alone(ledger):
    facts = lz.facts("rms_norm", X, WEIGHT)
    assert ledger.capture(torchs(), facts) is None
    ledger.record_capture(torchs(), facts, WHY)
    assert not lz.explain("rms_norm", X, WEIGHT).reasons("torch.rms_norm")
    captured = lz.explain("rms_norm", X, WEIGHT, capturing=True)
    (reason,) = captured.reasons("torch.rms_norm")
    assert reason.code is ReasonCode.CUDA_GRAPH_UNSAFE
    assert WHY in str(reason)
    assert "layerzero vet --graph --kernel torch.rms_norm --again" in str(reason)
    assert captured.chosen.kernel.id != "torch.rms_norm"
    other = lz.explain("rms_norm", torch.randn(4, 128), WEIGHT.repeat(2), capturing=True)
    assert not other.reasons("torch.rms_norm"), "of another class nothing is known"


def test_the_class_of_a_capture_is_told_by_sizes_and_arguments(ledger):
    query = torch.randn(2, 8, 4, 16)
    kernel = REGISTRY.kernel("torch.sdpa.math")
    ledger.record_capture(kernel, lz.facts("attention", query, query, query, layout="BSHD", causal=True), WHY)

    def why(tokens, **given):
        like = torch.randn(2, tokens, 4, 16)
        return ledger.capture(kernel, lz.facts("attention", like, like, like, layout="BSHD", **given))

    assert why(15, causal=True) == WHY, "the same powers of two"
    assert why(16, causal=True) is None
    assert why(8, causal=False) is None
    assert why(8, causal=True, scale=0.5) == why(8, causal=True, scale=0.25)


@pytest.mark.parametrize("in_files", [True, False])
def test_what_is_known_of_one_work_does_not_hold_for_its_class_and_a_later_proof_of_that_lifts_it(ledger, in_files):
    ledger = ledger if in_files else Ledger()
    facts, another = (lz.facts("rms_norm", torch.randn(rows, 64), WEIGHT) for rows in (9, 10))
    ledger.record_capture(torchs(), another, "")
    ledger.record_capture(torchs(), facts, "made before, is none", work=True)
    assert ledger.capture(torchs(), facts) == "made before, is none"
    assert ledger.capture(torchs(), another) == ""
    ledger.record_capture(torchs(), another, "")  # as of `layerzero vet --graph --again`
    assert ledger.capture(torchs(), facts) == ""


def test_a_verdict_holds_in_other_processes_until_a_version_changes_and_a_damaged_one_refuses(
    ledger, tmp_path, monkeypatch
):
    facts = lz.facts("rms_norm", X, WEIGHT)
    ledger.record_capture(torchs(), facts, WHY)
    assert FileLedger(tmp_path).capture(torchs(), facts) == WHY
    (file,) = (each for each in (tmp_path / "ledger-1").iterdir() if each.name.endswith(".capture.json"))
    kept = file.read_bytes()
    file.write_bytes(kept.replace(b"AcceleratorError", b"acceleratorError"))
    with pytest.warns(lz.LayerZeroWarning, match="may have been a ban"):
        assert "damaged" in FileLedger(tmp_path).capture(torchs(), facts)
    again = FileLedger(tmp_path)
    with pytest.warns(lz.LayerZeroWarning, match="may have been a ban"):
        assert any("vet --graph --kernel torch.rms_norm --again" in note for note in again.notes())
    again.record_capture(torchs(), facts, "")
    assert FileLedger(tmp_path).capture(torchs(), facts) == "", "it was asked again"
    monkeypatch.setattr(files, "_library", lambda kernel, device: "another version")
    assert FileLedger(tmp_path).capture(torchs(), facts) is None


def test_readiness_tells_what_a_capture_refuses(ledger):
    x, weight = (torch.empty(shape, device="meta") for shape in ((4, 64), (64,)))
    report = lz.explain("rms_norm", x, weight, device="H100")
    looked = readiness_parts.Looked("cuda", [("norm.rms 4x64", report)])
    assert readiness_parts.graphs(looked).state is readiness_parts.PartState.READY
    lz.configure(graph_strict_mode=True)
    assert "a capture refuses torch.rms_norm: not proved" in str(readiness_parts.graphs(looked))
    ledger.record_capture(torchs(), report.facts, "")
    assert readiness_parts.graphs(looked).state is readiness_parts.PartState.READY
    lz.configure()
    ledger.record_capture(torchs(), report.facts, WHY)
    told = readiness_parts.graphs(looked)
    assert (told.state, told.step) == (readiness_parts.PartState.DEGRADED, "`layerzero vet --graph` proves captures")
    assert WHY in told.text


def test_an_unsafe_verdict_of_another_process_makes_calls_be_chosen_anew(ledger, tmp_path):
    facts = lz.facts("rms_norm", X, WEIGHT)
    ledger.capture(torchs(), facts)
    before = ENGINE.epoch
    FileLedger(tmp_path).record_capture(torchs(), facts, WHY)
    ledger.markers.look()
    assert ENGINE.epoch > before
    assert ledger.capture(torchs(), facts) == WHY


def test_strict_mode_takes_what_was_proved_and_says_what_to_run(ledger, capture):
    with lz.scope(graph_strict_mode=True):
        with pytest.raises(lz.CudaGraphUnsafeError) as raised:
            lz.rms_norm(X, WEIGHT)
        assert "torch.rms_norm" in raised.value.excluded
        assert "must be proved here (graph_strict_mode), is not proved" in str(raised.value)
        assert "layerzero vet norm.rms --graph --manifest FILE" in str(raised.value)
        ledger.record_capture(torchs(), lz.facts("rms_norm", X, WEIGHT), "")
        ENGINE.bump()
        torch.testing.assert_close(lz.rms_norm(X, WEIGHT), torch.rms_norm(X, (64,), WEIGHT))
        assert lz.explain("rms_norm", X, WEIGHT, capturing=True).chosen.kernel.id == "torch.rms_norm"
    torch.testing.assert_close(lz.rms_norm(X, WEIGHT), torch.rms_norm(X, (64,), WEIGHT))


def test_what_is_captured_without_a_proof_is_told_once(ledger, capture, caplog):
    with caplog.at_level(logging.INFO, "layerzero"):
        for rows in (4, 400):
            lz.rms_norm(torch.randn(rows, 64), WEIGHT)
    (told,) = [each for each in caplog.messages if "no capture of it was proved here" in each]
    assert "layerzero vet norm.rms --graph" in told
    assert any("no capture" in note for note in lz.explain("rms_norm", X, WEIGHT).notes)
    ledger.record_capture(torchs(), lz.facts("rms_norm", X, WEIGHT), "")
    assert not any("no capture" in note for note in lz.explain("rms_norm", X, WEIGHT).notes)


def test_a_plan_of_before_refuses_a_capture_where_a_choice_would(ledger, monkeypatch):
    """A hit asks nothing: its text says so, or there is nothing in it."""
    x, weight = (torch.empty(shape, device="meta") for shape in ((4, 64), (64,)))

    def text(**settings):
        with lz.scope(**settings):
            report = lz.explain("rms_norm", x, weight, device="H100")
            candidate = next(each for each in report.candidates if each.kernel.id == "torch.rms_norm")
            function = CALLS["rms_norm"].function
            return plan_source.build(function, candidate, report, current_policy(), ENGINE.ledger).source

    assert "capturing()" not in text()
    assert "if capturing():\n        raise PlanUnusableError" in text(graph_strict_mode=True)
    facts = lz.explain("rms_norm", x, weight, device="H100").facts
    ledger.record_capture(torchs(), facts, WHY)
    assert "if capturing():\n        raise PlanUnusableError" in text()
    ledger.record_capture(torchs(), facts, "")
    assert "capturing()" not in text(graph_strict_mode=True)

"""For which versions and processes a verdict holds, and what no child can try."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels_to_vet import CALL, found

import layerzero as lz
from layerzero.core.kernel import Backend, Trust
from layerzero.core.ledger import Verdict
from layerzero.engine import probe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import files
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.verification.vetting import vet_calls


@pytest.fixture
def versioned(plugin, monkeypatch, tmp_path):
    """The plugin with a distribution whose version can be set, and files that remember."""
    versions = {"plug": "1.5"}
    real = probe.installed_version
    monkeypatch.setattr(probe, "installed_version", lambda name: versions.get(name) or real(name))
    lz.unregister_kernel("plug.rms")
    backend = Backend(name="plug", summary="a library", distribution="plug", versions=">=1,<2")
    lz.register_backend([replace(plugin.KERNEL, backend=backend, trust=Trust.DECLARED)])
    ENGINE.ledger = FileLedger(tmp_path / "cache")

    def install(version):
        versions["plug"] = version
        probe.forget()
        ENGINE.bump()

    install("1.5")
    yield install
    probe.forget()


def codes():
    return [each.code for each in lz.explain("rms_norm", *CALL).reasons("plug.rms")]


def test_a_version_that_nobody_tested_is_refused_until_it_was_vetted(versioned):
    kernel, facts = REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", *CALL)
    assert codes() == []
    versioned("2.1")
    (reason,) = lz.explain("rms_norm", *CALL).reasons("plug.rms")
    assert reason.code is lz.ReasonCode.VERSION_UNSUPPORTED
    assert "layerzero vet --backend plug" in reason.message
    ENGINE.ledger.record_verdict(kernel, facts, Verdict.PASSED)
    assert codes() == []
    versioned("2.2")
    assert codes() == [lz.ReasonCode.VERSION_UNSUPPORTED], "a verdict of another version"
    assert ENGINE.ledger.verdict(kernel, facts) is None


def test_what_was_wrong_is_not_chosen_until_its_version_changes(versioned, tmp_path):
    kernel, facts = REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", torch.randn(900, 64), CALL[1])
    ENGINE.ledger.record_verdict(kernel, facts, Verdict.WRONG, "planted")
    assert codes() == [lz.ReasonCode.UNHEALTHY]
    ENGINE.ledger = FileLedger(tmp_path / "cache")
    assert codes() == [lz.ReasonCode.UNHEALTHY], "another process"
    versioned("1.6")
    assert codes() == []


def test_a_version_known_to_be_bad_cannot_be_vetted(versioned):
    kernel = REGISTRY.kernel("plug.rms")
    lz.unregister_kernel("plug.rms")
    lz.register_backend([replace(kernel, backend=replace(kernel.backend, known_bad="==2.1"))])
    versioned("2.1")
    ENGINE.ledger.record_verdict(REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", *CALL), Verdict.PASSED)
    assert codes() == [lz.ReasonCode.VERSION_UNSUPPORTED]


def test_a_file_that_changed_is_another_version_of_a_kernel_without_a_package(plugin, tmp_path):
    ledger = FileLedger(tmp_path / "cache")
    kernel, facts = REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", *CALL)
    ledger.record_verdict(kernel, facts, Verdict.WRONG)
    assert ledger.verdict(kernel, facts) is Verdict.WRONG
    path = tmp_path / "a_plugin.py"
    path.write_text(path.read_text() + "# repaired\n")
    from layerzero.tuning.storage import records

    records.source_of.cache_clear()
    assert ledger.verdict(kernel, facts) is None


# other processes


def test_what_another_process_cleared_is_seen_by_one_that_runs(tmp_path, monkeypatch, plugin):
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    kernel, facts = REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", *CALL)
    mine, other = FileLedger(tmp_path / "cache"), FileLedger(tmp_path / "cache")
    mine.suspect(kernel, facts, "planted")
    assert other.suspicion(kernel, facts) == "planted"
    assert mine.suspicion(kernel, facts) == "planted"
    (suspect,) = other.suspects()
    other.settle(suspect, Verdict.PASSED, "")
    assert mine.suspicion(kernel, facts) is None
    other.record_verdict(kernel, facts, Verdict.WRONG, "planted")
    assert mine.verdict(kernel, facts) is Verdict.WRONG
    mine.record_verdict(kernel, facts, Verdict.PASSED)
    assert other.verdict(kernel, facts) is Verdict.PASSED


@pytest.mark.slow
def test_a_kernel_that_no_child_knows_is_not_vetted_and_the_answer_says_why(monkeypatch):
    @lz.register_kernel("norm.rms", "mine.local")
    def local(input, weight, *, eps=1e-6):
        return input

    monkeypatch.setattr(local, "__module__", "__main__")
    object.__setattr__(REGISTRY.kernel("mine.local").load, "__module__", "__main__")
    each = found("mine.local", shapes=[(4, 64)], dtype="float32")
    assert each.verdict is None
    assert "register it through an entry point" in each.detail


@pytest.mark.parametrize("seq", [128, 2048, 32768])
def test_a_call_too_large_for_the_reference_is_cut_until_it_fits(seq):
    from layerzero.core.operation import Case
    from layerzero.testing.sizes import cuts, fits

    operation = next(each for each in lz.list_operations() if each.name == "attention.gqa.prefill")
    sizes = dict(operation.cases[0].sizes) | {"batch": 4, "heads": 32, "kv_heads": 8, "seq_q": seq, "seq_k": seq}
    found = list(cuts(operation, Case("large", sizes, {"causal": True}), "cpu"))
    assert found
    for text, case in found:
        assert fits(operation, case, "cpu")
        assert case.sizes["heads"] == 4 * case.sizes["kv_heads"]
        assert ("seq_q" in text) == (case.sizes["seq_q"] < seq)
    assert any(case.sizes["seq_k"] == seq for _, case in found), "keys stay as long as they are, where that may be"


@pytest.mark.slow
def test_a_kernel_that_compiles_is_built_once_and_checked_as_built(planted):
    each = found("planted.right_key", shapes=[(4, 64)], dtype="float32")
    assert each.verdict is Verdict.PASSED
    assert int(each.detail.split()[0]) > 5


def test_nothing_to_vet_starts_no_process():
    assert vet_calls([]) == ()


# the command

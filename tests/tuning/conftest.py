"""Fixtures of tests of tuning."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kernels_to_vet import PLUGIN, registered
from one_time import right
from torch.nn.functional import rms_norm

import layerzero as lz
import vocabularies
from layerzero.core.kernel import Trust
from layerzero.core.ledger import Verdict, class_text
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement import loop
from layerzero.tuning.verification.vetting import Vetted


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    return tmp_path


@pytest.fixture
def kernels():
    for name in ("a", "b", "c"):
        lz.register_kernel("norm.rms", f"user.{name}", priority=50)(right)
    return [REGISTRY.kernel(f"user.{name}") for name in ("a", "b", "c")]


@pytest.fixture
def vetting(monkeypatch):
    """A kernel that has to be vetted, in rounds of which each reaches so many classes."""
    vetting = SimpleNamespace(reaches=1, rounds=[])

    def vet_calls(pairs, **_):
        unique = {(kernel.id, class_text(facts)): (kernel, facts) for kernel, facts in pairs}
        vetting.rounds.append(len(unique))
        reached = list(unique)[: vetting.reaches]
        for name in reached:
            ENGINE.ledger.record_verdict(*unique[name], Verdict.PASSED)
        ENGINE.bump()
        return tuple(Vetted(*name, Verdict.PASSED if name in reached else None, "", name in reached) for name in unique)

    monkeypatch.setattr(loop, "vet_calls", vet_calls)
    kernel = lz.Kernel(
        id="plug.rms",
        operations=("norm.rms",),
        backend=lz.Backend("plug", "a plugin", origin="plugin"),
        load=lambda facts: lambda input, weight, *, eps: rms_norm(input, weight.shape, weight, eps),
        accepts=("eps",),
        trust=Trust.PLUGIN,
    )
    lz.register_backend([kernel])
    return vetting


@pytest.fixture
def dangers(monkeypatch, request):
    return registered(monkeypatch, request.path.parent, "dangers")


@pytest.fixture
def planted(monkeypatch, request):
    return registered(monkeypatch, request.path.parents[1] / "kernels", "planted")


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    return registered(monkeypatch, tmp_path, "a_plugin", PLUGIN)


@pytest.fixture
def place(tmp_path):
    """A file of a tokenizer."""
    path = tmp_path / "tokenizer.json"
    path.write_text(vocabularies.byte_level())
    yield str(path)
    lz.forget_tokenizer()

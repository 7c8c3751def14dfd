"""Names that LayerZero has in vLLM: its entry point, what it refuses, and vLLM's choice of attention."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_steps import module

import layerzero_engines
from layerzero_engines import BACKEND, LATENT


class Selected(NamedTuple):
    """What vLLM's selector tells a platform, as far as the fakes below read it."""

    use_mla: bool = False
    use_sparse: bool = False


class Checked:
    """A backend that vLLM may ask."""

    @staticmethod
    def validate_configuration(device_capability, use_mla, use_sparse):
        return ["sparse not supported"] if use_sparse else []


@pytest.fixture
def platform(monkeypatch):
    """vLLM's registry and platforms by their names of 0.32, where vLLM is not installed."""
    for path in (BACKEND, LATENT):
        module(monkeypatch, path.rpartition(".")[0], **{path.rpartition(".")[2]: Checked})
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        module(monkeypatch, name)
    taken = {}

    class Member:
        def is_overridden(self):
            return self in taken

        def get_path(self):
            return taken[self]

    class CpuPlatform:
        def is_cpu(self):
            return True

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            return f"stock {num_heads}"

    class Gpu(CpuPlatform):
        def is_cpu(self):
            return False

        @classmethod
        def get_device_capability(cls):
            return 9, 0

    made = types.SimpleNamespace(custom=Member(), other=Member(), cpu=CpuPlatform, gpu=Gpu, taken=taken)
    made.platforms = module(monkeypatch, "vllm.platforms", current_platform=CpuPlatform())
    module(
        monkeypatch,
        "vllm.v1.attention.backends.registry",
        AttentionBackendEnum=types.SimpleNamespace(CUSTOM=made.custom),
        register_backend=taken.__setitem__,
    )
    return made


def test_a_cpu_takes_custom_where_it_is_asked_for_and_nothing_else_changes(platform):
    for _ in range(2):  # as in each of vLLM's processes, and again by hand
        layerzero_engines.vllm_plugin()
    layerzero_engines.register_vllm()
    choose = platform.cpu.get_attn_backend_cls
    assert choose(platform.custom, Selected()) == BACKEND
    assert choose(platform.custom, attn_selector_config=Selected(), num_heads=4) == BACKEND
    for other in (None, platform.other):
        assert choose(other, Selected(), num_heads=4) == "stock 4"
    assert choose(platform.custom, Selected(use_mla=True)) == LATENT
    with pytest.raises(ValueError, match=r"CUSTOM is not valid for this configuration.*sparse not supported"):
        choose(platform.custom, Selected(use_mla=True, use_sparse=True))
    platform.taken[platform.custom] = "another.Backend"
    assert choose(platform.custom, Selected()) == "stock None", "whose CUSTOM it is, is theirs"


def test_on_other_devices_latent_attention_alone_is_chosen_here(platform):
    platform.platforms.current_platform = platform.gpu()
    stock = vars(platform.cpu)["get_attn_backend_cls"]
    layerzero_engines.vllm_plugin()
    assert platform.taken == {platform.custom: BACKEND}
    assert vars(platform.cpu)["get_attn_backend_cls"] is stock
    choose = platform.gpu.get_attn_backend_cls
    assert choose(platform.custom, Selected()) == "stock None", "which reads the registry"
    assert choose(platform.custom, Selected(use_mla=True)) == LATENT
    assert choose(None, Selected(use_mla=True)) == "stock None"


def test_the_entry_point_says_why_it_refuses_and_lets_vllm_start(platform, caplog):
    platform.taken[platform.custom] = "another.Backend"
    layerzero_engines.vllm_plugin()
    assert "CUSTOM: wanted a place that is free, got another.Backend" in caplog.text
    assert platform.taken == {platform.custom: "another.Backend"}
    with pytest.raises(RuntimeError, match="wanted a place that is free"):
        layerzero_engines.register_vllm()
    platform.taken.clear()
    del platform.cpu.get_attn_backend_cls
    layerzero_engines.vllm_plugin()
    assert "would ignore CUSTOM" in caplog.text
    assert not platform.taken
    with pytest.raises(RuntimeError, match="chooses attention in another way"):
        layerzero_engines.register_vllm()


@pytest.mark.parametrize("version", ["0.19.9", "0.34.0", "1.0"])
def test_a_version_that_was_not_tried_is_named_with_the_range(platform, monkeypatch, caplog, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    layerzero_engines.vllm_plugin()
    assert f"vllm: wanted a version from 0.20 to below 0.34, which were tried, got {version}" in caplog.text
    assert not platform.taken
    with pytest.raises(RuntimeError, match="which were tried"):
        layerzero_engines.register_vllm()


@pytest.mark.parametrize(("names", "allowed", "told"), [
    ((), None, "got none: install layerzero"), (("layerzero",), "another", "got VLLM_PLUGINS=another"),
    (("layerzero",), "another,layerzero", ""), (("layerzero",), None, ""),
])  # fmt: skip
def test_registering_says_where_other_processes_will_not(platform, monkeypatch, caplog, names, allowed, told):
    found = [types.SimpleNamespace(name=each) for each in names]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: found if group == layerzero_engines.VLLM_GROUP else []
    )
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    layerzero_engines.register_vllm()
    assert told in caplog.text
    assert bool(told) is bool(caplog.text)


def test_the_entry_point_is_declared_and_imports_neither_library():
    project = tomllib.loads((Path(layerzero_engines.__file__).parents[1] / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]
    for group, name in ((layerzero_engines.VLLM_GROUP, "vllm"), (layerzero_engines.SGLANG_GROUP, "sglang")):
        assert points[group] == {layerzero_engines.NAME: f"layerzero_engines:{name}_plugin"}
    assert project["tool"]["setuptools"]["py-modules"] == ["layerzero_engines"]
    code = "import sys, layerzero_engines; print({'layerzero', 'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

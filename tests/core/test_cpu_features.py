"""A poorer CPU than this one, presented to the process: features are taken away, and everything it finds says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.core import cpu_features, device
from layerzero.core.cpu_features import VARIABLE, limited, torch_variables
from layerzero.core.evidence import call_work
from layerzero.engine.config import Configuration
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.diagnosis import _whole_beside
from layerzero.testing.process import child_environment
from layerzero.tuning.storage.environment import surroundings

SERVER = frozenset({"avx2", "avx512", "avx512_vnni", "avx512_bf16"})
EPYC = replace(lz.Device.named("CPU"), name="AMD EPYC", vendor="amd", instruction_sets=SERVER)


@pytest.fixture
def detected(monkeypatch):
    """What is detected on a server under a value of the variable."""
    monkeypatch.setattr(device, "cpu_of_this_machine", lambda: EPYC)

    def detect(text):
        with monkeypatch.context() as during:
            during.setenv(VARIABLE, text)
            during.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
            during.delenv("DNNL_MAX_CPU_ISA", raising=False)
            return device._detect_cpu()

    return detect


@pytest.mark.parametrize(("text", "kept"), [
    ("", SERVER),
    ("none", set()),
    ("avx2", {"avx2"}),
    ("AVX512", {"avx2", "avx512"}),
    ("avx512_bf16", SERVER),
    (" avx2, avx512_bf16 ,", SERVER),
])  # fmt: skip
def test_features_are_named_with_what_they_stand_on(text, kept):
    assert limited(SERVER, text) == kept


@pytest.mark.parametrize(("text", "told"), [
    ("amx_int8", "wanted amx_int8, which this CPU lacks; it has avx2, avx512, avx512_bf16, avx512_vnni. .*"),
    ("avx5122", "got 'avx5122'; did you mean 'avx512'"),
    ("avx2,laptop", "got 'laptop'"),
])  # fmt: skip
def test_nothing_is_added_and_no_name_is_guessed(detected, text, told):
    with pytest.raises(lz.PolicyError, match=f"^environment: {VARIABLE}: .*{told}"):
        detected(text)


def test_a_device_of_which_nothing_is_taken_is_the_same(detected):
    assert detected("") is detected("avx512_bf16") is EPYC


def test_times_and_verdicts_of_a_poorer_cpu_are_kept_apart(detected):
    laptop = detected("avx2")
    assert (laptop.name, laptop.instruction_sets) == ("AMD EPYC with avx2 only", {"avx2"})
    rows, weight, kernel = torch.ones(2, 8), torch.ones(8), REGISTRY.kernel("torch.rms_norm")
    for of in (
        lambda each: call_work(lz.facts("rms_norm", rows, weight, device=each)),
        lambda each: surroundings(each).environment(kernel)[1],
        lambda each: surroundings(each).environment(kernel)[0].capability,
    ):
        assert of(laptop) != of(EPYC)


def test_children_count_on_the_same_cpu(monkeypatch):
    monkeypatch.setenv(VARIABLE, "avx2")
    monkeypatch.setenv("LAYERZERO_DENY", "torch")
    found = child_environment((), {})
    assert found[VARIABLE] == "avx2"
    assert "LAYERZERO_DENY" not in found


def test_it_is_a_setting_with_an_origin(monkeypatch, tmp_path):
    found = Configuration({VARIABLE: "none"}).effective_with_origin()
    assert found["cpu_features"] == ("none", "environment")
    file = tmp_path / "layerzero.yaml"
    file.write_text("cpu_features: none\n")
    for name, set_it in {
        str(file): lambda: lz.load_config(file),
        "configure": lambda: lz.configure(cpu_features="none"),
    }.items():
        with pytest.raises(lz.PolicyError, match=f"^{name}: cpu_features: .* set {VARIABLE} before"):
            set_it()
    with pytest.raises(lz.PolicyError, match=f"^environment: {VARIABLE}: wanted features of a CPU .* got 'avx7'"):
        Configuration({VARIABLE: "avx7"}).effective()


@pytest.mark.parametrize(("kept", "aten", "onednn"), [
    (set(), "default", "SSE41"),
    ({"avx2"}, "avx2", "AVX2"),
    ({"avx2", "avx512"}, "avx512", "AVX512_CORE"),
    ({"avx2", "avx512", "avx512_vnni"}, "avx512", "AVX512_CORE_VNNI"),
    (SERVER, "avx512", "AVX512_CORE_BF16"),
    (SERVER | {"amx_bf16"}, "avx512", "AVX512_CORE_AMX"),
])  # fmt: skip
def test_torch_has_variables_of_its_own(kept, aten, onednn):
    assert torch_variables(kept) == {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}


def test_doctor_tells_what_still_uses_the_whole_cpu(monkeypatch):
    here = device.cpu_of_this_machine()
    for name in torch_variables(()):
        monkeypatch.delenv(name, raising=False)
    assert list(_whole_beside(here)) == []
    poorer = replace(here, name="poorer", instruction_sets=frozenset())
    (said,) = _whole_beside(poorer)
    assert "ATEN_CPU_CAPABILITY=default and ONEDNN_MAX_CPU_ISA=SSE41" in said
    for name, value in torch_variables(()).items():
        monkeypatch.setenv(name, value)
    assert list(_whole_beside(poorer)) == []


def test_every_feature_stands_on_known_ones():
    assert set(cpu_features._BELOW) | set(cpu_features._BELOW.values()) <= set(cpu_features.FLAGS.values())


@pytest.mark.parametrize(("held", "kept"), [
    ("AVX2", {"avx2"}), ("avx2_vnni_2", {"avx2", "avx_vnni"}), ("avx512_core", {"avx2", "avx512", "avx_vnni"}),
    ("SSE41", set()), ("", None), ("AVX512_CORE_BF16", None), ("AVX10_3_512", None),
])  # fmt: skip
def test_what_onednn_is_held_to_is_all_that_there_is(held, kept):
    """Its bfloat16 raised where it was held to AVX2, and its int8 products were wrong."""
    have = SERVER | {"avx_vnni"}
    assert cpu_features.left_by_onednn(have, {"ONEDNN_MAX_CPU_ISA": held}) == (have if kept is None else kept)
    assert cpu_features.left_by_onednn(have, {"DNNL_MAX_CPU_ISA": held}) == (have if kept is None else kept)


@pytest.mark.parametrize("feature", sorted({*cpu_features.FLAGS.values()}))
def test_the_variables_that_are_advised_take_nothing_more_away(feature):
    kept = cpu_features.wanted(feature)
    assert cpu_features.left_by_onednn(kept, torch_variables(kept)) == kept

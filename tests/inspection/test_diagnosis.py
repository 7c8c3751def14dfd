"""What doctor tells where something cannot be asked."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.core.device import Device
from layerzero.engine import accelerator, probe
from layerzero.engine.registry import REGISTRY
from layerzero.engine.services import SERVICES
from layerzero.inspection import diagnosis


def test_a_device_that_cannot_be_asked_is_an_issue_and_no_error(monkeypatch):
    def detect(name):
        if name == "cpu":
            return cpu
        raise ValueError("device: Cannot re-initialize CUDA in forked subprocess")

    cpu = Device.detect("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(Device, "detect", detect)
    told = lz.doctor()
    assert told.devices == (cpu,)
    assert sum("forked subprocess" in issue for issue in told.issues) == 2


def test_how_calls_find_their_kernels_is_told_in_words(monkeypatch):
    told = str(lz.doctor()).splitlines()
    assert told[0].startswith(f"layerzero {lz.__version__}, torch {torch.__version__}, python ")
    assert "hit path" not in told[0]
    assert told[1].startswith("calls like earlier ones find their kernel in ")
    assert told[2] == "the choice of kernels follows new times; lz.freeze() holds it"
    monkeypatch.setattr(accelerator, "HOT", None)
    monkeypatch.setattr(accelerator, "ABSENT", "it was not built")
    lz.rms_norm(torch.randn(2, 8), torch.ones(8))
    lz.freeze()
    try:
        told = lz.doctor().head()
    finally:
        lz.thaw()
    assert told[1] == "calls like earlier ones find their kernel in Python (it was not built)"
    assert told[2] == "the choice of kernels is frozen for 1 classes of calls; lz.thaw() lets it follow new times"


@pytest.mark.parametrize(("name", "here", "count"), [("B200", False, 1), ("B200", True, 0), ("RTX 5090", False, 0)])
def test_a_large_blackwell_whose_units_no_library_uses_is_an_issue(monkeypatch, name, here, count):
    cpu, blackwell = Device.detect("cpu"), Device.named(name)
    libraries = {"flash-attn-4": "4.0.0b36", "torch": torch.__version__} if here else {}
    monkeypatch.setattr(diagnosis.probe, "with_device", lambda device: probe.Machine(device, libraries))
    monkeypatch.setattr(diagnosis, "_devices", lambda: ([cpu, blackwell], []))
    told = [each for each in lz.doctor().issues if "tcgen05" in each]
    wanted = "torch alone has kernels for the tensor cores of NVIDIA B200 (tcgen05); `pip install --pre flash-attn-4` "
    assert len(told) == count
    assert all(each.startswith(wanted) for each in told)


def test_all_ways_of_reading_tensors_have_words():
    assert accelerator.HOT is None or accelerator.HOT.reader() in diagnosis._IN_C


def test_a_lock_that_names_nothing_is_an_issue_also_where_calls_were_recorded(monkeypatch):
    monkeypatch.setattr(REGISTRY.names, "problems", lambda policy: iter(["LAYERZERO_LOCK: norm.rms: names none here"]))
    monkeypatch.setattr(SERVICES, "builds", raises)
    told = lz.doctor()
    assert "LAYERZERO_LOCK: norm.rms: names none here" in told.issues
    assert told.builds == ()


def raises():
    raise lz.PolicyError("what builds() would ask raises while a lock names nothing")

"""What doctor tells where something cannot be asked."""

from __future__ import annotations

import torch

import layerzero as lz
from layerzero.core.device import Device


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

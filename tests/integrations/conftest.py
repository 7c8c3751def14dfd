"""Captured steps as they run on a CPU, and by a stand-in as they run on a GPU; weights that are packed on any CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero as lz


@pytest.fixture
def packs() -> None:
    """Let priorities decide, so that weights are packed: elsewhere than on AMD's processors torch keeps float32's."""
    lz.configure(unmeasured="priority")


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels are timed on the inputs' calls, which takes seconds: what is kept there is decided by the whole."""
    from layerzero.integrations.optimize.times.workload import Workload
    from layerzero.tuning.measurement.timing import Deadline

    tune = Workload.tune
    monkeypatch.setattr(Workload, "tune", lambda self, deadline, **more: tune(self, deadline=Deadline(0.0), **more))


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU; or by lengths that only the device knows, with graphs."""
    if request.param == "device":
        from decoders import Recorded
        from layerzero.integrations.optimize.models import steps

        monkeypatch.setattr(steps, "ON_HOST", frozenset())

        def captured(self: Any, run: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
            made = run()
            return Recorded(run, made), made

        monkeypatch.setattr(steps.Steps, "_captured", captured)
        Recorded.captured = 0
    return str(request.param)

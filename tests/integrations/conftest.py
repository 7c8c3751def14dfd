"""Captured steps as they run on a CPU, and by a stand-in as they run on a GPU; weights that are packed on any CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_steps import module

import layerzero as lz
from clock import Clock


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


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The integration on top of modules that have the names of sglang 0.5.23."""
    for name in ("", ".srt", ".srt.layers", ".srt.layers.attention", ".srt.mem_cache", ".srt.arg_groups"):
        module(monkeypatch, f"sglang{name}")

    class AttentionBackend:
        pass

    registered: dict[str, Any] = {}
    choices: list[str] = []
    module(monkeypatch, "sglang.srt.layers.attention.base_attn_backend", AttentionBackend=AttentionBackend)
    module(
        monkeypatch,
        "sglang.srt.layers.attention.attention_registry",
        ATTENTION_BACKENDS=registered,
        register_attention_backend=lambda name: lambda made: registered.setdefault(name, made),
    )
    module(monkeypatch, "sglang.srt.arg_groups.choices", add_attention_backend_choices=choices.extend)
    pools = module(monkeypatch, "sglang.srt.mem_cache.memory_pool", KVWriteLoc=lambda slots: ("at", slots))
    sys.modules["sglang.srt.mem_cache"].memory_pool = pools
    monkeypatch.delitem(sys.modules, "layerzero.integrations.sglang", raising=False)
    made = importlib.import_module("layerzero.integrations.sglang")
    made.tested = registered, choices
    yield made
    sys.modules.pop("layerzero.integrations.sglang", None)


@pytest.fixture(scope="module")
def registered() -> None:
    lz.register_with_transformers()


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """Transformers says nothing, and one thread computes: two wait for each other on a busy machine."""
    import transformers

    before, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    yield
    transformers.logging.set_verbosity(before)
    torch.set_num_threads(threads)


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is left out wherever it can be: no time of this machine decides."""
    from layerzero.integrations.optimize.models import stacks

    costs = stacks.Costs(4.0, 1.0, 0.0, 0.0, torch.get_num_threads())
    monkeypatch.setattr(stacks, "_costs", lambda *_: costs)


@pytest.fixture
def layer_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """What layers are timed by."""
    from layerzero.integrations.optimize.times import timing

    timing.forget()
    made = Clock()
    monkeypatch.setattr(timing, "CLOCK", made)
    yield made
    timing.forget()


@pytest.fixture
def clock_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs of a model are timed by."""
    from compiled_models import CLOCK

    from layerzero.integrations.optimize.times import timing, workload

    CLOCK.now = 0.0
    monkeypatch.setattr(workload, "CLOCK", CLOCK)
    monkeypatch.setattr(timing, "WALL", CLOCK)

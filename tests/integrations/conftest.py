"""Captured steps as they run on a CPU, and by a stand-in as they run on a GPU; weights that are packed on any CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import module
from packaging.version import Version

import layerzero as lz
from clock import Clock

_MORE_IN_NEWER = (
    (
        "5.5",
        "the configuration refuses a bool",
        ("test_*[[]Olmo*", "test_an_exchange_is_compared*", "test_a_chosen_window_holds*"),
    ),
    (
        "5.8",
        "ModernBERT's attention and padding are stock's",
        ("test_any_mask*[[]modernbert]", "test_every_way*[[]modernbert]", "test_real_positions*[[]modernbert*"),
    ),
    (
        "5.12",
        "no mask of four axes, nor masks that are traced",
        ("test_any_mask*[[]mpnet]", "test_a_library_compiles*[[]onnxruntime]"),
    ),
    (
        "5.13",
        "T5's attention is stock's, caches and their masks are other ones, DeepSeek V3.2 lacks",
        (
            "test_modules_are_found*[[]t5*",
            "test_models_without_such_steps*[[]T5]",
            "test_chunks_through_a_cache*[[]T5]",
            "test_gradients_equal_eager[[]t5]",
            "test_any_mask*[[]t5]",
            "test_every_way*[[]t5]",
            "test_real_positions*[[]t5*",
            "test_generate_hands_the_mask*",
            "test_a_prompt_in_an_empty_cache*",
            "test_a_model_whose_cache_keeps_latents*",
            "test_a_model_that_reads_its_masks_itself*",
        ),
    ),
    ("5.18", "whole layers of DINOv2 are left to stock", ("test_encoder_layers_are_taken_whole[[]Dinov2-*",)),
    (
        "5.24",
        "no version showed whole layers of Qwen2-VL and BLIP-2",
        ("test_layers_are_proved_behind_a_call*", "test_encoder_layers_are_taken_whole[[]Blip2Vision-*"),
    ),
    (
        "5.21",
        "whole layers of Gemma 2 are left to stock",
        (
            "test_a_change_of_any_module*[[]Gemma2-*",
            "test_layers_are_taken_whole*[[]Gemma2-*",
            "test_layers_know*[[]Gemma2]",
            "test_modules_are_found*[[]gemma2]",
        ),
    ),
)
"""The first version of Transformers in which tests find what they ask for, and what the ones before do otherwise."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip what the Transformers that is here leaves to stock, as docs/models.md says."""
    try:
        here = Version(metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return
    newer = [each for each in _MORE_IN_NEWER if here < Version(each[0])]
    for item in items if newer else ():
        for first, why, names in newer:
            if item.path.parent == Path(__file__).parent and any(fnmatchcase(item.name, name) for name in names):
                item.add_marker(pytest.mark.skip(reason=f"transformers before {first}: {why}"))


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

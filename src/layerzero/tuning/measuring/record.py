"""``lz.record``: write down which calls a program makes, for tuning on them later.

Nothing of it is on a hit. While something is recorded no plan is kept, so every call goes through choosing, where it is
counted: about a quarter of a millisecond each on a CPU of 2026. Calls inside a CUDA graph are seen when it is captured,
not when it is replayed; calls that other threads make at the same moment with the same key may count once.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

import layerzero
from layerzero.core import forking
from layerzero.core.disk import check_place
from layerzero.core.operation import Function
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Plan
from layerzero.core.recipe import CallRecipe
from layerzero.engine.dispatch import ENGINE
from layerzero.tuning.measuring.jobs import Job
from layerzero.tuning.measuring.manifest import FORMAT, Manifest, Recorded, jobs_of


class Recording:
    """A recording; also a context manager that ends it.

    Attributes:
        path: where the manifest goes when it ends; None keeps it in :meth:`manifest`.
        model: what the program runs, for whoever loads the manifest.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, model: str = "") -> None:
        if path is not None:
            check_place(path)
        self.path = path
        self.model = model
        self._counts: Counter[bytes] = Counter()
        self._lock = forking.lock()
        self._running = True
        ENGINE.watch(self._saw)

    def _saw(self, _: Function | PlainFunction, plan: Plan) -> None:
        call = msgspec.json.encode(CallRecipe.of(plan.report.facts))
        with self._lock:
            self._counts[call] += 1

    @property
    def calls(self) -> int:
        """How many calls were seen so far."""
        return self._counts.total()

    def manifest(self) -> Manifest:
        """What was seen so far, the most frequent call first."""
        with self._lock:
            counts = self._counts.most_common()
        calls = [Recorded(count, msgspec.json.decode(call, type=CallRecipe)) for call, count in counts]
        return Manifest(FORMAT, time.time(), layerzero.__version__, calls, self.model)

    def stop(self) -> Manifest:
        """End the recording, write the manifest where a path was given, and return it.

        Where it cannot be written there, as on a disk that filled up meanwhile, it is written among the system's
        temporary files, which the error names. Raises: OSError.
        """
        if self._running:
            self._running = False
            ENGINE.unwatch(self._saw)
        manifest = self.manifest()
        if self.path is not None:
            try:
                manifest.save(self.path)
            except OSError as error:
                error.add_note(f"what was recorded lies in {self._rescued(manifest)}")
                raise
        return manifest

    def _rescued(self, manifest: Manifest) -> str:
        place = Path(tempfile.mkdtemp(prefix="layerzero-")) / "workload.json"
        try:
            manifest.save(place)
        except OSError as error:
            return f"no file ({error}), but in Recording.manifest()"
        return str(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def record(path: str | os.PathLike[str] | None = None, *, model: str = "") -> Recording:
    """Record the calls that this process makes from now on, in all threads, until the recording is stopped.

        with lz.record("workload.json"):
            model.generate(...)
        lz.tune(manifest="workload.json")

    Args:
        path: a file for the manifest, written when the recording ends, with an error or without.
        model: a name or hash of what the program runs, kept in the manifest.
    Raises: OSError where the file could not be written, before anything is recorded.
    A model on meta or fake tensors may be recorded, whose calls would not fit into this machine: of meta tensors, as
    calls on the current CUDA device, or on the CPU where there is none.
    Calls are slower while it runs, since each is chosen for anew; before and after, they cost what they always do.
    """
    return Recording(path, model=model)


def jobs_of_model(model: Callable[..., Any], inputs: Any, device: str) -> list[Job]:
    """The calls of one forward pass. Raises: ValueError where it makes none on this device."""
    with Recording() as recording, torch.no_grad():
        if inputs is None:
            model()
        elif isinstance(inputs, Mapping):
            model(**inputs)
        else:
            model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    jobs = jobs_of(recording.manifest(), device)
    if not jobs:
        got = f"{type(model).__name__}, which made {recording.calls} calls elsewhere"
        hint = "lz.optimize(model) lets its modules call them, device= names another device"
        raise ValueError(f"wanted a model that calls LayerZero's functions on {device}, got {got}; {hint}")
    return jobs

"""The caller's own inputs: run, compared, recorded, measured and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerzero.core.kernel import Kernel
from layerzero.engine.config import current_policy
from layerzero.engine.registry import REGISTRY
from layerzero.integrations.optimize.time_left import RUN, TimeLeft
from layerzero.tuning.measuring.clocks import current
from layerzero.tuning.measuring.timing import Deadline, Effort
from layerzero.tuning.measuring.tune import Tuned, run_jobs
from layerzero.tuning.measuring.tune_run import Step
from layerzero.tuning.measuring.workload import jobs_of, record

SHORTEST_S = 0.05
"""A sample runs the model as often as fills this, at most :data:`MOST` times."""

MOST = 20


@dataclass
class Workload:
    """A way to run a model.

    Attributes:
        call: runs it once and returns what it gives.
        device: where the model lies.
        time: what is left of the time; it learns of every run.
    """

    call: Callable[[], Any]
    device: torch.device
    time: TimeLeft = field(default_factory=lambda: TimeLeft(None))
    _often: int = 0

    def run(self) -> list[Tensor]:
        """The tensors that it gives, in order."""
        with self.time.taking(RUN):
            with torch.no_grad():
                found = [each.detach().clone() for each in tensors_in(self.call())]
            self._wait()
        return found

    def samples(self, count: int) -> int:
        """How many runs so many samples are."""
        return count * max(self._often, 1)

    def fits(self, samples: int) -> bool:
        """Whether there is time for so many samples."""
        return self.time.fits(RUN, self.samples(samples))

    def sample(self) -> float:
        """Seconds of one run; short ones are run several times and the least counts."""
        if not self._often:
            seconds = self.time.expected_s(RUN) or self._seconds()
            self._often = max(1, min(MOST, int(SHORTEST_S / max(seconds, 1e-6))))
        return min(self._seconds() for _ in range(self._often))

    def _seconds(self) -> float:
        self._wait()
        started = time.perf_counter()
        with self.time.taking(RUN):
            with torch.no_grad():
                self.call()
            self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tune(self, *, deadline: Deadline, isolate: bool, progress: Callable[[Step], None] | None = None) -> Tuned:
        """Record the calls of one run and measure each class of them, the most frequent first."""
        with record() as recording, torch.no_grad():
            self.call()
        jobs = jobs_of(recording.manifest(), self.device.type)
        effort = Effort(current_policy()["tune_samples"], fill=self.device.type == "cpu")
        slow = [kernel.id for kernel in REGISTRY.kernels() if self._takes_minutes(kernel)]
        with current(self.device):
            return run_jobs(
                jobs, self.device, effort=effort, deadline=deadline, isolate=isolate, leave_out=slow, progress=progress
            )

    def _takes_minutes(self, kernel: Kernel) -> bool:
        """Compilers for the CPU take half a minute a call, more than most runs would ever win."""
        return kernel.jit and self.device.type == "cpu"


def _noted(call: Callable[[], Any], how: str) -> Callable[[], Any]:
    """What says how the model was called, where it raises: a SentenceTransformer takes no sentences that way."""

    def run() -> Any:
        try:
            return call()
        except Exception as error:
            other = "inputs may be a function that runs it otherwise: lz.optimize(model, lambda: model.encode(texts))"
            error.add_note(f"lz.optimize ran {how}; {other}")
            raise

    return run


def is_function(inputs: Any) -> bool:
    """Whether inputs are a function that runs the model, and no arguments of a call."""
    return callable(inputs) and not isinstance(inputs, (Mapping, tuple, list, Tensor))


def workload_of(model: Any, inputs: Any, time: TimeLeft) -> Workload:
    """A way to run a model on what the caller gave."""
    first = next((each for each in tensors_of_model(model)), None)
    device = torch.device("cpu") if first is None else first.device
    if isinstance(inputs, Mapping):
        return Workload(_noted(lambda: model(**inputs), "model(**inputs)"), device, time)
    if isinstance(inputs, (tuple, list)):
        return Workload(_noted(lambda: model(*inputs), "model(*inputs)"), device, time)
    if isinstance(inputs, Tensor):
        return Workload(_noted(lambda: model(inputs), "model(inputs)"), device, time)
    if callable(inputs):
        return Workload(inputs, device, time)
    wanted = "a tensor, a tuple, a dict, or a function without arguments"
    raise TypeError(f"optimize: inputs: wanted {wanted}, got {type(inputs).__name__}")


def tensors_of_model(model: Any) -> Iterator[Tensor]:
    """Its parameters, or those of the model within it."""
    module = model if isinstance(model, torch.nn.Module) else model.model
    yield from module.parameters()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in what a model returns, caches aside: in tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)

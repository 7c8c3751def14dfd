"""Workloads: ``lz.record`` writes down which calls a program makes and how often, in a JSON file that tuning takes.

    {"format": 1, "created_unix_s": …, "layerzero": "0.1.0", "model": "", "calls": [{"count": 40, "call": {…}}]}

A call is written as :class:`layerzero.core.recipe.CallRecipe`: sizes, strides and arguments, never data.

Nothing of it is on a hit. While something is recorded no plan is kept, so every call goes through choosing, where it is
counted: about a quarter of a millisecond each on a CPU of 2026. Calls inside a CUDA graph are seen when it is captured,
not when it is replayed; calls that other threads make at the same moment with the same key may count once.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch.nn import Module

import layerzero
from layerzero.core.arguments import told
from layerzero.core.errors import LayerZeroWarning, stays
from layerzero.core.ledger import class_text
from layerzero.core.operation import Case, Function, Operation
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Plan
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import forking, warn
from layerzero.core.system.disk import check_place, write_whole
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.plan_document import model_of
from layerzero.tuning.measurement.jobs import Job

FORMAT = 1


def model_text(model: str | Module) -> str:
    """What a manifest says of a model: its name, or its class and the hash of its configuration and parameters.

    Raises: ValueError for what is neither.
    """
    if isinstance(model, Module):
        name, _, found = model_of(model)
        return f"{name} {found}"
    if model is not None and not isinstance(model, str):
        raise ValueError(f"model: wanted a name or a torch.nn.Module, got {told(model)}")
    return model or ""


def model_compared(model: str | Module, manifest: str | os.PathLike[str] | None) -> str:
    """The same of a model that a manifest is compared with. Raises: ValueError for one without a manifest, too."""
    text = model_text(model)
    if text and manifest is None:
        raise ValueError(f"model: wanted it along with a manifest, which it is compared with, got {text!r} alone")
    return text


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call, and how often it was made."""

    count: int
    call: CallRecipe


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recorded workload.

    Attributes:
        format: version of this document.
        created_unix_s: when it was written.
        layerzero: the version that wrote it.
        model: what the program ran: a name, or class and hash of a model (:func:`record`). Empty if not said.
        calls: each call once, the most frequent first.
    """

    format: int
    created_unix_s: float
    layerzero: str
    calls: list[Recorded]
    model: str = ""

    @staticmethod
    def load(path: str | os.PathLike[str], *, model: str | Module = "") -> Manifest:
        """Read a manifest; warn of one that is older than ``manifest.stale_days`` says.

        Raises: ValueError for a file that is none, of another format, or of another model than the one given.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: wanted a manifest that lz.record wrote: {error.strerror}") from error
        try:
            manifest = msgspec.json.decode(text, type=Manifest)
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: no UTF-8
            raise ValueError(f"{path}: wanted a manifest that lz.record wrote: {error}") from error
        if manifest.format != FORMAT:
            raise ValueError(f"{path}: wanted a manifest of format {FORMAT}, got {manifest.format}; record it again")
        model = model_text(model)
        if model and manifest.model != model:
            raise ValueError(f"{path}: wanted a manifest of the model {model!r}, got one of {manifest.model!r}")
        for recorded in manifest.calls:
            if recorded.count < 1 or recorded.call.operation not in REGISTRY.operations():
                got = f"{recorded.call.operation}, {recorded.count} times"
                raise ValueError(f"{path}: wanted calls of known operations, made at least once, got {got}")
        age_days = (time.time() - manifest.created_unix_s) / 86400
        if age_days > CONFIGURATION.policy["manifest.stale_days"]:
            warn(
                f"{path}: it was recorded {age_days:.0f} days ago; record it again if the program changed since",
                LayerZeroWarning,
                stacklevel=2,
            )
        return manifest

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the manifest in place of what was there, whole or not at all. Raises: OSError."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1))


def jobs_of(manifest: Manifest, device: str) -> list[Job]:
    """Calls of each class, where a class is what verdicts are kept for; frequent classes first.

    A decode loop makes thousands of calls that differ in length by one. Of each power of two that they lie in, three
    stand for it: the smallest, the most frequent and the largest, so that all between them have measured neighbours; of
    those that are equally frequent, the middle one.
    The most frequent of every class come before the others. Calls without tensors are no jobs: see :func:`cases_of`.
    """
    classes: dict[str, list[Recorded]] = defaultdict(list)
    for recorded in manifest.calls:
        if recorded.call.device == device and recorded.call.tensors:
            classes[_class_of(recorded.call)].append(recorded)
    first, bracketing = [], []
    for members in classes.values():
        by_size = sorted(members, key=lambda each: (_elements(each.call), text_of(each.call)))
        highest = max(each.count for each in members)
        frequent = [each for each in by_size if each.count == highest]
        most = frequent[len(frequent) // 2]  # in a decode loop every length comes as often
        count = sum(each.count for each in members)
        first.append(job_of(most.call, count))
        ends = {_elements(each.call): each for each in (by_size[0], by_size[-1])}
        bracketing += [job_of(each.call, count) for size, each in ends.items() if size != _elements(most.call)]
    return [*sorted(first, key=_rank), *sorted(bracketing, key=_rank)]


def cases_of(manifest: Manifest) -> Iterator[tuple[Operation, Mapping[str, Any], list[Case]]]:
    """Calls without tensors: each operation, the parameters that name its work, and cases, frequent ones first.

    Those of something that existed in the recording process only are left out: no other one finds it.
    """
    found: dict[tuple[str, str], tuple[Mapping[str, Any], dict[str, Case]]] = {}
    for recorded in manifest.calls:
        operation = REGISTRY.operation(recorded.call.operation)
        if operation.plain is None or not recorded.call.params.get("source"):
            continue
        case = operation.plain.case(recorded.call.params)
        key = operation.name, str(recorded.call.params["source"])
        found.setdefault(key, (recorded.call.params, {}))[1].setdefault(case.name, case)
    for (name, _), (params, cases) in found.items():
        yield REGISTRY.operation(name), params, list(cases.values())


def jobs_of_file(path: str | os.PathLike[str], device: str, *, model: str | Module = "") -> list[Job]:
    """The calls of a manifest's file on a kind of device, as :func:`jobs_of` lists them.

    Raises: ValueError as :meth:`Manifest.load` does, and where all calls were made on other devices.
    """
    return _read(path, device, model, jobs_of)


def every_call_of_file(path: str | os.PathLike[str], device: str, *, model: str | Module = "") -> list[Job]:
    """Each call of a manifest's file on a kind of device, none standing for others. Raises: as :func:`jobs_of_file`."""

    def whole(manifest: Manifest, device: str) -> list[Job]:
        jobs = every_call_of(manifest, device)
        for job in jobs:
            job.facts(device)
        return jobs

    return _read(path, device, model, whole)


def every_call_of(manifest: Manifest, device: str) -> list[Job]:
    """Each call with tensors on a kind of device."""
    calls = [each for each in manifest.calls if each.call.device == device and each.call.tensors]
    return [job_of(each.call, each.count) for each in calls]


def _read(
    path: str | os.PathLike[str], device: str, model: str | Module, listed: Callable[[Manifest, str], list[Job]]
) -> list[Job]:
    manifest = Manifest.load(path, model=model)
    try:
        jobs = listed(manifest, device)
    except (RuntimeError, TypeError, LookupError, ValueError) as error:  # it was written by hand, or damaged
        raise ValueError(f"{path}: wanted calls as lz.record writes them, got another: {error}") from error
    elsewhere = ", ".join(sorted({each.call.device for each in manifest.calls} - {device}))
    if elsewhere and not jobs:
        got = f"{len(manifest.calls)} on {elsewhere}"
        raise ValueError(f"{path}: wanted calls on {device}, got {got}; device= says where, or record it again here")
    return jobs


def job_of(call: CallRecipe, count: int = 1) -> Job:
    """A written call as a job."""
    return Job(call.operation, Case(text_of(call), {}), dtype_of(call), recipe=call, count=count)


def _rank(job: Job) -> tuple[int, str]:
    return -job.count, job.name


def _elements(call: CallRecipe) -> int:
    return sum(math.prod(each.shape) for each in call.tensors.values())


def _class_of(call: CallRecipe) -> str:
    job = Job(call.operation, Case("", {}), "", recipe=call)
    return class_text(job.facts(call.device)) + f" {sorted(call.params.items(), key=str)}"


def dtype_of(call: CallRecipe) -> str:
    """The dtype of a call: that of its first tensor."""
    return next(iter(call.tensors.values())).dtype


def text_of(call: CallRecipe) -> str:
    """The sizes of a call's tensors, each once, its arguments that are not neutral, layout and gradients."""
    shapes = dict.fromkeys("x".join(map(str, each.shape)) for each in call.tensors.values())
    operation = REGISTRY.operation(call.operation)
    told = [
        f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for name, neutral in operation.schema.neutral.items()
        if (value := call.params.get(name, neutral)) not in (neutral, [*neutral] if isinstance(neutral, tuple) else ())
    ]
    told += [call.layout] if call.layout and call.layout not in operation.layouts[:1] else []
    return " ".join([*shapes, *told, *(["with gradients"] if call.requires_grad else [])])


class Recording:
    """A recording; also a context manager that ends it.

    Attributes:
        path: where the manifest goes when it ends; None keeps it in :meth:`manifest`.
        model: what the program runs, for the reader of the manifest.
    """

    __reduce_ex__ = stays("lz.record", "recording", "stop() it and send the manifest that it returns")

    def __init__(self, path: str | os.PathLike[str] | None = None, *, model: str | Module = "") -> None:
        if path is not None:
            check_place(path)
        self.path = path
        self.model = model_text(model)
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


def record(path: str | os.PathLike[str] | None = None, *, model: str | Module = "") -> Recording:
    """Record the calls that this process makes from now on, in all threads, until the recording is stopped.

        with lz.record("workload.json"):
            model.generate(...)
        lz.tune(manifest="workload.json")

    Args:
        path: a file for the manifest, written when the recording ends, with an error or without.
        model: what the program runs: a name, or the model, of which the manifest keeps class and hash of its
            configuration and of its parameters' names, shapes and dtypes.
    Raises: OSError where the file could not be written, before anything is recorded.
    A model on meta or fake tensors may be recorded, for calls that do not fit into this machine. Meta tensors count as
    calls on the current CUDA device, or on the CPU where there is none.
    Calls are slower while it runs, since each is chosen for anew; before and after, they cost what they always do.
    """
    return Recording(path, model=model)


def called(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with a tensor, a tuple, a list or a dict of its inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))


def jobs_of_model(
    model: Callable[..., Any], inputs: Any, device: str, said: Mapping[str, Any] | None = None
) -> list[Job]:
    """The calls of one forward pass; ``said`` is what else was said of calls, by name, of which a model takes nothing.

    Raises: ValueError where it makes none on this device, and where anything else was said.
    """
    named = [name for name, value in (said or {}).items() if value is not None and value not in ("", {})]
    if named:
        raise ValueError(
            f"{', '.join(named)}: wanted with an operation's name alone, got a model, which makes its calls; "
            "give the model and its inputs alone"
        )
    with Recording() as recording, torch.no_grad():
        called(model, () if inputs is None else inputs)
    jobs = jobs_of(recording.manifest(), device)
    if not jobs:
        got = f"{type(model).__name__}, which made {recording.calls} calls elsewhere"
        hint = "lz.optimize(model) lets its modules call them, device= names another device"
        raise ValueError(f"wanted a model that calls LayerZero's functions on {device}, got {got}; {hint}")
    return jobs

"""What ``lz.solve`` adds to frozen choices: the model, the machine and the buckets that they were solved for.

And documents of choices as text: the decision table of a plan, and what differs between two documents.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch.nn import Module

from layerzero.core.device import Device, capability_hash, driver_version
from layerzero.core.dtypes import dtype_name
from layerzero.engine import probe
from layerzero.engine.frozen_choices import FrozenChoice
from layerzero.engine.registry import REGISTRY

if TYPE_CHECKING:
    from layerzero.inspection.freeze import Frost

RUNTIME_SELECT, ERROR = "runtime_select", "error"
"""What becomes of a call outside of all buckets."""

Plain = bool | int | float | str


class Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One point of the grid, as ``{"seq_len": 512, "batch": 4}``, and the names of the choices of its calls."""

    sizes: dict[str, int]
    calls: list[str]


class BuiltFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What has to be built for a choice before it holds: the kernel and the name of the build."""

    kernel: str
    build: str


class Joint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What choosing the kernels of one point of the grid together came to (``plan_mode``).

    Attributes:
        sizes: the point.
        alone_us: a run of the model's code at this point with every kernel chosen for itself.
        together_us: the same with the plan's kernels.
        changed: names of the calls whose kernel is another one for its neighbours; their choices say why.
        lost: the next path: by the names of calls, the kernels in which it differs from the plan.
        lost_us: the times and conversions of that path, microseconds.
        note: what was tried, and what came of it.
    """

    sizes: dict[str, int]
    alone_us: float
    together_us: float
    changed: list[str]
    lost: dict[str, str]
    lost_us: float
    note: str


class Solved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a document that ``lz.solve`` writes besides the choices.

    Attributes:
        model: name of the model's class.
        configuration: what its config says, and its parameters counted; readable.
        configuration_hash: SHA-256 of that and of every parameter's name, shape and dtype.
        hardware: the device: signature, name, capability, driver, runtime, and threads of a CPU.
        libraries: distribution and version of each library that has kernels of these operations, torch among them.
        capabilities: SHA-256 of both.
        shape_buckets: the grid, by axis.
        plans: each point of it with its calls.
        jit_artifacts: builds that choices rest on, by the choice's name.
        fallback: what becomes of a call outside of all buckets, ``runtime_select`` or ``error``.
        joint: what choosing kernels together came to, point by point; empty where each was chosen for itself.
        not_recorded: points of the grid that have no bucket, since the budget was over; left out where there are none.
    """

    model: str
    configuration: dict[str, Plain]
    configuration_hash: str
    hardware: dict[str, Plain]
    libraries: dict[str, str]
    capabilities: str
    shape_buckets: dict[str, list[int]]
    plans: list[Bucket]
    jit_artifacts: dict[str, BuiltFor]
    fallback: str = RUNTIME_SELECT
    joint: list[Joint] = []
    not_recorded: list[dict[str, int]] | UnsetType = UNSET

    def differences(self, operations: Collection[str], model: Module | None) -> list[str]:
        """What is not here as it is there: hardware, libraries, and the model where one is given."""
        gpu = self.hardware.get("platform") != "cpu" and torch.cuda.is_available()
        device = Device.detect("cuda" if gpu else "cpu")
        found = unlike("hardware", self.hardware, hardware_of(device))
        known = REGISTRY.operations()
        found += [f"operation: wanted {each}, which is not registered here" for each in operations if each not in known]
        found += unlike("library", self.libraries, libraries_of(device, [each for each in operations if each in known]))
        if model is not None:
            name, configuration, digest = model_of(model)
            found += unlike("model", {"class": self.model, **self.configuration}, {"class": name, **configuration})
            if digest != self.configuration_hash and not any(each.startswith("model") for each in found):
                found.append(f"model: configuration_hash: wanted {self.configuration_hash}, got {digest}")
        return found


def unlike(what: str, wanted: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A line for each key whose values differ."""
    return [
        f"{what}: {key}: wanted {wanted.get(key, 'none')}, got {here.get(key, 'none')}"
        for key in sorted({*wanted, *here})
        if wanted.get(key) != here.get(key)
    ]


def model_of(model: Module) -> tuple[str, dict[str, Plain], str]:
    """The class, the readable configuration and the hash of a model; where its weights lie does not count."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    found: dict[str, Plain] = {
        str(key): str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no inf
        for key, value in to_dict().items()
        if isinstance(value, (bool, int, float, str)) and not key.startswith("_") and key != "transformers_version"
    }
    parameters = {name: (dtype_name(each.dtype), list(each.shape)) for name, each in model.named_parameters()}
    found["parameters"] = sum(each.numel() for each in model.parameters())
    found["parameter_dtypes"] = ", ".join(sorted({dtype for dtype, _ in parameters.values()}))
    name = type(model).__name__
    return name, found, digest([name, found, parameters])


def hardware_of(device: Device) -> dict[str, Plain]:
    """What choices on a device rest on, by name."""
    kind = device.architecture or "unknown"
    kind = f"sm{device.sm_number}_cu{device.runtime.replace('.', '')}" if device.sm else kind
    found: dict[str, Plain] = {
        "signature": f"{device.platform}_{kind}",
        "name": device.name,
        "platform": device.platform,
        "capability": capability_hash(device),
        "driver": driver_version(device),
        "runtime": device.runtime,
    }
    return found | ({"threads": torch.get_num_threads()} if device.platform == "cpu" else {})


def libraries_of(device: Device, operations: Iterable[str]) -> dict[str, str]:
    """Distribution and version of each library here that has kernels of these operations for a kind of device."""
    machine, found = probe.this_machine(), {"torch": probe.this_machine().torch}
    for backend in {each.backend for name in operations for each in REGISTRY.candidates(name)}:
        version = machine.version(backend, device) if device.platform in backend.platforms else None
        if version and backend.distributions[0]:
            found[backend.distributions[0]] = version
    return dict(sorted(found.items()))


def digest(value: object) -> str:
    """The SHA-256 of plain values, whatever the order of keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


MOST = 200
"""Characters of a value in a line; JSON has all of it."""


class Difference(msgspec.Struct, frozen=True):
    """Where two documents differ: what, and what each says; None where it says nothing."""

    what: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.what}: {_said(self.first)} -> {_said(self.second)}"


def _said(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def differences(first: Frost, second: Frost) -> list[Difference]:
    """Everything in which two documents differ, but for their hashes; nothing of a document and itself."""
    one, other = _flat(first), _flat(second)
    for name in {*first.choices} & {*second.choices}:  # of a choice that one of them lacks, its kernel says enough
        calls = [msgspec.to_builtins((each.choices[name].call, each.choices[name].state)) for each in (first, second)]
        one[f"example call of {name}"], other[f"example call of {name}"] = calls
    return [
        Difference(key, one.get(key), other.get(key))
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]


def _flat(document: Frost) -> dict[str, Any]:
    """What a document says, by one name each."""
    found = {name: getattr(document, name) for name in ("format", "layerzero", "torch", "device", "settings")}
    solved = document.solved
    if solved is not None:
        found |= {f"plan.{name}": getattr(solved, name) for name in ("model", "configuration_hash", "fallback")}
        for part in ("configuration", "hardware", "libraries", "shape_buckets"):
            found |= {f"{part}.{key}": value for key, value in getattr(solved, part).items()}
        found |= {f"bucket {_point(each.sizes)}": each.calls for each in solved.plans}
        found |= {f"bucket {_point(each)}": "not recorded" for each in solved.not_recorded or ()}
        found |= {f"together {_point(each.sizes)}": each.note for each in solved.joint}
        found |= {f"build of {name}": f"{each.kernel} {each.build}" for name, each in solved.jit_artifacts.items()}
    return found | {name: f"{each.kernel} ({_library(each)})" for name, each in document.choices.items()}


def table(document: Frost) -> Iterator[str]:
    """A plan as lines: what it was solved for, then each bucket's operations with their kernels."""
    solved = document.solved
    assert solved is not None
    yield f"plan of {solved.model} on {solved.hardware['name']}, hash {document.hash[:12]}"
    yield f"  hardware: {_listed(solved.hardware)}"
    yield f"  libraries: {_listed(solved.libraries)}"
    yield f"  model: configuration {solved.configuration_hash[:12]}, {_listed(solved.configuration, most=8)}"
    buckets = "; ".join(f"{name} {', '.join(map(str, ends))}" for name, ends in solved.shape_buckets.items())
    yield f"  buckets: {buckets or 'the sizes of the inputs'}"
    if solved.not_recorded:
        yield f"  not recorded before the budget was over: {lacking(solved)}"
    yield f"  builds: {len(solved.jit_artifacts)}; calls outside of all buckets: {solved.fallback}"
    for points, calls in _alike(document, solved).items():
        yield points
        rows = [(name.partition(" ")[0], each.kernel, _library(each), name.partition(" ")[2]) for name, each in calls]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row, (_, each) in zip(rows, calls, strict=True):
            yield "  " + "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]])
            if each.why:
                yield f"    for its neighbours: {each.why}"
    for joint in solved.joint:
        yield f"together, {_point(joint.sizes)}: {joint.note}"
        if joint.together_us:
            yield f"  a run takes {joint.together_us:.0f} us; {joint.alone_us:.0f} with each kernel chosen for itself"
        if joint.lost:
            others = ", ".join(f"{kernel} for {name.partition(' ')[0]}" for name, kernel in joint.lost.items())
            yield f"  the next path has {others}"


def _alike(document: Frost, solved: Solved) -> dict[str, list[tuple[str, FrozenChoice]]]:
    """The calls of each bucket; buckets with the same calls are one."""
    points: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for each in solved.plans:
        points[tuple(each.calls)].append(_point(each.sizes))
    return {" and ".join(those): [(name, document.choices[name]) for name in calls] for calls, those in points.items()}


def lacking(solved: Solved) -> str:
    """The points of a plan's grid that it has no bucket for."""
    return "; ".join(_point(each) for each in solved.not_recorded or ())


def _point(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}<={size}" for name, size in sizes.items()) or "the calls of these inputs"


def _library(choice: FrozenChoice) -> str:
    return f"{choice.library} {choice.version}".strip()


def _listed(values: Mapping[str, Any], most: int = 100) -> str:
    shown = [f"{name} {value}" for name, value in values.items() if value != ""]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")

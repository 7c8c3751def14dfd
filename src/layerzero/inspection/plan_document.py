"""What ``lz.solve`` adds to frozen choices: the model, the machine and the buckets that they were solved for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch.nn import Module

from layerzero.core.device import Device, capability_hash, driver_version
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.engine import probe
from layerzero.engine.jit import name_of
from layerzero.engine.registry import REGISTRY

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
    return name, found, _hash([name, found, parameters])


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


def capabilities_of(hardware: Mapping[str, Plain], libraries: Mapping[str, str]) -> str:
    """The hash of what a machine is and has."""
    return _hash([hardware, libraries])


def built_for(kernel: Kernel, facts: Facts) -> BuiltFor:
    """What has to be built before a kernel that compiles may run a call."""
    return BuiltFor(kernel.id, name_of(kernel, facts))


def _hash(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()

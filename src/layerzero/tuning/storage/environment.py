"""Under what a time was taken: the device, its driver, and the versions of torch and of the kernel's library.

And the state that the machine was in, and the memory that a call may use there. Times compare within a condition, in
buckets. On NVIDIA GPUs it is read through NVML, where nvidia-ml-py is installed: temperature, memory pressure, power
state. Without it, and on AMD's GPUs, torch tells the memory pressure. On a CPU: load, and the clock where the system
tells it. What cannot be read is left out.
Where times of one call were taken under several conditions, those under the present one count, or else those under the
one that most kernels share, and others count less. They are moved there by a factor that the device's own times give.

Linux gives out more memory than there is, and kills the process that then uses it. A GPU's allocator says so instead,
and its error is caught where it is raised.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import msgspec
import torch

from layerzero.core.device import Device, capability_hash, driver_version
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Libraries
from layerzero.core.system import log, resources
from layerzero.core.system.resources import available_bytes
from layerzero.engine import probe


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a time holds for; where any of it differs, the time does not count.

    Attributes:
        device, platform: its marketing name and kind.
        capability: hash of what the device can do: architecture, instruction sets, dtypes, memory.
        driver, runtime: of the device; empty where it has none.
        torch: version of torch.
        library, version: the kernel's library; the version is empty where torch brings it or nothing tells, and a hash
            of the code where a function was registered.
        threads: threads that torch's operators use on a CPU, 0 elsewhere.
    """

    device: str
    platform: str
    capability: str
    driver: str
    runtime: str
    torch: str
    library: str
    version: str
    threads: int = 0

    @property
    def key(self) -> bytes:
        """The identity under which it is stored."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).digest()


class Surroundings:
    """The environments of kernels on one device, each made once."""

    def __init__(self, device: Device, threads: int) -> None:
        self.device, self.threads = device, threads
        self._known: dict[tuple[str, str, str], tuple[Environment, bytes]] = {}

    def environment(self, kernel: Kernel, libraries: Libraries | None = None) -> tuple[Environment, bytes]:
        """The environment of a kernel as this process has it, or with other libraries, and its key."""
        backend, libraries = kernel.backend, libraries or probe.this_machine()
        version, torch_version = libraries.version(backend, self.device) or "", libraries.torch
        if not version and backend.origin in ("code", "decorator"):
            version = code_version(kernel.load)
        found = self._known.get((backend.name, version, torch_version))
        if found is None:
            device = self.device
            environment = Environment(
                device=device.name,
                platform=device.platform,
                capability=capability_hash(device),
                driver=driver_version(device),
                runtime=device.runtime,
                torch=torch_version,
                library=backend.name,
                version=version,
                threads=self.threads,
            )
            found = self._known[backend.name, version, torch_version] = (environment, environment.key)
        return found


_surroundings = functools.lru_cache(maxsize=64)(Surroundings)


def surroundings(device: Device) -> Surroundings:
    """The environments of a device as torch is set now."""
    return _surroundings(device, torch.get_num_threads() if device.platform == "cpu" else 0)


@functools.lru_cache(maxsize=1024)
def code_version(function: Callable[..., Any]) -> str:
    """Hash of a function's own code, and of the functions that it closes over: an edited kernel is measured again."""
    hashed = hashlib.blake2b(digest_size=8)
    todo: list[object] = [function]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, functools.partial):
            todo += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, FunctionType):
            todo += [cell.cell_contents for cell in each.__closure__ or () if cell != _EMPTY]
            todo.append(each.__code__)
        elif isinstance(each, CodeType):
            hashed.update(each.co_code + repr(each.co_names).encode())
            todo += each.co_consts
        elif isinstance(each, tuple):
            todo += each
        elif isinstance(each, (str, bytes, int, float, bool)):
            hashed.update(repr(each).encode())
    return f"code {hashed.hexdigest()}"


_EMPTY = CellType()


WARM_C, HOT_C = 50.0, 70.0
"""From here on a GPU is warm, hot."""

MEDIUM_MEMORY, HIGH_MEMORY = 0.5, 0.8
"""Share of a GPU's memory in use from which on the pressure is medium, high."""

MEDIUM_LOAD, HIGH_LOAD = 1.0, 2.0
"""Runnable threads a core beyond which the load is medium, high; what measures is one of them."""

LATELY_S = 30.0
"""How old a state may be that a choice is made by."""

_LATELY: dict[tuple[str, int], tuple[float, str]] = {}

BOOST = 0.9
"""Share of the highest clock from which on a device boosts."""

_THROTTLES = 0x8 | 0x20 | 0x40 | 0x80  # NVML's bits: hardware and software slowdown for heat, and the power brake
_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq")


def bucket(value: float, low: float, high: float, names: tuple[str, str, str]) -> str:
    """The name of the third that a value lies in; the bounds belong to the upper one."""
    return names[(value >= low) + (value >= high)]


def condition(device: torch.device) -> str:
    """The state of a device now, ``memory=low,power=boost,temperature=warm``; empty where nothing can be read."""
    if device.type == "cuda":  # AMD's GPUs are of this type, too
        told = _of_gpu(device.index or 0) if torch.version.cuda else {}
        return text(told if "memory" in told else told | _memory_by_torch(device.index or 0))
    return text(_of_cpu()) if device.type == "cpu" else ""


def lately(device_type: str, index: int) -> str:
    """The state of a device, at most half a minute old: a choice must not wait for it."""
    now = time.monotonic()
    found = _LATELY.get((device_type, index))
    if found is None or now - found[0] > LATELY_S:
        found = _LATELY[device_type, index] = now, condition(torch.device(device_type, index))
    return found[1]


def text(state: Mapping[str, str]) -> str:
    """Write a condition down, sorted by what is said."""
    return ",".join(f"{name}={value}" for name, value in sorted(state.items()))


def _of_cpu() -> dict[str, str]:
    state = {}
    try:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        state["load"] = bucket(load, MEDIUM_LOAD, HIGH_LOAD, ("low", "medium", "high"))
        now, most = (float((_CLOCK / name).read_text()) for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
        state["power"] = _power(now / most, throttled=False)
    except (AttributeError, OSError, ValueError):  # Windows has no load, virtual machines hide the clock
        return state
    return state


def _power(share: float, *, throttled: bool) -> str:
    return "throttled" if throttled else "boost" if share >= BOOST else "nominal"


@functools.cache
def _nvml() -> Any:
    """NVML, None where its bindings or the driver's library are missing; looked for once."""
    try:
        import pynvml
    except ImportError:
        log.info("of GPUs memory alone is recorded: nvidia-ml-py is not installed (pip install nvidia-ml-py)")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("of GPUs memory alone is recorded: NVML does not start: %s", error)
        return None
    return pynvml


def _of_gpu(index: int) -> dict[str, str]:
    nvml = _nvml()
    if nvml is None:
        return {}
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return of_nvml(nvml, uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _memory_by_torch(index: int) -> dict[str, str]:
    """The memory pressure as the runtime tells it, of all processes on the device."""
    try:
        free, total = torch.cuda.mem_get_info(index)
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA asserts
        log.info("memory of cuda:%d is not recorded: %s", index, error)
        return {}
    return {"memory": bucket(1 - free / total, MEDIUM_MEMORY, HIGH_MEMORY, ("low", "medium", "high"))}


def of_nvml(nvml: Any, uuid: str) -> dict[str, str]:
    """What NVML tells of a device; a number that this device does not have is left out."""

    def temperature(handle: Any) -> str:
        degrees = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        return bucket(degrees, WARM_C, HOT_C, ("cold", "warm", "hot"))

    def memory(handle: Any) -> str:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return bucket(found.used / found.total, MEDIUM_MEMORY, HIGH_MEMORY, ("low", "medium", "high"))

    def power(handle: Any) -> str:
        now = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        most = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return _power(now / most, throttled=bool(reasons & _THROTTLES))

    state: dict[str, str] = {}
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:  # a part of a device, or one that the container hides
        log.info("no condition of %s is recorded: %s", uuid, error)
        return state
    for name, read in (("temperature", temperature), ("memory", memory), ("power", power)):
        try:
            state[name] = read(handle)
        except nvml.NVMLError as error:
            log.info("%s of %s is not recorded: %s", name, uuid, error)
    return state


SHARE = 0.5
"""Of what is available, so much may be used: the machine belongs to others, too."""

WIDE_BYTES = 12
"""What an element needs beside its own memory: eight bytes in float64, and half as much where it is drawn or compared.
The peak of a call in float32 was 11.8 and 12.4 bytes an element (embedding, linear; AMD EPYC, 2026-11-23)."""


def needed_bytes(facts: Facts) -> int:
    """What its tensors need, as they are and in float64, and the scores of a reference that is not cut in parts."""
    operation = facts.operation
    whole = operation.scratch(facts.sizes()) if operation.scratch is not None and operation.parts is None else 0
    sizes = [(math.prod(each.shape), each.dtype.itemsize) for each in facts.tensors.values()]
    return sum(count * (own + WIDE_BYTES) for count, own in sizes) + 8 * whole


def too_large(facts: Facts) -> str:
    """Why a call is not made at all; empty if it may be."""
    if facts.device.torch_type != "cpu":
        return ""
    needed, free = needed_bytes(facts), available_bytes()
    if needed <= SHARE * free:
        return ""
    wanted = f"it needs about {needed / 1e9:.1f} GB with its values in float64"
    return f"too little memory: {wanted}, and of {free / 1e9:.1f} free ones {SHARE:.0%} may be used"


def bounded(facts: Facts) -> AbstractContextManager[None]:
    """Let what runs here fail to allocate where it would take more than its share of a CPU's memory."""
    return resources.bounded(SHARE * available_bytes() if facts.device.torch_type == "cpu" else math.inf)

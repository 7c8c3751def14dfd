"""What a device is: the facts that limits ask for, detected from torch or named for a machine that is not here."""

from __future__ import annotations

import functools
import hashlib
import os
import platform as host
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from layerzero.core import cpu_features
from layerzero.core.errors import PolicyError

GENERATIONS_VARIABLE = "LAYERZERO_GPU_GENERATIONS"


class Generation(NamedTuple):
    """GPUs of NVIDIA from one compute capability to another, both included, and the generation of their matrix units.

    Tensor cores are numbered as the specification does. Ada's are of the fourth in fact; instruction sets decide, not
    this number.
    """

    low: tuple[int, int]
    high: tuple[int, int]
    name: str
    tensor_cores: int


_KNOWN = (
    Generation((7, 5), (7, 9), "turing", 2),
    Generation((8, 0), (8, 8), "ampere", 3),
    Generation((8, 9), (8, 9), "ada", 3),
    Generation((9, 0), (9, 9), "hopper", 4),
    Generation((10, 0), (19, 9), "blackwell", 5),
)
"""Below 7.5 there is none."""

_GENERATION = re.compile(r"([a-z][a-z0-9_]*)=(\d+)\.(\d)-(\d+)\.(\d):(\d+)")


def generations_of(text: str) -> tuple[Generation, ...]:
    """The known generations, then those of a text: ``rubin=13.0-13.9:6``, with commas between several.

    Raises: PolicyError for another text.
    """
    given = []
    for each in filter(None, map(str.strip, text.split(","))):
        found = _GENERATION.fullmatch(each)
        name, *numbers = found.groups() if found else ("", 1, 0, 0, 0, 0)
        major, minor, to_major, to_minor, cores = map(int, numbers)
        if (major, minor) > (to_major, to_minor):
            wanted = "name=first-last:tensor_cores, as rubin=13.0-13.9:6"
            raise PolicyError(f"gpu_generations: wanted {wanted}, got {each!r}")
        given.append(Generation((major, minor), (to_major, to_minor), name, cores))
    return (*_KNOWN, *given)


@functools.cache
def generations() -> tuple[Generation, ...]:
    """The generations of NVIDIA's GPUs; of two with one capability in common the last counts."""
    try:
        return generations_of(os.environ.get(GENERATIONS_VARIABLE, ""))
    except PolicyError as error:
        raise PolicyError(f"environment: {GENERATIONS_VARIABLE}: {error}") from None


PLATFORMS = ("cpu", "cuda", "rocm", "hpu", "xpu", "mps")
"""What a device's ``platform`` may be."""

GPU_GRID = (2**31 - 1, 65535, 65535)
"""The largest launch grid of NVIDIA's and AMD's GPUs."""


def _generation(sm: tuple[int, int] | None) -> Generation | None:
    return next((each for each in reversed(generations()) if sm is not None and each.low <= sm <= each.high), None)


def generation_of(sm: tuple[int, int] | None) -> str | None:
    """Name the NVIDIA generation of a compute capability, None below 7.5 and for other vendors."""
    found = _generation(sm)
    return found and found.name


def cuda_instruction_sets(sm: tuple[int, int]) -> frozenset[str]:
    """Matrix instructions by compute capability; tcgen05 exists on 10.x and 11.x parts only, 12.x lacks it."""
    sets = set()
    if sm >= (7, 0):
        sets.add("wmma")
    if sm[0] == 9:
        sets.add("wgmma")
    if sm[0] in (10, 11):
        sets.add("tcgen05.mma")
    return frozenset(sets)


@dataclass(frozen=True, slots=True)
class Device:
    """The description of one device that limits are checked against.

    Attributes:
        platform: ``cuda``, ``rocm``, ``cpu``, ``hpu``, ``xpu`` or ``mps``.
        name: the marketing name.
        vendor: ``nvidia``, ``amd``, ``intel``, ``habana``, or the CPU's vendor.
        sm: NVIDIA compute capability as (major, minor).
        architecture: AMD's ``gfx942`` and relatives, or the CPU's machine type.
        instruction_sets: matrix or vector instructions, by the names limits use.
        dtypes: names of reduced-precision dtypes with native arithmetic.
        index: the device index that torch uses.
        total_bytes: memory of the device.
        max_grid: largest launch grid (x, y, z), where the platform has one.
        uuid, runtime, driver: identity and versions, empty where unknown.
    """

    platform: str
    name: str
    vendor: str
    sm: tuple[int, int] | None = None
    architecture: str = ""
    instruction_sets: frozenset[str] = frozenset()
    dtypes: frozenset[str] = field(default_factory=lambda: frozenset({"float32"}))
    index: int = 0
    total_bytes: int = 0
    max_grid: tuple[int, int, int] | None = None
    uuid: str = ""
    runtime: str = ""
    driver: str = ""

    @property
    def generation(self) -> str | None:
        """``turing`` to ``blackwell`` for NVIDIA, else None."""
        return generation_of(self.sm)

    @property
    def tensor_core_generation(self) -> int | None:
        """Number of the tensor core generation, None without tensor cores."""
        found = _generation(self.sm)
        return found and found.tensor_cores

    @property
    def torch_type(self) -> str:
        """The ``torch.device`` type under which tensors live on this device."""
        return "cuda" if self.platform == "rocm" else self.platform

    @property
    def supports_graphs(self) -> bool:
        """Whether launches can be captured into a graph."""
        return self.platform in ("cuda", "rocm")

    @property
    def sm_number(self) -> int | None:
        """Compute capability as one number (90, 120), as rules write it."""
        return self.sm[0] * 10 + self.sm[1] if self.sm else None

    @staticmethod
    def detect(device: str | torch.device = "cpu") -> Device:
        """Describe a device of this machine; cached for the process.

        Raises: ValueError if a CUDA device does not exist here; RuntimeError (from torch) for what names no device.
        """
        target = device if isinstance(device, torch.device) else torch.device(device)
        if target.type != "cuda":
            return _detect(target.type, target.index or 0)
        try:
            return _detect("cuda", torch.cuda.current_device() if target.index is None else target.index)
        except (AssertionError, RuntimeError) as error:
            short = str(error).partition("\n")[0]
            wanted = "wanted a device of this machine, or a name such as 'H100' for one that need not be here"
            raise ValueError(f"device: {wanted}; got {str(target)!r}: {short}") from error

    @staticmethod
    def named(name: str) -> Device:
        """Describe a well-known device that need not be here (``H100``, ``RTX 5090``, ``MI300X``, ``Gaudi``, ``CPU``).

        A driver's name is known, too (``NVIDIA H200``), a CPU's own (``AMD EPYC 9654``), and a family's for its best
        known one (``RDNA4``).
        Raises: KeyError naming the known devices.
        """
        from layerzero.core.known_devices import named

        return named(name)


def device_here(device: object = None) -> torch.device:
    """The device of this machine that is wanted; the current GPU if None, the CPU where there is none.

    Raises: ValueError for what names no device, and for one that is not here: ``meta`` runs nothing.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target: torch.device = torch.device(device)  # type: ignore[call-overload]  # anything may come
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"device: wanted a device such as cpu, cuda or cuda:1, got {device!r}") from None
    found = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu"] if found is None else ["cpu", found.type]
    why = "" if target.type in there else "no kernel runs there"
    try:
        Device.detect(target)
    except ValueError as error:
        why = str(error.__cause__).partition("\n")[0]
    if why:
        raise ValueError(f"device: wanted a device of this machine ({' or '.join(there)}), got {str(target)!r}: {why}")
    return target


@functools.cache
def _detect(device_type: str, index: int) -> Device:
    if device_type == "cuda":
        return _detect_cuda(index)
    if device_type == "cpu":
        return _detect_cpu()
    if device_type == "meta":  # no hardware: legality is checked, nothing runs
        return replace(_detect_cpu(), name="meta")
    if device_type == "mps":
        return apple(cpu_of_this_machine().name, index=index)
    vendor = {"hpu": "habana", "xpu": "intel"}.get(device_type, device_type)
    return Device(platform=device_type, name=device_type, vendor=vendor, index=index)


def apple(name: str, gib: int = 0, index: int = 0) -> Device:
    """The GPU of an Apple chip, by the chip's name; torch holds no float64 on it. None ran here."""
    dtypes = frozenset({"float32", "float16", "bfloat16"})
    return Device(platform="mps", name=name, vendor="apple", dtypes=dtypes, index=index, total_bytes=gib * 2**30)


def _detect_cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    sm = (properties.major, properties.minor)
    rocm: str | None = getattr(torch.version, "hip", None)  # mypy believes the CPU build, which has None
    return Device(
        platform="rocm" if rocm else "cuda",
        name=properties.name,
        vendor="amd" if rocm else "nvidia",
        sm=None if rocm else sm,
        architecture=properties.gcnArchName.split(":")[0] if rocm else "",
        instruction_sets=frozenset() if rocm else cuda_instruction_sets(sm),
        dtypes=rocm_dtypes(properties.gcnArchName) if rocm else cuda_dtypes(sm),
        index=index,
        total_bytes=properties.total_memory,
        max_grid=GPU_GRID,
        uuid=str(getattr(properties, "uuid", "")),
        runtime=rocm or torch.version.cuda or "",
        driver=_driver("rocm" if rocm else "cuda"),
    )


def cuda_dtypes(sm: tuple[int, int]) -> frozenset[str]:
    """What tensor cores multiply, by compute capability."""
    names = {"float32", "float16", "int8"}
    if sm >= (8, 0):
        names.add("bfloat16")
    if sm >= (8, 9):
        names |= {"float8_e4m3", "float8_e5m2"}
    if sm >= (10, 0):
        names |= {"nvfp4", "mxfp4"}
    return frozenset(names)


def rocm_dtypes(architecture: str) -> frozenset[str]:
    """What matrix units multiply, by AMD's name of the architecture.

    gfx942 has float8 of another kind (``e4m3fnuz``), so it has none of these. Source: AMD's tables of data types by
    architecture in the documents of ROCm 7 and LLVM 21; none of these devices ran here.
    """
    names = {"float32", "float16", "bfloat16"}
    if architecture.startswith(("gfx950", "gfx12")):
        names |= {"float8_e4m3", "float8_e5m2"}
    if architecture.startswith(("gfx950", "gfx1250")):
        names.add("mxfp4")
    return frozenset(names)


def _detect_cpu() -> Device:
    """This machine's CPU, without the features that ``LAYERZERO_CPU_FEATURES`` and oneDNN's variable take away.

    The name says so: times, verdicts and builds are kept by it, and those of the whole CPU stay apart. Of shipped
    times, those of the nearest CPU with the same unit for products count.
    """
    whole = cpu_of_this_machine()
    try:
        kept = cpu_features.limited(whole.instruction_sets, os.environ.get(cpu_features.VARIABLE, ""))
    except PolicyError as error:
        raise PolicyError(f"environment: {cpu_features.VARIABLE}: {error}") from None
    kept = cpu_features.left_by_onednn(kept, os.environ)
    if kept == whole.instruction_sets:
        return whole
    name = f"{whole.name} with {', '.join(sorted(kept)) or 'no vector unit'} only"
    return replace(whole, name=name, instruction_sets=kept)


@functools.cache
def cpu_of_this_machine() -> Device:
    """The CPU with all that it has, whatever ``LAYERZERO_CPU_FEATURES`` says."""
    name, vendor, flags = "", "unknown", set[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # Windows and macOS
        lines, (name, flags) = [], _cpu_by_torch()
        vendor = next((ours for ours in ("amd", "intel") if ours in name.lower()), "unknown")
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key == "vendor_id":
            vendor = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(value, value)
        elif key in ("flags", "Features"):
            flags = set(value.split())
    return Device(
        platform="cpu",
        name=name or host.processor() or host.machine(),  # last, because on Linux it starts a process, 5 ms
        vendor=vendor,
        architecture=host.machine(),
        instruction_sets=frozenset(ours for theirs, ours in cpu_features.FLAGS.items() if theirs in flags),
        dtypes=frozenset({"float32", "float64", "bfloat16", "float16"}),
    )


def _cpu_by_torch() -> tuple[str, set[str]]:
    """The CPU's name and flags as torch 2.13 finds them on any system; before, what its own kernels are compiled for.

    Torch writes ``avx512_f`` where Linux has ``avx512f``, and names no ARM flags before 2.13: every arm64 has NEON.
    """
    tell = getattr(torch.cpu, "get_capabilities", None)
    found = {} if tell is None else tell()
    capability = torch.backends.cpu.get_cpu_capability()
    flags = {name for name, here in found.items() if here is True} | {"avx2"} & {capability.lower()}
    flags |= {"asimdhp"} if "fp16_arith" in flags else set()
    if capability == "AVX512" or "avx512_f" in flags:
        flags |= {"avx2", "avx512f"}
    if host.machine().lower() in ("arm64", "aarch64"):
        flags.add("asimd")
    return str(found.get("cpu_name", "")), flags


_DRIVERS = {"cuda": Path("/proc/driver/nvidia/version"), "rocm": Path("/sys/module/amdgpu/version")}
_NUMBER = re.compile(r"\b\d+(?:\.\d+){1,3}\b")


def devices_here() -> list[Device]:
    """The devices of this machine, its CPU first."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if kind is None else torch.accelerator.device_count()
    return [Device.detect("cpu"), *(Device.detect(torch.device(kind.type, index)) for index in range(count) if kind)]


def capability_hash(device: Device) -> str:
    """Hash of what decides which code runs on a device and how fast; whole GiB, since drivers keep some of them."""
    parts = (
        *(device.sm_number, device.architecture, sorted(device.instruction_sets), sorted(device.dtypes)),
        round(device.total_bytes / 2**30),
    )
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()


def driver_version(device: Device) -> str:
    """The device's driver, empty where there is none or where it does not tell."""
    return device.driver or _driver(device.platform)


@functools.cache
def _driver(platform: str) -> str:
    path = _DRIVERS.get(platform)
    try:
        found = None if path is None else _NUMBER.search(path.read_text())
    except OSError:  # inside a container that hides it: the runtime's view of the driver is better than nothing
        found = None
    if found is not None:
        return found[0]
    runtime = getattr(torch._C, "_cuda_getDriverVersion", None) if platform == "cuda" else None
    return "" if runtime is None else str(runtime())

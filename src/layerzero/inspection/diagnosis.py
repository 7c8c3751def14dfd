"""What this machine has: libraries, devices, what rests, what is suspected, and what is wrong."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum

import torch

from layerzero.core import cpu_features, emulation
from layerzero.core import limits as limit
from layerzero.core.device import Device, cpu_of_this_machine
from layerzero.core.kernel import Backend, within
from layerzero.core.ledger import Suspect
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import disk, memory
from layerzero.core.system.memory import FREE
from layerzero.core.system.resources import thread_advice
from layerzero.engine import accelerator, isolation, probe
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.health import Counts
from layerzero.engine.registry import REGISTRY
from layerzero.engine.services import SERVICES
from layerzero.inspection.answers import awaits_vetting, example_calls
from layerzero.inspection.descriptors import DESCRIPTORS
from layerzero.inspection.model_sets import OperationFinding, served


class VersionStatus(StrEnum):
    """What is known about a version of a library."""

    TESTED = "tested"
    """Its kernels passed conformance."""
    EXPECTED = "expected"
    """Within the range that its declaration was written for; that very version was not run."""
    UNTESTED = "untested"
    """Outside that range: refused until it was vetted here."""
    UNVETTED = "not vetted: `layerzero vet`"
    """A plugin's, whose kernels no call gets before."""
    BAD = "known bad"
    """Refused, whatever vetting says."""


def status(backend: Backend, version: str) -> VersionStatus:
    """What is known about a version."""
    if backend.known_bad and within(version, backend.known_bad):
        return VersionStatus.BAD
    if version.partition("+")[0] in backend.tested:
        return VersionStatus.TESTED
    return VersionStatus.EXPECTED if backend.holds_for(version) else VersionStatus.UNTESTED


def conflicts(backends: Iterable[Backend]) -> Iterator[str]:
    """What is wrong with packages that are installed together, and what to do."""
    for backend in backends:
        own = next((name for name in backend.distributions if name and probe.installed_version(name) is not None), None)
        for package, harm in backend.conflicts:
            version = probe.installed_version(package)
            if own is not None and version is not None:
                yield (
                    f"{own} {probe.installed_version(own)} with {package} {version}: {harm}; uninstall one of them, or "
                    "give one an environment of its own: isolation.pythons (docs/isolation.md)"
                )


def other_cudas() -> Iterator[str]:
    """Packages of CUDA's runtime for another major version than torch's: a process loads both, and may mix them."""
    runtime = torch.version.cuda
    for suffix in ("-cu11", "-cu12", "") if runtime else ():
        name = f"nvidia-cuda-runtime{suffix}"
        version = probe.installed_version(name)
        if version is not None and version.partition(".")[0] != str(runtime).partition(".")[0]:
            yield (
                f"{name} {version} with torch for CUDA {runtime}: a process may load both; install builds of all "
                f"libraries for CUDA {str(runtime).partition('.')[0]}, or uninstall it"
            )


@dataclass(frozen=True, slots=True)
class LibraryFinding:
    """One library as doctor sees it: name, version if installed, why it is not used, if so, how well it is known."""

    name: str
    summary: str
    version: str | None
    kernels: int
    reason: Reason | None
    status: VersionStatus | None = None

    @property
    def known(self) -> str:
        """What is known of the version, to be put behind another word."""
        return f", {self.status}" if self.status is not None else ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What doctor found.

    Attributes:
        versions: of python, torch, layerzero and the system; also how calls find their kernels here.
        devices: devices that torch sees here.
        libraries: every library that LayerZero knows.
        resting: kernels that failed and rest, with the error.
        health: failures and fallbacks of each kernel that failed in this process.
        failures: errors of this process and of earlier ones, the latest of each kernel.
        suspects: kernels that may have killed a process, and those that a child process found guilty.
        plugin_errors: plugins that failed to load, or were left out, and why.
        descriptors: capability descriptors in force, as ``LoadedDescriptor.to_dict`` gives them.
        issues: what to do, most important first.
        builds: what calls of this machine would choose and is not built, or failed to build, with the next step.
        asked_for: what each operation of the requested set has, if one was requested.
        memory: what is free on each device in use, how much of it lies together, and the age of the reading.
        processes: libraries that run in processes of their own now, and what that adds to a call.
    """

    versions: dict[str, str]
    devices: tuple[Device, ...]
    libraries: tuple[LibraryFinding, ...]
    resting: dict[str, str]
    plugin_errors: dict[str, str]
    descriptors: tuple[dict[str, object], ...]
    issues: tuple[str, ...]
    health: dict[str, Counts] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    suspects: tuple[Suspect, ...] = ()
    builds: tuple[str, ...] = ()
    asked_for: tuple[OperationFinding, ...] = ()
    memory: dict[str, str] = field(default_factory=dict)
    processes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        asked_for: dict[str, object] = {"asked_for": [each.to_dict() for each in self.asked_for]}
        return {
            "versions": self.versions,
            "memory": self.memory,
            "devices": [{"platform": d.platform, "name": d.name, "sm": d.sm_number} for d in self.devices],
            "libraries": [
                {
                    "name": each.name,
                    "version": each.version,
                    "kernels": each.kernels,
                    "status": each.status and str(each.status),
                    "usable": each.reason is None,
                    "reason": str(each.reason.code) if each.reason else None,
                    "message": each.reason.message if each.reason else None,
                }
                for each in self.libraries
            ],
            "resting": self.resting,
            "health": {name: asdict(counts) for name, counts in self.health.items()},
            "failures": self.failures,
            "suspects": [suspect.to_dict() for suspect in self.suspects],
            "plugin_errors": self.plugin_errors,
            "descriptors": list(self.descriptors),
            "builds": list(self.builds),
            "processes": list(self.processes),
            "issues": list(self.issues),
        } | (asked_for if self.asked_for else {})

    def health_lines(self) -> list[str]:
        """What failed, a line for each kernel and operation."""
        lines = [
            f"{name}: {counts.failures} failures in this process, {counts.fallbacks} times another kernel ran instead"
            for name, counts in self.health.items()
        ]
        earlier = [name for name in self.failures if name not in self.health]
        return lines + [f"{name}: failed in an earlier process, last: {self.failures[name]}" for name in earlier]

    def head(self) -> list[str]:
        """The versions in a line, and in words how calls find their kernels here."""
        state = {"hit path": "calls like earlier ones find their kernel", "choices": "the choice of kernels"}
        state |= {"emulated": ""}  # a sentence by itself
        versions = ", ".join(f"{name} {each}" for name, each in self.versions.items() if name not in state)
        return [
            versions,
            *(f"{what} {self.versions[name]}".strip() for name, what in state.items() if name in self.versions),
        ]

    def faults(self) -> Iterator[tuple[str, str]]:
        """What there is to say behind devices and libraries: each line, and the colour in which a screen shows it."""
        yield from ((f"resting: {kernel}: {error}", "red") for kernel, error in self.resting.items())
        yield from ((line, "") for line in (*self.health_lines(), *self.processes))
        yield from ((f"jit: {line}", "") for line in self.builds)
        yield from ((f"plugin {name}: {error}", "red") for name, error in self.plugin_errors.items())
        yield from ((f"descriptor: {each['name']} (sha256 {each['sha256']})", "") for each in self.descriptors)
        yield from ((f"issue: {issue}", "yellow") for issue in self.issues)
        if not self.issues:
            yield "no issues found", "green"

    def __str__(self) -> str:
        lines = self.head()
        lines += [f"device {device.platform}:{device.index} {device.name}" for device in self.devices]
        lines += [f"memory {name}: {told}" for name, told in self.memory.items()]
        for library in self.libraries:
            state = f"usable{library.known}" if library.reason is None else str(library.reason)
            lines.append(f"  {library.name} {library.version or ''}: {state}")
        lines += [f"  {each}" for each in self.asked_for]
        return "\n".join((*lines, *(line for line, _ in self.faults())))


def _devices() -> tuple[list[Device], list[str]]:
    """The devices of this machine, and what is wrong with those that do not answer, as in a forked child."""
    devices, unread = [Device.detect("cpu")], []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            devices.append(Device.detect(f"cuda:{index}"))
        except ValueError as error:
            unread.append(str(error))
    return devices, unread


def doctor(*, load: bool = False, asked_for: str | None = None) -> Diagnosis:
    """Diagnose this machine: devices, libraries and why each unusable one is unusable, kernels that rest, issues.

    Args:
        load: also load every usable library's kernels, so that a broken installation shows now and not in a call.
        asked_for: also tell what each operation of a set has here, such as ``decoder`` or ``serving``.
    Raises: ValueError for a word that names no set, with the nearest.
    """
    findings = () if asked_for is None else served(asked_for)
    devices, unread = _devices()
    best = devices[-1]
    if load:
        _load_everything(best)
    libraries = []
    for backend in REGISTRY.backends():
        if backend.name in ("reference", "user"):
            continue
        device = next((each for each in reversed(devices) if each.platform in backend.platforms), best)
        state = probe.this_machine().state(backend, device)
        reason = state.reason
        if device.platform not in backend.platforms:  # whatever else is wrong with it does not matter here
            reason = Reason(ReasonCode.PLATFORM_MISMATCH, "platform", " or ".join(backend.platforms), device.platform)
        kernels = [kernel for kernel in REGISTRY.kernels() if kernel.backend == backend]
        name = backend.name if backend.distributions in ((), ("",)) else f"{backend.name} ({backend.distributions[0]})"
        known = status(backend, state.version) if state.version else None
        known = VersionStatus.UNVETTED if reason is None and awaits_vetting(kernels, device) else known
        libraries.append(LibraryFinding(name, backend.summary, state.version or None, len(kernels), reason, known))
    health, ledger = ENGINE.health, ENGINE.ledger
    resting = {f"{kernel} in {operation}": b.error for (kernel, operation), b in health.breakers().items()}
    resting |= health.disabled()
    problems = [*REGISTRY.names.problems(CONFIGURATION.policy)]
    suspects, failed = ledger.suspects(), dict(REGISTRY.plugins.told() if REGISTRY.plugins else {})
    return Diagnosis(
        versions=_versions(),
        devices=tuple(devices),
        libraries=tuple(libraries),
        resting=resting,
        plugin_errors=failed,
        descriptors=tuple(each.to_dict() for each in DESCRIPTORS.in_force()),
        issues=(
            *unread,
            *_issues(libraries, devices, resting),
            *problems,
            *(f"plugin {name} was not loaded: {error}; mend or uninstall it" for name, error in failed.items()),
            *(
                f"{name} of the hub is not used: {why}"
                for name, why in (REGISTRY.hub.told() if REGISTRY.hub else {}).items()
            ),
            *conflicts(REGISTRY.backends()),
            *other_cudas(),
            *_accused(suspects),
            *ledger.notes(),
        ),
        health={f"{kernel} in {operation}": counts for (kernel, operation), counts in health.counts().items()},
        failures={f"{kernel} in {operation}": e[-1] for (kernel, operation), e in ledger.failures().items()},
        suspects=suspects,
        builds=() if problems else tuple(SERVICES.builds()),  # every call would raise for the first of them
        asked_for=findings,
        memory=_memory(),
        processes=tuple(isolation.processes()),
    )


def _memory() -> dict[str, str]:
    most_s = CONFIGURATION.policy["memory.max_age_s"]
    return {f"{each.torch_type}:{each.index}": FREE.told(each, most_s) for each in memory.in_use()}


_IN_C = {
    "handles": "in C, which reads tensors by torch's own C functions",
    "dlpack": "in C, which reads tensors by DLPack",
}
"""By what the hit path in C reads tensors with."""


def _versions() -> dict[str, str]:
    from layerzero import __version__

    return {
        "layerzero": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "hit path": f"in Python ({accelerator.ABSENT})" if accelerator.HOT is None else _IN_C[accelerator.HOT.reader()],
        **({"emulated": emulated} if (emulated := emulation.told(Device.detect("cpu"), emulation.NATIVE)) else {}),
        "choices": "follows new times; lz.freeze() holds it"
        if ENGINE.frozen is None
        else f"is frozen for {len(ENGINE.frozen.choices)} classes of calls; lz.thaw() lets it follow new times",
    } | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _issues(libraries: list[LibraryFinding], devices: list[Device], resting: dict[str, str]) -> Iterator[str]:
    for library in libraries:
        if library.reason is None:
            continue
        if library.reason.code in (ReasonCode.BACKEND_IMPORT_FAILED, ReasonCode.VERSION_UNSUPPORTED):
            yield f"{library.name}: {library.reason.message}"
    yield from (f"{kernel} failed and rests: {error}" for kernel, error in resting.items())
    usable = [library for library in libraries if library.reason is None and not library.name.startswith("torch")]
    if not usable:
        more = "pip install onnxruntime onnx" if devices[-1].platform == "cpu" else "pip install flash-attn"
        yield f"only torch's own kernels are usable on {devices[-1].name}; `{more}` adds others"
    yield from _unused_units(devices)
    yield from _whole_beside(devices[0])
    threads = torch.get_num_threads()
    if devices[-1].platform == "cpu" and threads > 1 and (advice := thread_advice(threads)):  # one is a choice
        yield advice
    if not disk.HAS_LOCKS:
        yield "what is learnt ends with the process: this system has no locks of files as POSIX has them"
    if not CONFIGURATION.policy.enabled:
        yield "LayerZero is disabled (enabled: false); only torch's own kernels run"


def _unused_units(devices: Iterable[Device]) -> Iterator[str]:
    """Say of Blackwell's large GPUs that no library is here whose kernels use what they alone have."""
    uses = limit.instruction("tcgen05.mma")
    for device in (each for each in devices if "tcgen05.mma" in each.instruction_sets):
        made = {each.backend for each in REGISTRY.kernels() if uses in each.limits}
        machine = probe.with_device(device)
        if all(machine.state(each, device).reason is not None for each in made):
            ways = " or ".join(filter(None, (machine.install(each, device) for each in made)))
            yield f"torch alone has kernels for the tensor cores of {device.name} (tcgen05); `{ways}` adds some"


def _whole_beside(cpu: Device) -> Iterator[str]:
    """Say that torch's own kernels use all of a CPU of which only a part is presented to this process."""
    if cpu == cpu_of_this_machine():
        return
    wanted = cpu_features.torch_variables(cpu.instruction_sets)
    unset = [f"{name}={value}" for name, value in wanted.items() if name not in os.environ]
    if unset:
        yield (
            f"the environment presents {cpu.name}, and torch's own kernels use all of the CPU; "
            f"set {' and '.join(unset)} as well"
        )


def _import(backend: Backend) -> None:
    if backend.import_name:
        try:
            importlib.import_module(backend.import_name)
        except Exception as error:  # noqa: BLE001  # any failure to load is what this looks for
            probe.mark_broken(backend, error)


def _accused(suspects: Iterable[Suspect]) -> Iterator[str]:
    for suspect in suspects:
        if suspect.verdict is None:
            yield f"{suspect}; it is refused until `layerzero doctor --confirm` has run it in a child process"
        else:
            way_out = "until its version changes, or `layerzero doctor --confirm --again` clears it"
            yield f"{suspect}; it is refused {way_out}"


def _load_everything(device: Device) -> None:
    """Load one kernel of every usable library on small calls; what fails is marked broken."""
    machine = probe.this_machine()
    for kernel in REGISTRY.kernels():
        out = machine.state(kernel.backend, device).reason is not None
        if out or isolation.isolated(kernel, CONFIGURATION.policy):
            continue
        if kernel.jit:  # compiling takes long; importing shows what is broken
            _import(kernel.backend)
            continue
        for call in example_calls(kernel, device):
            try:
                kernel.load(call)
            except Exception as error:  # noqa: BLE001  # any failure to load is what this looks for
                probe.mark_broken(kernel.backend, error)
            break

"""What this machine has: devices, and which kernel libraries are installed, without importing any of them.

Environments of libraries: another interpreter, or a container, that a process of their own runs in.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from layerzero.core.device import Device
from layerzero.core.errors import PolicyError
from layerzero.core.import_hook import importable
from layerzero.core.kernel import Backend, Release, within
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import forking

_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+?)\s*((?:[<>=!~]=?|===).*)$")


@dataclass(frozen=True, slots=True)
class LibraryState:
    """Whether a library may be used.

    Attributes:
        version: what is installed, None if nothing is.
        reason: why it may not be used, None if it may.
        untested: whether nothing else is the matter than a version that the declaration does not know: its kernels may
            run where they were vetted.
    """

    version: str | None
    reason: Reason | None = None
    untested: bool = False


@dataclass(frozen=True)
class Machine:
    """A device and its libraries: this machine's, or those of another one in question.

    Attributes:
        device: None for whatever device the tensors lie on.
        libraries: distribution name to version, in place of what is installed here; None to look.
    """

    device: Device | None = None
    libraries: Mapping[str, str] | None = None
    _states: dict[tuple[Backend, str], LibraryState] = field(default_factory=dict, compare=False, repr=False)

    def state(self, backend: Backend, device: Device) -> LibraryState:
        """Whether the backend may be used with this device; looked up once."""
        identity = (backend, f"{device.runtime} {device.driver}")
        state = self._states.get(identity)
        if state is None:
            state = self._states[identity] = self._look(backend, device)
        return state

    @property
    def asked(self) -> Machine | None:
        """This machine where its libraries are others than those here, as times need it; else None."""
        return None if self.libraries is None else self

    @property
    def torch(self) -> str:
        return (self.libraries or {}).get("torch") or str(torch.__version__)

    def version(self, backend: Backend, device: Device) -> str | None:
        """The version of the backend's library; empty where nothing tells, None where it is absent."""
        return self.state(backend, device).version

    def _look(self, backend: Backend, device: Device) -> LibraryState:
        version = self._version(backend)
        if backend.refused is not None:
            return LibraryState(version, backend.refused)
        fits, install = self._fitting(backend, device), self.install(backend, device)
        vetting = f"`layerzero vet --backend {backend.name}`"
        if backend.distribution and version is None:
            hint = f"Install it: {install}" if install else self._of_no_release(backend)
            if fits and not fits.proven:
                hint += f", then prove it here: {vetting}"
            name, wanted = " or ".join(backend.distributions), (fits or backend).versions or "any"
            return LibraryState(None, Reason(ReasonCode.NOT_INSTALLED, name, wanted, "absent", hint))
        fact = f"{next(filter(None, backend.distributions), backend.name)} version"
        fitting = f"Install a version that fits: {install}" if install else self._of_no_release(backend)
        if backend.known_bad and version and within(version, backend.known_bad):
            wanted = f"{backend.versions}, not {backend.known_bad}".removeprefix(", ")
            return LibraryState(version, Reason(ReasonCode.VERSION_UNSUPPORTED, fact, wanted, version, fitting))
        release = backend.release(version) if version else None
        reason = self.unmet(
            (*backend.requires, *(release.requires if release else ())), device, fitting if release else ""
        )
        if reason is not None:
            return LibraryState(version, reason)
        broken = _BROKEN.get(backend) if self.libraries is None else None
        if broken is None and backend.versions and version is not None and not backend.holds_for(version):
            prove = f"prove this one here: {vetting}" if version else ""
            hint = "; or ".join(filter(None, ("" if release else fitting, prove)))
            reason = Reason(ReasonCode.VERSION_UNSUPPORTED, fact, backend.versions, version or "unknown", hint)
            return LibraryState(version, reason, untested=bool(version) and self.libraries is None)
        return LibraryState(version, broken)

    def install(self, backend: Backend, device: Device) -> str:
        """The command that installs what fits here; empty where none is known to."""
        fits = self._fitting(backend, device)
        return fits.install if fits else "" if backend.releases else backend.install

    def _fitting(self, backend: Backend, device: Device) -> Release | None:
        met = (each for each in backend.releases if all(self._unmet(one, device) is None for one in each.requires))
        return next(met, None)

    def _of_no_release(self, backend: Backend) -> str:
        if not backend.releases:
            return ""
        ways = " or ".join(f"{each.install} with {each.beside}" for each in backend.releases)
        return f"No release of it is known for torch {self.torch}; install one with its own: {ways}"

    def _version(self, backend: Backend) -> str | None:
        if not backend.distribution:
            return backend.version
        for name in backend.distributions:
            found = self._distribution_version(name)
            if found is not None:
                return found
        if self.libraries is None and backend.import_name and importable(backend.import_name):
            return ""  # importable, yet no distribution tells its version: fails a version range, as it should
        return None

    def _distribution_version(self, name: str) -> str | None:
        if name == "torch":  # whatever else is pretended, a torch is there
            return self.torch
        if self.libraries is not None:
            return self.libraries.get(name)
        return installed_version(name)

    def unmet(self, requirements: Iterable[str], device: Device, hint: str = "") -> Reason | None:
        """Why the first requirement does not hold that does not; None where all do."""
        return next((each for one in requirements if (each := self._unmet(one, device, hint))), None)

    def _unmet(self, requirement: str, device: Device, hint: str = "") -> Reason | None:
        name, specifier = check_requirement(requirement)
        if name in ("cuda", "rocm"):
            version: str | None = device.runtime if device.platform == name else None
            if version is None:
                return None  # another platform: the kernel's platform limit says so
        elif name == "driver":
            version = device.driver if device.platform == "cuda" else None
            if version is None or "." not in version:
                return None  # another platform, a device that is not here, or a container that hides it
        else:
            version = self._distribution_version(name)
        if version and within(version, specifier):
            return None
        return Reason(ReasonCode.VERSION_UNSUPPORTED, name, specifier, version or "absent", hint)


_VERSION = re.compile(r"^version:[ \t]*(\S+)[ \t]*$", re.IGNORECASE | re.MULTILINE)


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed.

    It is read from the head of its metadata: ``importlib.metadata.version`` parses all of it, readme included, which
    for the libraries here takes two thirds of 6 ms (AMD EPYC, 2026-11-28).
    """
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    head = (found.read_text("METADATA") or "").partition("\n\n")[0]
    told = [match[1]] if (match := _VERSION.search(head)) else found.metadata.get_all("Version")
    return told[0] if told else None  # importlib_metadata's ``version`` raises here


def check_requirement(requirement: str) -> tuple[str, str]:
    """Split ``torch>=2.10`` into name and specifier. Raises: ValueError where it is neither."""
    match = _REQUIREMENT.match(requirement)
    try:
        if match is not None:
            SpecifierSet(match[2])
            return match[1], match[2]
    except InvalidSpecifier:
        pass  # reported below, like any other text that is no requirement
    raise ValueError(f"wanted name>=version, got {requirement!r}")


_BROKEN: dict[Backend, Reason] = {}
_lock = forking.lock()
_here = Machine()


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return _here


def with_device(device: Device) -> Machine:
    """This machine's libraries with another device; what was looked up of them is shared."""
    return Machine(device, _states=_here._states)


def mark_broken(backend: Backend, error: BaseException) -> Reason:
    """Remember that a library is installed but does not load; it is tried once a process."""
    root = error.__cause__ or error  # torch says which library did not load; its cause, which system library is missing
    text = f"{type(root).__name__}: {str(root).strip().splitlines()[0] if str(root).strip() else 'no message'}"
    install = _here.install(backend, Device.detect("cpu"))  # it fits the torch that is here
    of_torch = f" for torch {torch.__version__}" if any(each.startswith("torch>") for each in backend.demands) else ""
    hint = f"Reinstall it{of_torch}: {install}" if install else ""
    reason = Reason(ReasonCode.BACKEND_IMPORT_FAILED, backend.name, "a library that loads", text, hint)
    with _lock:
        _BROKEN[backend] = reason
    forget()
    return reason


def forget() -> None:
    """Look at the installed libraries again (one was installed, or one broke)."""
    global _here
    _here = Machine()


def reset_broken() -> None:
    """Give libraries that failed to load another chance."""
    with _lock:
        _BROKEN.clear()
    forget()


LOOK_S = 60.0
"""How long an environment may take to list its packages."""

KILL_S = 10.0
"""How long the runtime may take to kill a container."""

_IMAGE = re.compile(r"[\w.][\w./:-]*(:[\w.-]+|@sha256:[0-9a-f]{64})")
_MEMORY = re.compile(r"[1-9]\d*[kmg]")
RUNTIME = "podman"  # it hands open files to a container, which others do not
_HANDED = "--preserve-fds=2"  # those behind the standard ones
_PACKAGES = (
    "import importlib.metadata as m, json; print(json.dumps({each.name: each.version for each in m.distributions()}))"
)


class Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A container that a library's process runs in: without network, capabilities or a file system to write into.

    Attributes:
        image: its name with a tag or a digest; it has ``python`` with LayerZero in it.
        memory: the most that it may take, as ``8g``; as much as there is if empty.
    """

    image: str
    memory: str = ""

    def command(self) -> list[str]:
        """The command that runs its interpreter, with the first two open files behind the standard ones."""
        bound = [f"--memory={self.memory}"] if self.memory else []
        told = [f"--env={name}" for name in _PASSED if name in os.environ]
        return [
            *(RUNTIME, "run", "--rm", "--interactive", _HANDED, "--network=none", "--read-only"),
            *("--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges", "--user=65534:65534"),
            *("--pids-limit=512", *bound, *told, "--env=LAYERZERO_CACHE_DIR=", "--env=LAYERZERO_JIT=never"),
            *(self.image, "python"),
        ]


_PASSED = ("OMP_NUM_THREADS", "LAYERZERO_CPU_FEATURES", "LAYERZERO_GPU_GENERATIONS")


def containers(given: Mapping[str, Any]) -> dict[str, Container]:
    """The containers of a setting, by library. Raises: PolicyError with what is wrong with each."""
    found, problems = {}, []
    for name, each in given.items():
        try:
            found[name] = made = msgspec.convert(dict(each) if isinstance(each, (tuple, Mapping)) else each, Container)
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            problems.append(f"{name}: wanted {{image: name:tag, memory: 8g}}, got {each!r}: {error}")
            continue
        if not _IMAGE.fullmatch(made.image):
            problems.append(f"{name}: image: wanted a name with a tag or a digest, got {made.image!r}")
        if made.memory and not _MEMORY.fullmatch(made.memory):
            problems.append(f"{name}: memory: wanted a number with k, m or g, got {made.memory!r}")
    if problems:
        raise PolicyError(*problems)
    return found


def pythons(given: Mapping[str, Any]) -> dict[str, str]:
    """The interpreters of a setting, by library. Raises: PolicyError for what is no path of a file."""
    problems = [
        f"{name}: wanted the path of an interpreter that is there, got {path!r}; make its environment first"
        for name, path in given.items()
        if not isinstance(path, str) or not os.access(path, os.X_OK) or not os.path.isfile(path)  # noqa: PTH113
    ]
    if problems:
        raise PolicyError(*problems)
    return dict(given)


def end_container(name: str) -> str:
    """Kill a container, which lives on when the command that runs it is killed; gives what went wrong."""
    try:
        subprocess.run([RUNTIME, "kill", name], capture_output=True, text=True, timeout=KILL_S, check=True)  # noqa: S603
    except (subprocess.SubprocessError, OSError) as error:
        return str(getattr(error, "stderr", None) or error).strip()[-300:]
    return ""


def packages(command: tuple[str, ...]) -> Mapping[str, str]:
    """The versions of an environment's packages. Raises: OSError where it does not answer."""
    asked = [*(each for each in command if each != _HANDED), "-P", "-c", _PACKAGES]
    path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        said = subprocess.run(  # noqa: S603  # a command of the operator's settings
            asked, capture_output=True, text=True, timeout=LOOK_S, env=path, check=True
        )
        found = msgspec.convert(json.loads(said.stdout), dict[str, str])
        return found | {canonicalize_name(name): version for name, version in found.items()}
    except (subprocess.SubprocessError, ValueError) as error:
        words = getattr(error, "stderr", None) or error
        raise OSError(f"wanted the packages of {' '.join(command[:1])}, got {str(words).strip()[-300:]}") from error

"""``layerzero libraries``: which libraries to install together for a kind of model on a device, and which not, and why.

A library is in the set where a tested version of it fits torch, CUDA, driver and device, where one of its kernels may
run a named call of the operations, and where it does no harm to those before it. Nothing is looked up elsewhere:
the declarations say what was tested, and the limits of the kernels what they run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from layerzero.core.device import Device
from layerzero.core.kernel import Backend
from layerzero.core.operation import Operation
from layerzero.engine.config import SCOPES
from layerzero.engine.probe import Machine, check_requirement
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.model_sets import report_of, set_named, usual_dtype
from layerzero.ops.calls import is_call_of
from layerzero.ops.sets import SETS

_PIP = re.compile(r"pip install (--pre )?[A-Za-z0-9_.=-]+")
"""What installs one package and needs nothing else, so that several may stand in one line."""


@dataclass(frozen=True, slots=True)
class LibraryChoice:
    """A library of the set.

    Attributes:
        library: its name.
        package: with the version that was tested: ``quack-kernels==0.6.5``.
        operations: those of the set that one of its kernels may run.
        command: how it is installed, where pip with the package does not do it; else empty.
        needs: further packages.
    """

    library: str
    package: str
    operations: tuple[str, ...]
    command: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LibrarySet:
    """What to install together.

    Attributes:
        device, torch, runtime: what it is for; ``runtime`` is that of CUDA or ROCm.
        libraries: those that serve most operations first.
        left: others that are made for such a device, with the reason.
        alone: operations that none of the libraries runs.
    """

    device: str
    torch: str
    runtime: str
    libraries: tuple[LibraryChoice, ...]
    left: tuple[tuple[str, str], ...]
    alone: tuple[str, ...]

    @property
    def commands(self) -> list[str]:
        """What installs all of it: one line for pip, which must not exchange torch, and those that need their own."""
        packages = [name for each in self.libraries if not each.command for name in (each.package, *each.needs)]
        own = [each.command for each in self.libraries if each.command]
        pinned = [f"torch=={self.torch}", *packages]
        return [*([f"pip install {' '.join(map(_quoted, pinned))}"] if packages else []), *own]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**asdict(self), "commands": self.commands}

    def lines(self) -> list[str]:
        """What there is to say, a line each."""
        runtime = f", CUDA or ROCm {self.runtime}" if self.runtime else ""
        head = f"with torch {self.torch} on {self.device}{runtime}:"
        found = [f"  {each.package}: {len(each.operations)} operations" for each in self.libraries]
        lines = [head, *(found or ["  nothing"]), *self.commands]
        lines += [f"left out: {name}: {why}" for name, why in self.left]
        return lines + ([f"torch alone: {', '.join(self.alone)}"] if self.alone else [])


def _quoted(package: str) -> str:
    return f"'{package}'" if set("<>!~,[ ") & set(package) else package


def together(names: Sequence[str], device: Device, torch_version: str = "") -> LibrarySet:
    """Tell which libraries to install together.

    Args:
        names: sets of operations: ``serving``; none for all of them.
        device: where; it need not be here.
        torch_version: with which torch; the one that is here by default.
    Raises: ValueError for a word that names no set.
    """
    wanted = dict.fromkeys(each for name in names or SETS for each in set_named(name).operations)
    version = torch_version or str(torch.__version__).partition("+")[0]
    bare = Machine(device, {"torch": version})
    left: dict[str, str] = {}
    fitting: dict[Backend, str] = {}
    for backend in REGISTRY.backends():
        packages = [each for each in backend.distributions if each and each != "torch"]
        if not packages or device.platform not in backend.platforms or backend.origin != "builtin":
            continue
        found, why = _tested(backend, bare, device)
        if found:
            fitting[backend] = found
        else:
            left[packages[0]] = why
    pretended = {"torch": version} | {_package(backend): each for backend, each in fitting.items()}
    pretended |= {name: _lowest(each) for backend in fitting for name, each in _needs(backend).items()}
    runs = _runs([REGISTRY.operation(each) for each in wanted], device, pretended)
    chosen: dict[str, LibraryChoice] = {}
    for backend in sorted(fitting, key=lambda each: (-len(runs.get(each, ())), each.name)):
        package = _package(backend)
        harm = _harm(backend, chosen)
        if not runs.get(backend):
            left[package] = "none of its kernels may run a call of these operations there"
        elif harm:
            left[package] = harm
        else:
            install = bare.install(backend, device)
            needs = tuple(f"{name}{each}" for name, each in _needs(backend).items())
            own = "" if _PIP.fullmatch(install) else install
            pin = f"{package}=={fitting[backend]}"
            chosen[package] = LibraryChoice(backend.name, pin, tuple(sorted(runs[backend])), own, needs)
    served = {name for each in chosen.values() for name in each.operations}
    return LibrarySet(
        device.name,
        version,
        device.runtime,
        tuple(chosen.values()),
        tuple(sorted(left.items())),
        tuple(each for each in wanted if each not in served),
    )


def _package(backend: Backend) -> str:
    return next(each for each in backend.distributions if each and each != "torch")


def _tested(backend: Backend, machine: Machine, device: Device) -> tuple[str, str]:
    """The newest tested version that fits, or why none does."""
    if not backend.tested:
        return "", "none of its versions was tested; `layerzero vet` proves one where it is installed"
    why = ""
    for version in reversed(backend.tested):
        release = backend.release(version)
        if backend.releases and release is None:
            continue
        demands = (*backend.requires, *(release.requires if release else ()))
        reason = machine.unmet((each for each in demands if not _package_of(each)), device)
        if reason is None:
            return version, ""
        why = why or f"{version} needs {reason.fact}{reason.wanted}, got {reason.got}"
    return "", why


def _package_of(demand: str) -> str:
    """The package that is demanded; empty for torch, a runtime and the driver, which are what they are."""
    name, _ = check_requirement(demand)
    return "" if name in ("torch", "cuda", "rocm", "driver") else name


def _needs(backend: Backend) -> dict[str, str]:
    """Further packages that a library requires, with their ranges."""
    return {name: check_requirement(each)[1] for each in backend.requires if (name := _package_of(each))}


def _lowest(specifier: str) -> str:
    found = re.search(r"\d[\w.]*", specifier)
    assert found is not None, specifier
    return found[0]


def _harm(backend: Backend, chosen: Mapping[str, LibraryChoice]) -> str:
    """Why a library must not come along with those that were chosen; empty where it may."""
    for owner in REGISTRY.backends():
        for package, harm in owner.conflicts:
            for ours, theirs in ((owner.distributions, (package,)), ((package,), owner.distributions)):
                other = next((each for each in chosen if each in theirs), "")
                if other and not set(ours).isdisjoint(backend.distributions):
                    return f"along with {other}: {harm}"
    return ""


def _runs(operations: Iterable[Operation], device: Device, libraries: Mapping[str, str]) -> dict[Backend, set[str]]:
    """The operations of which each library may run a named call."""
    found: dict[Backend, set[str]] = {}
    with SCOPES.scope({"allow_jit_compile": True}):
        for operation in operations:
            dtype = usual_dtype(operation, device)
            for case in operation.cases:
                if not is_call_of(operation, case, dtype):
                    continue
                report = report_of(operation, case, dtype, device, promised=True, libraries=libraries)
                for each in report.candidates if report else ():
                    if each.legal:
                        found.setdefault(each.kernel.backend, set()).add(operation.name)
    return found

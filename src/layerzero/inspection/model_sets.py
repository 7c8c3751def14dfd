"""Whether a machine has optimised kernels for all that a kind of model calls, and what each operation falls back to.

And which libraries to install together for such a model on a device (``layerzero libraries``), and which not, and why.
A library is in the set where a tested version of it fits torch, CUDA, driver and device, where one of its kernels may
run a named call of the operations, and where it does no harm to those before it. Nothing is looked up elsewhere: the
declarations say what was tested, and the limits of the kernels what they run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import chain

import torch

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, UnknownOperationError
from layerzero.core.kernel import Backend
from layerzero.core.operation import Case, Operation
from layerzero.core.plan import Report
from layerzero.engine.config import SCOPES
from layerzero.engine.probe import Machine, check_requirement
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import nearest
from layerzero.inspection.answers import explain
from layerzero.ops import SET_ALIASES, SETS, OperationSet
from layerzero.ops.calls import accepted, arguments_of, function_for, is_call_of

_STOCK = "torch"
"""The library that is always there."""

_USUAL = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""What models run in on a kind of device."""


class OperationSupport(StrEnum):
    """What an operation has on a machine."""

    OPTIMISED = "optimised"
    """A library's kernel may run every one of its named calls."""
    PREPARED = "optimised if prepared"
    """A library's kernel may run every one of them where the caller brings what it made once, as a packed weight."""
    PARTLY = "partly optimised"
    """A library's kernel may run some of them."""
    STOCK = "torch alone"
    """Nothing but torch's own operators, and expressions of them."""
    REFERENCE = "reference alone"
    """Nothing but the definition."""


@dataclass(frozen=True, slots=True)
class OperationFinding:
    """One operation of a set on this machine.

    Attributes:
        operation: its name.
        served: what it has.
        dtype: that of the calls in question.
        kernels: those of libraries that may run any of its named calls.
        chosen: what these calls get today.
        handles: arguments that kernels want which the caller makes once; empty where they run without.
        refused: a library's kernel that may run none of them as they are, and why; empty where there is none, or where
            others may.
    """

    operation: str
    served: OperationSupport
    dtype: str
    kernels: tuple[str, ...]
    chosen: tuple[str, ...]
    refused: str = ""
    handles: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        gets = f"calls get {', '.join(self.chosen)}" if self.chosen else "no call finds a kernel"
        others = [each for each in self.kernels if each not in self.chosen]
        given = f"with {', '.join(f'{each}=' for each in self.handles)}" if self.handles else "too"
        more = f"; {', '.join(others)} may run them, {given}" if others else ""
        return (
            f"{self.operation}: {self.served} ({self.dtype}): {gets}{more}{f'; {self.refused}' if self.refused else ''}"
        )


def served(name: str, device: Device | None = None) -> tuple[OperationFinding, ...]:
    """Tell for each operation of a set whether an optimised kernel may run its named calls here.

    Args:
        name: of the set: ``decoder``; or ``norm.rms,attention``, operations and functions with commas between them.
        device: another device than this machine's best.
    Raises: ValueError for a word that names no set, with the nearest.
    """
    found = set_named(name)
    if device is None:
        device = Device.detect("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(_finding(REGISTRY.operation(each), device) for each in found.operations)


def set_named(name: str) -> OperationSet:
    """A set by its name, or one of operations, functions and sets with commas between them.

    Raises: ValueError for a word that names none, with the nearest.
    """
    if known := _known(name):
        return known
    words = [each.strip() for each in name.split(",") if each.strip()] if isinstance(name, str) else []
    return OperationSet(
        "operations named by the caller", tuple(dict.fromkeys(chain(*map(_operations_of, words or [name]))))
    )


def _known(word: object) -> OperationSet | None:
    return SETS.get(SET_ALIASES.get(word, word)) if isinstance(word, str) else None


def _operations_of(word: object) -> tuple[str, ...]:
    if known := _known(word):
        return known.operations
    near = nearest(word, SETS) if isinstance(word, str) else ""
    try:
        found = REGISTRY.operations_named(word) if isinstance(word, str) and word else []
    except UnknownOperationError:
        found = []
    if not found or any(REGISTRY.operation(each).plain is not None for each in found):
        wanted = f"wanted one of {', '.join(SETS)}, or operations of tensors with commas between them"
        raise ValueError(f"asked_for (--for): {wanted}, got {word!r}{near}")
    return tuple(found)


def usual_dtype(operation: Operation, device: Device) -> torch.dtype:
    """What models run an operation in on a device."""
    dtype = _USUAL.get(device.platform, torch.bfloat16)
    return dtype if dtype in operation.dtypes else operation.dtypes[0]


def _finding(operation: Operation, device: Device) -> OperationFinding:
    dtype = usual_dtype(operation, device)
    cases = [case for case in operation.cases if is_call_of(operation, case, dtype)]
    reports = [report for case in cases if (report := report_of(operation, case, dtype, device)) is not None]
    legal = [_of_libraries(report) for report in reports]
    handles: tuple[str, ...] = ()
    if not any(legal):  # a caller may keep more than weights for kernels
        promised = [each for case in cases if (each := report_of(operation, case, dtype, device, promised=True))]
        legal = [_of_libraries(report) for report in promised]
        handles = tuple(operation.schema.handles) if any(legal) else ()
    chosen = tuple(dict.fromkeys(report.kernel_id for report in reports if report.kernel_id))
    if legal and all(legal):
        state = OperationSupport.PREPARED if handles else OperationSupport.OPTIMISED
    elif any(legal):
        state = OperationSupport.PARTLY
    else:
        theirs = {each.kernel.backend.name for report in reports for each in report.candidates if each.legal}
        state = OperationSupport.STOCK if _STOCK in theirs else OperationSupport.REFERENCE
    kernels = tuple(sorted(set().union(*legal)))
    refused = "" if kernels and not handles else _why(reports)
    return OperationFinding(operation.name, state, dtype_name(dtype), kernels, chosen, refused, handles)


def _of_libraries(report: Report) -> set[str]:
    """The legal kernels that are neither torch's nor the reference."""
    legal = (each.kernel for each in report.candidates if each.legal)
    return {kernel.id for kernel in legal if kernel.backend.name not in (_STOCK, "reference")}


def report_of(
    operation: Operation,
    case: Case,
    dtype: torch.dtype,
    device: Device,
    *,
    promised: bool = False,
    libraries: Mapping[str, str] | None = None,
) -> Report | None:
    """What a named call gets on a device; None for one that the device's other rules forbid.

    ``promised`` brings what a caller makes once; ``libraries`` are others than those that are here.
    """
    function = function_for(operation)
    arguments = accepted(function, arguments_of(operation, case, dtype, "meta", promised=promised))
    try:
        return explain(function.name, **arguments, device=device, libraries=libraries)
    except InvalidCallError:
        return None


def _why(reports: list[Report]) -> str:
    """The first reason of a kernel that a library has for such calls: what to install, or what it lacks."""
    for report in reports:
        for each in report.candidates:
            backend = each.kernel.backend
            if backend.name not in (_STOCK, "reference") and report.facts.device.platform in backend.platforms:
                return f"{each.kernel.id}: {each.reasons[0]}"
    return ""


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
        return {**asdict(self), "commands": self.commands}

    def lines(self) -> list[str]:
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
    fitting, left, pretended = fitting_libraries(bare, device)
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


def fitting_libraries(bare: Machine, device: Device) -> tuple[dict[Backend, str], dict[str, str], dict[str, str]]:
    """Libraries with the version that was tested and fits, those that are left with the reason, and all as packages."""
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
    pretended = {"torch": bare.torch} | {_package(backend): each for backend, each in fitting.items()}
    pretended |= {name: _lowest(each) for backend in fitting for name, each in _needs(backend).items()}
    return fitting, left, pretended


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

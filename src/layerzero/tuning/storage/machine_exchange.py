"""What passes from one machine to others of its kind, as lines of an exported file behind its times.

Findings about kernels are verdicts, proofs of captures and workspaces. Each is sealed, and says for which library,
torch, device and capability it holds: one that does not fit is left, and the first difference is named. What was found
here stays.

A build is what a library compiled for calls of one machine, and is code. It says what made it, and is taken only where
all of that is the same, into the folder in which its library looks, and only where the user asks for builds: a forged
one runs whatever it likes. A checksum finds damage, not forgery.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from layerzero.core.device import Device, devices_here
from layerzero.core.errors import UnknownOperationError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.system import disk
from layerzero.engine import probe
from layerzero.engine.jit import NOTED, files_of, folder_of
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.files import FileLedger, versions_of
from layerzero.tuning.storage.records import CAPTURE, VERDICT, WORKSPACE, Name, Record, Versions, slug_of
from layerzero.tuning.storage.rows import Row
from layerzero.tuning.storage.store import StoreLedger

KINDS = (VERDICT, CAPTURE, WORKSPACE)


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of one of :data:`KINDS`."""

    kind: str
    record: Record

    @property
    def name(self) -> Name:
        return Name(slug_of(self.record.kernel), self.record.key, self.kind)


def _files(ledger: Ledger) -> FileLedger | None:
    markers = ledger.markers if isinstance(ledger, StoreLedger) else ledger
    return markers if isinstance(markers, FileLedger) else None


def found_here(ledger: Ledger) -> list[Finding]:
    """All that lies in this machine's folder, whatever it holds for."""
    files = _files(ledger)
    if files is None:
        return []
    files.notes()  # lists the folder anew
    return [Finding(name.kind, record) for name, record in files.files.all(*KINDS)]


def covered(name: str) -> Callable[[str], bool]:
    """Whether an operation is one that a function's name, an alias or a glob means; some rows are of none here."""
    known: Collection[str] = ()
    with contextlib.suppress(UnknownOperationError):
        known = REGISTRY.operations_named(name)
    return lambda operation: operation in known or fnmatch.fnmatchcase(operation, name)


def matching(found: Iterable[Finding], *, kernel: str, operation: str, here: bool) -> Iterator[Finding]:
    """Those by glob of kernel and name of operations; with ``here`` those alone that hold on this machine now."""
    devices, covers = devices_here(), covered(operation)
    for each in found:
        of = each.record.what.split(" ", 1)[0]  # a class of calls names its operation first
        if (
            fnmatch.fnmatchcase(each.record.kernel, kernel)
            and covers(of)
            and not (here and unlike(each.record, devices))
        ):
            yield each


def sealed(finding: Finding) -> Finding:
    """The finding with its checksum, for a file."""
    return Finding(finding.kind, msgspec.json.decode(finding.record.sealed(), type=Record))


def check_finding(finding: Finding) -> None:
    """Refuse one that was changed, or is of no kind. Raises: ValueError with wanted and got."""
    if finding.kind not in KINDS:
        raise ValueError(f"kind: wanted {' or '.join(KINDS)}, got {finding.kind!r}")
    if sealed(finding).record.check != finding.record.check:
        raise ValueError(f"{finding.record.kernel}: its checksum does not hold")


def unlike(record: Record, devices: Iterable[Device]) -> str:
    """The first thing in which a record differs from this machine; empty where it holds here."""
    here = _versions_here(record.kernel, record.versions, devices)
    return here if isinstance(here, str) else _first_unlike(here, msgspec.structs.asdict(record.versions))


def _versions_here(kernel_id: str, there: Versions, devices: Iterable[Device]) -> dict[str, str] | str:
    """What a finding or a build of a kernel would hold for here, on a device like that; or why there is no such one."""
    try:
        kernel = REGISTRY.kernel(kernel_id)
    except KeyError:
        return f"{kernel_id}: wanted a kernel that is registered here"
    several = [versions_of(kernel, device) for device in devices]
    return msgspec.structs.asdict(next((each for each in several if each.device == there.device), several[-1]))


def _first_unlike(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The first difference; the capability and the device tell more than versions. A compiler may be absent here."""
    for name in (*Versions.__struct_fields__[::-1], *sorted({*here, *there} - {*Versions.__struct_fields__})):
        wanted, got = here.get(name, ""), there.get(name, "")
        if wanted != got and (wanted or name not in HOST_COMPILERS):
            return f"{name}: wanted {wanted or 'none'}, got {got or 'none'}"
    return ""


def take(ledger: Ledger, found: Iterable[Finding], *, dry_run: bool = False) -> tuple[int, Counter[str]]:
    """Keep what holds here and says something new; how many, and how many were left, by the difference."""
    left: Counter[str] = Counter()
    files, taken, devices = _files(ledger), 0, devices_here()
    if files is None:
        return 0, Counter({"no folder is kept on disk": len(list(found))})
    known = {each.name for each in found_here(ledger)}
    for each in found:
        why = unlike(each.record, devices) or ("it was found here already" if each.name in known else "")
        left[why] += bool(why)
        if not why:
            taken += 1
            if not dry_run:
                files.files.put(each.record, each.kind)
    return taken, +left


def differences(here: Iterable[Row], there: Iterable[Row], most: int) -> tuple[Counter[str], list[str]]:
    """How two sets of times differ: counts, and a line for each kernel and work of both, farthest apart first."""
    own, other = _latest(here), _latest(there)
    both = sorted(own.keys() & other.keys(), key=lambda each: -_apart(own[each], other[each]))
    lines = [
        f"{each[0]} {own[each].facts.get('operation')}: {own[each].median_us:.1f} us here, "
        f"{other[each].median_us:.1f} us there"
        for each in itertools.islice(both, most)
    ]
    counts = {"in both": len(both), "here alone": len(own) - len(both), "there alone": len(other) - len(both)}
    return Counter(counts), lines


def _latest(rows: Iterable[Row]) -> Mapping[tuple[str, bytes, bool], Row]:
    found: dict[tuple[str, bytes, bool], Row] = {}
    for row in sorted(rows, key=lambda each: each.written_at):
        found[row.kernel, row.work.key, row.graph] = row
    return found


def _apart(one: Row, other: Row) -> float:
    return max(one.median_us, other.median_us) / min(one.median_us, other.median_us)


HOST_COMPILERS = {"c++": ("CXX", "c++"), "nvcc": ("CUDACXX", "nvcc")}
"""Variables that name a compiler, and what is looked for without; a machine without one may take a build, too."""

TOOLS = ("triton", "nvidia-cutlass-dsl", "apache-tvm-ffi")
"""Packages that compile."""


class BuiltFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: its name in the library's folder, what it holds, and the SHA-256 of that."""

    name: str
    sha256: str
    data: bytes


class PassedBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was compiled for a class of calls.

    Attributes:
        kernel: which it is for.
        versions: library, torch, device and capability.
        made_by: versions of Python, the system's C library, and the compilers.
        files: in the order in which they are written.
    """

    kernel: str
    versions: Versions
    made_by: dict[str, str]
    files: list[BuiltFile]


@functools.cache
def made_by() -> dict[str, str]:
    """What compiles here: packages and the C++ compiler by version, nvcc by the folder that its links lead to."""
    system = f"{platform.system()} {platform.machine()} {''.join(platform.libc_ver())}"
    found = {"python": platform.python_version().rpartition(".")[0], "system": system}
    for name in TOOLS:
        if (version := probe.installed_version(name)) is not None:
            found[name] = version
    for name, (variable, usual) in HOST_COMPILERS.items():
        path = shutil.which(os.environ.get(variable) or usual)
        if path is not None:
            told = _version(path) if name == "c++" else Path(path).resolve().parents[1].name
            found |= {name: told} if told else {}
    return found


def _version(compiler: str) -> str:
    """What a C++ compiler tells of itself, without the name that it was called by; empty for one that does not run."""
    try:
        line = subprocess.run(  # noqa: S603  # the one that torch and the libraries run
            [compiler, "--version"], capture_output=True, check=True, timeout=60, env={**os.environ, "LC_ALL": "C"}
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return line.partition("\n")[0].removeprefix(Path(compiler).name).strip()


def builds_of(calls: Iterable[Facts], kernels: Iterable[Kernel]) -> list[PassedBuild]:
    """The builds for calls that lie here, each once."""
    found: dict[tuple[str, ...], PassedBuild] = {}
    several = list(kernels)
    for facts in calls:
        for kernel in several:
            if facts.operation.name not in kernel.operations or not kernel.builds_apart:
                continue
            folder, names = folder_of(kernel), files_of(kernel, facts)
            if folder is None or not names or (kernel.id, *names) in found:
                continue
            content = {each: (folder / each).read_bytes() for each in names}
            files = [BuiltFile(each, hashlib.sha256(data).hexdigest(), data) for each, data in content.items()]
            found[kernel.id, *names] = PassedBuild(kernel.id, versions_of(kernel, facts.device), made_by(), files)
    return list(found.values())


def check_build(build: PassedBuild) -> None:
    """Refuse one that was changed, or has files elsewhere. Raises: ValueError with wanted and got."""
    for each in build.files:
        path = PurePosixPath(each.name)
        if path.is_absolute() or ".." in path.parts or {"\\", "\0"} & {*each.name} or not path.name:
            raise ValueError(f"{build.kernel}: wanted files in the library's folder, got {each.name!r}")
        if hashlib.sha256(each.data).hexdigest() != each.sha256:
            raise ValueError(f"{build.kernel}: {each.name}: its checksum does not hold")


def _unlike_build(build: PassedBuild) -> str:
    """The first thing in which what made a build differs from this machine; empty where nothing does."""
    here = _versions_here(build.kernel, build.versions, devices_here())
    if isinstance(here, str):
        return here
    if why := _first_unlike(here | made_by(), msgspec.structs.asdict(build.versions) | build.made_by):
        return why
    folder = folder_of(REGISTRY.kernel(build.kernel))
    if folder is None:
        return f"{build.kernel}: wanted a folder in which its library keeps builds, got none"
    inside = {folder / each for file in build.files for each in PurePosixPath(file.name).parents}
    why = next((why for each in sorted(inside) if (why := disk.distrust(each))), "")
    return f"{folder}: {why}" if why else ""


def take_builds(builds: Iterable[PassedBuild], *, dry_run: bool = False) -> tuple[int, Counter[str]]:
    """Write builds where their libraries look; how many, and how many were left, by the difference.

    Raises: OSError where nothing can be written.
    """
    left: Counter[str] = Counter()
    taken = 0
    for each in builds:
        why = _unlike_build(each) or _there(each)
        left[why] += bool(why)
        taken += not why
        if why or dry_run:
            continue
        folder = folder_of(REGISTRY.kernel(each.kernel))
        assert folder is not None  # those without were left those without
        for file in each.files:
            place = folder / file.name
            disk.make_private(place.parent)
            disk.write_whole(place, file.data, private=True)
    if not dry_run:
        NOTED.forget()
    return taken, +left


def _there(build: PassedBuild) -> str:
    """Why a build is not needed, or would change what lies here."""
    folder = folder_of(REGISTRY.kernel(build.kernel))
    assert folder is not None
    places = [(folder / each.name, each.data) for each in build.files]
    same = [place.read_bytes() == data for place, data in places if place.is_file()]
    if len(same) == len(places) and all(same):
        return "it was built here already"
    return "" if all(same) else f"{build.kernel}: other files of these names lie here"

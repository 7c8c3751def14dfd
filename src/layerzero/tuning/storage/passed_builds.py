"""Builds in exported files: what a library compiled for calls of one machine, for others of its kind.

A build is code. It says what made it, and is taken only where all of that is the same, into the folder in which its
library looks, and only where the user asks for builds: a forged one runs whatever it likes. A checksum finds
damage, not forgery.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import msgspec

from layerzero.core.device import devices_here
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.system import disk
from layerzero.engine.jit import NOTED, files_of, folder_of
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.files import versions_of
from layerzero.tuning.storage.records import Versions

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
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
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


def check(build: PassedBuild) -> None:
    """Refuse one that was changed, or has files elsewhere. Raises: ValueError with wanted and got."""
    for each in build.files:
        path = PurePosixPath(each.name)
        if path.is_absolute() or ".." in path.parts or {"\\", "\0"} & {*each.name} or not path.name:
            raise ValueError(f"{build.kernel}: wanted files in the library's folder, got {each.name!r}")
        if hashlib.sha256(each.data).hexdigest() != each.sha256:
            raise ValueError(f"{build.kernel}: {each.name}: its checksum does not hold")


def unlike(build: PassedBuild) -> str:
    """The first thing in which what made a build differs from this machine; empty where nothing does."""
    try:
        kernel = REGISTRY.kernel(build.kernel)
    except KeyError:
        return f"{build.kernel}: wanted a kernel that is registered here"
    several = [versions_of(kernel, device) for device in devices_here()]
    versions = next((each for each in several if each.device == build.versions.device), several[-1])
    here: dict[str, str] = msgspec.structs.asdict(versions) | made_by()
    there: dict[str, str] = msgspec.structs.asdict(build.versions) | build.made_by
    for name in (*Versions.__struct_fields__[::-1], *sorted({*made_by(), *build.made_by})):
        wanted, got = here.get(name, ""), there.get(name, "")
        if wanted != got and (wanted or name not in HOST_COMPILERS):
            return f"{name}: wanted {wanted or 'none'}, got {got or 'none'}"
    folder = folder_of(kernel)
    if folder is None:
        return f"{build.kernel}: wanted a folder in which its library keeps builds, got none"
    inside = {folder / each for file in build.files for each in PurePosixPath(file.name).parents}
    why = next((why for each in sorted(inside) if (why := disk.distrust(each))), "")
    return f"{folder}: {why}" if why else ""


def take(builds: Iterable[PassedBuild], *, dry_run: bool = False) -> tuple[int, Counter[str]]:
    """Write builds where their libraries look; how many, and how many were left, by the difference.

    Raises: OSError where nothing can be written.
    """
    left: Counter[str] = Counter()
    taken = 0
    for each in builds:
        why = unlike(each) or _there(each)
        left[why] += bool(why)
        taken += not why
        if why or dry_run:
            continue
        folder = folder_of(REGISTRY.kernel(each.kernel))
        assert folder is not None  # unlike() left those without
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

"""What a build of a hub kernel must be before it is imported; the first check that fails refuses it by name.

Checks that a library has are that library's: ``kernels`` reads metadata, chooses the variant and hashes files,
``sigstore`` verifies signatures without a network, ``kernel-abi-check`` reads the symbols of shared libraries.

What the settings name of the hub: a build of each repository, and what is wrong with those that give none.

Repositories of hub kernels on this disk: a folder of the user's, or the cache that ``kernels download`` fills.

A folder holds ``<owner>/<name>/build/<variant>``, or what a cache of the hub does:
``kernels--<owner>--<name>/snapshots/<commit>/build/<variant>``. Nothing else is looked at, and nothing is imported.

A lockfile of hub kernels: repository, commit, and a hash of the metadata of every variant.

``kernels lock`` of the ``kernels`` package pins commits alone. A hash of ``metadata.json`` pins the content, since that
file has a hash of every other one. The document has a checksum, so that an edit is noticed where it makes sense, too;
it is no signature.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from layerzero.backends.hub.adapters import ADAPTERS
from layerzero.backends.hub.build import Build, RefusedBuildError, altered, sha256_of
from layerzero.core.import_hook import importable
from layerzero.core.kernel import within

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_CACHED = re.compile(r"kernels--(?P<owner>.+?)--(?P<name>.+)")


class Found(NamedTuple):
    """A repository: ``owner/name``, its folder, its commit in a cache of the hub, and whether refs/main names it."""

    repo: str
    path: Path
    revision: str = ""
    is_main: bool = False


def cache_of_the_hub() -> Path:
    """The folder that the ``kernels`` package downloads to, by the variables that it reads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("KERNELS_CACHE") or os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def repositories(folder: Path) -> Iterator[Found]:
    """Every repository in a folder, sorted; a cache gives one for each commit. Raises: OSError."""
    for owner in sorted(each for each in folder.iterdir() if each.is_dir()):
        cached = _CACHED.fullmatch(owner.name)
        if cached is not None:
            repo = f"{cached['owner']}/{cached['name']}"
            main = owner / "refs" / "main"
            commit = main.read_text().strip() if main.is_file() else ""
            yield from (Found(repo, each, each.name, each.name == commit) for each in _folders(owner / "snapshots"))
        elif _NAME.fullmatch(owner.name):
            for path in _folders(owner):
                if _NAME.fullmatch(path.name) and (path / "build").is_dir():
                    yield Found(f"{owner.name}/{path.name}", path)


def _folders(parent: Path) -> list[Path]:
    return sorted(each for each in parent.iterdir() if each.is_dir()) if parent.is_dir() else []


def variants_in(repository: Path) -> list[Path]:
    """The folders of every build variant."""
    return [each for each in _folders(repository / "build") if (each / "metadata.json").is_file()]


_MOST_BYTES = 2**24


class Locked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is pinned of a repository: its commit, empty where none is known, and a SHA-256 for each variant."""

    revision: str
    variants: dict[str, str]


class Lockfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document. ``checksum`` is the SHA-256 of the other fields."""

    version: int
    kernels: dict[str, Locked]
    checksum: str


def checksum_of(kernels: Mapping[str, Locked]) -> str:
    """What a lockfile of these repositories has as its checksum."""
    return hashlib.sha256(msgspec.json.encode(kernels, order="sorted")).hexdigest()


def read_lockfile(path: Path) -> dict[str, Locked]:
    """What a lockfile pins, by repository. Raises: ValueError, or OSError where it cannot be read."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"wanted at most {_MOST_BYTES} bytes, got {path.stat().st_size}")
    found = msgspec.json.decode(path.read_bytes(), type=Lockfile)
    if found.version != 1:
        raise ValueError(f"wanted version 1, got {found.version}")
    wanted = checksum_of(found.kernels)
    if wanted != found.checksum:
        raise ValueError(f"it was edited: wanted checksum {wanted[:16]}, got {found.checksum[:16]}")
    return found.kernels


def text_of(found: Iterable[Found]) -> str:
    """A lockfile that pins repositories as they are on this disk."""
    kernels = {
        each.repo: Locked(
            each.revision, {path.name: sha256_of(path / "metadata.json") for path in variants_in(each.path)}
        )
        for each in found
    }
    document = Lockfile(1, kernels, checksum_of(kernels))
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2).decode() + "\n"


PACKAGES = (("kernels", ">=0.17,<0.18"), ("kernel-abi-check", ">=0.14,<0.15"))
"""What checks with; each is pinned to the versions that this file was written against."""

PYTHON_ABI, MANYLINUX = "3.9", "manylinux_2_28"
"""The stable ABI and the C library that kernels of the hub are built for: kernel-builder's own, 2026-08."""

PLATFORMS = ("cpu", "cuda", "rocm", "xpu")
_NATIVE = (".so", ".dylib", ".dll", ".pyd")


def checked(found: Found, allow: Sequence[str], locked: Mapping[str, Locked] | None) -> Build:
    """The build of a repository for this machine; nothing of it is imported.

    Args:
        found: the repository.
        allow: globs of repositories that may be used at all.
        locked: what a lockfile pins; None without one.
    Raises: RefusedBuildError with the first check that failed.
    """
    repo = found.repo
    if not any(fnmatch.fnmatchcase(repo, pattern) for pattern in allow):
        raise RefusedBuildError("hub.allow", ", ".join(allow) or "nothing", repo, "Add it there if you trust it")
    pinned = _pinned(found, locked)
    _packages(repo)
    path = _variant(found)
    sha256 = sha256_of(path / "metadata.json")
    if pinned is not None and pinned.variants.get(path.name) != sha256:
        wanted = pinned.variants.get(path.name, "no such variant")
        raise RefusedBuildError(f"{repo} hash", f"{wanted[:16]} by hub.lockfile", f"{sha256[:16]} of {path.name}")
    signed = _signed(repo, path)
    metadata = _metadata(repo, path)
    if problem := altered(path, sha256):
        raise RefusedBuildError(f"{repo} digest", "the files that its metadata lists", problem)
    _dependencies(repo, metadata, path.name)
    libraries = _libraries(repo, path)
    _name_is_free(repo, metadata, path)
    platform = str(metadata.backend.backend_type).lower()
    if platform not in PLATFORMS:
        raise RefusedBuildError(f"{repo} backend", " or ".join(PLATFORMS), platform)
    return Build(
        *(repo, str(path), found.revision, path.name, metadata.id, sha256),
        *(platform, bool(libraries), signed, str(metadata.version)),
    )


def _pinned(found: Found, locked: Mapping[str, Locked] | None) -> Locked | None:
    if locked is None:
        return None
    pinned = locked.get(found.repo)
    if pinned is None:
        raise RefusedBuildError("hub.lockfile", "a repository that it pins", found.repo)
    if found.revision and pinned.revision != found.revision:
        raise RefusedBuildError(f"{found.repo} revision", pinned.revision or "none", found.revision)
    return pinned


def _packages(repo: str) -> None:
    for name, versions in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        if not within(version, versions):
            raise RefusedBuildError(name, f"{versions} to check {repo}", version, f"pip install '{name}{versions}'")


def _variant(found: Found) -> Path:
    from kernels.variants import get_variants_local, resolve_variant, variants_trace_str

    place = found.path / "build"
    chosen, decisions = resolve_variant(get_variants_local(place))
    if chosen is None:
        got = "; ".join(variants_trace_str(decisions).splitlines()) or "none that has a name of a variant"
        raise RefusedBuildError(f"{found.repo} ABI", "a variant for this machine", got)
    path: Path = place / chosen.variant_str
    return path


def _signed(repo: str, path: Path) -> bool:
    """Whether the metadata is signed by a publisher that ``kernels`` trusts; a signature that is not is refused."""
    bundle = path / "metadata.json.sigstore"
    if not bundle.exists():
        return False
    from kernels.verify import DEFAULT_POLICIES
    from sigstore.errors import Error
    from sigstore.models import Bundle, InvalidBundle
    from sigstore.verify import Verifier, policy

    try:
        Verifier.production(offline=True).verify_artifact(
            (path / "metadata.json").read_bytes(), Bundle.from_json(bundle.read_bytes()), policy.AnyOf(DEFAULT_POLICIES)
        )
    except (InvalidBundle, Error, ValueError) as error:
        wanted = "metadata.json as a publisher that kernels trusts signed it"
        raise RefusedBuildError(f"{repo} signature", wanted, f"{type(error).__name__}: {error}") from error
    return True


def _metadata(repo: str, path: Path) -> Any:
    from kernels.resolver import Metadata

    try:
        found = Metadata.read_from_file(path / "metadata.json")
    except ValueError as error:
        raise RefusedBuildError(f"{repo} metadata", "what kernel-builder writes", str(error)) from error
    if str(found.name) != repo.partition("/")[2]:
        raise RefusedBuildError(f"{repo} name", repo.partition("/")[2], str(found.name))
    return found


def _dependencies(repo: str, metadata: Any, variant: str) -> None:
    from kernels.validate import DependencyValidator, MinverValidator

    if metadata.kernel_depends:
        got = ", ".join(each.repo_id for each in metadata.kernel_depends)
        raise RefusedBuildError(f"{repo} dependencies", "no other kernel of the hub", got)
    try:
        for each in (DependencyValidator(), MinverValidator()):
            each.validate_metadata(metadata=metadata, variant=variant)
    except (ImportError, RuntimeError, ValueError) as error:
        raise RefusedBuildError(f"{repo} dependencies", "what is installed", str(error)) from error


def _libraries(repo: str, path: Path) -> list[Path]:
    """Its shared libraries, which keep to the stable ABI of Python and to an old C library."""
    found = []
    for each in sorted(path.rglob("*")):
        if each.suffix in _NATIVE or ".so." in each.name:
            found.append(each)
            if problem := _abi_problem(each):
                raise RefusedBuildError(f"{repo} ABI", f"abi3 of Python {PYTHON_ABI} and {MANYLINUX}", problem)
    return found


def _abi_problem(library: Path) -> str:
    from kernel_abi_check import BinaryFormat, ObjectFile

    if not library.name.endswith(".abi3.so"):
        return f"{library.name}, which is no .abi3.so"
    try:
        file = ObjectFile(library)
        if file.format() != BinaryFormat.ELF:
            return f"{library.name} in {file.format()}"
        python, system = file.check_python_abi(PYTHON_ABI), file.check_manylinux(MANYLINUX)
    except (OSError, ValueError) as error:
        return f"{library.name}: {error}"
    names = [each.name for each in python] + [f"{each.name} of {each.dep} {each.version}" for each in system]
    return f"{library.name}: {', '.join(names[:4])}" if names else ""


def _name_is_free(repo: str, metadata: Any, path: Path) -> None:
    """Its module and its namespace of ``torch.ops`` are free."""
    name, fact = metadata.id, f"{repo} namespace"
    if not name.isidentifier():
        raise RefusedBuildError(fact, "a name of a module", repr(name))
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded == str(path / "__init__.py"):
        return
    if name in sys.modules or name in sys.builtin_module_names or importable(name):
        raise RefusedBuildError(fact, "a module that no package has", name)
    if any(each.startswith(f"{name}::") for each in torch._C._dispatch_get_all_op_names()):
        raise RefusedBuildError(fact, "a namespace of torch.ops that is free", name)


def builds_in(
    folder: str | None, lockfile: str | None, allow: Sequence[str]
) -> tuple[tuple[Build, ...], dict[str, str]]:
    """The builds of repositories with an adapter, refused ones with their reason; and what gives none, and why.

    Args:
        folder: where to look; the hub's cache if None.
        lockfile: what pins them; None for whatever is there.
        allow: globs of repositories that may be used.
    """
    try:
        locked = read_lockfile(Path(lockfile)) if lockfile else None
        found = list(repositories(Path(folder or cache_of_the_hub())))
    except (OSError, ValueError) as error:
        return (), {"hub.lockfile" if lockfile else "hub.folder": str(error)}
    problems, by_name = {}, dict[str, list[Build]]()
    for repo, revisions in groupby(sorted(found), key=lambda each: each.repo):
        name = repo.partition("/")[2]
        if name in ADAPTERS:
            by_name.setdefault(name, []).append(_build(list(revisions), allow, locked))
        else:
            problems[repo] = f"no adapter: wanted one of {', '.join(ADAPTERS)}"
    builds: dict[str, Build] = {}
    for of_name in by_name.values():
        chosen = next((each for each in of_name if each.refused is None), of_name[0])
        rest = [each for each in of_name if each is not chosen]
        problems |= {each.repo: f"{chosen.repo} has its name; hub.allow may name one of them" for each in rest}
        if chosen.refused is None and chosen.id in builds:
            taken = RefusedBuildError(f"{chosen.repo} namespace", "one of its own", f"{builds[chosen.id].repo}'s")
            chosen = dataclasses.replace(chosen, refused=taken.reason)
        builds[chosen.id if chosen.refused is None else chosen.repo] = chosen
    return tuple(builds.values()), problems


def _build(revisions: Sequence[Found], allow: Sequence[str], locked: Mapping[str, Locked] | None) -> Build:
    """A repository's build, with the reason if it is refused; whatever a check cannot read is a refusal, too."""
    found = revisions[-1]
    try:
        found = _one_of(revisions, locked)
        return checked(found, allow, locked)
    except RefusedBuildError as error:
        reason = error.reason
    except Exception as error:  # noqa: BLE001  # of a package that checks, over files that were planted
        reason = RefusedBuildError(f"{found.repo} files", "what can be read", f"{type(error).__name__}: {error}").reason
    return Build(found.repo, str(found.path), found.revision, refused=reason)


def _one_of(revisions: Sequence[Found], locked: Mapping[str, Locked] | None) -> Found:
    """The revision that the lockfile pins; without one the only revision, or main. Raises: RefusedBuildError."""
    last = revisions[-1]
    if locked is not None:  # where it pins none of them, its check says so
        pinned = locked.get(last.repo)
        return next((each for each in revisions if pinned and each.revision == pinned.revision), last)
    chosen = revisions if len(revisions) == 1 else [each for each in revisions if each.is_main]
    if not chosen:
        got = ", ".join(each.revision[:12] or str(each.path) for each in revisions)
        hint = "Keep one of them on the disk, or name one in hub.lockfile"
        raise RefusedBuildError(f"{last.repo} revision", "one, or a refs/main that names one of them", got, hint)
    return chosen[0]

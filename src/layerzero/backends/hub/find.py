"""Repositories of hub kernels on this disk: a folder of the user's, or the cache that ``kernels download`` fills.

A folder holds ``<owner>/<name>/build/<variant>``, or what a cache of the hub does:
``kernels--<owner>--<name>/snapshots/<commit>/build/<variant>``. Nothing else is looked at, and nothing is imported.

A lockfile of hub kernels: repository, commit, and a hash of the metadata of every variant.

``kernels lock`` of the ``kernels`` package pins commits alone. A hash of ``metadata.json`` pins the content, since that
file has a hash of every other one. The document has a checksum, so that an edit is noticed where it makes sense, too;
it is no signature.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from layerzero.backends.hub.build import sha256_of

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

"""A lockfile of hub kernels: repository, commit, and a hash of the metadata of every variant.

``kernels lock`` of the ``kernels`` package pins commits alone. A hash of ``metadata.json`` pins the content, since that
file has a hash of every other one. The document has a checksum, so that an edit is noticed where it makes sense, too;
it is no signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from layerzero.backends.hub.build import sha256_of
from layerzero.backends.hub.find import Found, variants_in

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


def read(path: Path) -> dict[str, Locked]:
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

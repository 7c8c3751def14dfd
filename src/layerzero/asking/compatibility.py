"""How well a library's version is known, and which installed packages do harm beside each other."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator
from enum import StrEnum

from layerzero.core.kernel import Backend, within


class Status(StrEnum):
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


def status(backend: Backend, version: str) -> Status:
    """What is known about a version."""
    if backend.known_bad and within(version, backend.known_bad):
        return Status.BAD
    if version.partition("+")[0] in backend.tested:
        return Status.TESTED
    return Status.EXPECTED if backend.holds_for(version) else Status.UNTESTED


def conflicts(backends: Iterable[Backend]) -> Iterator[str]:
    """What is wrong with packages that are installed beside each other, and what to do."""
    for backend in backends:
        own = next((name for name in backend.distributions if name and installed_version(name) is not None), None)
        for package, harm in backend.conflicts:
            version = installed_version(package)
            if own is not None and version is not None:
                yield (
                    f"{own} {installed_version(own)} beside {package} {version}: {harm}; uninstall one of them, or "
                    "give each an environment of its own"
                )


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

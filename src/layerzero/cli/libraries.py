"""Pretend that other kernel libraries are installed: ``--with flash_attn_3=3.0.0 --without zentorch``."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping

from packaging.version import InvalidVersion, Version

from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import nearest


def pretend(installed: Mapping[str, str], missing: Iterable[str]) -> dict[str, str]:
    """Give distribution names and versions as ``lz.explain(libraries=...)`` takes them: what is here, changed.

    Raises: ValueError for a library that no backend asks for, or an unreadable version.
    """
    known = _known()
    libraries = {name: version for names in known.values() for name in names if (version := _version(name))}
    for name in missing:
        for spelling in _spellings(name, known, "--without"):
            libraries.pop(spelling, None)
    for name, version in installed.items():
        try:
            Version(version)
        except InvalidVersion:
            raise ValueError(f"--with {name}: wanted a version like 3.0.0, got {version!r}") from None
        libraries |= dict.fromkeys(_spellings(name, known, "--with"), version)
    return libraries


def _known() -> dict[str, set[str]]:
    """Every name that a backend looks for, without dashes and capitals, to its spellings."""
    known: dict[str, set[str]] = {}
    for backend in REGISTRY.backends():
        required = [match[0] for each in backend.demands if (match := re.match(r"[A-Za-z0-9_.-]+", each))]
        for name in filter(None, (*backend.distributions, *required)):
            if name not in ("cuda", "rocm"):  # the device says these
                known.setdefault(_plain(name), set()).add(name)
    return known


def _spellings(name: str, known: Mapping[str, set[str]], flag: str) -> set[str]:
    if _plain(name) not in known:
        names = sorted({min(spellings) for spellings in known.values()})
        near = nearest(name, names) or f"; known: {', '.join(names)}"
        raise ValueError(f"{flag}: no kernel needs a library {name!r}{near}")
    return known[_plain(name)]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

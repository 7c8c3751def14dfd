"""Caches of compilers: what artefacts of the CuTe DSL depend on, and where they, Triton's and the driver's lie."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import tempfile
from getpass import getuser
from pathlib import Path


@functools.cache
def stamps() -> tuple[str, ...]:
    """What an artefact depends on besides a call: versions of Python and of what compiles it."""
    found = [f"{sys.version_info.major}.{sys.version_info.minor}"]
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return tuple(found)


def temporary(name: str) -> Path | None:
    """The folder of a library for this user among temporary files; none for a user without a name."""
    try:
        return Path(tempfile.gettempdir()) / getuser() / name
    except (KeyError, OSError):
        return None


def triton_cache() -> Path:
    """The folder, as Triton 3 names it; nothing of Triton is imported to know."""
    named = os.environ.get("TRITON_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def driver_cache() -> Path | None:
    """Where the CUDA driver keeps what it compiled of PTX, by its own key; none where it keeps nothing.

    What a child compiled is noted there, so that no later process compiles it again: until 2026-11-23 every one took a
    minute of its background for it. The driver drops what is oldest beyond CUDA_CACHE_MAXSIZE (1 GB).
    Source: CUDA programming guide 13.0, environment variables.
    """
    if os.environ.get("CUDA_CACHE_DISABLE") == "1":
        return None
    named = os.environ.get("CUDA_CACHE_PATH")
    try:
        return Path(named) if named else Path.home() / ".nv" / "ComputeCache"
    except RuntimeError:  # a user without a home
        return None

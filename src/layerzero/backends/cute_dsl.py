"""Kernels in the CuTe DSL: what their compiled artefacts depend on, and where libraries keep them."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import tempfile
from getpass import getuser
from pathlib import Path


@functools.cache
def stamps() -> tuple[str, ...]:
    """What an artefact depends on beside a call: versions of Python and of what compiles it."""
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

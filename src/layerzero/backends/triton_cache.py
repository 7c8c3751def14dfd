"""Where Triton keeps what it compiled: a folder for each kernel, named by a hash of source, options and device."""

from __future__ import annotations

import os
from pathlib import Path


def triton_cache() -> Path:
    """The folder, as Triton 3 names it; nothing of Triton is imported to know."""
    named = os.environ.get("TRITON_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"

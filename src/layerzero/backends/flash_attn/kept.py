"""What FlashAttention 4 compiled, kept for other processes: its own persistent cache, by its own key.

The package has one and leaves it off: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 turns it on, below the system's folder
for temporary files. Kernels here use the same class in a copy of the package's function, whatever the variable says, so
that a child process can compile for this one and nothing compiles again after a restart. Where the user turned it on,
or named a folder (FLASH_ATTENTION_CUTE_DSL_CACHE_DIR), it is that one; else one in the user's own cache, since others
may write among temporary files, and what lies there is run.

Read: flash_attn/cute/cache_utils.py of flash-attn-4 4.0.0b36 (2026-11-22). Entries lie in a folder for the fingerprint
of the package's sources, Python's, CUTLASS's and tvm_ffi's version; each is moved into place whole, and one that does
not load is compiled anew.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.backends.cute_dsl import temporary

NAME = "flash_attention_cute_dsl_cache"


def cache_folder() -> Path | None:
    """Where the package's entries lie; none where nobody says who the user is."""
    named = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    if named is not None:
        return Path(named)
    if os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1":
        return temporary(NAME)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME
    except RuntimeError:  # a user without a home
        return None


def kept(forward: types.FunctionType, wrapped: Callable[[Any], Any] = lambda cache: cache) -> Callable[..., Any]:
    """A copy of the package's function that keeps what it compiles on disk; ``wrapped`` stands before that cache."""
    cache = types.SimpleNamespace(compile_cache=wrapped(_on_disk(forward)))
    seen = {**forward.__globals__, forward.__name__: cache}
    copy = types.FunctionType(forward.__code__, seen, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


_CACHES: dict[Path, Any] = {}
"""One a folder: kernels of a process share what is loaded."""


def _on_disk(forward: Any) -> Any:
    """The cache on disk; the package's own where that is one, or where none can be made."""
    folder = cache_folder()
    try:
        from flash_attn.cute import cache_utils
    except ImportError:  # a version that has none
        return forward.compile_cache
    if folder is None or isinstance(forward.compile_cache, cache_utils.JITPersistentCache):
        return forward.compile_cache
    if folder not in _CACHES:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = folder / cache_utils._compute_source_fingerprint() / "fwd"
            _CACHES[folder] = cache_utils.JITPersistentCache(place)
        except OSError:  # a folder that cannot be written: it is compiled in each process, as before
            return forward.compile_cache
    return _CACHES[folder]

"""Where tokenizers that exist as objects are written, so that other processes find them: beside times and verdicts."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

from layerzero.core.system import forking
from layerzero.core.system.disk import distrust
from layerzero.ops.tokenize.tokenizer import Tokenizer

log = logging.getLogger("layerzero")

_LOCK = forking.lock()
_PRIVATE: list[Path] = []


def folder() -> Path:
    """The folder of written tokenizers; a private one of this process where nothing may be kept, or others may write.

    What lies there is read as this user's own tokenizer, so that nobody else may have put it, or a link, there.
    """
    named = os.environ.get("LAYERZERO_CACHE_DIR")
    if named == "":
        return _private()
    if named is None:
        import platformdirs

        kept = platformdirs.user_cache_path("layerzero", appauthor=False)
    else:
        kept = Path(named).expanduser().absolute()
    place = kept / "tokenizers"
    why = distrust(kept) or distrust(place)
    if why:
        if not _PRIVATE:
            log.warning("tokenizers are written for this process alone: %s", why)
        return _private()
    return place


def _private() -> Path:
    """A new folder that nobody else can enter, gone when this process ends; children find it by its name until then."""
    with _LOCK:
        if not _PRIVATE:
            made = Path(tempfile.mkdtemp(prefix="layerzero-tokenizers-"))
            _PRIVATE.append(made)
            atexit.register(_remove, made, os.getpid())
        return _PRIVATE[0]


def _remove(made: Path, process: int) -> None:
    """Remove a folder; a forked child leaves it to its parent."""
    if os.getpid() == process:
        shutil.rmtree(made, ignore_errors=True)


def written(tokenizer: Tokenizer) -> str:
    """A name by which another process finds a tokenizer."""
    return tokenizer.written(folder())

"""Where tokenizers that exist as objects are written, so that other processes find them: beside times and verdicts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from layerzero.ops.tokenize.tokenizer import Tokenizer


def folder() -> Path:
    """The folder of written tokenizers; one of the system's temporary folders where nothing may be kept."""
    named = os.environ.get("LAYERZERO_CACHE_DIR")
    if named is None:
        import platformdirs

        return platformdirs.user_cache_path("layerzero", appauthor=False) / "tokenizers"
    return (
        Path(named).expanduser().absolute() / "tokenizers"
        if named
        else Path(tempfile.gettempdir()) / "layerzero-tokenizers"
    )


def written(tokenizer: Tokenizer) -> str:
    """A name by which another process finds a tokenizer."""
    return tokenizer.written(folder())

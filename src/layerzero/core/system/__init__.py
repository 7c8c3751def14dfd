"""What the operating system does to a process (forks, memory, control groups, files, threads), its log and warnings."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any


class _Log(logging.LoggerAdapter[logging.Logger]):
    """The logger of the package; a closed error stream, as of a service, ends no call that has something to say."""

    def log(self, level: int, msg: object, *args: object, stacklevel: int = 1, **kwargs: Any) -> None:
        try:
            super().log(level, msg, *args, stacklevel=stacklevel + 1, **kwargs)
        except ValueError:
            if not _stream_is_closed():
                raise


log = _Log(logging.getLogger("layerzero"))


def warn(text: str, kind: type[Warning], stacklevel: int = 1) -> None:
    """Warn as ``warnings.warn`` does; into the log alone where the error stream is closed, for which Python raises."""
    try:
        warnings.warn(text, kind, stacklevel=stacklevel + 1)
    except ValueError:
        if not _stream_is_closed():
            raise
        log.warning("%s", text)


def _stream_is_closed() -> bool:
    return bool(getattr(sys.stderr, "closed", False))

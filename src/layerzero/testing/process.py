"""Child processes that check kernels: what they inherit, how they are asked, and how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import IO, AnyStr


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment and import path, without LayerZero's settings: kernels are checked, not a policy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(more or {})


APART = {"LAYERZERO_CACHE_DIR": "", "CUDA_LAUNCH_BLOCKING": "1"}
"""For a child that may end: it keeps no files of its own, and launches block, so that it ends where it fails."""


def hand_over(stream: IO[AnyStr], question: AnyStr) -> None:
    """Write a question and close the stream; what a child that died at once leaves unread, its end tells as well."""
    with contextlib.suppress(BrokenPipeError):
        stream.write(question)
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def how_it_ended(code: int) -> str:
    """An exit code, or the name of the signal, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def last_line(output: bytes) -> str:
    """The last line of what a process said, cut to 500 characters."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"


def ended_how(code: int, output: bytes) -> str:
    """How a process ended that did not say so itself."""
    told = f"it ended the process with {how_it_ended(code)}"
    return told if code < 0 else f"{told}: {last_line(output)}"

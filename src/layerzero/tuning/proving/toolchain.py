"""Which program a build lacked, or what ended it: what libraries raise runs to pages, and ends with something else."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

MOST_CAUSES = 20
"""Causes of an error that are looked at."""


class Program(NamedTuple):
    """A program that builds need, the words in which libraries say that it is not there, and what to do."""

    name: str
    said: re.Pattern[str]
    remedy: str


_ABSENT = r"No such file or directory: '(?:[^']*/)?"

PROGRAMS = (
    Program(
        "a C++ compiler that works",
        re.compile(rf"InvalidCxxCompiler|No working C\+\+ compiler|{_ABSENT}(?:g\+\+|c\+\+|clang\+\+)[\w.-]*'"),
        "install one (g++), or name it in CXX",
    ),
    Program(
        "a C compiler",
        re.compile(rf"Failed to find C compiler|{_ABSENT}(?:gcc|cc|clang)[\w.-]*'"),
        "install one (gcc), or name it in CC",
    ),
    Program(
        "ninja",
        re.compile(rf"Ninja is required|ninja: (?:command )?not found|{_ABSENT}ninja'"),
        "pip install ninja",
    ),
    Program(
        "nvcc",
        re.compile(rf"CUDA_HOME environment variable is not set|[Cc]ould not find nvcc|nvcc: not found|{_ABSENT}nvcc'"),
        "install the CUDA toolkit of torch's CUDA version, and name its folder in CUDA_HOME",
    ),
)
"""In the words of torch 2.13 (Inductor and cpp_extension), Triton 3.6, FlashInfer 0.6 and the system."""


_ENDED = (
    (
        re.compile(
            r"Killed signal terminated program|died due to signal 9|fatal error: [Kk]illed|\bKilled\s*$", re.MULTILINE
        ),
        "a compiler was killed, most often since memory ran out",
    ),
    (
        re.compile(
            r"out of memory allocating \d+ bytes|virtual memory exhausted|[Cc]annot allocate memory"
            r"|what\(\):\s*std::bad_alloc"
        ),
        "a compiler had too little memory",
    ),
    (re.compile(r"No space left on device"), "the disk is full"),
)
"""What GCC 12, nvcc 12 and shells say of compilers that were ended, or could not go on, for no fault of the source."""

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def lacking(error: BaseException) -> Program | None:
    """The program that an error, or one that caused it, says is absent."""
    for at in _causes(error):
        text = f"{type(at).__name__}: {at}"
        for program in PROGRAMS:
            if program.said.search(text):
                return program
    return None


def interrupted(error: BaseException) -> str:
    """What kept a compiler from its work and may be over the next time: little memory, a full disk, a kill."""
    for at in _causes(error):
        code = getattr(at, "returncode", None)  # of a subprocess.CalledProcessError
        if isinstance(code, int):
            number = -code if code < 0 else code - 128  # a shell adds 128
            if number in _FROM_OUTSIDE:
                return f"a compiler was ended by {signal.Signals(number).name}, most often since memory ran out"
        for said, meaning in _ENDED:
            found = said.search(str(at))
            if found is not None:
                return f"{meaning} ({found[0].strip()})"
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that caused it."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen and len(seen) < MOST_CAUSES:
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__

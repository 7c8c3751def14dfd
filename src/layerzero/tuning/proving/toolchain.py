"""Which program a build lacked, and what to do: what libraries raise runs to pages, and ends with something else."""

from __future__ import annotations

import re
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
        "a C++ compiler",
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


def lacking(error: BaseException) -> Program | None:
    """The program that an error, or one that caused it, says is absent."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen and len(seen) < MOST_CAUSES:
        seen.append(at)
        text = f"{type(at).__name__}: {at}"
        for program in PROGRAMS:
            if program.said.search(text):
                return program
        at = at.__cause__ or at.__context__
    return None

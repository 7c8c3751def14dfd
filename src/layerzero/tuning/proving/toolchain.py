"""Which program a build lacked, or what ended it: what libraries raise runs to pages, and ends with something else."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

TRIAL_S = 60.0
"""How long a compiler may take for an empty program, on a machine that does other things, too."""

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


def of_compiler(error: BaseException) -> BaseException:
    """The error, or what ails the C++ compiler if that is why.

    Inductor asks the compiler first what the processor can do, takes every failure for a no, and then asserts about
    something else. So it is asked for an empty program here.
    """
    if all(type(each).__name__ != "InductorError" for each in _causes(error)):
        return error
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:  # another torch has it elsewhere
        return error
    try:
        command = shlex.split(str(get_cpp_compiler()))
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(  # noqa: S603  # the compiler that torch is about to run
                [*command, "-x", "c++", "-c", "-o", f"{folder}/empty.o", "-"],
                input=b"int main() { return 0; }",
                capture_output=True,
                check=True,
                timeout=TRIAL_S,
            )
    except subprocess.CalledProcessError as found:
        text = found.stderr.decode(errors="replace")
        said = RuntimeError(text)
        if interrupted(found) or interrupted(said):
            found.__cause__ = said
            return found
        said.__cause__ = RuntimeError(f"No working C++ compiler: {command[0]} refuses an empty program")
        return said
    except Exception as found:  # noqa: BLE001  # whatever it raises, the compiler does not work
        return found
    return error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that caused it."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen and len(seen) < MOST_CAUSES:
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__

"""What a child does that builds: have a kernel compile for a call, and note what lies in its library's cache.

It works at low priority, and what it compiles it keeps where its library does, so that the parent process, and every
later one, finds it there. Of a build that failed it says which program was lacking, or what ended the compiler: what
libraries raise runs to pages, and ends with something else.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import shlex
import signal
import subprocess
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from layerzero.core.dtypes import dtype_named
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.recipe import CallRecipe
from layerzero.core.system.resources import available_bytes, usable_cpus
from layerzero.engine import jit
from layerzero.engine.config import SCOPES
from layerzero.engine.failures import out_of_memory
from layerzero.engine.jit import BUILT, BuildIdentity, BuildOutcome, build_of
from layerzero.engine.registry import REGISTRY
from layerzero.testing.child_main import Tell
from layerzero.testing.children import BUILD_S, End, Task, run_apart
from layerzero.testing.process import OUTSIDE, apart_on, by_device
from layerzero.testing.single_run import attempt, duplicate
from layerzero.tuning.storage.environment import SHARE
from layerzero.tuning.storage.host_notes import shortened
from layerzero.tuning.verification.child import homes, rebuilt

NICENESS = 10

_CORES = usable_cpus()
AT_ONCE = max(1, min(4, _CORES // 8))
"""Children that build at the same time: each starts compilers for a quarter of the cores, one alone for half of them.
One after the other got through two classes of FlashAttention 4 and one of PTX in 100 s (H200, 16 cores, 2026-11-23)."""

COMPILER_BYTES = 4 * 2**30
"""What a compiler of CUDA code may need: FlashInfer's own builds count with as much for each (0.7.2)."""

LINES, EARLIER = 15, 5
"""Lines that are reported of what a compiler said: the last ones, and of those before them a few that speak of an
error."""

_SPARE = 2
"""How many times a call's tensors must fit into what a device has left: the copies, and what else runs there."""


class Build(msgspec.Struct, frozen=True):
    """A kernel to build for a call, once modules are imported that register it."""

    kernel: str
    call: CallRecipe
    modules: list[str]


def work(build: Build, tell: Tell) -> None:
    """Build, and tell what became of it."""
    _step_back()
    try:
        for module in build.modules:
            importlib.import_module(module)
        kernel = REGISTRY.kernel(build.kernel)
    except (ImportError, KeyError) as error:
        tell.found(BuildOutcome(f"a child process does not know {build.kernel}: {error}", lasting=False))
        return
    tell.begins()
    tell.found(built(kernel, build.call))


def _step_back() -> None:
    """Leave the processor to what serves; compilers that are started from here do, too."""
    if hasattr(os, "nice") and os.nice(0) < NICENESS:
        os.nice(NICENESS)
    os.environ.setdefault("MAX_JOBS", str(compilers(available_bytes())))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def compilers(free: float) -> int:
    """How many compilers a child starts at once: its share of the cores, and of the memory that is left."""
    share = _CORES // (2 if AT_ONCE == 1 else 4)
    return int(max(1, min(share, free / AT_ONCE / COMPILER_BYTES)))


def built(kernel: Kernel, recipe: CallRecipe) -> BuildOutcome:
    """Run a kernel on a call like the one that is waited for; the first time compiles, the second shows it is done."""
    try:
        short = short_of_memory(recipe)
        if short:
            return BuildOutcome(short, lasting=False)
        with SCOPES.scope({"allow_jit_compile": True}), torch.no_grad(), jit.opened_files() as opened:
            call = rebuilt(recipe)
            trial = attempt(kernel, REGISTRY.operation(recipe.operation), call)
            if trial is None or trial.reasons:
                return BuildOutcome(
                    f"a child process may not run it: {trial.reasons if trial else 'no call'}", lasting=False
                )
            trial.plan()
            for _ in range(2):
                trial.run(**duplicate(call).arguments)
            if recipe.device == "cuda":
                torch.cuda.synchronize()
        jit.note(kernel, trial.facts, opened)
    except Exception as error:  # noqa: BLE001  # whatever a compiler raises is what became of it
        return failed(error, lasting=not out_of_memory(error) and not isinstance(error, OSError))
    return BuildOutcome()


def failed(error: BaseException, *, lasting: bool) -> BuildOutcome:
    """What became of a build that raised: the program that it lacked, in one line, or the last lines of the error."""
    error = of_compiler(error)
    program = lacking(error)
    if program is not None:
        return BuildOutcome(f"{program.name} was not found: {program.remedy}", lasting=True, lacks=program.name)
    if ended := interrupted(error):
        return BuildOutcome(f"{last_lines(error)}\nerror: {ended}", lasting=False)
    return BuildOutcome(last_lines(error), lasting=lasting)


def last_lines(error: BaseException) -> str:
    """What an error says, or what caused it: where it speaks of errors, and its end, for compilers write pages."""
    cause = error.__cause__ or error
    lines = "".join(traceback.format_exception_only(cause)).strip().splitlines()
    errors = [line for line in lines[:-LINES] if "error" in line.lower()][:EARLIER]
    return "\n".join(shortened(line) for line in [*errors, *lines[len(errors) - LINES :]])


def short_of_memory(recipe: CallRecipe) -> str:
    """Why a call does not fit next to what runs on its device; empty where it can.

    On a CPU the system gives out more than there is, and then ends a process, perhaps the parent.
    """
    sizes = [math.prod(each.shape) * dtype_named(each.dtype).itemsize for each in recipe.tensors.values()]
    free = SHARE * available_bytes() if recipe.device == "cpu" else math.inf
    if recipe.device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    needed = sum(sizes) * _SPARE
    if needed <= free:
        return ""
    return f"making its tensors takes {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB may be used on the device"


TRIAL_S = 60.0
"""How long a compiler may take for an empty program, on a machine that does other things, too."""

MOST_CAUSES = 20
"""Causes of an error that are looked at."""


class BuildProgram(NamedTuple):
    """A program that builds need, the words in which libraries say that it is not there, and what to do."""

    name: str
    said: re.Pattern[str]
    remedy: str


_ABSENT = r"No such file or directory: '(?:[^']*/)?"

PROGRAMS = (
    BuildProgram(
        "a C++ compiler that works",
        re.compile(rf"InvalidCxxCompiler|No working C\+\+ compiler|{_ABSENT}(?:g\+\+|c\+\+|clang\+\+)[\w.-]*'"),
        "install one (g++), or name it in CXX",
    ),
    BuildProgram(
        "a C compiler",
        re.compile(rf"Failed to find C compiler|{_ABSENT}(?:gcc|cc|clang)[\w.-]*'"),
        "install one (gcc), or name it in CC",
    ),
    BuildProgram(
        "ninja", re.compile(rf"Ninja is required|ninja: (?:command )?not found|{_ABSENT}ninja'"), "pip install ninja"
    ),
    BuildProgram(
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


def lacking(error: BaseException) -> BuildProgram | None:
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
            if number in OUTSIDE:
                return f"a compiler was ended by {signal.Signals(number).name}, most often since memory ran out"
        for said, meaning in _ENDED:
            found = said.search(str(at))
            if found is not None:
                return f"{meaning} ({found[0].strip()})"
    return ""


def of_compiler(error: BaseException) -> BaseException:
    """The error, or what ails the C++ compiler if that is why.

    Inductor first tests by the compiler what the processor can do, takes every failure for a no, and then asserts about
    something else. So an empty program is compiled here.
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
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen and len(seen) < MOST_CAUSES:
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__


Told = Callable[[Kernel, Facts, BuildOutcome], None]
"""Called with what became of a build."""


def build_apart(
    pairs: Sequence[tuple[Kernel, Facts]],
    told: Told,
    stop: Callable[[], bool],
    *,
    modules: Sequence[str] = (),
    at_once: int = AT_ONCE,
    begins: Callable[[Kernel, Facts], None] = lambda _kernel, _facts: None,
) -> None:
    """Build kernels for calls, each build once, in children that do one job after the other.

    Args:
        pairs: kernels that say ``prebuilt`` or ``cache_folder``, each with a call.
        told: called with each build that ended; not with those that were stopped.
        stop: called all the while; once it is true, the children are killed.
        modules: modules that register kernels, besides those that did so here.
        at_once: children that work at the same time.
        begins: called with each build that begins, for several are under way at once.
    """
    unique = {build_of(kernel, facts): (kernel, facts) for kernel, facts in pairs if not BUILT.ready(kernel, facts)}

    def ended(task: Task, end: End) -> None:
        if end.kind != "stopped":
            kernel, facts = task.about
            hangs = end.kind == "hung" and end.started  # wherever it is stuck, the next process would wait as long
            told(kernel, facts, BuildOutcome(str(end), lasting=hangs or end.verdict is not None))

    for of_one in by_device(unique.values()):
        named = homes((kernel for kernel, _ in of_one), modules)
        lanes = _lanes(of_one)
        tasks = deque(
            Task(
                Build(kernel.id, CallRecipe.of(facts), named),
                kernel.id,
                BUILD_S,
                lane=f"lane {lanes[build_of(kernel, facts)]}",
                about=(kernel, facts),
            )
            for kernel, facts in of_one
        )
        run_apart(
            "layerzero.tuning.verification.build_child",
            tasks,
            found=lambda task, value: told(task.about[0], task.about[1], msgspec.convert(value, BuildOutcome)),
            ended=ended,
            begins=lambda task: begins(*task.about),
            at_once=at_once,
            modules=named,
            environment=apart_on(of_one[0][1].device),
            stop=stop,
        )


def _lanes(pairs: Iterable[tuple[Kernel, Facts]]) -> dict[BuildIdentity, int]:
    """What is built after what: kernels of one library that depend on the same, by one child.

    They share what is compiled: FlashInfer's decoding by tensor cores, its tokens over pages and its ragged prompts are
    one module of 65 s, which a second child would wait for, or write at the same moment. A key that holds another one
    (FlashInfer's cascade takes the module for batches besides its own) is a lane of its own: the second one waits for
    the library's lock.

    All else goes to whichever child is free, and a child that has begun a lane does all of it first. Of two children
    that shared the builds out before they began, one had not come to half of its FlashAttention 4 after 90 s, behind a
    module of 46, and the other was done (tuning an H200, 2026-11-24).
    """
    found: dict[BuildIdentity, int] = {}
    shared: dict[Hashable, int] = {}
    for kernel, facts in pairs:
        identity = build_of(kernel, facts)
        whose = kernel.source if kernel.build_key is not None else kernel.id  # others share a class of calls, no more
        found[identity] = shared.setdefault((whose, identity[1:]), len(shared))
    return found

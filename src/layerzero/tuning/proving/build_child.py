"""What a child does that builds: have a kernel compile for a call, and note what lies in its library's cache.

It works at low priority, and what it compiles it keeps where its library does, so that the process that asked, and
every later one, finds it there.
"""

from __future__ import annotations

import importlib
import math
import os
import traceback

import msgspec
import torch

from layerzero.core.dtypes import dtype_named
from layerzero.core.free_memory import available_bytes
from layerzero.core.kernel import Kernel
from layerzero.core.recipe import CallRecipe
from layerzero.engine import jit
from layerzero.engine.config import SCOPES
from layerzero.engine.failing import out_of_memory
from layerzero.engine.jit import Outcome
from layerzero.engine.registry import REGISTRY
from layerzero.testing.apart_child import Tell
from layerzero.testing.trial import attempt, duplicate
from layerzero.tuning.keeping.builds import shortened
from layerzero.tuning.measuring.room import SHARE
from layerzero.tuning.proving.child import rebuilt
from layerzero.tuning.proving.toolchain import interrupted, lacking, of_compiler

NICENESS = 10

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
AT_ONCE = max(1, min(4, _CORES // 8))
"""Children that build at the same time: each starts compilers for a quarter of the cores, one alone for half of them.
One after the other got through two classes of FlashAttention 4 and one of PTX in 100 s (H200, 16 cores, 2026-11-23)."""

COMPILER_BYTES = 4 * 2**30
"""What a compiler of CUDA code may need: FlashInfer's own builds count with as much for each (0.7.2)."""

LINES, EARLIER = 15, 5
"""Lines that are told of what a compiler said: the last ones, and of those before them a few that speak of an error."""

_SPARE = 2
"""How many times a call's tensors must fit into what a device has left: the copies, and what else runs there."""


class Build(msgspec.Struct, frozen=True):
    """A kernel to build for a call, once modules are imported that register it."""

    kernel: str
    call: CallRecipe
    modules: list[str]


Job = Build


def work(build: Build, tell: Tell) -> None:
    """Build, and tell what became of it."""
    _step_back()
    try:
        for module in build.modules:
            importlib.import_module(module)
        kernel = REGISTRY.kernel(build.kernel)
    except (ImportError, KeyError) as error:
        tell.found(Outcome(f"a child process does not know {build.kernel}: {error}", lasting=False))
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


def built(kernel: Kernel, recipe: CallRecipe) -> Outcome:
    """Run a kernel on a call like the one that is waited for; the first time compiles, the second shows it is done."""
    try:
        short = short_of_memory(recipe)
        if short:
            return Outcome(short, lasting=False)
        with SCOPES.scope({"allow_jit_compile": True}), torch.no_grad(), jit.opened_files() as opened:
            call = rebuilt(recipe)
            trial = attempt(kernel, REGISTRY.operation(recipe.operation), call)
            if trial is None or trial.reasons:
                return Outcome(
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
    return Outcome()


def failed(error: BaseException, *, lasting: bool) -> Outcome:
    """What became of a build that raised: the program that it lacked, in one line, or the last lines of the error."""
    error = of_compiler(error)
    program = lacking(error)
    if program is not None:
        return Outcome(f"{program.name} was not found: {program.remedy}", lasting=True, lacks=program.name)
    if ended := interrupted(error):
        return Outcome(f"{last_lines(error)}\nerror: {ended}", lasting=False)
    return Outcome(last_lines(error), lasting=lasting)


def last_lines(error: BaseException) -> str:
    """What an error says, or what caused it: where it speaks of errors, and its end, for compilers write pages."""
    cause = error.__cause__ or error
    lines = "".join(traceback.format_exception_only(cause)).strip().splitlines()
    errors = [line for line in lines[:-LINES] if "error" in line.lower()][:EARLIER]
    return "\n".join(shortened(line) for line in [*errors, *lines[len(errors) - LINES :]])


def short_of_memory(recipe: CallRecipe) -> str:
    """Why a call cannot be made beside what runs on its device; empty where it can.

    On a CPU the system gives out more than there is, and then ends a process, perhaps the one that asked.
    """
    sizes = [math.prod(each.shape) * dtype_named(each.dtype).itemsize for each in recipe.tensors.values()]
    free = SHARE * available_bytes() if recipe.device == "cpu" else math.inf
    if recipe.device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    needed = sum(sizes) * _SPARE
    if needed <= free:
        return ""
    return f"making its tensors takes {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB may be used on the device"

"""A child process: what it inherits, where it imports from, how it is spoken with, and how it is ended."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from layerzero.core import cpu_features
from layerzero.core.device import GENERATIONS_VARIABLE, Device
from layerzero.core.facts import Facts
from layerzero.core.system import log, resources
from layerzero.engine.registry import REGISTRY
from layerzero.testing.child_main import Message

APART = {"LAYERZERO_CACHE_DIR": "", "LAYERZERO_JIT": "never", "CUDA_LAUNCH_BLOCKING": "1"}
"""For a child that may end: it keeps no files of its own, builds alone, and launches block, so that it ends where it
fails."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_KILLED_S = 2.0
"""How long a killed process may take to end; only one that waits in the system, as for a device, takes any time."""

_DECODER = msgspec.json.Decoder(Message)


def apart_on(device: Device) -> dict[str, str]:
    """The same for a child that works where this process does: its first GPU is that one, and all others stay visible.

    A call is written down for a kind of device, and made on the first. That is another rank's where ranks see all GPUs,
    and may be of another kind. Libraries name what they compile after all that are visible, so none is hidden.
    """
    if device.platform != "cuda" or device.index == 0:
        return APART
    named = os.environ.get(_VISIBLE)
    known = named.split(",") if named is not None else [str(number) for number in range(torch.cuda.device_count())]
    if device.index >= len(known):
        return APART
    mine = known.pop(device.index)
    return {**APART, _VISIBLE: ",".join([mine, *known])}


def by_device(pairs: Iterable[tuple[Any, Facts]]) -> list[list[tuple[Any, Facts]]]:
    """What children do, with calls; one list for each device, whose children have an environment of their own."""
    found: dict[tuple[str, int], list[tuple[Any, Facts]]] = {}
    for what, facts in pairs:
        found.setdefault((facts.device.platform, facts.device.index), []).append((what, facts))
    return list(found.values())


def child_environment(modules: Iterable[str], more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without LayerZero's settings, since kernels are checked and no policy; and more.

    The CPU that is presented to this process is presented to the child: its verdicts are of that CPU.
    A child finds the modules, which it imports by name, where this process does, and imports the plugins and kernels of
    the hub that this one admits.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LAYERZERO_") or name in (cpu_features.VARIABLE, GENERATIONS_VARIABLE)
    }
    plugins = REGISTRY.plugins.admitted() if REGISTRY.plugins is not None else ()
    ours = {"PYTHONPATH": os.pathsep.join(_import_path(modules)), "LAYERZERO_PLUGINS": ",".join(plugins)}
    hub = REGISTRY.hub.for_children() if REGISTRY.hub is not None else {}
    return kept | ours | hub | dict(more)


def _import_path(modules: Iterable[str]) -> list[str]:
    """This process's own, without the working folder, where a file with a library's name would run in its place.

    It stays where ``PYTHONPATH`` or the running script names it. The home of a wanted module comes last, or first where
    another would hide the module.
    """
    main, here = sys.modules["__main__"], Path.cwd().resolve()
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if getattr(main, "__spec__", None) is None and (script := getattr(main, "__file__", None)):
        named.append(str(Path(script).parent))
    kept = here in {Path(each).resolve() for each in named if each}
    path = [each for each in sys.path if each and (kept or Path(each).resolve() != here)]
    for name in dict.fromkeys(["layerzero", *(module.partition(".")[0] for module in modules)]):
        with contextlib.suppress(ImportError, ValueError):  # what has no spec, as a module made by hand
            spec = find_spec(name)
            if spec is not None and spec.has_location and spec.origin is not None:
                home = str(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0])
                if home not in path:
                    path.insert(0 if PathFinder.find_spec(name, path) else len(path), home)
    return path


def how_it_ended(code: int) -> str:
    """An exit code, or the name of the signal, in words."""
    names = {-each: each.name for each in signal.Signals}
    return names.get(code, f"exit code {code}" if code >= 0 else f"signal {-code}")


OUTSIDE = frozenset(each for each in signal.Signals if each.name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"))
"""Signals that others send: a system short of memory, an operator, a terminal. What ran is not to blame."""


def interpreter() -> str:
    """The Python that runs children: what :func:`multiprocessing.set_executable` names, else ``sys.executable``.

    Raises: OSError in a program with Python inside it, which would start itself again.
    """
    path = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable or "")
    program = sys.executable, os.path.realpath("/proc/self/exe")  # the first may be set later, and name another
    if not path or (getattr(sys, "frozen", False) and path in program):
        got = f"a program with Python inside it, {path}" if path else "none"
        step = "multiprocessing.set_executable(path) names one"
        raise OSError(errno.ENOTSUP, f"wanted a Python interpreter for child processes, got {got}; {step}")
    return path


class Process(subprocess.Popen[bytes]):
    """A fresh interpreter that does jobs, in a process group of its own."""

    def __init__(
        self,
        worker: str,
        environment: Mapping[str, str],
        handed: Collection[int] = (),
        command: Sequence[str] = (),
        *,
        outlives: bool = False,
    ) -> None:
        """``handed`` are open files that it keeps, under their numbers; ``command`` runs another interpreter.

        One that ``outlives`` this process for a while, as in a container, ends when its files are closed.
        """
        if not hasattr(os, "killpg"):
            raise OSError(errno.ENOTSUP, "wanted process groups, to end a child with what it started; got none")
        self.silent, self._half, self.killed_before = False, b"", resources.kills()
        parent = "0" if outlives else str(os.getpid())
        command = [*(command or (interpreter(),)), "-P", "-m", "layerzero.testing.child_main", worker, parent]
        with contextlib.ExitStack() as unless_begun:
            self._said = unless_begun.enter_context(tempfile.TemporaryFile())  # closed when the process has ended
            super().__init__(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=dict(environment),
                pass_fds=tuple(handed),
                start_new_session=True,  # what interrupts a terminal's processes is for this one to act upon
            )
            unless_begun.pop_all()
        resources.lift(self.pid)
        assert self.stdin is not None
        assert self.stdout is not None
        self.jobs, self._answers = self.stdin, self.stdout
        self.answers = self.stdout.fileno()
        os.set_blocking(self.answers, False)

    def send(self, job: object) -> None:
        """Send a job to a child that waits for one; what a dead one leaves unread, its end tells."""
        with contextlib.suppress(BrokenPipeError):
            self.jobs.write(msgspec.json.encode(job) + b"\n")
            self.jobs.flush()

    def messages(self) -> Iterator[Message]:
        """What it said since; half a message waits for its other half, and what is none is left out."""
        while not self.silent:
            try:
                part = os.read(self.answers, 2**16)
            except BlockingIOError:
                return
            self.silent = not part  # it closed the pipe, as its end does
            *lines, self._half = (self._half + part).split(b"\n")
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):  # printed before the child could see to that
                    yield _DECODER.decode(line)

    def last_words(self) -> str:
        """The last line that it printed apart from messages, cut to 300 characters; empty if there is none."""
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 2**16))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""

    def kill(self) -> None:
        """Kill it and what it started, and do not wait."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        try:
            self.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d was killed and does not end; the system holds it", self.pid)
        with contextlib.suppress(BrokenPipeError):  # a job that it did not read
            self.jobs.close()
        self._answers.close()
        self._said.close()

"""The process of one library: how it starts, answers, ends, and rests before the next start."""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait

import msgspec

from layerzero import __version__
from layerzero.core.errors import IsolatedKernelError
from layerzero.core.system import log
from layerzero.engine import probe
from layerzero.engine.isolation import COSTS
from layerzero.serving.isolation.arena import MAX_KEPT
from layerzero.serving.isolation.child import MOST_BYTES
from layerzero.serving.isolation.messages import Answer, Awake, Failed, Hello, Request, Serve
from layerzero.testing.process import Process, child_environment, how_it_ended, interpreter

START_S = 120.0
"""How long a process may take to import torch and what it needs."""

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
"""How long a library rests whose process ended twice without a result between; twice as long with each further end."""

_CHILD = "layerzero.serving.isolation.child"
_ENVIRONMENT = {"LAYERZERO_CACHE_DIR": "", "LAYERZERO_JIT": "never"}
_IN_CONTAINER = 3, 4
_HANDING_OVER = (
    "-ISc",
    """import fcntl, os, sys
for number, each in enumerate([fcntl.fcntl(int(each), fcntl.F_DUPFD_CLOEXEC, 10) for each in sys.argv[1:3]]):
    os.dup2(each, 3 + number)
os.execvp(sys.argv[3], sys.argv[3:])""",
)
"""What gives the files that are handed over the numbers that a container has them under."""

_END_S = 2.0  # how long the system may take to tell of the end of a process that is gone


class Worker:
    """A child that answers requests, one at a time, in memory that both share.

    Attributes:
        name: the library.
        key: what its cost is kept by: the library, and the command of its interpreter.
        ends: how often a process of it ended by itself or hung.
    """

    def __init__(self, name: str, command: Sequence[str] = ()) -> None:
        """``command`` runs the interpreter of its environment; this process's if empty."""
        self.name, self.ends, self._command = name, 0, tuple(command)
        self.key = name, *self._command
        self._process: Process | None = None
        self._container = ""
        self._socket: socket.socket | None = None
        self._in_a_row, self._rests_until = 0, -math.inf
        self._encoder = msgspec.msgpack.Encoder()
        self._decoded = functools.lru_cache(MAX_KEPT)(msgspec.msgpack.Decoder(Answer).decode)

    @property
    def pid(self) -> int | None:
        """The process that runs now, if one does."""
        return None if self._process is None else self._process.pid

    def start(self, memory: int, modules: list[str]) -> None:
        """Start a process that shares a file of memory. Raises: IsolatedKernelError where it rests or fails."""
        left_s = self._rests_until - time.monotonic()
        if left_s > 0:
            text = f"the process of {self.name} ended {self._in_a_row} times without a result between"
            raise IsolatedKernelError(f"{text}; it is started again in {left_s:.0f} s")
        try:
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket, self._awake = ours, Awake(ours)
            with its:
                handed, command = (memory, its.fileno()), self._command
                if len(command) > 1:
                    self._container = f"layerzero-{secrets.token_hex(8)}"
                    command = (*command[:2], f"--name={self._container}", *command[2:])
                self._process = _begun(command, [] if command else modules, handed)
            self._process.send(Serve(*(_IN_CONTAINER if len(self._command) > 1 else handed)))
            hello = self._greeted(self._process)
        except OSError as error:
            self.end()
            raise IsolatedKernelError(f"no process of {self.name} could be started: {error}") from error
        except BaseException:
            self.end()
            raise
        if hello.layerzero != __version__:
            self.end()
            raise IsolatedKernelError(f"wanted layerzero {__version__} in its environment, got {hello.layerzero}")

    def ask(self, request: Request, timeout_s: float, what: str, meanwhile: Callable[[], None] | None = None) -> Answer:
        """Send a request and wait for the answer. Raises: IsolatedKernelError where the process ends or hangs.

        ``meanwhile`` runs while the process is at it. Equal answers are one object.
        """
        assert self._socket is not None
        try:
            self._socket.send(self._encoder.encode(request))
            if meanwhile is not None:
                meanwhile()
            answer = self._socket.recv(MOST_BYTES) if self._awake.comes(timeout_s) else None
        except OSError:
            answer = b""
        except BaseException:  # of a signal handler: the answer would be taken for that of the next request
            self.end()
            raise
        if answer is None:
            raise self._gone(what, f"gave no answer for {timeout_s:g} s and was killed")
        if not answer:
            raise self._gone(what)
        return self._decoded(answer)  # type: ignore[no-any-return]

    def worked(self) -> None:
        """Note that a kernel gave a result: the next end of the process is a first one."""
        self._in_a_row = 0

    def refused(self, failed: Failed) -> IsolatedKernelError:
        """The error that a kernel raised there, with its type and text."""
        error = IsolatedKernelError(f"{failed.kind}: {failed.text} (in process {self.pid}, which runs {self.name})")
        error.add_note(failed.where)
        if failed.lost:
            self._ended()
        return error

    def kill(self) -> None:
        """Kill the process and what it started, from any thread: a call that waits for it then raises."""
        process = self._process
        if process is not None and process.poll() is None:
            if self._container and (problem := probe.end_container(self._container)):
                log.warning("container %s of %s may go on: %s", self._container, self.name, problem)
            process.kill()

    def end(self) -> None:
        """Kill the process and what it started."""
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            process.end()
            for key, cost in list(COSTS.items()):  # what was measured still counts
                if cost.pid == process.pid:
                    COSTS[key] = cost._replace(pid=0)
        if self._socket is not None:
            self._socket.close()

    def abandon(self) -> None:
        """Let go of the process in a forked child: it is the parent's."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # nothing is to be waited for
            for each in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, AttributeError):
                    each.close()  # type: ignore[union-attr]
        if self._socket is not None:
            self._socket.close()

    def _gone(self, what: str, how: str = "") -> IsolatedKernelError:
        """End what is left of the process; the error that tells how it ended."""
        process = self._process
        assert process is not None
        if not how:
            with contextlib.suppress(Exception):
                process.wait(_END_S)
            code = process.returncode
            how = f"ended with {how_it_ended(code)}" if code is not None else "closed its end"
        words = process.last_words()
        pid = process.pid
        self._ended()
        return IsolatedKernelError(f"process {pid} of {self.name} {how}, in {what}{f': {words}' if words else ''}")

    def _ended(self) -> None:
        """End what is left of a process that can run no more calls, and note that it ended by itself."""
        self.end()
        self.ends, self._in_a_row = self.ends + 1, self._in_a_row + 1
        if self._in_a_row > 1:
            rest_s = min(FIRST_REST_S * 2 ** (self._in_a_row - 2), LONGEST_REST_S)
            self._rests_until = time.monotonic() + rest_s

    def _greeted(self, process: Process) -> Hello:
        """Wait until the child serves."""
        end = time.monotonic() + START_S
        while (left_s := end - time.monotonic()) > 0 and not process.silent:
            wait([process.answers], left_s)
            for message in process.messages():
                if message.kind == "found":
                    return msgspec.convert(message.value, Hello)
        raise self._gone("its start", "" if process.silent else f"did not start in {START_S:g} s and was killed")


def _begun(command: tuple[str, ...], modules: list[str], handed: tuple[int, int]) -> Process:
    """Start a process from a thread that lives as long: the system ends a child with the thread that began it."""
    environment = child_environment([_CHILD, *modules], _ENVIRONMENT)
    if command:  # it has packages of its own
        del environment["PYTHONPATH"]
    contained = len(command) > 1
    if contained:
        command = (interpreter(), *_HANDING_OVER, *map(str, handed), *command)
    begun: Future[Process] = Future()

    def begin() -> None:
        try:
            process = Process(_CHILD, environment, handed, command, outlives=contained)
        except BaseException as error:  # noqa: BLE001  # the thread that waits raises it
            begun.set_exception(error)
            return
        begun.set_result(process)
        process.wait()

    threading.Thread(target=begin, name="layerzero-isolation", daemon=True).start()
    return begun.result()

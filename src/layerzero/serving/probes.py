"""Liveness, readiness, metrics and state over HTTP, for orchestrators, Prometheus and rolling updates.

:meth:`Probes.answer` decides. An ASGI app (``layerzero.serving.probes:app``, to be mounted) and a server of the
standard library (``lz.serve_health``, ``layerzero serve-health``) hand its answers out. Metrics and kernels that rest
belong to a process: probes in the serving process see them, those of another process see what lies on disk.

What an instance tells a rolling update of itself, and the file by which it is forced to run torch's own kernels.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import torch

from layerzero.core.errors import printable
from layerzero.core.system import forking, log
from layerzero.core.system.resources import started
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.serving.exporters import prometheus_text
from layerzero.serving.readiness import readiness_check


class InstanceState(msgspec.Struct, frozen=True):
    """What ``/statez`` answers.

    Attributes:
        process: another one for each process; a restarted instance has a new one.
        versions: of LayerZero, torch and the kernel libraries, and a hash of the kernels that are registered.
        settings: those that decide something and are not at their defaults; not what is forced.
        frozen: hash of the kernels that ``lz.freeze`` holds; empty where nothing is frozen.
        fallback: whether torch's own kernels alone run: forced, or by the program's own settings.
        file: the file that forces it; empty where the instance follows none.
    """

    process: str
    versions: dict[str, str]
    settings: dict[str, str]
    frozen: str = ""
    fallback: bool = False
    file: str = ""


class FallbackFile:
    """Forces torch's own kernels and the references upon this process as long as a file exists.

    It holds above settings and scopes, for every call that chooses or looks up a plan. Captured graphs and functions
    bound with ``guard=False`` go on with what they hold.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._lock = forking.lock()

    def follow(self) -> None:
        """Do as the file says now. Raises: OSError for a folder that cannot be read."""
        with self._lock:
            try:
                os.stat(self.path)  # noqa: PTH116  # Path.exists takes any error for "no" (Python 3.14)
                wanted = True
            except FileNotFoundError:
                wanted = False
            if wanted == bool(CONFIGURATION.forced):
                return
            CONFIGURATION.force(**({"enabled": False} if wanted else {}))
            told = "exists: only torch's own kernels run" if wanted else "is gone: kernels are chosen again"
            log.warning("%s %s", self.path, told)


_process = ""


def _forget() -> None:
    global _process
    _process = ""


forking.in_child(_forget)


def state_here(file: FallbackFile | None) -> InstanceState:
    """The state of this process."""
    global _process
    from layerzero import __version__
    from layerzero.inspection import arrivals  # torch.distributed is imported with it

    _process = _process or secrets.token_hex(8)
    settings, held = arrivals.settings_here(), ENGINE.frozen
    for name in CONFIGURATION.forced:
        settings.pop(name, None)
    frozen = {} if held is None else {name: each.kernel for name, each in held.choices.items()}
    for added in () if held is None else held.added:  # by traffic, which differs between instances
        frozen.pop(added, None)
    return InstanceState(
        process=_process,
        versions=arrivals.versions_here() | {"layerzero": __version__},
        settings={name: printable(value) for name, value in settings.items()},
        frozen=hashlib.sha256(msgspec.json.encode(sorted(frozen.items()))).hexdigest() if frozen else "",
        fallback=not CONFIGURATION.policy.enabled,
        file="" if file is None else printable(file.path),
    )


PORT = 9400

MAX_AGE_S = 10.0
"""How old any answer of ``/readyz`` may be: to look at 1,000 calls takes seconds, and orchestrators ask as often."""

SHARE = 0.05
"""The share of the time that looking may take while the process is ready and nothing moved in it. To look at 500 calls
took 2.9 s of Python, and a step of 100 norms at the same time 25 ms in place of 10 (2 CPU cores, 2026-11-26)."""

CLIENT_S = 10.0
"""How long the server waits for a client that sends or takes nothing."""

_TEXT = "text/plain; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_JSON = "application/json"
_PATHS = "/livez, /readyz, /metrics, /statez"

Message = MutableMapping[str, Any]


class Answered(NamedTuple):
    """What a probe gets."""

    status: int
    body: bytes
    kind: str = _TEXT


class _Look(NamedTuple):
    """A look at readiness: when it ended, how long it took, what the process was as it began, and what was found."""

    ended_s: float
    took_s: float
    state: object
    answered: Answered

    def holds(self, now_s: float) -> bool:
        """Whether it need not be looked again. An answer that is not ready gets no traffic, and is looked at soon."""
        age_s = now_s - self.ended_s
        if age_s < MAX_AGE_S:
            return True
        return self.answered.status == 200 and age_s < self.took_s / SHARE and self.state == _state()


def _state() -> object:
    """What moves where calls may choose otherwise: settings, times and builds begin an epoch."""
    health = ENGINE.health
    return ENGINE.epoch, ENGINE.frozen, health.context_lost, list(health.breakers()), list(health.disabled())


def _said(status: int, text: str) -> Answered:
    return Answered(status, f"{printable(text)}\n".encode())


class Probes:
    """The answers, and an ASGI app of them; mount it as ``app.mount("/layerzero", Probes(manifest="workload.json"))``.

    ``/livez`` is 200 until an error of the device stays, from which only a new process recovers. ``/readyz`` is 200
    where ``lz.readiness_check`` is true, else 503, with its lines. It checks once at a time and every 10 s at most. It
    checks less often where that takes more than 5 % of the time and the process did not change. ``/metrics`` has the
    numbers of ``lz.metrics`` for Prometheus. ``/statez`` has what ``layerzero rolling-update`` compares: versions,
    settings, and whether torch's own kernels alone run.

    Args:
        manifest, model, device, sets: as :func:`lz.readiness_check` takes them.
        fallback_file: while this file exists, torch's own kernels and the references alone run in this process.
            Requests of ``/readyz`` and ``/statez`` look for it.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str] | None = None,
        *,
        model: str = "",
        device: str | torch.device | None = None,
        sets: Sequence[str] = (),
        fallback_file: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked: dict[str, Any] = {"manifest": manifest, "model": model, "device": device, "sets": sets}
        self._clock = clock
        self._file = None if fallback_file is None else FallbackFile(fallback_file)
        self._lock = forking.lock()
        self._latest: _Look | None = None
        self._failed = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy what it was made of: another process looks for itself."""
        file = None if self._file is None else self._file.path
        return functools.partial(type(self), **self._asked, fallback_file=file, clock=self._clock), ()

    def answer(self, method: str, path: str) -> Answered:
        """The answer to a request; nothing here raises."""
        probes = {"/livez": self.livez, "/readyz": self.readyz, "/metrics": self.metrics, "/statez": self.statez}
        probe = probes.get(path)
        if probe is None:
            return _said(404, f"wanted one of {_PATHS}, got {path!r}")
        if method not in ("GET", "HEAD"):
            return _said(405, f"wanted GET or HEAD, got {method}")
        try:
            return probe()
        except Exception as error:  # noqa: BLE001  # a probe that raises tells so, and harms nothing
            text = f"{path}: {type(error).__name__}: {error}"
            if text != self._failed:
                self._failed = text
                log.warning("a probe failed: %s", text)
            return _said(503, text)

    @staticmethod
    def livez() -> Answered:
        """Whether the process can work; it looks at nothing that could block."""
        lost = ENGINE.health.context_lost
        return _said(503, lost) if lost else _said(200, "alive")

    def readyz(self) -> Answered:
        """Whether traffic may come. While one caller looks, others get the answer before."""
        self.follow()
        latest = self._latest
        if latest is not None and latest.holds(self._clock()):
            return latest.answered
        if not self._lock.acquire(blocking=False):
            return _said(503, "not ready: looking for the first time") if latest is None else latest.answered
        try:
            began_s, state = self._clock(), _state()
            report = readiness_check(**self._asked)
            found = _said(200 if report else 503, str(report))
            ended_s = self._clock()
            self._latest = _Look(ended_s, ended_s - began_s, state, found)
            return found
        finally:
            self._lock.release()

    def follow(self) -> None:
        """Do as the fallback file says. Raises: OSError for a folder that cannot be read."""
        if self._file is not None:
            self._file.follow()

    def statez(self) -> Answered:
        """What this process is, as a rolling update compares it."""
        self.follow()
        return Answered(200, msgspec.json.encode(state_here(self._file)), _JSON)

    @staticmethod
    def metrics() -> Answered:
        try:
            return Answered(200, prometheus_text(), _PROMETHEUS)
        except ModuleNotFoundError as error:
            return _said(501, str(error))

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer as an ASGI app."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
        if path == "/livez":  # no thread: those of the program may be busy
            found = self.answer(method, path)
        else:
            found = await asyncio.get_running_loop().run_in_executor(None, self.answer, method, path)
        headers = [(b"content-type", found.kind.encode()), (b"content-length", str(len(found.body)).encode())]
        await send({"type": "http.response.start", "status": found.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else found.body})


app = Probes()
"""The app of a process, about what this machine called: ``uvicorn layerzero.serving.probes:app``, or to be mounted."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_S

    def do_GET(self) -> None:
        try:
            path = urlsplit(self.path).path
        except ValueError:  # no address, as http://[
            path = self.path
        found = self.server.probes.answer(self.command, path)
        self.send_response(found.status)
        self.send_header("Content-Type", found.kind)
        self.send_header("Content-Length", str(len(found.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(found.body)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815  # the names that http.server calls

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        log.debug(format, *args)


class _Server(ThreadingHTTPServer):
    probes: Probes

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # the base class's arguments
        """Note a client that went away; the base class prints a traceback."""
        log.debug("a probe of %s ended early", client_address)


_OPEN: set[HealthServer] = set()
"""Those of this process that serve."""


class HealthServer:
    """Probes that are served on a thread; :func:`serve_health` makes one.

    Attributes:
        port: the port; the one that was free where 0 was given.
        url: where it listens.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        host, self.port = str(server.server_address[0]), int(server.server_address[1])
        self.url = f"http://{host}:{self.port}"
        self._thread = started("layerzero-probes", server.serve_forever)
        if self._thread is None:
            server.server_close()
            raise RuntimeError("probes: wanted a thread to serve them on, got none: the system has no more")
        _OPEN.add(self)  # a program need not keep it, and a forked child must find it
        forking.in_child(self._leave)

    def _leave(self) -> None:
        """Close the socket in a forked child: the port is the parent's."""
        self._server.socket.close()
        _OPEN.discard(self)

    def wait(self) -> None:
        assert self._thread is not None
        self._thread.join()

    def close(self) -> None:
        """End it, and give the port back; nothing where it has ended, or its thread is a forked child's parent's."""
        if self in _OPEN:
            _OPEN.discard(self)
            self._server.shutdown()
            self._server.server_close()


def serve_health(
    port: int = PORT,
    *,
    host: str = "127.0.0.1",
    manifest: str | os.PathLike[str] | None = None,
    model: str = "",
    device: str | torch.device | None = None,
    sets: Sequence[str] = (),
    fallback_file: str | os.PathLike[str] | None = None,
) -> HealthServer:
    """Serve ``/livez``, ``/readyz``, ``/metrics`` and ``/statez`` from this process, on a thread.

    Args:
        port: where; 0 takes any free one.
        host: the address to listen on. Only this machine reaches 127.0.0.1; Kubernetes' ``httpGet`` needs 0.0.0.0.
            Answers name kernels, versions and errors, to any client: keep the port inside.
        manifest, model, device, sets: what must be ready, as :func:`lz.readiness_check` takes them.
        fallback_file: while this file exists, torch's own kernels and the references alone run in this process: for
            ``layerzero rolling-update``. Keep it where only your operators may write. None: no file is looked for.
    Returns: the server, with its ``url``; ``close`` ends it, and so does the end of the process.
    Raises: ValueError for a port that another process has, or an address that this machine has not.
    """
    try:
        server = _Server((host, port), _Handler)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            why = (
                f"port: wanted a free one on {host}, got {port}, which another process has; name another, or 0 for any"
            )
            raise ValueError(f"{why} free one") from error
        text = getattr(error, "strerror", None) or error
        raise ValueError(f"wanted to listen on {host}:{port}, got: {text}; name another address or port") from error
    server.daemon_threads = True
    server.probes = Probes(manifest, model=model, device=device, sets=sets, fallback_file=fallback_file)
    server.probes.follow()  # a process that is started during an update must not choose otherwise even once
    return HealthServer(server)

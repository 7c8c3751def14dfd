"""What an instance tells a rolling update of itself, and the file by which it is forced to run torch's own kernels."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from pathlib import Path

import msgspec

from layerzero.core.system import forking
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE

log = logging.getLogger("layerzero")


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
        settings=settings,
        frozen=hashlib.sha256(msgspec.json.encode(sorted(frozen.items()))).hexdigest() if frozen else "",
        fallback=not CONFIGURATION.policy.enabled,
        file="" if file is None else str(file.path),
    )

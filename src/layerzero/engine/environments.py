"""Environments of libraries: another interpreter, or a container, that a process of their own runs in."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import msgspec
from packaging.utils import canonicalize_name

from layerzero.core.errors import PolicyError

LOOK_S = 60.0
"""How long an environment may take to list its packages."""

KILL_S = 10.0
"""How long the runtime may take to kill a container."""

_IMAGE = re.compile(r"[\w.][\w./:-]*(:[\w.-]+|@sha256:[0-9a-f]{64})")
_MEMORY = re.compile(r"[1-9]\d*[kmg]")
RUNTIME = "podman"  # it hands open files to a container, which others do not
_HANDED = "--preserve-fds=2"  # those behind the standard ones
_PACKAGES = (
    "import importlib.metadata as m, json; print(json.dumps({each.name: each.version for each in m.distributions()}))"
)


class Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A container that a library's process runs in: without network, capabilities or a file system to write into.

    Attributes:
        image: its name with a tag or a digest; it has ``python`` with LayerZero in it.
        memory: the most that it may take, as ``8g``; as much as there is if empty.
    """

    image: str
    memory: str = ""

    def command(self) -> list[str]:
        """The command that runs its interpreter, with the first two open files behind the standard ones."""
        bound = [f"--memory={self.memory}"] if self.memory else []
        told = [f"--env={name}" for name in _PASSED if name in os.environ]
        return [
            *(RUNTIME, "run", "--rm", "--interactive", _HANDED, "--network=none", "--read-only"),
            *("--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges", "--user=65534:65534"),
            *("--pids-limit=512", *bound, *told, "--env=LAYERZERO_CACHE_DIR=", "--env=LAYERZERO_JIT=never"),
            *(self.image, "python"),
        ]


_PASSED = ("OMP_NUM_THREADS", "LAYERZERO_CPU_FEATURES", "LAYERZERO_GPU_GENERATIONS")


def containers(given: Mapping[str, Any]) -> dict[str, Container]:
    """The containers of a setting, by library. Raises: PolicyError with what is wrong with each."""
    found, problems = {}, []
    for name, each in given.items():
        try:
            found[name] = made = msgspec.convert(dict(each) if isinstance(each, (tuple, Mapping)) else each, Container)
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            problems.append(f"{name}: wanted {{image: name:tag, memory: 8g}}, got {each!r}: {error}")
            continue
        if not _IMAGE.fullmatch(made.image):
            problems.append(f"{name}: image: wanted a name with a tag or a digest, got {made.image!r}")
        if made.memory and not _MEMORY.fullmatch(made.memory):
            problems.append(f"{name}: memory: wanted a number with k, m or g, got {made.memory!r}")
    if problems:
        raise PolicyError(*problems)
    return found


def pythons(given: Mapping[str, Any]) -> dict[str, str]:
    """The interpreters of a setting, by library. Raises: PolicyError for what is no path of a file."""
    problems = [
        f"{name}: wanted the path of an interpreter, got {path!r}"
        for name, path in given.items()
        if not isinstance(path, str) or not os.access(path, os.X_OK) or not os.path.isfile(path)  # noqa: PTH113
    ]
    if problems:
        raise PolicyError(*problems)
    return dict(given)


def end_container(name: str) -> str:
    """Kill a container, which lives on when the command that runs it is killed; gives what went wrong."""
    try:
        subprocess.run([RUNTIME, "kill", name], capture_output=True, text=True, timeout=KILL_S, check=True)  # noqa: S603
    except (subprocess.SubprocessError, OSError) as error:
        return str(getattr(error, "stderr", None) or error).strip()[-300:]
    return ""


def packages(command: tuple[str, ...]) -> Mapping[str, str]:
    """The versions of an environment's packages. Raises: OSError where it does not answer."""
    asked = [*(each for each in command if each != _HANDED), "-P", "-c", _PACKAGES]
    path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        said = subprocess.run(  # noqa: S603  # a command of the operator's settings
            asked, capture_output=True, text=True, timeout=LOOK_S, env=path, check=True
        )
        found = msgspec.convert(json.loads(said.stdout), dict[str, str])
        return found | {canonicalize_name(name): version for name, version in found.items()}
    except (subprocess.SubprocessError, ValueError) as error:
        words = getattr(error, "stderr", None) or error
        raise OSError(f"wanted the packages of {' '.join(command[:1])}, got {str(words).strip()[-300:]}") from error

"""Under what a time was taken: the device, its driver, and the versions of torch and of the kernel's library."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

import msgspec
import torch

from layerzero.core.device import Device, capability_hash, driver_version
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Libraries
from layerzero.engine import probe


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a time holds for; where any of it differs, the time does not count.

    Attributes:
        device, platform: its marketing name and kind.
        capability: hash of what the device can do: architecture, instruction sets, dtypes, memory.
        driver, runtime: of the device; empty where it has none.
        torch: version of torch.
        library, version: the kernel's library; the version is empty where torch brings it or nothing tells, and a hash
            of the code where a function was registered.
        threads: threads that torch's operators use on a CPU, 0 elsewhere.
    """

    device: str
    platform: str
    capability: str
    driver: str
    runtime: str
    torch: str
    library: str
    version: str
    threads: int = 0

    @property
    def key(self) -> bytes:
        """The identity under which it is stored."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).digest()


class Surroundings:
    """The environments of kernels on one device, each made once."""

    def __init__(self, device: Device, threads: int) -> None:
        self.device, self.threads = device, threads
        self._known: dict[tuple[str, str, str], tuple[Environment, bytes]] = {}

    def environment(self, kernel: Kernel, libraries: Libraries | None = None) -> tuple[Environment, bytes]:
        """The environment of a kernel as this process has it, or with other libraries, and its key."""
        backend, libraries = kernel.backend, libraries or probe.this_machine()
        version, torch_version = libraries.version(backend, self.device) or "", libraries.torch
        if not version and backend.origin in ("code", "decorator"):
            version = code_version(kernel.load)
        found = self._known.get((backend.name, version, torch_version))
        if found is None:
            device = self.device
            environment = Environment(
                device=device.name,
                platform=device.platform,
                capability=capability_hash(device),
                driver=driver_version(device),
                runtime=device.runtime,
                torch=torch_version,
                library=backend.name,
                version=version,
                threads=self.threads,
            )
            found = self._known[backend.name, version, torch_version] = (environment, environment.key)
        return found


@functools.lru_cache(maxsize=64)
def _surroundings(device: Device, threads: int) -> Surroundings:
    return Surroundings(device, threads)


def surroundings(device: Device) -> Surroundings:
    """The environments of a device as torch is set now."""
    return _surroundings(device, torch.get_num_threads() if device.platform == "cpu" else 0)


@functools.lru_cache(maxsize=1024)
def code_version(function: Callable[..., Any]) -> str:
    """Hash of a function's own code, and of the functions that it closes over: an edited kernel is measured again."""
    hashed = hashlib.blake2b(digest_size=8)
    todo: list[object] = [function]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, functools.partial):
            todo += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, FunctionType):
            todo += [cell.cell_contents for cell in each.__closure__ or () if cell != _EMPTY]
            todo.append(each.__code__)
        elif isinstance(each, CodeType):
            hashed.update(each.co_code + repr(each.co_names).encode())
            todo += each.co_consts
        elif isinstance(each, tuple):
            todo += each
        elif isinstance(each, (str, bytes, int, float, bool)):
            hashed.update(repr(each).encode())
    return f"code {hashed.hexdigest()}"


_EMPTY = CellType()

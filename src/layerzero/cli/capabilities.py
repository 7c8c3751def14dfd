"""Capability descriptors on the command line: what is declared, and whether a file may narrow it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from layerzero.asking import descriptors
from layerzero.cli.output import NO, Answer
from layerzero.core.errors import DescriptorError
from layerzero.core.kernel import Kernel
from layerzero.engine.settings import nearest


def declared(operation: str, backend: str | None) -> Answer:
    """The descriptor of one library, or a list of all. Raises: ValueError if an operation was named, too."""
    if operation != "*":
        raise ValueError(f"--descriptor describes whole libraries: wanted --backend NAME or nothing, got {operation!r}")
    if backend is not None:
        data: object = descriptors.descriptor(backend)
    else:
        data = [descriptors.exported(owner, kernels) for owner, kernels in descriptors.by_backend().items()]
    return Answer(data, lambda: [json.dumps(data, indent=2)])


def of_backend(kernels: Sequence[Kernel], backend: str) -> list[Kernel]:
    """The kernels of one library. Raises: ValueError with the nearest name if it has none."""
    found = [kernel for kernel in kernels if backend == kernel.source]
    found = found or [kernel for kernel in kernels if backend in kernel.backend.distributions]
    if not found:
        known = sorted({kernel.source for kernel in kernels})
        raise ValueError(f"--backend: wanted one of {', '.join(known)}, got {backend!r}{nearest(backend, known)}")
    return found


def checked(file: Path) -> Answer:
    """Every problem of a file, or what it speaks of."""
    data: dict[str, object] = {"file": str(file)}
    try:
        loaded = descriptors.DESCRIPTORS.check(file)
    except DescriptorError as error:
        problems = [f"{file}: {problem}" for problem in error.problems]
        return Answer(data | {"valid": False, "problems": list(error.problems)}, lambda: problems, NO)
    fine = f"{file}: fine; sha256 {loaded.sha256}; kernels: {', '.join(loaded.kernels)}"
    data |= {"valid": True, "problems": [], "sha256": loaded.sha256, "kernels": list(loaded.kernels)}
    return Answer(data, lambda: [fine])

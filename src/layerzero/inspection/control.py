"""What an operator does while the process runs: configure, lock, prefer, disable, register."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.core.operation import Operation
from layerzero.engine import config
from layerzero.engine.function_kernels import kernel_of_function
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import checked
from layerzero.inspection.answers import Named, name_of
from layerzero.inspection.descriptors import DESCRIPTORS
from layerzero.ops import function_of

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def configure(**settings: Any) -> None:
    """Set process-wide settings (``layerzero config keys`` lists them); None resets a key.

    Takes effect on the next call. Raises: PolicyError for an unknown key or a value that does not fit.
    """
    _check_descriptors(settings, "configure")
    _check_names({name: value for name, value in settings.items() if value is not None}, "configure")
    config.CONFIGURATION.configure(**settings)
    DESCRIPTORS.sync(again="descriptors" in settings)


def _check_descriptors(settings: Mapping[str, Any], origin: str) -> None:
    """Raise for a file that could not be put in force before a setting that names it is."""
    if settings.get("descriptors"):
        for path in checked({"descriptors": settings["descriptors"]}, origin)["descriptors"]:
            DESCRIPTORS.check(path)


def _check_names(settings: Mapping[str, Any], origin: str) -> None:
    """Raise for a name that names nothing, if all else is right with the settings."""
    values = checked(settings, origin)
    if values:
        config.CONFIGURATION.effective(values)
        REGISTRY.names.check_values(values, origin)


def load_config(path: str | os.PathLike[str]) -> None:
    """Load settings from a YAML file; environment variables and ``configure`` stay above it.

    Raises: PolicyError naming the file, the key, what was wanted and what came.
    """
    _check_descriptors(config.read_yaml(path), str(path))
    config.CONFIGURATION.load(path)
    DESCRIPTORS.sync(again=True)


def lock(operation: Named, kernel: str, otherwise: str = "error") -> None:
    """Bind an operation to a kernel: scoring is skipped, legality never. Of several locks on a call the latest holds.

    Args:
        operation: an operation, alias (``attention.causal``), function (``lz.rms_norm`` or its name) or glob; its name
            means an operation alone, ``attention.gqa.*`` all below.
        kernel: a kernel id, alias, library or glob.
        otherwise: what happens where that kernel is not legal: ``error``, or ``select`` as if it were not locked.
    Raises: PolicyError if nothing has that name; TypeError for what names nothing.
    """
    operation = name_of(operation, "lock")
    given: object = kernel
    if not isinstance(given, str):
        got = f"got {given!r}; lz.list_kernels({operation!r}) lists them"
        raise TypeError(f"lock: wanted a kernel's id, an alias, a library or a glob, {got}")
    REGISTRY.ready()
    _check_names({"locks": {operation: {"kernel": kernel, "otherwise": otherwise}}}, "lock")
    config.CONFIGURATION.lock(operation, kernel, otherwise)


def unlock(operation: Named) -> None:
    """Remove a lock. Raises: PolicyError if ``lock`` did not make one for this name."""
    config.CONFIGURATION.unlock(name_of(operation, "unlock"))


def scope(**settings: Any) -> AbstractContextManager[None]:
    """Let settings hold inside a ``with`` block, in this thread or task only. Lists add to those outside.

    Raises: PolicyError for an unknown key or name, or a value that does not fit.
    """
    _check_names(settings, "scope")
    return config.SCOPES.scope(settings)


def prefer(*sources: str) -> AbstractContextManager[None]:
    """Prefer libraries or kernels inside a ``with`` block; each earns 20 points."""
    return scope(prefer_sources=list(sources))


def avoid(*sources: str) -> AbstractContextManager[None]:
    """Avoid libraries or kernels inside a ``with`` block; each loses 50 points."""
    return scope(avoid_sources=list(sources))


def disabled() -> AbstractContextManager[None]:
    """Run only torch's own kernels and the references inside a ``with`` block."""
    return scope(enabled=False)


def deterministic() -> AbstractContextManager[None]:
    """Run only deterministic kernels inside a ``with`` block."""
    return scope(deterministic=True)


def register_operation(operation: Operation) -> None:
    """Add an operation; its reference becomes its last candidate. Raises: RegistrationError if the name is taken."""
    REGISTRY.register_operation(operation)


def unregister_operation(name: str) -> None:
    """Take an operation back, with the kernels that implement it and its public function.

    What other operations the function has stay, and cannot be called until another function has them.
    Raises: KeyError for one that is not known; RegistrationError for a built-in one, and for a kernel that implements
        other operations, too: unregister that first.
    """
    from layerzero.engine.functions import unregister_function

    function = function_of(name)
    REGISTRY.unregister_operation(name)
    if function is not None:
        unregister_function(function)
        vars(sys.modules["layerzero"]).pop(function.name, None)  # where the first use has put it


def register_backend(kernels: Iterable[Kernel]) -> None:
    """Add the kernels of a backend, all or none. The caller vouches for them; an entry point does not.

    Raises: RegistrationError, and then none of them is registered.
    """
    REGISTRY.register_kernels([_of_code(kernel) for kernel in kernels])


def _of_code(kernel: Kernel) -> Kernel:
    if kernel.backend.origin != "builtin":
        return kernel
    return dataclasses.replace(kernel, backend=dataclasses.replace(kernel.backend, origin="code"))


def unregister_kernel(kernel_id: str) -> None:
    """Remove a kernel. Raises: KeyError if there is none of that name."""
    REGISTRY.unregister_kernel(kernel_id)


def register_kernel(
    operation: str,
    kernel_id: str,
    *,
    platform: str | Sequence[str] = "cpu",
    min_sm: int | tuple[int, int] | None = None,
    max_sm: int | tuple[int, int] | None = None,
    supported_dtypes: Iterable[torch.dtype | str] | None = None,
    max_head_dim: int | None = None,
    priority: int = 50,
    limits: Sequence[Limit] = (),
    **declared: Any,
) -> Callable[[Decorated], Decorated]:
    """Register the decorated function as a kernel; it is then a candidate like any other.

    The function gets the operation's required tensors by position, in the layout it declares (``layout=``, BSHD by
    default). It gets by name exactly those further arguments that it has. What it does not have it is never offered.

    Args:
        operation: an operation; a function (``attention``), which means all of its operations; or ``attention.causal``
            and ``attention.full``, which mean equal head counts.
        platform: ``cuda``, ``rocm``, ``cpu``, ``hpu`` or several.
        min_sm, max_sm: NVIDIA compute capability, inclusive, as 80 or (8, 0).
        supported_dtypes: dtypes or their names; any if None.
        max_head_dim: largest head dim.
        priority: 0 to 100.
        limits: further limits from ``lz.limits``.
        declared: other fields of ``lz.Kernel``: grad, deterministic, graph_safe, layout, workspace_bytes, …
    Raises: RegistrationError for an unknown operation or argument, or an id that is taken.
    """

    def decorate(function: Decorated) -> Decorated:
        kernel = kernel_of_function(
            function,
            operation=operation,
            kernel_id=kernel_id,
            platform=platform,
            min_sm=min_sm,
            max_sm=max_sm,
            supported_dtypes=supported_dtypes,
            max_head_dim=max_head_dim,
            limits=limits,
            priority=priority,
            known=REGISTRY.operations(),
            **declared,
        )
        REGISTRY.register_kernel(kernel)
        return function

    return decorate

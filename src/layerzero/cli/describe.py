"""Kernels and settings in words: what tables say about a declaration, about a setting, and what is wrong with a file.

Here, too, whether names of kernels name anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from layerzero import ops
from layerzero.cli.tables import new_row, table_of
from layerzero.core.errors import DescriptorError, PolicyError
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Dtype, Platform
from layerzero.engine.config import plain_yaml
from layerzero.engine.policy import Policy, names_kernel, read_policy
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import SETTINGS, Setting, checked, nearest
from layerzero.inspection.descriptors import DESCRIPTORS
from layerzero.ops import FUNCTIONS

FLAGS = {
    "grad": "its backward pass is right",
    "deterministic": "gives the same bits each time",
    "batch_invariant": "gives a row the same bits alone and in every batch",
    "tp_invariant": "gives the same bits for every number of ranks",
    "graph_safe": "may run under CUDA graph capture",
    "jit": "compiles; refused until `lz.warmup` built it",
    "untried": "written after its library's sources, proved on no device; refused until `layerzero vet` proved it",
}
"""Flags of a kernel that decide whether it is legal, and what they mean."""


def operations(names: Sequence[str]) -> list[str]:
    """Name operations briefly: a function stands for all of its operations."""
    left, texts = list(names), []
    for function in FUNCTIONS.values():
        owned = [operation.name for operation in function.operations]
        if len(owned) > 1 and set(owned) <= set(left):
            texts.append(f"{function.name} (all {len(owned)})")
            left = [name for name in left if name not in owned]
    return [*texts, *left]


def function_of(operation: str) -> str:
    """Name the public function that leads to an operation, empty if there is none."""
    function = ops.function_of(operation) or ops.plain_function_of(operation)
    return function.name if function else ""


def platforms(kernel: Kernel) -> tuple[str, ...]:
    """Platforms that the kernel runs on."""
    named = [set(limit.names) for limit in kernel.limits if isinstance(limit, Platform)]
    return tuple(name for name in kernel.backend.platforms if all(name in names for names in named)) or tuple(
        sorted(set().union(*named))
    )


def dtypes(kernel: Kernel) -> tuple[str, ...]:
    """Dtypes that the kernel takes; empty if it names none."""
    return next((limit.names for limit in kernel.limits if isinstance(limit, Dtype)), ())


def limits(kernel: Kernel) -> list[str]:
    """Every limit other than platform and dtype."""
    return [limit.describe() for limit in kernel.limits if not isinstance(limit, (Platform, Dtype))]


def flags(kernel: Kernel) -> list[str]:
    """Names of the flags that the kernel sets."""
    return [name for name in FLAGS if getattr(kernel, name)]


def kind(type_: object) -> str:
    """Name a type as Python writes it in an annotation."""
    if isinstance(type_, tuple):
        return " | ".join(kind(each) for each in type_)
    return type_.__name__ if isinstance(type_, type) else str(type_).replace("typing.", "")


def problems(file: Path) -> list[str]:
    """List what is wrong, with file, key, wanted and got; empty if the file is fine.

    A name that no kernel has is wrong although the engine takes it: the plugin that brings it may not be installed, but
    far more often it is misspelt, and a denied kernel would run.
    """
    values: dict[str, Any] = {}
    found: list[str] = []
    try:
        said = plain_yaml(file)
    except PolicyError as error:
        return list(error.problems)
    for key, value in said.items():  # each by itself: names are checked whatever is wrong elsewhere
        try:
            values |= checked({key: value}, str(file))
        except PolicyError as error:
            found += error.problems
    defaults = {name: setting.default for name, setting in SETTINGS.items()}
    policy, wrong = read_policy(defaults | values)
    wrong += _wrong_descriptors(policy)
    REGISTRY.ready()
    return [*found, *(f"{file}: {problem}" for problem in wrong), *REGISTRY.names.problems(policy, str(file))]


def _wrong_descriptors(policy: Policy) -> Iterator[str]:
    for path in policy["descriptors"]:
        try:
            DESCRIPTORS.check(path)
        except DescriptorError as error:
            yield from (f"descriptors: {path}: {problem}" for problem in error.problems)


def kernels_exist(patterns: Iterable[str]) -> None:
    """Refuse a pattern that names no kernel. Raises: ValueError with the nearest name."""
    kernels = REGISTRY.kernels()
    for pattern in patterns:
        if not any(names_kernel(pattern, kernel) for kernel in kernels):
            known = sorted({name for kernel in kernels for name in (kernel.id, kernel.source)})
            wanted = f"wanted a library or kernel, got {pattern!r}, which names none here{nearest(pattern, known)}"
            raise ValueError(f"--kernel: {wanted}")


def effective(settings: Mapping[str, tuple[Any, str]]) -> Iterator[RenderableType]:
    """A row for each setting; those that were set stand out."""
    table = table_of("key", "value", "origin")
    for key, (value, origin) in settings.items():
        style = "" if origin == "default" else "bold green"
        new_row(table, Text(key, style=style), Text(repr(value), style=style), Text(origin, style=style or "dim"))
    yield table


def keys(settings: Mapping[str, Setting]) -> Iterator[RenderableType]:
    """A row for each key."""
    table = table_of("key", "type", "default", "meaning")
    for key, setting in settings.items():
        meaning = setting.meaning if setting.built else f"{setting.meaning} (not built yet: the default only)"
        new_row(table, key, kind(setting.kind), repr(setting.default), meaning)
    yield table

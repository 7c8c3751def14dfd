"""Kernels in words: what tables say about a declaration."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero import ops
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Dtype, Platform
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

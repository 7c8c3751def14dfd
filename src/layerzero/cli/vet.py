"""``layerzero vet``: what kernels prove about themselves here, a line for each class of calls."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence

from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.core.ledger import Verdict
from layerzero.engine.policy import names_kernel
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.vetting import vet


def answer(
    *,
    kernels: Sequence[str] | None,
    backends: Sequence[str] | None,
    operation: str,
    shapes: str | None,
    dtype: str | None,
    device: str | None,
    modules: Sequence[str],
    again: bool,
) -> Answer:
    """Vet; exit with 1 if a verdict is bad. Raises: ValueError for a name that means nothing, or a bad shape."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"--module {module}: it does not import: {error}") from None
    names = [*(kernels or []), *(backends or [])]
    for name in names:
        if not any(names_kernel(name, kernel) for kernel in REGISTRY.kernels()):
            raise ValueError(f"no kernel here is named by {name}; `layerzero kernels` lists them")
    sizes = None if shapes is None else [_shape(text) for text in shapes.split(",")]
    found = vet(
        operation,
        kernels=kernels or None,
        backends=backends or None,
        shapes=sizes,
        dtype=dtype,
        device=device,
        modules=modules,
        again=again,
        progress=say,
    )
    counts = Counter(str(each.verdict or "not vetted") for each in found)
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    nothing = "nothing to vet: " + ("each class has a verdict (--again asks once more)" if names else "all is trusted")
    bad = any(each.verdict not in (None, Verdict.PASSED) for each in found)
    lines = [str(each) for each in found] + [f"{len(found)} classes: {told}" if found else nothing]
    return Answer(
        {"classes": [each.to_dict() for each in found], "counts": dict(counts)}, lambda: lines, NO if bad else FINE
    )


def _shape(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split("x")]
    except ValueError:
        raise ValueError(f"--shapes: wanted sizes like 512x1024, got {text!r}") from None

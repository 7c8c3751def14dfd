"""``layerzero conformance``: kernels against their references, as tables of what is wrong and what limits are worth."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.cli.modules import import_modules
from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.testing import conformance


def answer(
    *,
    backends: Sequence[str],
    kernels: Sequence[str],
    operation: str,
    device: str | None,
    seed: int,
    calls: int,
    modules: Sequence[str],
) -> Answer:
    """Run the suite; exit with 1 if anything is wrong, died or hung, or if nothing ran.

    Raises: ValueError if no kernel has such a name, or a module does not import.
    """
    import_modules(modules)
    report = conformance.run(
        kernels or None,
        operation,
        backends=backends or None,
        device=device,
        seed=seed,
        calls=calls,
        modules=modules,
        progress=say,
    )
    if not report.kernels:
        of = [] if operation == "*" else [f"operation {operation}"]
        asked = ", ".join([*(f"library {name}" for name in backends), *kernels, *of])
        raise ValueError(f"wanted kernels, got none of {asked}; `layerzero kernels` lists them, --module brings yours")
    if not report.passed:
        say("nothing passed: no kernel that was asked for may run here")
    return Answer(report.to_dict(), lambda: [str(report)], FINE if report.ok and report.passed else NO)
